"""Rounds in which all workers of a generation take part: barriers and checkpoints.

    begin            the first worker opens a round for the members of the generation
    report           each member reports once; a repeated report changes nothing
    complete         after the last report the round is committed, and all members get its result
    failure          if a member is lost or the deadline passes, the round is aborted with an error that names the
                     missing members; it can be begun again

A round belongs to one generation. Committed results are kept, so a worker that lost the answer can ask again.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from hcsim.cluster.coordinator.messages import CommittedCheckpoint, GenerationMember, GenerationRoster, GenerationStatus
from hcsim.errors import CallRefused, HcsimError, WorkerLost


class ResolveCall(msgspec.Struct, frozen=True):
    """Effect: complete a pending question with a value or an error."""

    question: int
    value: Any = None
    error: HcsimError | None = None


class NotifyWorker(msgspec.Struct, frozen=True):
    """Effect: notify a worker of the status of its generation."""

    worker: str
    notice: GenerationStatus


class PersistState(msgspec.Struct, frozen=True):
    """Effect: save the state that must survive a restart, before any later effect."""


class LogMessage(msgspec.Struct, frozen=True):
    """Effect: write a log message."""

    text: str


CoordinatorEffect: TypeAlias = ResolveCall | NotifyWorker | PersistState | LogMessage


RoundKey: TypeAlias = tuple[str, str]
"""("barrier", its name) or ("checkpoint", the step)"""

BARRIER, CHECKPOINT = "barrier", "checkpoint"
MANY_BARRIERS = 1024


class BarrierRound:
    """A round in progress."""

    def __init__(self, key: RoundKey, roster: GenerationRoster, until_s: float) -> None:
        self.key = key
        self.roster = roster
        self.until_s = until_s
        self.reports: dict[str, str] = {}
        self.questions: dict[int, None] = {}

    @property
    def name(self) -> str:
        kind, which = self.key
        return f"barrier {which!r}" if kind == BARRIER else f"the checkpoint of step {which}"

    @property
    def missing(self) -> list[GenerationMember]:
        return [peer for peer in self.roster.peers if peer.worker not in self.reports]


class BarrierRounds:
    """All rounds of the current generation."""

    def __init__(self, committed: CommittedCheckpoint | None = None) -> None:
        self.committed = committed
        self._rounds: dict[RoundKey, BarrierRound] = {}
        self._passed: dict[str, None] = {}
        """Completed barriers of this generation."""

    @property
    def due_s(self) -> float:
        return min((round.until_s for round in self._rounds.values()), default=float("inf"))

    def barrier(
        self, roster: GenerationRoster, worker: str, name: str, question: int, until_s: float
    ) -> list[CoordinatorEffect]:
        """Record that a worker reached a barrier; the question is answered when all have."""
        if name in self._passed:
            return [ResolveCall(question)]
        key = (BARRIER, name)
        round = self._rounds.setdefault(key, BarrierRound(key, roster, until_s))
        return self._reported(round, worker, "", question)

    def begin(self, roster: GenerationRoster, step: int, until_s: float) -> list[CoordinatorEffect]:
        if self.committed is not None and step <= self.committed.step:
            if step == self.committed.step:
                return []
            raise CallRefused(f"the checkpoint of step {self.committed.step} is committed: {step} is too late")
        for (kind, which), round in self._rounds.items():
            if kind == CHECKPOINT and which != str(step):
                raise CallRefused(f"{round.name} is still under way")
        key = (CHECKPOINT, str(step))
        if key in self._rounds:
            return []
        self._rounds[key] = BarrierRound(key, roster, until_s)
        return [LogMessage(f"{self._rounds[key].name} begins")]

    def report(self, worker: str, step: int, digest: str, question: int) -> list[CoordinatorEffect]:
        """Record that a worker has written its shard; the question is answered when all have."""
        done = self.committed
        round = self._rounds.get((CHECKPOINT, str(step)))
        if round is None and done is not None and done.step == step:
            return [ResolveCall(question, done)]
        if round is None:
            raise CallRefused(f"no checkpoint of step {step} is under way: begin it first")
        before = round.reports.get(worker, digest)
        if before != digest:
            raise CallRefused(f"{worker} has reported another digest for step {step}: {before}, now {digest}")
        return self._reported(round, worker, digest, question)

    def _reported(self, round: BarrierRound, worker: str, digest: str, question: int) -> list[CoordinatorEffect]:
        round.reports[worker] = digest
        round.questions[question] = None
        if round.missing:
            return []
        del self._rounds[round.key]
        if round.key[0] == BARRIER:
            self._passed[round.key[1]] = None
            if len(self._passed) > MANY_BARRIERS:
                del self._passed[next(iter(self._passed))]
            return [ResolveCall(waiting) for waiting in round.questions]
        self.committed = CommittedCheckpoint(
            int(round.key[1]),
            round.roster.generation,
            tuple((peer.rank, round.reports[peer.worker]) for peer in round.roster.peers),
        )
        answers = [ResolveCall(waiting, self.committed) for waiting in round.questions]
        return [PersistState(), LogMessage(f"{round.name} is committed"), *answers]

    def gave_up(self, question: int) -> None:
        """Drop a question whose caller no longer waits. Its report stays recorded."""
        for round in self._rounds.values():
            round.questions.pop(question, None)

    def generation_over(self, reason: str) -> list[CoordinatorEffect]:
        """Abort all rounds, because not all of their members will report."""
        self._passed.clear()
        return [effect for round in tuple(self._rounds.values()) for effect in self._abort(round, reason)]

    def tick(self, now: float) -> list[CoordinatorEffect]:
        late = [round for round in self._rounds.values() if round.until_s <= now]
        return [
            effect
            for round in late
            for effect in self._abort(round, f"nothing came in time from {names(round.missing)}")
        ]

    def _abort(self, round: BarrierRound, reason: str) -> list[CoordinatorEffect]:
        del self._rounds[round.key]
        error: HcsimError = WorkerLost(f"{round.name} was given up: {reason}")
        return [LogMessage(str(error)), *(ResolveCall(question, error=error) for question in round.questions)]


class PersistedState(msgspec.Struct, frozen=True):
    """The coordinator's persistent state: generation numbers never go back, ranks stay, checkpoints are known."""

    generation: int = 0
    ranks: dict[str, int] = {}
    owners: dict[str, str] = {}
    committed: CommittedCheckpoint | None = None
    line: str = ""
    finished: bool = False
    outcomes: dict[str, str] = {}


def names(peers: list[GenerationMember]) -> str:
    return ", ".join(f"{peer.name or peer.worker} (rank {peer.rank})" for peer in peers)
