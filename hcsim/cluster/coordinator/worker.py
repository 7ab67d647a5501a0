"""A worker's side of the coordinator: it registers, sends its heartbeats, and calls again when the connection is lost.

async with await Worker.join(host, "mini.local:52415", "studio", "studio.local:52416") as worker:
    while True:
        roster = await worker.ready()
        async with await Group.open(host, roster.membership(worker.name)) as group:
            try:
                await worker.during(roster, train(group))
                break
            except (WorkerLost, CollectiveError):
                continue  # somebody died: the rest goes on, in the next generation

`Coordinated` is the `Conductor` of those that train: it takes its views from the coordinator's generations. Members
order themselves as they do without a coordinator: who has been there for longer comes first, newcomers last. While the
coordinator is away they go on, and call it again. Whoever needs it then, for a view or because it just came, waits for
it for a while, and ends with an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec

from hcsim.cluster.conductor import Checker, Introduction
from hcsim.cluster.coordinator import messages
from hcsim.cluster.coordinator.messages import Checkpoint, Notice, Policy, Register, Roster
from hcsim.cluster.coordinator.state import NEXT
from hcsim.cluster.diagnosis import Accusation, Diagnosis, Failure, Findings
from hcsim.cluster.probe import Ways
from hcsim.cluster.view import Member, Terms, View
from hcsim.errors import CallRefused, ChannelBroken, ChannelError, DeadlineExceeded, HcsimError, UsageError, WorkerLost
from hcsim.runtime.clock import disappoint, within
from hcsim.runtime.host import Host
from hcsim.transport.callers import one_line
from hcsim.transport.reception import CHECK_S
from hcsim.transport.rpc import Endpoint, Procedure, Registry

T = TypeVar("T")

PATIENCE_S = 60.0
REGISTER_TIMEOUT_S = 5.0
RETRY_S = 0.2


class Worker:
    """This worker. Make one with `join`."""

    def __init__(
        self, host: Host, coordinator: str, who: Register, patience_s: float, tell: Callable[[str], None]
    ) -> None:
        self.host = host
        self._tell = tell
        self.rank = -1
        """Stable: a worker that starts again with its name gets it back."""
        self._coordinator = coordinator
        self._who = who
        self._patience_s = patience_s
        self._policy: Policy | None = None
        self._line: Endpoint | None = None
        self._found: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done while we are registered; it has the reason when we never will be again."""
        self._generation = 0
        self._over: dict[int, asyncio.Future[str]] = {}
        self._superseded = False
        self._barriers = 0
        self._staying: asyncio.Task[None] | None = None
        self._has_left = False
        self.endures = False
        """Whether we can do without the coordinator for as long as we ask it nothing."""
        self._asking = 0
        self._lost = ""
        """Why we have to look for the coordinator again."""

    @classmethod
    async def join(
        cls, host: Host, coordinator: str, name: str, address: str, *, patience_s: float = PATIENCE_S
    ) -> Worker:
        """Register as `name`, with collectives at `address`; the coordinator is waited for and looked for again
        for at most `patience_s`."""
        life = host.rng("coordinated worker", name, repr(host.clock.now())).getrandbits(61)
        return await cls.registered(host, coordinator, Register(name, life, address), patience_s)

    @classmethod
    async def registered(
        cls,
        host: Host,
        coordinator: str,
        who: Register,
        patience_s: float = PATIENCE_S,
        tell: Callable[[str], None] = lambda what: None,
    ) -> Worker:
        """Register with all that there is to say of us. `tell` hears when the coordinator is lost, and found again."""
        worker = cls(host, coordinator, who, patience_s, tell)
        worker._staying = host.spawn(worker._stay(), name=f"stay with the coordinator as {who.worker}")
        try:
            await asyncio.shield(worker._found)
        except BaseException:
            await worker.close()
            raise
        return worker

    async def __aenter__(self) -> Worker:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.leave()
        await self.close()

    @property
    def name(self) -> str:
        """Our id."""
        return self._who.worker

    @property
    def policy(self) -> Policy:
        """The coordinator's."""
        assert self._policy is not None  # `join` returns a worker that is registered
        return self._policy

    @property
    def generation(self) -> int:
        """The last one that we were in; 0: none."""
        return self._generation

    @property
    def superseded(self) -> bool:
        """Whether somebody waits to be in the next generation: ask for it after this step."""
        return self._superseded

    def over(self, generation: int) -> asyncio.Future[str]:
        """Done, with the reason, once that generation cannot work any more."""
        if generation not in self._over:
            self._over[generation] = asyncio.get_running_loop().create_future()
            if generation < self._generation:
                self._over[generation].set_result("a later one was formed")
        return self._over[generation]

    async def ready(self, *, deadline_s: float | None = None) -> Roster:
        """The next generation that we are in, once all its members are ready, with all of them."""
        return await self.after(NEXT, deadline_s=deadline_s)

    async def after(
        self, why: str, outcome: str = "", found: tuple[Findings, ...] = (), *, deadline_s: float | None = None
    ) -> Roster:
        """The same; `why` says why ours is over, and is empty if all its members come out of it. If our work is done,
        `outcome` says what came of it: the roster is empty if others have finished with the same. If it failed, `found`
        says what we saw of that."""
        roster = await self._ask(messages.READY, self._generation, why, outcome, found, deadline_s=deadline_s)
        if outcome and not roster.peers:
            return roster
        roster.place(self.name)
        for generation, over in self._over.items():
            if generation < roster.generation and not over.done():
                over.set_result("a later one was formed")
        self._over = {roster.generation: self.over(roster.generation)}
        self._generation, self._superseded, self._barriers = roster.generation, False, 0
        return roster

    async def during(self, roster: Roster, work: Coroutine[Any, Any, T]) -> T:
        """Do the work, or end it with an error that says who was lost, as soon as the generation is over."""
        over = self.over(roster.generation)
        task: asyncio.Task[T] = self.host.spawn(work, name=f"work in generation {roster.generation}")
        over.add_done_callback(lambda _: task.cancel())
        try:
            return await task
        except asyncio.CancelledError:
            if over.done() and not _being_cancelled():
                raise WorkerLost(f"generation {roster.generation} is over: {over.result()}") from None
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise

    async def barrier(self, name: str = "") -> None:
        """Return when all workers of our generation have come to it; all call the same barriers in the same order."""
        self._barriers += 1
        await self._ask(messages.BARRIER, self._generation, f"{name}#{self._barriers}")

    async def checkpoint(self, step: int, digest: str) -> Checkpoint:
        """Say that our shard is written. Returns once everybody's is; otherwise nothing is committed, and it can be
        tried again."""
        await self._ask(messages.BEGIN, self._generation, step)
        return await self._ask(messages.REPORT, self._generation, step, digest)

    async def committed(self) -> Checkpoint | None:
        """The last checkpoint that everybody has written."""
        found = await self._ask(messages.COMMITTED)
        return found[0] if found else None

    async def leave(self, outcome: str = "", *, orderly: bool = False) -> None:
        """Be in no further generation; returns when nobody counts on us any more, or nobody is there to tell. See
        `State.leave`."""
        if self._line is not None:
            limit_s = self.policy.leave_s + self.policy.silence_s
            try:
                await self._line.call(messages.LEAVE, orderly, outcome, deadline_s=limit_s)
            except (HcsimError, TimeoutError) as error:
                self.host.trace("coordinated worker", "left without goodbye", str(error))
        self._has_left = True

    async def close(self) -> None:
        """Stop. Without `leave`, the others find out by our silence."""
        if self._staying is not None:
            self._staying.cancel()
            await asyncio.gather(self._staying, return_exceptions=True)
        await self._hang_up()
        self._lost_for_good(UsageError(f"{self.name} is closed"))

    # The connection.

    async def _ask(self, procedure: Procedure[T], *args: Any, deadline_s: float | None = None) -> T:
        """Ask until there is an answer: whatever is asked here may be asked twice."""
        late = f"{procedure.name} was not answered within {deadline_s or 0:g} s"
        self._asking += 1
        try:
            async with within(self.host.clock, deadline_s, late):
                while True:
                    await asyncio.shield(self._found)
                    line = self._line
                    assert line is not None
                    try:
                        return await line.call(procedure, *args)
                    except ChannelError:
                        self._not_registered(line)
        finally:
            self._asking -= 1

    async def _stay(self) -> None:
        """Be registered and alive, as long as there is a coordinator."""
        try:
            while not self._has_left:
                await self._register()
                await self._beat()
        except HcsimError as error:
            self._lost_for_good(error)

    async def _register(self) -> None:
        until_s, lost = self.host.clock.elapsed() + self._patience_s, self._lost
        self._lost = ""
        where = f"the coordinator at {self._coordinator}"
        if lost:
            self._tell(f"{where} is lost ({lost}); it is called again for {self._patience_s:g} s")
        while True:
            left_s = min(until_s - self.host.clock.elapsed(), REGISTER_TIMEOUT_S)
            failure: HcsimError
            try:
                channel = await self.host.connect(self._coordinator, timeout_s=max(left_s, RETRY_S))
                self._line = Endpoint(self.host, channel, self._served())
                who = msgspec.structs.replace(self._who, generation=self._generation)
                answer = await self._line.call(messages.REGISTER, who, deadline_s=REGISTER_TIMEOUT_S)
                if lost:
                    self._tell(f"{where} is there again")
                self.rank, self._policy = answer.rank, answer.policy
                if not self._found.done():
                    self._found.set_result(None)
                return
            except (ChannelError, DeadlineExceeded, CallRefused) as error:
                failure = error
                await self._hang_up()
            if self.endures and not self._asking:
                until_s = self.host.clock.elapsed() + self._patience_s
            elif self.host.clock.elapsed() + RETRY_S >= until_s:
                if isinstance(failure, CallRefused):
                    raise failure
                raise ChannelBroken(f"{where} could not be reached for {self._patience_s:g} s: {failure}") from failure
            await self.host.clock.sleep(RETRY_S)

    async def _beat(self) -> None:
        """Send heartbeats until the coordinator is lost, or has lost us."""
        line, policy = self._line, self.policy
        assert line is not None
        try:
            while True:
                await self._notice(await line.call(messages.HEARTBEAT, self._generation, deadline_s=policy.silence_s))
                try:
                    async with self.host.clock.timeout(policy.heartbeat_s):
                        await asyncio.shield(line.ended)
                except TimeoutError:
                    continue
        except (ChannelError, DeadlineExceeded) as error:
            self.host.trace("coordinated worker", "lost the coordinator", str(error))
            self._lost = str(error)
        except WorkerLost as error:
            self._generation_over(str(error))
        self._not_registered(line)
        await self._hang_up()

    def _not_registered(self, line: Endpoint) -> None:
        if self._line is line and self._found.done():
            self._found = asyncio.get_running_loop().create_future()

    async def _hang_up(self) -> None:
        if self._line is not None:
            await self._line.close()
            self._line = None

    def _served(self) -> Registry:
        registry = Registry()
        registry.serve(messages.NOTICE, self._notice)
        return registry

    async def _notice(self, notice: Notice) -> None:
        if notice.generation == self._generation and self._generation:
            self._superseded = self._superseded or notice.superseded
            if notice.over:
                self._generation_over(notice.over)

    def _generation_over(self, reason: str) -> None:
        over = self.over(self._generation)
        if not over.done():
            over.set_result(reason)

    def _lost_for_good(self, error: HcsimError) -> None:
        if self._found.done():
            self._found = asyncio.get_running_loop().create_future()
        disappoint(self._found, error)
        self._generation_over(str(error))


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Coordinated:
    """This machine's part of a cluster that a coordinator holds together."""

    def __init__(
        self,
        host: Host,
        me: Introduction,
        coordinator: str,
        tell: Callable[[str], None] = lambda what: None,
        terms: Terms | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._host = host
        self._coordinator = coordinator
        self._tell: Callable[[str], None] = lambda what: tell(one_line(what))
        self._patience_s = patience_s
        self._us = Member(me.node, me.boot, me.name, me.address, me.home)
        self._identified = bool(me.namespace)
        own: Mapping[str, str] = terms or {}
        self._register = Register(me.node, me.boot, me.address, me.name, me.home, terms=dict(own))
        self._worker: Worker | None = None
        self._view: View | None = None
        self._broken = ""
        """Why the view that we are in is over for us."""
        self._diagnosis = Diagnosis(me.node)
        self._to_check = False
        """Whether we have to see which members we can work with before we ask for the next view."""
        self._checker: Checker | None = None
        self._outcome = ""

    async def start(self) -> None:
        """There is nothing to do before somebody asks for a view, and can be called: then we register."""

    async def stop(self, reason: str = "it was stopped") -> None:
        """Be no member any more."""
        if self._worker is not None:
            await self._worker.close()

    @property
    def us(self) -> Member:
        """This node, in this life."""
        return self._us

    @property
    def identified(self) -> bool:
        """In a cluster with a secret they do."""
        return self._identified

    @property
    def ways(self) -> Ways | None:
        """Nothing is measured."""
        return None

    async def view(self, after: int, outcome: str = "") -> View | None:
        """See `Conductor.view`."""
        worker = await self._joined()
        while True:
            why = self._broken
            if not why and worker.generation and worker.over(worker.generation).done():
                why = worker.over(worker.generation).result()
            await self._check()
            found = () if self._diagnosis.ours is None else (self._diagnosis.ours,)
            try:
                roster = await worker.after(why, outcome, found)
            except WorkerLost as error:  # we were silent for too long, and register again
                self._host.trace("coordinated member", str(error))
                await self._host.clock.sleep(RETRY_S)
                continue
            if not roster.peers:
                return None
            if roster.generation > after:
                return self._adopted(roster)

    def over(self, epoch: int) -> asyncio.Future[str]:
        """Done once the view of that epoch cannot work any more."""
        assert self._worker is not None  # whoever asks has a view
        return self._worker.over(epoch)

    def superseded(self, epoch: int) -> bool:
        """Whether somebody waits to be in the next view, or would like to leave this one."""
        assert self._worker is not None
        return self._worker.superseded or self._worker.generation > epoch

    def preparing(self, epoch: int) -> bool:
        """Who asks to be let in has nothing left to prepare."""
        return False

    def will_be_let_in(self, epoch: int) -> bool:
        """Nobody works alone who waits for the coordinator's word."""
        return False

    def surveyed(self, epoch: int) -> None:
        """See `Conductor.surveyed`."""
        self._diagnosis.surveyed(epoch)

    def broken(self, epoch: int, failure: Failure) -> None:
        """Our work in that view failed; we say so when we ask for the next one."""
        if self._view is not None and epoch == self._view.epoch:
            self._broken = f"could not go on: {failure.reason}"
            now = self._host.clock.elapsed()
            self._to_check = self._diagnosis.failed(self._view.lineage, epoch, failure, now) or self._to_check

    def check_with(self, check: Checker | None) -> None:
        """See by this whether this machine can work with others."""
        self._checker = check

    async def _check(self) -> None:
        """Find out which members of a view that failed cannot be worked with."""
        if not self._to_check or self._view is None:
            return
        self._to_check = False
        others = [member for member in self._view.members if member != self._us]
        wrong: list[Accusation] = []
        if self._checker is not None:
            own, theirs = await self._checker([(member.address, CHECK_S) for member in others])
            told = zip((self._us, *others), (own, *theirs), strict=True)
            wrong = [Accusation(member.node, why) for member, why in told if why]
        self._diagnosis.checked(self._view.epoch, wrong)

    def finish(self, outcome: str) -> None:
        """The coordinator hears of it when we leave, which is at once."""
        self._outcome = outcome

    async def leave(self) -> None:
        """Be in no further view; returns when the others know, or after a deadline."""
        if self._worker is not None:
            await self._worker.leave(self._outcome, orderly=True)

    async def _joined(self) -> Worker:
        if self._worker is None:
            self._worker = await Worker.registered(
                self._host, self._coordinator, self._register, self._patience_s, self._tell
            )
            self._worker.endures = True
            needed = self._worker.policy.needed
            self._tell(f"registered with the coordinator at {self._coordinator}; work begins with {needed}")
        return self._worker

    def _adopted(self, roster: Roster) -> View:
        before = -1 if self._view is None else self._view.epoch
        peers = sorted(roster.peers, key=lambda peer: (peer.since, peer.rank))
        members = tuple(
            Member(peer.node or peer.worker, peer.life, peer.name or peer.worker, peer.address, peer.home)
            for peer in peers
        )
        lineage = roster.line
        view = View(lineage, roster.generation, members, before, formed=True, reason=roster.reason)
        if view.rank(self._us) is None:
            raise HcsimError(
                f"the coordinator at {self._coordinator} takes us for another machine in view {view.epoch}"
            )
        self._view, self._broken, self._to_check = view, "", False
        self._diagnosis.entered()
        self._diagnosis.began(view.epoch, self._host.clock.elapsed())
        names = ", ".join(member.name for member in members)
        listed = ",".join(f"{member.name}#{member.boot:x}" for member in members)
        self._host.trace("view", lineage, view.epoch, before, listed)
        metrics = self._host.metrics
        metrics.gauge("hcsim_view_epoch").set(view.epoch)
        metrics.gauge("hcsim_view_members").set(len(members))
        metrics.gauge("hcsim_leader").set(view.rank(self._us) == 0)
        self._tell(f"view {view.epoch}: {names} ({view.reason})")
        return view
