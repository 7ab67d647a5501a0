"""A worker's side of the coordinator: it registers, sends heartbeats, and reconnects when the connection is lost.

    async with await CoordinatorClient.join(host, "mini.local:52417", "studio", "studio.local:52416") as worker:
        while True:
            roster = await worker.ready()
            async with await Group.open(host, roster.membership(worker.name)) as group:
                try:
                    await worker.during(roster, train(group))
                    break
                except (WorkerLost, CollectiveError):
                    continue  # a worker was lost: the rest continues, in the next generation

`CoordinatedMembership` is the `MembershipSource` used in training: it takes its views from the coordinator's
generations. Members are ordered as without a coordinator: by seniority, newcomers last. While the coordinator is
unreachable they continue to work and try to reconnect. A worker that needs the coordinator then, for a view or because
it has just started, waits for a limited time and ends with an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec

from hcsim.cluster.control_connections import HELLO_TIMEOUT_S, MESSAGE_LIMIT_BYTES, StatusClients, details_of
from hcsim.cluster.coordinator import messages
from hcsim.cluster.coordinator.messages import (
    CommittedCheckpoint,
    CoordinatorPolicy,
    GenerationRoster,
    GenerationStatus,
    Register,
)
from hcsim.cluster.coordinator.state import NEXT
from hcsim.cluster.diagnosis import Accusation, Diagnosis, Findings, ViewFailure
from hcsim.cluster.discovery import Announcement
from hcsim.cluster.health import SleepDetector
from hcsim.cluster.membership_source import MemberCheck, NodeInfo
from hcsim.cluster.messages import SCHEMA, Details, Goodbye, LinkStatus, Status, StatusReply, StatusRequest
from hcsim.cluster.probe import Routes
from hcsim.cluster.view import JobTerms, Member, View
from hcsim.errors import (
    CallRefused,
    ChannelBroken,
    ChannelError,
    ConfigError,
    DeadlineExceeded,
    HcsimError,
    UsageError,
    WorkerLost,
)
from hcsim.runtime.channel import Channel, Listener
from hcsim.runtime.clock import fail_future, within
from hcsim.runtime.host import Host
from hcsim.telemetry.history import RunHistory
from hcsim.transport.admission_queue import AdmissionQueue, one_line
from hcsim.transport.groups import CheckedPeer
from hcsim.transport.rpc import Endpoint, Procedure, ProcedureRegistry

T = TypeVar("T")

PATIENCE_S = 60.0
REGISTER_TIMEOUT_S = 5.0
RETRY_S = 0.2


class CoordinatorClient:
    """A registered worker. Create one with `join`."""

    def __init__(
        self, host: Host, coordinator: str, who: Register, patience_s: float, tell: Callable[[str], None]
    ) -> None:
        self.host = host
        self._tell = tell
        self.rank = -1
        """Stable: a worker that restarts with the same name gets it back."""
        self._coordinator = coordinator
        self._who = who
        self._patience_s = patience_s
        self._policy: CoordinatorPolicy | None = None
        self._line: Endpoint | None = None
        self._found: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done while registered; has an exception once registration is no longer possible."""
        self._generation = 0
        self._over: dict[int, asyncio.Future[str]] = {}
        self._superseded = False
        self._barriers = 0
        self._staying: asyncio.Task[None] | None = None
        self._has_left = False
        self.endures = False
        """Whether the worker tolerates an unreachable coordinator as long as it has no request to it."""
        self._asking = 0
        self._sleep = SleepDetector(host.clock.asleep())
        self._lost = ""
        """Why the coordinator has to be found again."""

    @classmethod
    async def join(
        cls, host: Host, coordinator: str, name: str, address: str, *, patience_s: float = PATIENCE_S
    ) -> CoordinatorClient:
        """Register as `name`, with collectives at `address`. Retry for at most `patience_s`, now and after a lost
        connection."""
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
    ) -> CoordinatorClient:
        """Register with a complete registration request. `tell` is called when the coordinator is lost, and when it
        is found again."""
        worker = cls(host, coordinator, who, patience_s, tell)
        worker._staying = host.spawn(worker._stay(), name=f"stay with the coordinator as {who.worker}")
        try:
            await asyncio.shield(worker._found)
        except BaseException:
            await worker.close()
            raise
        return worker

    async def __aenter__(self) -> CoordinatorClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.leave()
        await self.close()

    @property
    def name(self) -> str:
        return self._who.worker

    @property
    def policy(self) -> CoordinatorPolicy:
        assert self._policy is not None  # `join` returns a worker that is registered
        return self._policy

    @property
    def generation(self) -> int:
        """The last generation that contained this worker; 0: none."""
        return self._generation

    @property
    def superseded(self) -> bool:
        """Whether a worker waits to join the next generation: ask for it after this step."""
        return self._superseded

    def over(self, generation: int) -> asyncio.Future[str]:
        if generation not in self._over:
            self._over[generation] = asyncio.get_running_loop().create_future()
            if generation < self._generation:
                self._over[generation].set_result("a later one was formed")
        return self._over[generation]

    async def ready(self, *, deadline_s: float | None = None) -> GenerationRoster:
        """Return the next generation that contains this worker, once all its members are ready."""
        return await self.after(NEXT, deadline_s=deadline_s)

    async def after(
        self, why: str, outcome: str = "", found: tuple[Findings, ...] = (), *, deadline_s: float | None = None
    ) -> GenerationRoster:
        """Like `ready`, with a reason. `why` says why the present generation ended; it is empty if all its members
        leave it together. If the work is finished, `outcome` is the result: the roster is empty if others have
        finished with the same outcome. If the work failed, `found` contains this worker's findings."""
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

    async def during(self, roster: GenerationRoster, work: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine. Once the generation ends, cancel it and raise an error that names the lost worker."""
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
        """Return when all workers of the generation have reached it; all must call the same barriers in the same
        order."""
        self._barriers += 1
        await self._ask(messages.BARRIER, self._generation, f"{name}#{self._barriers}")

    async def checkpoint(self, step: int, digest: str) -> CommittedCheckpoint:
        """Report that this worker's shard is written. Return once all shards are; otherwise nothing is committed,
        and the call can be repeated."""
        await self._ask(messages.BEGIN, self._generation, step)
        return await self._ask(messages.REPORT, self._generation, step, digest)

    async def committed(self) -> CommittedCheckpoint | None:
        found = await self._ask(messages.COMMITTED)
        return found[0] if found else None

    async def leave(self, outcome: str = "", *, orderly: bool = False) -> None:
        """Leave for good; return when no other worker depends on this one, or the coordinator is unreachable. See
        `CoordinatorState.leave`."""
        if self._line is not None:
            limit_s = self.policy.leave_s + self.policy.silence_s
            try:
                await self._line.call(messages.LEAVE, orderly, outcome, deadline_s=limit_s)
            except (HcsimError, TimeoutError) as error:
                self.host.trace("coordinated worker", "left without goodbye", str(error))
        self._has_left = True

    async def close(self) -> None:
        """Stop. Without `leave`, the others notice only by the missing heartbeats."""
        if self._staying is not None:
            self._staying.cancel()
            await asyncio.gather(self._staying, return_exceptions=True)
        await self._hang_up()
        self._lost_for_good(UsageError(f"{self.name} is closed"))

    # The connection.

    async def _ask(self, procedure: Procedure[T], *args: Any, deadline_s: float | None = None) -> T:
        """Call a procedure and retry until there is an answer, so every request must be idempotent."""
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
        try:
            while not self._has_left:
                await self._register()
                await self._beat()
        except HcsimError as error:
            self._lost_for_good(error)

    async def _register(self) -> None:
        until_s, lost = self.host.clock.elapsed() + self._patience_s, self._lost
        self._lost, told = "", False
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
                if not (lost or told):
                    told = True
                    self._tell(f"{where} does not take us yet ({error}); it is called for {self._patience_s:g} s")
            if self.endures and not self._asking:
                until_s = self.host.clock.elapsed() + self._patience_s
            elif self.host.clock.elapsed() + RETRY_S >= until_s:
                if isinstance(failure, CallRefused):
                    raise failure
                raise ChannelBroken(f"{where} could not be reached for {self._patience_s:g} s: {failure}") from failure
            await self.host.clock.sleep(RETRY_S)

    async def _beat(self) -> None:
        line, policy = self._line, self.policy
        assert line is not None
        try:
            while True:
                if slept := self._sleep.report(self.host.clock.asleep()):
                    self.host.trace("coordinated worker", slept)
                    self._tell(slept)
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

    def _served(self) -> ProcedureRegistry:
        registry = ProcedureRegistry()
        registry.serve(messages.NOTICE, self._notice)
        return registry

    async def _notice(self, notice: GenerationStatus) -> None:
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
        fail_future(self._found, error)
        self._generation_over(str(error))


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class CoordinatedMembership:
    """The `MembershipSource` of a machine in a cluster with a coordinator."""

    def __init__(
        self,
        host: Host,
        me: NodeInfo,
        coordinator: str,
        tell: Callable[[str], None] = lambda what: None,
        terms: JobTerms | None = None,
        patience_s: float = PATIENCE_S,
        history: RunHistory | None = None,
        *,
        announced: bool = False,
    ) -> None:
        """`announced` is whether status clients find this machine by its announcement on the local network."""
        self._host = host
        self._me = me
        self._announced = announced
        self._history = history or RunHistory()
        self._clients = StatusClients(host, self)
        self._admission = AdmissionQueue(host)
        self._serving: list[asyncio.Task[None]] = []
        self._links: tuple[LinkStatus, ...] = ()
        self._coordinator = coordinator
        self._tell: Callable[[str], None] = lambda what: tell(one_line(what))
        self._patience_s = patience_s
        self._us = Member(me.node, me.boot, me.name, me.address, me.home)
        self._identified = bool(me.namespace)
        own: Mapping[str, str] = terms or {}
        self._register = Register(me.node, me.boot, me.address, me.name, me.home, terms=dict(own), control=me.control)
        self._worker: CoordinatorClient | None = None
        self._view: View | None = None
        self._broken = ""
        """Why the present view has failed for this node."""
        self._diagnosis = Diagnosis(me.node)
        self._to_check = False
        """Whether the other members have to be checked before the next view is requested."""
        self._checker: MemberCheck | None = None
        self._outcome = ""

    async def start(self) -> None:
        """Answer status clients; registration happens at the first request for a view."""
        try:
            if self._coordinator.rpartition(":")[2] == self._me.control.rpartition(":")[2]:
                raise ConfigError("discovery_port is the coordinator's port")  # which may be of this machine
            listener = await self._host.listen(self._me.control)
        except HcsimError as error:  # several members may share a machine and its settings
            self._register = msgspec.structs.replace(self._register, control="")
            self._tell(f"`hcsim cluster status` does not see this machine: {error}")
            return
        self._serving.append(self._host.spawn(self._serve(listener), name="status clients"))
        if self._announced:
            self._serving.append(self._host.spawn(self._announce(), name="announce"))

    async def stop(self, reason: str = "it was stopped") -> None:
        if self._worker is not None:
            await self._worker.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await self._clients.close()
        await self._admission.close()

    # Status clients.

    async def _serve(self, listener: Listener) -> None:
        try:
            await self._admission.accept(
                listener, lambda channel, number: self._host.spawn(self._greet(channel), name=f"status client {number}")
            )
        finally:
            await listener.close()

    async def _announce(self) -> None:
        me = self._me
        service = Announcement(me.node, me.name, me.namespace, me.boot, me.control, is_coordinated=True).service()
        try:
            await self._host.lan.advertise(service)
        except HcsimError as error:
            self._host.trace("not announced", str(error))
            return
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await self._host.lan.withdraw(service.name)

    async def _greet(self, channel: Channel) -> None:
        try:
            try:
                channel.limit(MESSAGE_LIMIT_BYTES)
                async with self._host.clock.timeout(HELLO_TIMEOUT_S):
                    first = await SCHEMA.recv(channel)
                    if not isinstance(first, StatusRequest) or first.forget:
                        text = f"{self._us.name} works with the coordinator at {self._coordinator}, which decides alone"
                        await SCHEMA.send(channel, Goodbye(text, refused=True))
                        return
                    await self._clients.answer(channel, first)
            finally:
                self._admission.known(channel)
            await self._clients.answer_again(channel)
        except (HcsimError, TimeoutError) as error:
            self._host.trace("status client", channel.peer, str(error))
        finally:
            self._clients.left(channel)
            await channel.close()

    def asked(self, ask: StatusRequest) -> StatusReply:
        view = self._view or View("", 0, (self._us,))
        status = Status(self._us, self._me.control, view.lineage, view.epoch, len(view.members), view.formed)
        facts = None if self._me.facts is None else self._me.facts()
        return StatusReply(status, view, self._links, self._host.interfaces(), facts=facts)

    async def details(self, since_s: float) -> Details:
        needed = 0 if self._worker is None or self._worker.rank < 0 else self._worker.policy.needed
        return await details_of(self._host, self._history, needed, since_s)

    @property
    def us(self) -> Member:
        return self._us

    @property
    def identified(self) -> bool:
        """Return whether the cluster has a secret."""
        return self._identified

    @property
    def ways(self) -> Routes | None:
        return None

    async def view(self, after: int, outcome: str = "") -> View | None:
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
        assert self._worker is not None  # whoever asks has a view
        return self._worker.over(epoch)

    def superseded(self, epoch: int) -> bool:
        """Return whether a worker waits to join the next view, or this node is in a later view already."""
        assert self._worker is not None
        return self._worker.superseded or self._worker.generation > epoch

    def preparing(self, epoch: int) -> bool:
        """Return False: a worker that asks to join has nothing left to prepare."""
        return False

    def will_be_let_in(self, epoch: int) -> bool:
        """Return False: a worker that waits for the coordinator does not work alone."""
        return False

    def surveyed(self, epoch: int) -> None:
        self._diagnosis.surveyed(epoch)

    def broken(self, epoch: int, failure: ViewFailure) -> None:
        """Record the failure; it is reported with the request for the next view."""
        if self._view is not None and epoch == self._view.epoch:
            self._broken = f"could not go on: {failure.reason}"
            now = self._host.clock.elapsed()
            self._to_check = self._diagnosis.failed(self._view.lineage, epoch, failure, now) or self._to_check

    def check_with(self, check: MemberCheck | None) -> None:
        self._checker = check

    async def _check(self) -> None:
        if not self._to_check or self._view is None:
            return
        self._to_check = False
        others = [member for member in self._view.members if member != self._us]
        wrong: list[Accusation] = []
        if self._checker is not None:
            own, theirs = await self._checker([CheckedPeer(member.address) for member in others])
            told = zip((self._us, *others), (own, *theirs), strict=True)
            wrong = [Accusation(member.node, why) for member, why in told if why]
        self._diagnosis.checked(self._view.epoch, wrong)

    def finish(self, outcome: str) -> None:
        """Record the outcome; the coordinator is told by `leave`, which follows at once."""
        self._outcome = outcome

    async def leave(self) -> None:
        if self._worker is not None:
            await self._worker.leave(self._outcome, orderly=True)

    async def _joined(self) -> CoordinatorClient:
        if self._worker is None:
            self._worker = await CoordinatorClient.registered(
                self._host, self._coordinator, self._register, self._patience_s, self._tell
            )
            self._worker.endures = True
            needed = self._worker.policy.needed
            self._tell(f"registered with the coordinator at {self._coordinator}; work begins with {needed}")
        return self._worker

    def _adopted(self, roster: GenerationRoster) -> View:
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
        self._links = tuple(
            LinkStatus(peer.node or peer.worker, peer.name or peer.worker, peer.control, "", None, "")
            for peer in peers
            if peer.control and peer.worker != self._us.node
        )
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
