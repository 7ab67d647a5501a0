"""The state machine of the parameter server. It does no I/O: events and the time are its input, effects its output.

Modes, and when an update is made:

    sync     when every awaited worker has pushed, or `deadline_s` after the round's first push if at least
             `quorum` have. The mean is weighted by samples and summed in the order of the workers' names.
    bounded  at every push whose model is at most `staleness` updates old. A worker that is more
             than `staleness` pushes ahead of the slowest waits for it before it gets the next model
             (stale synchronous parallel, Ho et al., NIPS 2013).
    async    at every push.

If one push makes an update, its learning rate is scaled by the share of that push in the samples of one push
from each worker. So one push from each of N workers moves the model as far as one round does, and steps and
learning rates mean the same in every mode.

A worker is

    awaited, and becomes absent  when a round's deadline passes without its push, when it is silent for
                                 `deadline_s` (modes other than sync), or `grace_s` after its connection
                                 was lost
    absent, and becomes awaited  when it sends anything
    no longer a contributor      when it leaves

A push, numbered by its worker, is

    answered already   repeated, with the same answer (one before the last: rejected and forgotten)
    under way          repeated, and answered once, when its round ends
    new                Accepted (and in exactly one update), Stale, or Refused; after the end it is Stale

No worker waits for ever: a waiting worker gets `KeepAlive` every `deadline_s`. Without an update for `patience_s`,
training ends with an error that names the missing workers. It ends normally after `total` updates, or when all
have left. Then all workers are told, and the server stays until all have fetched what they want, for at most
`linger_s`.

`ServerPolicy` says when a push counts and for which workers the server waits, `WorkerState` is the server's record of a
worker, and the effects are what the server must do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, Literal, TypeAlias

import msgspec

from hcsim.errors import UsageError
from hcsim.training.parameter_server.messages import (
    AwaitEnd,
    Join,
    JoinReply,
    KeepAlive,
    Pull,
    Push,
    PushAccepted,
    PushStale,
    PushVerdict,
    RequestRefused,
    ServerReply,
    TrainingDone,
)


class ServerPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of a parameter server for its workers."""

    mode: Literal["sync", "bounded", "async"] = "sync"
    """sync: one update per round of all workers. bounded: one per push of a model that is not too old. async:
    one per push."""
    staleness: int = 0
    """bounded: how many updates a push may lag behind, and how many pushes a worker may be ahead of the slowest.
    Higher wastes less work on unequal machines, and learns from older gradients. Among N workers of equal
    speed every push lags N - 1 updates, so a lower bound than that refuses many."""
    quorum: int = 1
    """sync: the number of pushes that a round needs at its deadline, unless fewer workers are left. Lower
    survives more losses; higher keeps a few disconnected workers from training on alone."""
    deadline_s: float = 30.0
    """How long a worker may keep the others waiting: in a round after its first push, or in silence."""
    grace_s: float = 1.0
    """How long the server waits for a worker whose connection is lost to reconnect."""
    patience_s: float = 60.0
    """The limit of all waiting: how long there may be no update, or no answer, before training fails with an
    error."""
    linger_s: float = 30.0
    """How long the server stays at the end for a worker that it last heard so long ago, or since then. Higher
    lets a slow worker finish its computation and fetch the final model; lower ends sooner after a silent
    crash."""

    def __post_init__(self) -> None:
        times = (self.deadline_s, self.grace_s, self.patience_s, self.linger_s)
        if self.quorum < 1 or self.staleness < 0 or not all(0 < seconds < float("inf") for seconds in times):
            raise UsageError(f"a quorum is at least 1, a staleness at least 0, and times are positive: {self}")

    @property
    def silence_s(self) -> float:
        """The time of silence after which a connection is considered dead: a waiting peer gets a message at every
        deadline."""
        return 2 * self.deadline_s


class SendReply(msgspec.Struct, frozen=True):
    """Answer a worker, if it is connected."""

    worker: str
    answer: ServerReply


class SendModel(msgspec.Struct, frozen=True):
    """Answer a worker with the model, or with its version alone if the worker has that already."""

    worker: str
    version: int
    known: bool


class Contribution(msgspec.Struct, frozen=True):
    """A valid push that is to count."""

    worker: str
    sequence: int
    samples: int
    gradient: Any


class ApplyUpdate(msgspec.Struct, frozen=True):
    """Make the next version from the mean of these gradients, weighted by samples."""

    contributions: tuple[Contribution, ...]
    """In the order in which they are summed."""
    share: float
    """The share of the learning rate."""


ServerEffect: TypeAlias = SendReply | SendModel | ApplyUpdate


NEVER_S = float("inf")


class WorkerState(msgspec.Struct):
    """The record of a worker that has connected or is expected to."""

    life: int | None = None
    """None if the worker has not connected to this server yet."""
    contributes: bool = True
    """Whether the worker will push; False once it has said that it will not."""
    awaited: bool = True
    """Whether the others wait for the worker."""
    gone: bool = False
    """Whether the worker has left after the end, with all it requested."""
    connected: bool = False
    lost_s: float = 0.0
    """The time at which its connection was lost, if it is not connected."""
    heard_s: float = 0.0
    """The time of its last message; at first, the time at which it was expected."""
    told_s: float = 0.0
    """The time of its last request, or of the last `KeepAlive` to it."""
    asked: Pull | AwaitEnd | None = None
    """The pending request, beside a push."""
    answered: int = 0
    """The number of its last answered push."""
    verdict: PushVerdict | None = None
    answered_life: int | None = None
    """The life in which it pushed that."""
    accepted: int = 0
    """The number of its pushes that have counted."""
    pace: int = 0
    """The number of its pushes for comparison with others: a worker that joins or returns starts from the
    slowest of the others."""
    samples: int | None = None
    """The number of samples in its last push."""

    def absent_s(self, policy: ServerPolicy) -> float:
        """Return when the others stop waiting for it, if it stays silent."""
        if not self.connected:
            return self.lost_s + (policy.deadline_s if self.life is None else policy.grace_s)
        if policy.mode == "sync" or self.asked is not None:
            return NEVER_S  # the round's deadline decides; or it is we who keep it waiting
        return self.heard_s + policy.deadline_s


class ServerRounds:
    """The state machine. Its methods are the events; the returned effects are to be carried out in order.

    Time never goes back, and every event is followed by a tick at the same time."""

    def __init__(self, policy: ServerPolicy, total: int, *, awaited: Iterable[str] = (), now: float = 0.0) -> None:
        self.policy = policy
        self.total = total
        self.version = 0
        self.history = 0
        self.members = {name: WorkerState(lost_s=now, heard_s=now) for name in sorted(awaited)}
        self.pending: dict[str, Contribution] = {}
        """sync: the pushes of this round."""
        self.ended: TrainingDone | None = None
        self._since_s = now
        """The time of the last update, then of the end."""
        self._first_push_s = now

    # Events.

    def objection(self, join: Join) -> str:
        """Return why this worker cannot be accepted; empty if it can."""
        member = self.members.get(join.worker)
        if member is None or not member.connected or not member.awaited or member.life in (None, join.life):
            return ""
        return f"a worker called {join.worker} is connected already"

    def joined(self, join: Join, now: float) -> list[ServerEffect]:
        """A worker connected, and there is no objection."""
        member = self.members.setdefault(join.worker, WorkerState(awaited=False))
        if member.life != join.life:
            # It starts again and knows nothing of a push that is under way: nobody was told that this counts.
            self.pending.pop(join.worker, None)
            member.life, member.gone = join.life, False
        if member.answered_life != join.life:
            member.verdict = None  # which this life would take for the answer to a push of its own
        member.connected, member.contributes, member.asked = True, join.contributes, None
        self._heard(member, now)
        effects: list[ServerEffect] = [
            SendReply(join.worker, JoinReply(member.answered, member.accepted, self.history))
        ]
        return [*effects, SendReply(join.worker, self.ended)] if self.ended else effects

    def asked(self, worker: str, question: Pull | AwaitEnd, now: float) -> list[ServerEffect]:
        """A worker requested the model, or notification of the end."""
        member = self.members[worker]
        self._heard(member, now)
        member.asked = question
        return list(self._released(worker, member))

    def wants(self, worker: str, push: Push) -> bool:
        """Return whether the push's payload is needed: otherwise the answer is known without it."""
        known = push.sequence <= self.members[worker].answered or worker in self.pending
        return not known and not self.ended and self._fresh(push.version)

    def pushed(self, worker: str, push: Push, gradient: Any, fault: str, now: float) -> list[ServerEffect]:
        """A worker pushed. The gradient is None if the payload was not wanted or, as `fault` says, not valid."""
        member = self.members[worker]
        self._heard(member, now)
        if push.sequence <= member.answered:
            again = member.verdict if push.sequence == member.answered else None
            return [SendReply(worker, again or RequestRefused(push.sequence, "a later push has been answered already"))]
        before = self.pending.get(worker)
        if before is not None and before.sequence == push.sequence:
            return []  # its answer is on the way
        if before is not None:
            return [SendReply(worker, RequestRefused(push.sequence, f"push {before.sequence} is still under way"))]
        if fault and not self.ended:
            return [self._judged(worker, RequestRefused(push.sequence, fault))]
        if self.ended or gradient is None or not self._fresh(push.version):
            return [self._judged(worker, PushStale(push.sequence, self.version))]
        member.samples, member.contributes = push.samples, True
        return list(self._counted(Contribution(worker, push.sequence, push.samples, gradient), now))

    def left(self, worker: str, now: float) -> list[ServerEffect]:
        """A worker will push no more; after the end, it has all it requested."""
        member = self.members[worker]
        member.contributes, member.gone = False, self.ended is not None
        return list(self._settled(now))

    def lost(self, worker: str, now: float) -> list[ServerEffect]:
        """A worker's connection is lost. It is expected to reconnect for a while."""
        member = self.members[worker]
        member.connected, member.asked, member.lost_s = False, None, now
        return []

    def tick(self, now: float) -> list[ServerEffect]:
        for member in self.members.values():
            if now >= member.absent_s(self.policy):
                member.awaited = False
        effects = list(self._settled(now))
        if not self.ended and now >= self._since_s + self.policy.patience_s:
            effects += self._end(f"no update for {self.policy.patience_s:g} s, {self._missing()}", now)
        for name, member in self.members.items():
            if self._waits(name) and now >= member.told_s + self.policy.deadline_s:
                effects.append(SendReply(name, KeepAlive()))
                member.told_s = now
        return effects

    def regroup(self, workers: Collection[str]) -> None:
        """Make these workers, and no others, contributors again, even if they had left and have not reconnected
        since."""
        for name, member in self.members.items():
            member.gone = name not in workers
            member.contributes = not member.gone
            member.awaited = member.awaited and not member.gone

    # What is to come.

    def due_s(self, now: float) -> float:
        """Return when the next tick is due, if no event happens before."""
        policy = self.policy
        times = [self._since_s + (policy.linger_s if self.ended else policy.patience_s)]
        if self.pending:
            times.append(self._first_push_s + policy.deadline_s)
        for name, member in self.members.items():
            times.append(self._expected_s(member) if self.ended else member.absent_s(policy))
            if self._waits(name):
                times.append(member.told_s + policy.deadline_s)
        return min((time for time in times if time > now), default=now + policy.deadline_s)

    def over(self, now: float) -> bool:
        """Return whether the server may end: training is over, and every worker that is connected or may return has
        all it requested."""
        if not self.ended:
            return False
        here = any(now < self._expected_s(member) for member in self.members.values() if not member.gone)
        return not here or now >= self._since_s + self.policy.linger_s

    def _expected_s(self, member: WorkerState) -> float:
        """Return until when a worker may make requests after the end. A worker that left and disconnected makes
        none."""
        lives = member.connected or member.contributes
        return member.heard_s + self.policy.linger_s if lives else member.absent_s(self.policy)

    # Decisions.

    def _counted(self, contribution: Contribution, now: float) -> Iterator[ServerEffect]:
        if self.policy.mode == "sync":
            if not self.pending:
                self._first_push_s = now
            self.pending[contribution.worker] = contribution
        else:
            yield from self._update((contribution,), self._share(contribution.samples), now)
        yield from self._settled(now)

    def _settled(self, now: float) -> Iterator[ServerEffect]:
        """Yield the effects that have become possible."""
        if self._complete(now):
            for name in self._awaited():
                self.members[name].awaited = name in self.pending
            contributions = tuple(self.pending[name] for name in sorted(self.pending))
            self.pending.clear()
            yield from self._update(contributions, 1.0, now)
        if not self.ended and (
            self.version >= self.total or (self.members and not any(m.contributes for m in self.members.values()))
        ):
            yield from self._end("", now)
        for name, member in self.members.items():
            yield from self._released(name, member)

    def _complete(self, now: float) -> bool:
        possible = sum(member.contributes for member in self.members.values())
        if not self.pending or len(self.pending) < min(self.policy.quorum, possible):
            return False
        everybody = all(name in self.pending for name in self._awaited())
        return everybody or now >= self._first_push_s + self.policy.deadline_s

    def _update(self, contributions: tuple[Contribution, ...], share: float, now: float) -> Iterator[ServerEffect]:
        self.version += 1
        self._since_s = now
        yield ApplyUpdate(contributions, share)
        for contribution in contributions:
            member = self.members[contribution.worker]
            member.accepted += 1
            member.pace += 1
            yield self._judged(contribution.worker, PushAccepted(contribution.sequence, self.version))

    def _end(self, error: str, now: float) -> Iterator[ServerEffect]:
        self.ended = TrainingDone(self.version, error)
        self._since_s = now
        for contribution in self.pending.values():
            yield self._judged(contribution.worker, PushStale(contribution.sequence, self.version))
        self.pending.clear()
        for name, member in self.members.items():
            if isinstance(member.asked, AwaitEnd):
                member.asked = None
            yield SendReply(name, self.ended)

    def _judged(self, worker: str, verdict: PushVerdict) -> SendReply:
        member = self.members[worker]
        member.answered, member.answered_life, member.verdict = verdict.sequence, member.life, verdict
        return SendReply(worker, verdict)

    def _released(self, name: str, member: WorkerState) -> Iterator[ServerEffect]:
        """Yield the answer to a worker's request, if it can be given now."""
        if isinstance(member.asked, Pull) and (self.ended or not self._ahead(member)):
            yield SendModel(name, self.version, known=member.asked.version == self.version)
            member.asked = None
        elif isinstance(member.asked, AwaitEnd) and self.ended:
            yield SendReply(name, self.ended)
            member.asked = None

    def _heard(self, member: WorkerState, now: float) -> None:
        if not member.awaited:
            # The others shall not wait until it has caught up.
            member.pace = max(member.pace, self._slowest())
        member.awaited = True
        member.heard_s = member.told_s = now

    def _fresh(self, version: int) -> bool:
        """Return whether a gradient of this version may count now."""
        allowed = {"sync": 0, "bounded": self.policy.staleness, "async": self.version}[self.policy.mode]
        return 0 <= self.version - version <= allowed

    def _ahead(self, member: WorkerState) -> bool:
        return self.policy.mode == "bounded" and member.pace > self._slowest() + self.policy.staleness

    def _slowest(self) -> int:
        return min((self.members[name].pace for name in self._awaited()), default=0)

    def _share(self, samples: int) -> float:
        known = [self.members[name].samples for name in self._awaited()]
        everybody = sum(samples if count is None else count for count in known)
        return samples / everybody if everybody else 0.0

    def _awaited(self) -> list[str]:
        return [name for name, member in self.members.items() if member.contributes and member.awaited]

    def _waits(self, name: str) -> bool:
        member = self.members[name]
        return member.connected and (name in self.pending or member.asked is not None)

    def _missing(self) -> str:
        silent = [name for name, m in self.members.items() if m.contributes and name not in self.pending]
        return (
            f"{len(self.pending)} of at least {self.policy.quorum} pushed, waiting for {', '.join(silent) or 'anyone'}"
        )
