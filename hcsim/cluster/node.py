"""A cluster node: the driver that feeds events to the state machines and executes their effects.

It is the `MembershipSource` of the computation: it determines the members to work with, and when a view has ended.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

from hcsim.cluster.agreement import AcceptorState
from hcsim.cluster.control_connections import ControlConnections, details_of
from hcsim.cluster.diagnosis import SLOWER, Accusation, ViewFailure
from hcsim.cluster.discovery import Announcement, Discovery
from hcsim.cluster.health import FailureDetector, PauseDetector, SleepDetector
from hcsim.cluster.membership import (
    AdoptView,
    CheckMembers,
    CheckNewcomer,
    EndEpoch,
    Membership,
    ReportWaiting,
    SendMessage,
)
from hcsim.cluster.membership_source import LAST_CALL_S, MemberCheck, NodeInfo
from hcsim.cluster.messages import (
    SCHEMA,
    ControlMessage,
    Details,
    Goodbye,
    HeartbeatMessage,
    HeartbeatReply,
    LastCall,
    LinkStatus,
    MeetingRequest,
    MeetingResult,
    NodeHello,
    Status,
    StatusReply,
    StatusRequest,
    TrustUpdate,
)
from hcsim.cluster.metrics import ClusterMetrics
from hcsim.cluster.probe import Routes
from hcsim.cluster.view import JobTerms, Member, MembershipRules, View, refusal, unlike
from hcsim.config.cluster import Cluster
from hcsim.errors import ConfigError, HcsimError, PeerRefused
from hcsim.identity.trust_store import TrustStore
from hcsim.runtime.channel import Channel
from hcsim.runtime.clock import BroadcastEvent
from hcsim.runtime.host import Host, keep, kept
from hcsim.telemetry.history import RunHistory
from hcsim.transport.admission_queue import LogDeduplicator, one_line
from hcsim.transport.groups import CHECK_S, CheckedPeer, echo_s

_TICK_S = 0.001
"""A minimum wait: if clock drift wakes the task early, it looks again, but not at once."""
GONE = "it has gone"
"""The reason for the absence of a node that has said goodbye."""
EXPELLED = "it was expelled from the cluster"
_MEASURE_S = 10.0
"""How long a newcomer may measure its routes to the members before it joins them."""
QUALIFY_AGAIN_S = 2.0
QUALIFY_AGAIN_MOST_S = 60.0
"""The initial and the maximum time that a machine that cannot join waits before it checks again."""
_REFUSAL_S = 0.1
"""How long the operating system of a node whose process has ended may take to refuse a connection."""
_BUSY_S = 0.25
"""How long a healthy machine may be too busy to answer a check."""
_LOOKS = 4
"""The number of health checks of all peers per heartbeat."""


MeetingHandler: TypeAlias = Callable[[Host, str, Channel, MeetingRequest], Awaitable[None]]
"""Serves a meeting on this host, which is reached at that control address."""


class ClusterNode:
    """A machine's node in a cluster."""

    def __init__(
        self,
        host: Host,
        me: NodeInfo,
        config: Cluster,
        tell: Callable[[str], None] = lambda text: None,
        terms: JobTerms | None = None,
        trusted: TrustStore | None = None,
        history: RunHistory | None = None,
        meeting: MeetingHandler | None = None,
    ) -> None:
        self._host = host
        self._meeting = meeting
        self._meets = False
        self._history = history or RunHistory()
        self._trusted = trusted
        self._me = me
        self._terms = dict(terms or {})
        self._terms_of: dict[str, JobTerms] = {}
        self._config = config
        self._beat = config.beat
        self._tell: Callable[[str], None] = lambda what: tell(one_line(what))
        self._tell_once = LogDeduplicator(self._tell)
        self._pulses: dict[str, FailureDetector] = {}
        self._up_since_s: dict[str, float] = {}
        self._sent: dict[int, float] = {}
        self._number = 1
        self._watch = PauseDetector(math.inf, self._beat.interval_s / _LOOKS)
        self._sleep = SleepDetector(host.clock.asleep())
        self._news = BroadcastEvent()
        self._overs: dict[int, asyncio.Future[str]] = {}
        self._review = asyncio.Event()
        self._waiting: dict[str, None] = {}
        """The waiting messages logged since the last view, since they may alternate between members."""
        self._unsaved = False
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: BaseException | None = None
        self._record = f"membership-{me.namespace[:16]}" if me.namespace else "membership"
        self._us = Member(me.node, me.boot, me.name, me.address, me.home)
        rules = MembershipRules(config.needed, config.quorum, config.settle_s, self._beat.timeout_s)
        remembered = kept(host.store, self._record, AcceptorState)
        self._membership = Membership(self._us, me.control, rules, remembered, self._save)
        self._known = self._membership.status
        self._checker: MemberCheck | None = None
        self._disqualified_s = 0.0
        """How long to wait before the next check whether this node can join; grows each time."""
        self._last_call = asyncio.Event()
        """Set when the work of this node, or of the cluster that it wants to join, is done: joining has to happen
        soon."""
        self._qualifying: asyncio.Task[None] | None = None
        """The task that checks whether this node can join; a new request replaces it."""
        self._checking: asyncio.Task[None] | None = None
        """The task that checks the members of a view that failed; the next view ends it."""
        self._lines = ControlConnections(host, self)
        self._ways = Routes(host, me.node, self._control_of)
        announcement = Announcement(me.node, me.name, me.namespace, me.boot, me.control)
        self._discovery = Discovery(host, config, announcement, self._lines.dial, self._on_line, self.told)
        self._figures = ClusterMetrics(host, self._membership, self._lines, self._discovery, self._pulses, self._ways)

    async def start(self) -> None:
        listener = await self._host.listen(self._me.control)
        self._membership.started(self._now())
        self._carry_out()
        if self._trusted is not None:
            self._trusted.on_change.append(self._trust_changed)
            self._leave_out_expelled()
        for name, work in (
            ("control", self._lines.serve(listener)),
            ("discovery", self._discovery.run()),
            ("heartbeats", self._beats()),
            ("reviews", self._reviews()),
        ):
            self._tasks.append(self._host.spawn(work, name=name))
            self._tasks[-1].add_done_callback(self._ended)

    async def stop(self, reason: str = "it was stopped") -> None:
        if self._trusted is not None and self._trust_changed in self._trusted.on_change:
            self._trusted.on_change.remove(self._trust_changed)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._figures.end()  # tells how it was until now
        await self._lines.close(reason)
        await self._discovery.goodbye()

    # What a computation asks.

    @property
    def us(self) -> Member:
        return self._us

    @property
    def identified(self) -> bool:
        """Return whether the cluster has a secret."""
        return bool(self._me.namespace)

    @property
    def ways(self) -> Routes | None:
        return None if self._config.measure == "nothing" else self._ways

    async def view(self, after: int, outcome: str = "") -> View | None:
        """See `MembershipSource.view`. A node that was excluded waits for the members that continue, even if it could
        work alone."""
        membership = self._membership
        while True:
            if self._failure is not None:
                raise self._failure
            view = membership.view
            if outcome in membership.outcomes and membership.deserted:
                return None
            if membership.outcomes and membership.outside:
                who = ", ".join(dict.fromkeys(membership.outcomes.values()))
                raise HcsimError(f"training has ended without this machine: {who} finished it, and nobody is left")
            if view.epoch > after and view.formed and view.rank(self._us) is not None and not membership.left_behind:
                membership.began(view.epoch, self._now())
                return view
            await self._news.next()

    def over(self, epoch: int) -> asyncio.Future[str]:
        if epoch not in self._overs:
            self._overs[epoch] = asyncio.get_running_loop().create_future()
        return self._overs[epoch]

    def superseded(self, epoch: int) -> bool:
        return self._membership.view.epoch > epoch

    def preparing(self, epoch: int) -> bool:
        """With all steps done, return whether a visible machine is still preparing to join that epoch's view, or
        whether this node, alone, is preparing to join another.

        Nodes in quarantine may try too, since no step is left for them to block. A node that fails serves the
        rest of its quarantine; it is waited for if that ends soon. For the same reason this node itself tries
        again soon, and sends a last call to nodes that are preparing."""
        membership, now = self._membership, self._now()
        membership.roster.release(now)
        self._last_call.set()
        if self.superseded(epoch) or self.over(epoch).done():
            return False
        preparing = membership.roster.preparing(membership.view, now + LAST_CALL_S / 2)
        for node in preparing:
            self._lines.send(node, LastCall(membership.view.lineage))
        return membership.asks or bool(preparing)

    def will_be_let_in(self, epoch: int) -> bool:
        ended = self.superseded(epoch) or self.over(epoch).done()
        return not ended and self._membership.will_be_let_in

    def surveyed(self, epoch: int) -> None:
        self._membership.surveyed(epoch)

    def broken(self, epoch: int, failure: ViewFailure) -> None:
        self._membership.broken(epoch, failure, self._now())
        self._carry_out()

    def check_with(self, check: MemberCheck | None) -> None:
        self._checker = check

    def finish(self, outcome: str) -> None:
        """Record the outcome; the others are told by `leave`, which follows at once."""
        self._membership.outcome = outcome

    async def leave(self) -> None:
        self._membership.leave(self._now())
        self._carry_out()
        try:
            async with self._host.clock.timeout(self._beat.timeout_s):
                while len(self._membership.view.members) > 1:
                    await self._news.next()
        except TimeoutError:
            pass  # the others will notice

    # What happens on the lines.

    def status(self) -> Status:
        return self._membership.status

    def hello(self) -> NodeHello:
        return NodeHello(self._membership.status, self._terms)

    def asked(self, ask: StatusRequest) -> StatusReply:
        """Record a node that is gone for good, if one is named; then return the status and connections of this node."""
        if ask.forget:
            member = self._membership.view.member(ask.forget)
            self._tell(f"{member.name if member else ask.forget} is gone for good, as somebody says")
            self._membership.forget(ask.forget, self._now())
            self._carry_out()
        membership, pulses, ends = self._membership, self._pulses, self._ways.in_use()
        links = []
        for node, peer in sorted(membership.roster.peers.items()):
            line = self._ways.line(peer.status.us)
            links.append(
                LinkStatus(
                    node,
                    peer.status.us.name,
                    peer.status.control,
                    self._lines.address(node),
                    pulses[node].latency_s if node in pulses else None,
                    peer.suspected,
                    ends.get(node, ("", "")),
                    None if line is None else line.there_Bps,
                    None if line is None else line.back_Bps,
                )
            )
        facts = None if self._me.facts is None else self._me.facts()
        interfaces, heard = self._host.interfaces(), self._discovery.heard
        return StatusReply(membership.status, membership.view, tuple(links), interfaces, facts=facts, heard=heard)

    async def details(self, since_s: float) -> Details:
        return await details_of(self._host, self._history, self._config.needed, since_s)

    def up(self, hello: NodeHello) -> None:
        status, now = hello.status, self._now()
        node = status.us.node
        self._terms_of[node] = hello.terms
        self._up_since_s[node] = now
        self._pulses.setdefault(node, FailureDetector(now, self._beat)).sign(now)
        self._discovery.want(node, status.control)
        self._meet(status)
        self._membership.heard(status, now)
        self._membership.found(node, now)
        self._membership.connected(node, now)
        self._carry_out()

    async def probed(self, channel: Channel) -> None:
        await self._ways.answer(channel)

    async def met(self, channel: Channel, request: MeetingRequest) -> None:
        try:
            if self._meeting is None or self._meets:
                busy = "other links are being measured" if self._meets else "it cannot measure links"
                await SCHEMA.send(channel, MeetingResult(error=busy))
                return
            self._meets = True
            try:
                await self._meeting(self._host, self._me.control, channel, request)
            finally:
                self._meets = False
        finally:
            await channel.close()

    def _meet(self, status: Status) -> None:
        """Dial the nodes that another node reaches and this one does not."""
        for node, control in zip(status.reaches, status.contacts, strict=False):
            if node != self._us.node and not self._on_line(node) and not self._is_expelled(node):
                self._discovery.learn(node, control)

    def down(self, node: str, goodbye: Goodbye | None) -> None:
        """The connection to a node has closed: the node has left, or has to be dialled again, but not soon if it
        rejected this node."""
        if self._is_expelled(node):
            self._leave_out_expelled()
        elif goodbye is not None:
            if not goodbye.refused:
                self._discovery.forget(node)
            self._membership.lost(node, "it refused us" if goodbye.refused else GONE, self._now())
            self._carry_out()
        else:
            lasted_s = self._now() - self._up_since_s[node]
            pause_s = 0.0 if lasted_s > self._beat.interval_s else self._beat.interval_s / 2
            self._host.spawn(self._call_again(node, pause_s), name="call again")

    def said(self, node: str, message: ControlMessage) -> None:
        if self._is_expelled(node):
            return  # the channel to it ends
        now, pulse = self._now(), self._pulses[node]
        if isinstance(message, HeartbeatMessage):
            if message.number:
                pulse.beat(now)
                self._lines.send(node, HeartbeatReply(message.number))
            if message.status.us.node == node:
                self._membership.heard(message.status, now)
                self._meet(message.status)
        elif isinstance(message, HeartbeatReply):
            if message.number in self._sent:
                pulse.echoed(now - self._sent[message.number])
        elif isinstance(message, TrustUpdate):
            self._hear_trust(message)
        elif isinstance(message, LastCall):
            if message.lineage == self._membership.status.joins:
                self._last_call.set()
        else:
            self._membership.message(node, message, now)
        pulse.sign(now)
        self._membership.found(node, now)
        self._carry_out()

    def told(self, what: str) -> None:
        self._host.trace("cluster", what)
        self._tell_once(what)

    # Who belongs to the cluster.

    def _is_expelled(self, node: str) -> bool:
        return self._trusted is not None and node in self._trusted.list.expelled

    def _hear_trust(self, update: TrustUpdate) -> None:
        if self._trusted is not None:
            try:
                self._trusted.take(update.record)
            except ConfigError as error:
                self.told(str(error))

    def _trust_changed(self) -> None:
        """Send the list to the other members, and exclude expelled nodes."""
        assert self._trusted is not None
        update = TrustUpdate(self._trusted.record)
        for node in self._lines.nodes:
            if node in self._trusted.list.members:
                self._lines.send(node, update)
        self._leave_out_expelled()

    def _leave_out_expelled(self) -> None:
        """Mark expelled nodes as lost, so that views exclude them and no proposal waits for their votes."""
        assert self._trusted is not None
        for node in self._trusted.list.expelled:
            if (peer := self._membership.roster.peers.get(node)) is not None and peer.suspected != EXPELLED:
                peer.suspected = ""
                self._tell_once(f"{peer.status.us.name} was expelled from the cluster")
                self._membership.lost(node, EXPELLED, self._now())
            self._membership.forget(node, self._now())
            self._discovery.forget(node)
        self._carry_out()

    # What goes on by itself.

    async def _beats(self) -> None:
        pause_s = self._beat.interval_s / _LOOKS
        while True:
            self._number += 1
            self._sent[self._number] = self._now()
            self._sent.pop(self._number - 16, None)
            self._lines.send_all(HeartbeatMessage(self._number, self._membership.status))
            self._figures.beat_sent()
            for _ in range(_LOOKS):
                self._watch.due_s = self._now() + pause_s
                await self._host.clock.sleep(pause_s)
                self._look()

    def _look(self) -> None:
        """Suspect silent peers, unless this process itself was suspended."""
        now = self._now()
        if slept := self._sleep.report(self._host.clock.asleep()):
            self._host.trace("cluster", slept)
            self._tell(slept)
        if away_s := self._watch.away_s(now):
            self._host.trace("stood still", away_s)
            for pulse in self._pulses.values():
                pulse.excuse(away_s, now)
        for node, pulse in self._pulses.items():
            why = pulse.suspected(now)
            self._figures.looked(node, pulse, why, now)
            if why:
                self._membership.lost(node, why, now)
        self._carry_out()

    async def _reviews(self) -> None:
        while True:
            self._review.clear()
            wake_at_s = self._membership.wake_at_s
            wait_s = None if wake_at_s is None else max(_TICK_S, wake_at_s - self._now())
            try:
                async with self._host.clock.timeout(wait_s):
                    await self._review.wait()
            except TimeoutError:
                self._membership.tick(self._now())
                self._carry_out()

    async def _call_again(self, node: str, pause_s: float) -> None:
        """Dial again after a broken connection, and take a refusal as proof that the process has ended.

        In that case the operating system refuses at once, and the others need not wait for a missed heartbeat."""
        peer = self._membership.roster.peers[node]
        await self._host.clock.sleep(pause_s)
        for timeout_s in (min(_REFUSAL_S, self._beat.interval_s), self._beat.interval_s):
            if self._on_line(node):
                return
            try:
                await self._lines.dial(peer.status.control, timeout_s, node)
            except PeerRefused as error:
                self._pulses[node].refused(str(error))
                self._look()
                return
            except HcsimError as error:
                self._host.trace("not reached", node, str(error))

    def _carry_out(self) -> None:
        membership = self._membership
        if membership.status != self._known:  # first, so that what we ask is heard by those who know that we hear them
            self._known = membership.status
            self._lines.send_all(HeartbeatMessage(0, self._known))
        while membership.effects:
            effects, membership.effects = membership.effects, []
            for effect in effects:
                if isinstance(effect, SendMessage):
                    self._lines.send(effect.to, effect.message)
                elif isinstance(effect, AdoptView):
                    self._adopted(effect.view)
                elif isinstance(effect, EndEpoch):
                    self._is_over(effect)
                elif isinstance(effect, CheckMembers):
                    self._stop_checking()
                    check = self._check(self._membership.view, effect)
                    self._checking = self._host.spawn(check, name=f"check the members of {effect.epoch}")
                elif isinstance(effect, CheckNewcomer):
                    if self._qualifying is not None:
                        self._qualifying.cancel()
                    self._qualifying = self._host.spawn(self._qualify(effect), name="qualify")
                elif isinstance(effect, ReportWaiting) and effect.reason not in self._waiting:
                    self._waiting[effect.reason] = None
                    self._host.trace("cluster", effect.reason)
                    self._tell(effect.reason)
        self._review.set()
        self._news.tell()

    def _stop_checking(self) -> None:
        """End the checks of a view that is over: where views fail quickly, their connections would add up."""
        if self._checking is not None:
            self._checking.cancel()

    async def _check(self, view: View, asked: CheckMembers) -> None:
        others = [member for member in view.members if member.node != self._us.node]
        wrong = await self._wrong_with(others, slow=asked.slow)
        accusations = [Accusation(node, reason) for node, reason in wrong.items()]
        for node, reason in wrong.items():
            self._host.trace("accused", view.epoch, node, reason)
        self._membership.checked(view.epoch, accusations, self._now())
        self._carry_out()

    async def _qualify(self, asked: CheckNewcomer) -> None:
        """Check whether this node can work with the members, and measure the routes to them, while they continue
        without it."""
        membership, passed = self._membership, dict[str, None]()
        await self._host.clock.sleep(self._config.settle_s)  # they may be taking us in as the last one they wait for
        while nodes := [node for node in membership.to_qualify_with(asked.lineage) if node not in passed]:
            members = [membership.roster.peers[node].status.us for node in nodes]
            wrong = await self._wrong_with(members)
            if disk := await self._wrong_with_disk():
                wrong = {self._us.node: disk, **wrong}
            if wrong:
                names = {self._us.node: self._us.name, **{member.node: member.name for member in members}}
                self.told(f"not ready to join: {', '.join(f'{names[node]}: {why}' for node, why in wrong.items())}")
                await self._pause_before_trying_again()
                membership.disqualified(asked.lineage, self._now())
                self._carry_out()
                return
            if self.ways is not None:
                with suppress(TimeoutError):
                    async with self._host.clock.timeout(_MEASURE_S):
                        await self._ways.measure(members)
            passed |= dict.fromkeys(nodes)
        self._disqualified_s = 0.0
        membership.qualified(asked.lineage, self._now())
        self._carry_out()

    async def _pause_before_trying_again(self) -> None:
        """Wait, longer each time unless all work is done."""
        self._disqualified_s = min(2 * self._disqualified_s or QUALIFY_AGAIN_S, QUALIFY_AGAIN_MOST_S)
        with suppress(TimeoutError):
            async with self._host.clock.timeout(self._disqualified_s):
                await self._last_call.wait()
                await self._host.clock.sleep(QUALIFY_AGAIN_S)

    async def _wrong_with(self, members: Sequence[Member], *, slow: bool = False) -> dict[str, str]:
        """Return what is wrong with this machine and with these members, by node; no entry for one that is healthy
        or cannot be checked.

        If steps are slow, members have to answer within the time that the measured routes to them predict."""
        if self._checker is None:
            return {}
        lines = [self._ways.line(member) if slow else None for member in members]
        promised_s = [echo_s(line.latency_s, line.there_Bps, line.back_Bps) if line else CHECK_S for line in lines]
        peers = [
            CheckedPeer(self._ways.address(member), SLOWER * each_s + _BUSY_S, member.node if self.identified else "")
            for member, each_s in zip(members, promised_s, strict=True)
        ]
        own, theirs = await self._checker(peers)
        wrong = {self._us.node: own, **{member.node: why for member, why in zip(members, theirs, strict=True)}}
        return {node: why for node, why in wrong.items() if why}

    async def _wrong_with_disk(self) -> str:
        """Return why the other members could not count on this node's vote: a machine without a vote, or with a late
        one, only enlarges the quorum.

        If any side may go on, votes are not counted on, but a slow disk delays heartbeats nevertheless."""
        began_s = self._now()
        try:
            self._membership.write()
        except HcsimError as error:
            return "" if self._config.quorum == "any" else str(error)
        await self._host.clock.sleep(_TICK_S)
        late = self._now() > began_s + _TICK_S + self._beat.interval_s
        return "its disk takes longer than a heartbeat to write a record" if late else ""

    def _adopted(self, view: View) -> None:
        self._stop_checking()
        self._waiting.clear()
        self._last_call.clear()
        self._figures.adopted(view)
        members = ",".join(f"{member.name}#{member.boot:x}" for member in view.members)
        self._host.trace("view", view.lineage, view.epoch, view.previous, members)
        names = ", ".join(member.name for member in view.members)
        if view.formed:
            self._tell(f"view {view.epoch}: {names} ({view.reason})")
        elif len(view.members) > 1:
            self._tell(f"here so far: {names}; work begins with {self._config.needed}")
        self._compare_terms(view)
        self._news.tell()

    def _compare_terms(self, view: View) -> None:
        """Compare start options: a node that differs from the leader ends, and the leader logs the reason."""
        if view.rank(self._us) is None:
            return
        for member in view.members if view.leader == self._us else (view.leader,):
            differences = unlike(self._terms_of.get(member.node, self._terms), self._terms, member.name)
            if differences and view.leader == self._us:
                self._tell_once(f"{member.name} was started otherwise and cannot take part: {differences}")
            elif differences:
                self._failure = refusal(member.name, differences)
                # The others must not wait for our part in this view.
                self._membership.broken(view.epoch, f"{self._us.name} was started otherwise", self._now())

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Stop the node if one of its tasks has ended: callers that ask for a view get the reason."""
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
            self._news.tell()

    def _is_over(self, over: EndEpoch) -> None:
        """Fail the views up to that epoch: work may still be in a step of the previous view, and a lost member takes
        no part in that either."""
        self.over(over.epoch)
        for epoch, future in self._overs.items():
            if epoch <= over.epoch and not future.done():
                future.set_result(over.reason)

    def _control_of(self, node: str) -> str:
        peer = self._membership.roster.peers.get(node)
        return "" if peer is None else peer.status.control

    def _on_line(self, node: str) -> bool:
        return node in self._lines.nodes

    def _now(self) -> float:
        return self._host.clock.elapsed()

    def _save(self, record: AcceptorState) -> None:
        try:
            keep(self._host.store, self._record, record)
        except HcsimError as error:
            if not self._unsaved:
                self._tell(f"{error}; until it can be written, this machine has no vote on who is in the cluster")
            self._unsaved = True
            raise
        self._unsaved = False
