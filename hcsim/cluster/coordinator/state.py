"""The coordinator's state machine: events and `now` in, effects out.

A worker registers and gets a rank below the policy's number of workers. A worker that restarts with the same id
gets its rank back, unless a new worker has taken it meanwhile (ranks that were never used are given out first).
A worker asks for a generation when it is ready. A generation is formed when all registered workers are ready:
the first one when the required number is registered, later ones with at least `least`. All its members get the
complete roster at once.

A generation ends when a member is silent for too long, restarts, leaves, or asks for the next one. The other
members are notified, pending rounds end with an error that names the member, and the next generation has a
higher number. A worker that is too busy to ask for it is left out after a while. A worker that registers while
others work, or that asks again after it was left out, does not interrupt them: they are told that the
generation is superseded. If members ask for the next generation without a failure, the end is orderly: the next
one is formed when all have asked.

After a failure, the members report their findings, and the next generation is formed without the culprits (see
`hcsim.cluster.diagnosis`). A culprit is readmitted after a waiting time that grows with each exclusion.

A worker that leaves with an outcome has finished the work together with its generation. A worker that asks with
the same outcome is told that all work is done; any other is told that it is too late. Once all have left, the
next work begins like the first.

Times are of a monotonic clock. If the coordinator itself was suspended, no worker is evicted for that time.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import inf

from hcsim.cluster.coordinator.messages import (
    CoordinatorPolicy,
    GenerationMember,
    GenerationRoster,
    GenerationStatus,
    Register,
    Registered,
)
from hcsim.cluster.coordinator.rounds import (
    BarrierRounds,
    CoordinatorEffect,
    LogMessage,
    NotifyWorker,
    PersistedState,
    PersistState,
    ResolveCall,
)
from hcsim.cluster.diagnosis import Diagnosis, Findings
from hcsim.cluster.health import PauseDetector
from hcsim.cluster.roster import Quarantine
from hcsim.cluster.view import refusal, unlike
from hcsim.errors import CallRefused, HcsimError, WorkerLost

OUT = "all have come out of it"
ANEW = "the coordinator has started anew"
NEXT = "asks for the next generation"


class WorkerStage(Enum):
    """The stages of a worker's life."""

    REGISTERED = "registered"
    READY = "ready"
    WORKING = "working"
    BEHIND = "behind"
    LEAVING = "leaving"
    GONE = "gone"


class StageEvent(Enum):
    """The events that take a worker from one stage to the next."""

    ASKED = "asks for a generation"
    GAVE_UP = "does not wait for it any more"
    FORMED = "is in a generation"
    PASSED = "is busy while the others go on"
    LEFT = "wants to leave"
    RELEASED = "is not needed any more"
    EVICTED = "is silent, or has started anew"


TRANSITIONS: dict[tuple[WorkerStage, StageEvent], WorkerStage] = {
    (WorkerStage.REGISTERED, StageEvent.ASKED): WorkerStage.READY,
    (WorkerStage.REGISTERED, StageEvent.LEFT): WorkerStage.LEAVING,
    (WorkerStage.REGISTERED, StageEvent.EVICTED): WorkerStage.GONE,
    (WorkerStage.READY, StageEvent.ASKED): WorkerStage.READY,
    (WorkerStage.READY, StageEvent.GAVE_UP): WorkerStage.REGISTERED,
    (WorkerStage.READY, StageEvent.FORMED): WorkerStage.WORKING,
    (WorkerStage.READY, StageEvent.LEFT): WorkerStage.LEAVING,
    (WorkerStage.READY, StageEvent.EVICTED): WorkerStage.GONE,
    (WorkerStage.WORKING, StageEvent.ASKED): WorkerStage.READY,
    (WorkerStage.WORKING, StageEvent.PASSED): WorkerStage.BEHIND,
    (WorkerStage.WORKING, StageEvent.LEFT): WorkerStage.LEAVING,
    (WorkerStage.WORKING, StageEvent.EVICTED): WorkerStage.GONE,
    (WorkerStage.BEHIND, StageEvent.ASKED): WorkerStage.READY,
    (WorkerStage.BEHIND, StageEvent.LEFT): WorkerStage.LEAVING,
    (WorkerStage.BEHIND, StageEvent.EVICTED): WorkerStage.GONE,
    (WorkerStage.LEAVING, StageEvent.LEFT): WorkerStage.LEAVING,
    (WorkerStage.LEAVING, StageEvent.RELEASED): WorkerStage.GONE,
    (WorkerStage.LEAVING, StageEvent.EVICTED): WorkerStage.GONE,
}


class WorkerEntry:
    """A registered worker."""

    def __init__(self, who: Register, rank: int, now: float) -> None:
        self.who = who
        self.rank = rank
        self.stage = WorkerStage.REGISTERED
        self.heard_s = now
        self.attached = True
        self.question: int | None = None
        """Its pending question, for a generation or for permission to leave."""
        self.since_s = now
        """When it asked."""
        self.node = ""
        self.since = 0
        """The first of the consecutive generations that contain it."""
        self.apart_s = -inf
        """The time until which it is quarantined, because it kept a generation from working."""

    @property
    def name(self) -> str:
        return f"{self.who.name or self.who.worker} (rank {self.rank})"

    @property
    def member(self) -> str:
        """The node id under which other workers know it."""
        return self.node or self.who.worker

    @property
    def peer(self) -> GenerationMember:
        who = self.who
        return GenerationMember(
            self.rank, who.worker, who.address, who.life, who.name, who.home, self.node, self.since, who.control
        )

    def turn(self, turn: StageEvent) -> None:
        """Go to the next stage, if the table has a transition for this event."""
        after = TRANSITIONS.get((self.stage, turn))
        if after is None:
            raise CallRefused(f"{self.who.worker} {turn.value}, but it is {self.stage.value}")
        self.stage = after


class CoordinatorState:
    """The state of the coordinator."""

    def __init__(
        self, policy: CoordinatorPolicy, cluster: str, kept: PersistedState, now: float, line: str = ""
    ) -> None:
        self.policy = policy
        self.cluster = cluster
        self.workers: dict[str, WorkerEntry] = {}
        self.ranks = dict(kept.ranks)
        """The last rank of each worker, including those that have gone."""
        self.owners = dict(kept.owners)
        """The node that owns each worker's name, if nodes are authenticated."""
        self.generation = kept.generation
        self.line = kept.line or line
        self.finished = kept.finished
        self.outcomes = dict(kept.outcomes)
        """The outcome of the finished work, and the workers that reported it last."""
        self.roster: GenerationRoster | None = None
        self.over = ANEW if kept.generation else "work begins"
        """Why no generation is working, if none is."""
        self._last: tuple[GenerationMember, ...] = ()
        self._diagnosis = Diagnosis("")
        self._apart: dict[str, Quarantine] = {}
        self._ended_s = now
        self.rounds = BarrierRounds(kept.committed)
        self._settled_s = now + policy.silence_s if kept.generation else now
        """Until then, workers from before a restart of the coordinator may reconnect."""
        self._watch = PauseDetector(now, policy.heartbeat_s)

    def kept(self) -> PersistedState:
        committed = self.rounds.committed
        return PersistedState(
            self.generation, self.ranks, self.owners, committed, self.line, self.finished, self.outcomes
        )

    # What workers ask.

    def register(self, who: Register, now: float, node: str = "") -> tuple[Registered, list[CoordinatorEffect]]:
        """Register a worker, for the first time or again. `node` is its authenticated node id, or empty."""
        effects = self._awoke(now)
        if self.owners.get(who.worker, node) != node:
            raise CallRefused(f"the name {who.worker} belongs to another node: choose another one")
        entry = self.workers.get(who.worker)
        if entry is not None and entry.who.life != who.life:
            at_once = node and entry.who.address == who.address  # where it listens nobody else can
            if entry.attached and not at_once and now - entry.heard_s < self.policy.silence_s:
                raise CallRefused(
                    f"a worker called {who.worker} is here already, at {entry.who.address}: if that was you before "
                    f"a restart, try again in {self.policy.silence_s:g} s; otherwise choose another name"
                )
            effects += self._evict(entry, "has started anew", now)
            entry = None
        if entry is None:
            self._compare_terms(who)
            entry = self.workers[who.worker] = WorkerEntry(who, self._rank_for(who.worker), now)
            entry.node = node
            if (apart := self._apart.get(entry.member)) is not None and now < apart.until_s:
                entry.apart_s = apart.until_s  # who registers again is not readmitted sooner
            if self.roster is None and who.generation > self.generation:
                self.generation, self.over, self._settled_s = who.generation, ANEW, now + self.policy.silence_s
            if node:
                self.owners[who.worker] = node
            effects += [PersistState(), LogMessage(f"{entry.name} registers, at {who.address}")]
            effects += self._superseded() if now >= entry.apart_s else []
        entry.attached, entry.heard_s = True, now
        return Registered(entry.rank, self.policy), effects

    def heartbeat(self, who: Register, generation: int, now: float) -> tuple[GenerationStatus, list[CoordinatorEffect]]:
        effects = self._awoke(now)
        self._entry(who).heard_s = now
        return self._notice(generation, now), effects

    def ready(
        self,
        who: Register,
        after: int,
        question: int,
        now: float,
        why: str = NEXT,
        outcome: str = "",
        found: Sequence[Findings] = (),
    ) -> list[CoordinatorEffect]:
        """Request a generation later than `after`; the question is answered when there is one. `why` says why the
        current one ended; it is empty if all members leave it together. If the worker has finished its work,
        `outcome` is the result; if the work failed, `found` contains its findings."""
        effects = self._awoke(now)
        entry = self._entry(who)
        entry.heard_s = now
        if self.roster is not None and after < self.generation and entry.stage is WorkerStage.WORKING:
            return [*effects, ResolveCall(question, self.roster)]
        if self.outcomes:
            entry.turn(StageEvent.ASKED)
            return [*effects, self._too_late(question, outcome), *self._emptied(now), *self._released(now)]
        asked_before = entry.question if entry.stage is WorkerStage.READY else None
        working, behind = entry.stage is WorkerStage.WORKING, entry.stage is WorkerStage.BEHIND
        entry.turn(StageEvent.ASKED)
        entry.question, entry.since_s = question, now
        if asked_before is not None:
            effects.append(ResolveCall(asked_before, error=CallRefused(f"{who.worker} asked again")))
        for findings in found:
            self._diagnosis.heard(entry.member, findings, self.line, self.generation, now)
        if working and why:
            effects += self._end(f"{entry.name} {why}", now)
        if behind:
            effects += self._superseded()
        return effects + self._emptied(now) + self._released(now) + self._form(now)

    def leave(
        self, who: Register, question: int, now: float, outcome: str = "", *, orderly: bool = False
    ) -> list[CoordinatorEffect]:
        """Remove a worker; the question is answered when no other worker depends on it. If `orderly`, its generation
        does not end at once; if all work is done, `outcome` is the result."""
        effects = self._awoke(now)
        entry = self._entry(who)
        if entry.question is not None:
            effects.append(
                ResolveCall(entry.question, error=CallRefused(f"{who.worker} leaves, and waits for that now"))
            )
        was_working = entry.stage is WorkerStage.WORKING
        entry.turn(StageEvent.LEFT)
        entry.question, entry.since_s = question, now
        if outcome:
            effects += self._finished(outcome, entry)
        elif was_working:
            effects += self._superseded() if orderly else self._end(f"{entry.name} leaves", now)
        return effects + self._emptied(now) + self._released(now) + self._form(now)

    def gave_up(self, question: int) -> None:
        """Drop a question whose caller no longer waits."""
        self.rounds.gave_up(question)
        for entry in self.workers.values():
            if entry.question == question:
                entry.question = None
                if entry.stage is WorkerStage.READY:
                    entry.turn(StageEvent.GAVE_UP)

    def lost(self, who: Register) -> None:
        """Record that a worker's connection has closed; it may reconnect until it is evicted for silence."""
        entry = self.workers.get(who.worker)
        if entry is not None and entry.who.life == who.life:
            entry.attached = False

    def barrier(self, who: Register, generation: int, name: str, question: int, now: float) -> list[CoordinatorEffect]:
        roster = self._working(who, generation)
        return self.rounds.barrier(roster, who.worker, name, question, now + self.policy.barrier_s)

    def begin(self, who: Register, generation: int, step: int, now: float) -> list[CoordinatorEffect]:
        return self.rounds.begin(self._working(who, generation), step, now + self.policy.checkpoint_s)

    def report(self, who: Register, generation: int, step: int, digest: str, question: int) -> list[CoordinatorEffect]:
        self._working(who, generation)
        return self.rounds.report(who.worker, step, digest, question)

    # Time.

    def tick(self, now: float) -> list[CoordinatorEffect]:
        effects = self._awoke(now)
        for entry in tuple(self.workers.values()):
            if entry.stage is not WorkerStage.GONE and now - entry.heard_s >= self.policy.silence_s:
                effects += self._evict(entry, f"was silent for {self.policy.silence_s:g} s", now)
        effects += self._let_in(now) + self._stuck(now)
        return effects + self._released(now) + self._form(now) + self.rounds.tick(now)

    def due_s(self, now: float) -> float:
        """Return when something is due next, at the latest after one heartbeat interval."""
        entries = self.workers.values()
        times = [entry.heard_s + self.policy.silence_s for entry in entries]
        times += [entry.since_s + self.policy.leave_s for entry in entries if entry.stage is WorkerStage.LEAVING]
        times += [entry.apart_s for entry in entries]
        asked = [entry.since_s for entry in entries if entry.stage is WorkerStage.READY]
        times += [max(self._ended_s, since_s) + self.policy.form_s for since_s in asked]
        times += [self._settled_s, self.rounds.due_s, self._pending_s(now)]
        soon = [time for time in times if time > now]
        self._watch.due_s = min([now + self.policy.heartbeat_s, *soon])
        return self._watch.due_s

    def _awoke(self, now: float) -> list[CoordinatorEffect]:
        """If the coordinator was suspended, count no worker as silent for that time."""
        away_s = self._watch.away_s(now)
        if not away_s:
            return []
        for entry in self.workers.values():
            entry.heard_s = min(now, entry.heard_s + away_s)
        return [LogMessage(f"the coordinator itself was stuck for {away_s:.3g} s")] if self.workers else []

    # What follows.

    def _entry(self, who: Register) -> WorkerEntry:
        entry = self.workers.get(who.worker)
        if entry is None or entry.who.life != who.life:
            raise WorkerLost(f"{who.worker} is not registered any more: it was evicted, or has started anew")
        return entry

    def _working(self, who: Register, generation: int) -> GenerationRoster:
        entry = self._entry(who)
        if self.roster is None or generation != self.generation or entry.stage is not WorkerStage.WORKING:
            raise WorkerLost(f"generation {generation} is over: {self._over(generation)}")
        return self.roster

    def _notice(self, generation: int, now: float) -> GenerationStatus:
        if self.roster is not None and generation == self.generation:
            there = [entry for entry in self.workers.values() if now >= entry.apart_s]
            waiting = any(entry.stage in (WorkerStage.REGISTERED, WorkerStage.READY) for entry in there)
            return GenerationStatus(generation, superseded=waiting)
        return GenerationStatus(generation, over=self._over(generation))

    def _over(self, generation: int) -> str:
        return self.over if generation == self.generation else "a later one was formed"

    def _rank_for(self, worker: str) -> int:
        taken = {entry.rank for entry in self.workers.values()}
        own = self.ranks.get(worker, self.policy.workers)
        if own >= self.policy.workers or own in taken:
            known = {rank: name for name, rank in self.ranks.items() if name != worker}
            free = [rank for rank in range(self.policy.workers) if rank not in taken]
            if not free:
                raise CallRefused(f"{worker} is one too many: the {self.policy.workers} workers are all there")
            own = next((rank for rank in free if rank not in known), free[0])
            self.ranks.pop(known.get(own, ""), None)
            self.owners.pop(known.get(own, ""), None)
        self.ranks[worker] = own
        return own

    def _superseded(self) -> list[CoordinatorEffect]:
        if self.roster is None:
            return []
        notice = GenerationStatus(self.generation, superseded=True)
        return [NotifyWorker(peer.worker, notice) for peer in self.roster.peers if peer.worker in self.workers]

    def _compare_terms(self, who: Register) -> None:
        for entry in sorted(self.workers.values(), key=lambda entry: entry.rank):
            name = entry.who.name or entry.who.worker
            if entry.who.worker != who.worker and (differences := unlike(entry.who.terms, who.terms, name)):
                raise refusal(name, differences)

    def _members(self) -> list[WorkerEntry]:
        peers = () if self.roster is None else self.roster.peers
        known = [self.workers.get(peer.worker) for peer in peers]
        return [entry for entry, peer in zip(known, peers, strict=True) if entry and entry.who.life == peer.life]

    def _emptied(self, now: float) -> list[CoordinatorEffect]:
        """All members have left the generation: allow the next one to be formed."""
        if self.roster is None or any(entry.stage is WorkerStage.WORKING for entry in self._members()):
            return []
        self._ended_s = now
        self.roster, self.over = None, OUT
        return self.rounds.generation_over(self.over)

    def _stuck(self, now: float) -> list[CoordinatorEffect]:
        """End the generation if some members have asked for the next one and the others do not follow in time."""
        members = self._members()
        working = [entry for entry in members if entry.stage is WorkerStage.WORKING]
        out = [
            entry for entry in members if entry.stage is WorkerStage.READY and now >= entry.since_s + self.policy.form_s
        ]
        if not (working and out):
            return []
        names = ", ".join(entry.name for entry in working)
        return self._end(f"{out[0].name} came out of it {self.policy.form_s:g} s before {names}", now)

    def _finished(self, outcome: str, entry: WorkerEntry) -> list[CoordinatorEffect]:
        effects: list[CoordinatorEffect] = (
            [] if outcome in self.outcomes else [PersistState(), LogMessage(f"{entry.name} has finished")]
        )
        self.outcomes[outcome], self.finished = entry.who.name or entry.who.worker, True
        for other in self.workers.values():
            if other.stage is WorkerStage.READY and other.question is not None:
                effects.append(self._too_late(other.question, ""))
                other.question = None
                other.turn(StageEvent.GAVE_UP)
        return effects

    def _too_late(self, question: int, outcome: str) -> ResolveCall:
        if outcome in self.outcomes:
            return ResolveCall(question, GenerationRoster(self.cluster, self.generation, ()))
        who = ", ".join(dict.fromkeys(self.outcomes.values()))
        text = f"training has ended without this machine: {who} finished it, and nobody is left"
        return ResolveCall(question, error=HcsimError(text))

    def _end(self, reason: str, now: float) -> list[CoordinatorEffect]:
        """End the generation after a failure: its working members are notified and have time to ask for the next."""
        if self.roster is None:
            return []
        self._ended_s = now
        told = [peer.worker for peer in self.roster.peers if peer.worker in self.workers]
        self.roster, self.over = None, reason
        notice = GenerationStatus(self.generation, over=reason)
        return [
            LogMessage(f"generation {self.generation} is over: {reason}"),
            *(NotifyWorker(worker, notice) for worker in told),
            *self.rounds.generation_over(reason),
        ]

    def _evict(self, entry: WorkerEntry, why: str, now: float) -> list[CoordinatorEffect]:
        entry.turn(StageEvent.EVICTED)
        del self.workers[entry.who.worker]
        reason = f"{entry.name} {why}"
        effects: list[CoordinatorEffect] = [LogMessage(reason)]
        if entry.question is not None:
            effects.append(ResolveCall(entry.question, error=WorkerLost(reason)))
        if self.roster is not None and entry.who.worker in [peer.worker for peer in self.roster.peers]:
            effects += self._end(reason, now)
        return effects + self._released(now) + self._form(now)

    def _released(self, now: float) -> list[CoordinatorEffect]:
        """Let leaving workers go on which no other worker depends."""
        effects: list[CoordinatorEffect] = []
        busy = any(entry.stage is WorkerStage.WORKING for entry in self.workers.values())
        for entry in tuple(self.workers.values()):
            if entry.stage is WorkerStage.LEAVING and (not busy or now >= entry.since_s + self.policy.leave_s):
                if entry in self._members():
                    effects += self._end(f"{entry.name} has left", now)
                entry.turn(StageEvent.RELEASED)
                del self.workers[entry.who.worker]
                effects.append(LogMessage(f"{entry.name} has left"))
                if entry.question is not None:
                    effects.append(ResolveCall(entry.question))
        if self.outcomes and not self.workers:
            self.outcomes.clear()
            self.over = "work begins"
            effects.append(PersistState())
        return effects

    def _failed_in(self) -> list[str]:
        """Return the members of the last generation that are still registered, seniors first."""
        peers = sorted(self._last, key=lambda peer: (peer.since, peer.rank))
        entries = [self.workers.get(peer.worker) for peer in peers]
        return [e.member for e, p in zip(entries, peers, strict=True) if e is not None and e.who.life == p.life]

    def _pending_s(self, now: float) -> float:
        if self.roster is not None or self._diagnosis.ours is None:
            return inf
        until_s = self._diagnosis.pending_until_s(self.line, self.generation, self._failed_in(), now)
        return inf if until_s is None or now >= until_s else until_s

    def _leave_out(self, now: float) -> list[CoordinatorEffect]:
        """Quarantine the members that kept the last generation from working."""
        culprits = self._diagnosis.culprits(self.line, self.generation, self._failed_in(), now)
        effects: list[CoordinatorEffect] = []
        for entry in self.workers.values():
            if entry.member in culprits and now >= entry.apart_s:
                apart = self._apart[entry.member] = Quarantine.after(self._apart.get(entry.member), 0.0, now)
                entry.apart_s = apart.until_s
                self.over = f"{entry.name} is left out: {culprits[entry.member]}"
                effects.append(LogMessage(f"{self.over}; for {apart.lasts_s:g} s"))
        return effects

    def _let_in(self, now: float) -> list[CoordinatorEffect]:
        back = [entry for entry in self.workers.values() if -inf < entry.apart_s <= now]
        for entry in back:
            entry.apart_s = -inf
        return self._superseded() if back else []

    def _changes(self, ready: list[WorkerEntry]) -> str:
        """Describe how the ready workers differ from the members of the last generation."""
        peers = [entry.peer for entry in ready]
        before, now = (
            {(peer.worker, peer.life): peer.name or peer.worker for peer in each} for each in (self._last, peers)
        )
        joined = [f"{name} joined" for key, name in now.items() if key not in before]
        return ", ".join(joined + [f"{name} left" for key, name in before.items() if key not in now]) or self.over

    def _form(self, now: float) -> list[CoordinatorEffect]:
        policy = self.policy
        if self.roster is None and self._pending_s(now) < inf:
            return []
        effects = self._leave_out(now) if self.roster is None else []
        waiting = [
            entry for entry in self.workers.values() if entry.stage is WorkerStage.READY and now >= entry.apart_s
        ]
        ready = sorted(waiting, key=lambda entry: entry.rank)
        needed = policy.least if self.generation and not self.finished else policy.needed
        if self.roster is not None or self.outcomes or len(ready) < needed:  # who works asks when told that others wait
            return effects
        if len(ready) < policy.workers:
            there = [entry for entry in self.workers.values() if now >= entry.apart_s]
            others = [entry for entry in there if entry.stage in (WorkerStage.REGISTERED, WorkerStage.WORKING)]
            waited = now >= max(self._ended_s, min(entry.since_s for entry in ready)) + policy.form_s
            if now < self._settled_s or (others and not waited):
                return effects
        reason = self._changes(ready) if self.over == OUT else self.over
        self.generation = 1 + max(self.generation, *(entry.who.generation for entry in ready))
        self.finished = False
        stayed = [(peer.worker, peer.life) for peer in self._last]
        for entry in ready:
            if (entry.who.worker, entry.who.life) not in stayed:
                entry.since = self.generation
        self.roster = GenerationRoster(
            self.cluster, self.generation, tuple(entry.peer for entry in ready), reason, self.line
        )
        self.over, self._last = "", self.roster.peers
        self._diagnosis.entered()
        effects += [PersistState(), LogMessage(f"generation {self.generation} begins, with {len(ready)} workers")]
        for entry in self.workers.values():
            if entry.stage is WorkerStage.WORKING:
                entry.turn(StageEvent.PASSED)
        for entry in ready:
            entry.turn(StageEvent.FORMED)
            assert entry.question is not None
            effects.append(ResolveCall(entry.question, self.roster))
            entry.question = None
        return effects
