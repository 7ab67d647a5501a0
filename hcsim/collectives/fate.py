"""What all groups over one mesh share: its links, and the failure that ends them together.

A collective that fails on one rank has failed: the ranks no longer agree on what was done. So a
group breaks as a whole. The first rank to notice tells the others, and each waiting operation
ends with an error that names the cause, on every rank, whatever it was waiting for. Afterwards the
group only repeats that error; `Group.reopen` makes a new one, under the next epoch.

An error is raised only once the links are closed, so that nothing writes into the caller's
arrays any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeVar

from hcsim.collectives.agreement import Agreement
from hcsim.collectives.memory import ScratchPool
from hcsim.collectives.meter import Meter
from hcsim.collectives.watch import watch
from hcsim.collectives.wiring import POINT_TO_POINT, RECEIVING, Ticket
from hcsim.errors import ChannelError, CollectiveError, CollectiveTimeout, HcsimError, RemoteProtocolError
from hcsim.runtime.frame import Header, Kind
from hcsim.transport.hello import culprit_in
from hcsim.transport.link import Link
from hcsim.transport.mesh import ABORT_TIMEOUT_S, Mesh

T = TypeVar("T")


class Work(Protocol):
    """An operation that can be run: an `Execution`, or what becomes one."""

    @property
    def sent_bytes(self) -> int:
        """What it sends from begin to end."""

    @property
    def ticket(self) -> Ticket:
        """Which operation it is."""

    async def run(self) -> None:
        """Run it to its end; fails with a `CollectiveError`."""

    def blame(self) -> tuple[int | None, str]:
        """The rank that we wait for, if it is one, and what for."""


class Turn(NamedTuple):
    """What has to be over before an operation begins."""

    task: asyncio.Task[Any]
    blame: Callable[[], tuple[int | None, str]]
    """As a `Work`'s: whom it waits for."""


class Follower(Protocol):
    """Somebody who has to know what becomes of the links."""

    def joined(self, link: Link) -> None:
        """There is a new link."""

    def lost(self, member: int, error: HcsimError) -> None:
        """Nothing more comes from there."""

    def ended(self, error: HcsimError) -> None:
        """The group is over."""


class Fate:
    """The shared state of a group and its subgroups."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.scratch = ScratchPool()
        self.agreement = Agreement(mesh.us.rank)
        self._meter = Meter(mesh.host)
        self.error: HcsimError | None = None
        self.waited_for: int | None = None
        """The rank that the oldest operation was waiting for when the group failed, if it was waiting."""
        self.skipped: RemoteProtocolError | None = None
        """What shows that this rank had left out what was waited for, if anything does."""
        self.standing_s = 0.0
        """How long that operation had been under way then; or, if none was waiting, how long ago the last one ended
        here."""
        self._ended_s = mesh.host.clock.elapsed()
        """When the last operation ended, or else when there was none yet."""
        self._running: dict[Work, float] = {}
        """Operations, and when they began."""
        self.followers: list[Follower] = []
        self._failing = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None
        self._cutting = False
        self._watching: asyncio.Task[None] | None = None
        self._expected: range = range(0)
        """Those who are about to call us, until all have."""
        mesh.on_link = self._adopt
        mesh.on_newer = self._left_behind

    async def watch(self, every_s: float) -> None:
        """Look, that often, for collectives that do not end because others do something else.

        Rank 0 has a link to everybody from now on: so it notices who is lost before anybody needed it, and through it
        a failure reaches also those who still wait to be called. Returns when we have ours."""
        mesh = self.mesh
        if mesh.us.rank == 0:
            self._expected = range(1, mesh.us.world)
        for rank in self._expected if mesh.us.rank == 0 else (0,):
            try:
                await mesh.link(rank)
            except HcsimError as error:
                self._expected = range(0)  # it was waited for long enough
                self.fail(CollectiveError(f"there is no link to rank {rank}: {error}", peer=rank))
                return
        self._expected = range(0)
        if self.error is None:
            self._watching = mesh.host.spawn(watch(mesh, self.agreement, every_s), name="watch over operations")

    def begin(self, ticket: Ticket) -> None:
        """A collective begins here; that others do something else in its place ends the group."""
        trouble = self.agreement.begin(ticket)
        if trouble is not None:
            self.fail(trouble)

    def see_through(
        self,
        work: Work,
        result: Callable[[], T],
        timeout_s: float,
        before: Turn | None = None,
        over: Callable[[asyncio.Task[T]], None] | None = None,
    ) -> asyncio.Task[T]:
        """Run an operation to its end, once `before` is over; if it fails, so does the group. `over` hears of its end,
        however it ends, before whoever waits for it."""

        def ended(task: asyncio.Task[T]) -> None:
            if not task.cancelled():
                task.exception()  # a group's failure ends all its operations; who awaits one of them knows enough
            elif self.error is None:  # before it ran at all, so nobody has told the others
                with suppress(ChannelError):  # with a host that has crashed
                    self.fail(_cancelled(work.ticket))
            if over is not None:
                over(task)

        running = self._run(work, result, timeout_s, before)
        return self.mesh.host.spawn(running, name=str(work.ticket), over=ended)

    async def _run(
        self,
        work: Work,
        result: Callable[[], T],
        timeout_s: float,
        before: Turn | None,
    ) -> T:
        ticket, blame = work.ticket, work.blame
        began_s, sent_bytes = self._meter.begin(), None
        self._running[work] = began_s
        try:
            async with self.mesh.host.clock.timeout(timeout_s):
                if before is not None:
                    blame = before.blame
                    await asyncio.gather(asyncio.shield(before.task), return_exceptions=True)
                    before, blame = None, work.blame  # it holds what its caller may want to free
                if self.error is not None:
                    peer = self.error.peer if isinstance(self.error, CollectiveError) else None
                    raise CollectiveError(f"{ticket} was not started: {self.error}", peer=peer) from self.error
                await work.run()
            sent_bytes, self._ended_s = work.sent_bytes, self.mesh.host.clock.elapsed()
        except CollectiveError as error:
            reason = await self._heard_out(ticket, error)
            await self._broken(reason)
            raise reason from error.__cause__
        except TimeoutError:
            peer, phase = blame()
            before, blame = None, work.blame
            text = f"{ticket} took longer than {timeout_s:g} s: {phase}{self.mesh.doubts(peer)}"
            late = CollectiveTimeout(text, peer=peer, phase=phase)
            late.__cause__ = self._skipped(ticket, peer, phase)
            await self._broken(late)
            raise late from late.__cause__
        except asyncio.CancelledError:
            await self._broken(_cancelled(ticket))
            raise
        except Exception as error:  # not ours, so the others cannot know: no memory, say
            text = f"{ticket} failed on rank {ticket.rank}: {error!r}"
            await self._broken(CollectiveError(text, peer=ticket.rank))
            raise
        finally:
            del self._running[work]
            self._meter.end(ticket.name, began_s, sent_bytes)
        return result()

    def _skipped(self, ticket: Ticket, peer: int | None, phase: str) -> RemoteProtocolError | None:
        """Frames come in the order of plans: a peer that sent others of this operation, or of a later one, left out
        what we wait for. Only messages from one rank to another have an order of their own."""
        link = None if peer is None else self.mesh.links.get(peer)
        if link is None or not phase.startswith(RECEIVING) or ticket.group & POINT_TO_POINT:
            return None
        if not link.holds(ticket.group, ticket.operation, ticket.bucket):
            return None
        return RemoteProtocolError(
            f"rank {peer} sent frames that {ticket} does not have, and not what it has", str(peer)
        )

    async def _heard_out(self, ticket: Ticket, error: CollectiveError) -> CollectiveError:
        """A peer that hangs up may have said why just before, and that its hanging up is not the reason."""
        cause = error.__cause__
        if not isinstance(cause, ChannelError) or isinstance(cause, RemoteProtocolError):
            return error  # who says something wrong has not hung up, and that is the reason
        for each in self.mesh.links.values():
            each.attend(True)  # its words may lie behind what nobody asks for any more
        try:
            async with self.mesh.host.clock.timeout(ABORT_TIMEOUT_S):
                await self._failing.wait()
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            self.fail(error)
            raise
        told = self.error
        if isinstance(told, CollectiveError) and told.phase == TOLD:
            return CollectiveError(f"{ticket} failed: {told}", peer=told.peer, phase=TOLD)
        link = self.mesh.links.get(error.peer) if error.peer is not None else None
        if link is not None and link.leaving:  # its goodbye lay behind what we had still to read
            text = f"{ticket} failed while {error.phase}: rank {error.peer} has left the group"
            return CollectiveError(text, peer=error.peer, phase=error.phase)
        if isinstance(told, CollectiveError) and told.peer not in (None, error.peer):
            # Another is lost, too: that is why this one hung up, whose words may have been lost on the way.
            return CollectiveError(f"{ticket} failed: {told}", peer=told.peer, phase=told.phase)
        return error

    async def _broken(self, error: CollectiveError) -> None:
        self.fail(error)
        await self.ended()

    def fail(self, error: CollectiveError) -> None:
        """Break the group, for this reason; only the first one counts."""
        if self.error is None:
            self.error = error
            waits = ((work.ticket, began_s, *work.blame()) for work, began_s in self._running.items())
            idle = None, self._ended_s, None, ""
            ticket, since_s, self.waited_for, phase = next((each for each in waits if each[2] is not None), idle)
            self.standing_s = self.mesh.host.clock.elapsed() - since_s
            self.skipped = None if ticket is None else self._skipped(ticket, self.waited_for, phase)
            self._failing.set()
            self.mesh.host.trace("group failed", self.mesh.us.rank, str(error))
            self._end((Kind.ABORT, str(error)), error, [rank for rank in self._expected if rank not in self.mesh.links])

    async def leave(self) -> None:
        """Leave in an orderly way, when nothing is under way any more."""
        if self.error is None:
            self.error = CollectiveError("the group is closed")
            self._end((Kind.BYE, ""), self.error)
        await self.ended()

    async def ended(self) -> None:
        """Return when the links are closed."""
        if self._ending is not None:
            await asyncio.shield(self._ending)

    def _end(self, parting: tuple[Kind, str], error: HcsimError, late: Sequence[int] = ()) -> None:
        if self._watching is not None:
            self._watching.cancel()
        for follower in self.followers:
            follower.ended(error)
        for link in self.mesh.links.values():
            link.fail(error)
        self._ending = self.mesh.host.spawn(self.mesh.close(parting, error, late), name="end the group")

    def _adopt(self, link: Link) -> None:
        link.on_abort = lambda header, text: self._aborted(link, header, text)
        link.on_failure = self._link_failed
        link.on_stray = self._look_at
        if self.error is not None:
            link.fail(self.error)
        for follower in self.followers:
            follower.joined(link)

    def _aborted(self, link: Link, header: Header, text: str) -> None:
        messenger = link.peer_rank
        reason = text.removeprefix(_GAVE_UP.format(messenger))
        culprit = culprit_in(header, self.mesh.us.world)
        peer = messenger if culprit is None else culprit
        self.fail(CollectiveError(_GAVE_UP.format(messenger) + reason, peer=peer, phase=TOLD))

    def _look_at(self, link: Link, header: Header) -> None:
        trouble = self.agreement.objection(link.peer_rank, header)
        if trouble is not None:
            self.fail(trouble)

    def cutting(self) -> None:
        """An operation is being cancelled, which may cut a frame: what breaks now is not the reason for anything."""
        self._cutting = True

    def _left_behind(self, rank: int, epoch: int) -> None:
        self.fail(CollectiveError(f"rank {rank} has moved on to epoch {epoch}", peer=rank, phase=TOLD))

    def _link_failed(self, link: Link, error: HcsimError) -> None:
        # One that said goodbye may go while nobody needs it; whoever does need it has failed by itself.
        if link.leaving:
            for follower in self.followers:
                follower.lost(link.peer_rank, error)
        elif not self._cutting:
            failure = CollectiveError(f"the link to rank {link.peer_rank} failed: {error}", peer=link.peer_rank)
            failure.__cause__ = error
            self.fail(failure)


def _cancelled(ticket: Ticket) -> CollectiveError:
    return CollectiveError(f"{ticket} was cancelled on rank {ticket.rank}", peer=ticket.rank)


_GAVE_UP = "rank {} gave up: "
TOLD = "told by a peer"
"""The phase of an error that another rank found."""
