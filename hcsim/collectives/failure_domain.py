"""The failure domain of one mesh: the links that all its groups share, and the failure that ends them together.

A collective that fails on one rank has failed everywhere, because the ranks no longer agree on what was done. A
group therefore breaks as a whole. The first rank to notice notifies the others, and each operation in flight
ends with an error that names the cause, on every rank. Later operations raise the same error; `Group.reopen`
creates a new group under the next epoch.

An error is raised only after the links are closed, so that nothing writes to the caller's arrays any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from hcsim.collectives.buffers import ScratchPool
from hcsim.collectives.keep_alive import ComputeNotices
from hcsim.collectives.mismatch import MismatchDetector, watch
from hcsim.collectives.operation import POINT_TO_POINT, RECEIVING, Operation, OperationId, OperationMetrics
from hcsim.errors import ChannelError, CollectiveError, CollectiveTimeout, HcsimError, RemoteProtocolError
from hcsim.runtime.clock import Limit
from hcsim.runtime.frame import Header, Kind
from hcsim.transport.groups import culprit_in
from hcsim.transport.link import Link
from hcsim.transport.mesh import ABORT_TIMEOUT_S, Mesh

_GAVE_UP = "rank {} gave up: "
TOLD = "told by a peer"
"""The phase of an error that another rank has reported."""


class LinkObserver(Protocol):
    """Receives events of the links."""

    def joined(self, link: Link) -> None:
        """Called when a link has opened."""

    def lost(self, member: int, error: HcsimError) -> None:
        """Called when the member can send no more."""

    def ended(self, error: HcsimError) -> None:
        """Called when the group has ended."""


class FailureDomain:
    """A group and its subgroups, which fail together."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.scratch = ScratchPool()
        self.mismatches = MismatchDetector(mesh.us.rank)
        self.metrics = OperationMetrics(mesh.host)
        self.error: HcsimError | None = None
        self.waited_for: int | None = None
        """The rank that the oldest waiting operation was waiting for when the group failed, or None."""
        self.skipped: RemoteProtocolError | None = None
        """Evidence that this rank skipped what was waited for, or None."""
        self.standing_s = 0.0
        """The age of that operation at the failure; if none was waiting, the time since the last one ended."""
        self.ended_s = mesh.host.clock.elapsed()
        """The time when the last operation ended, initially the time of creation."""
        self.in_flight: dict[Operation, float] = {}
        """The start times of the operations in flight, in the order in which their tasks started."""
        self.deadlines: dict[Operation, tuple[Limit, float]] = {}
        """The time limits of those operations, and how long each is."""
        self.notices = ComputeNotices(mesh, self._computes)
        self.observers: list[LinkObserver] = []
        self._failing = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None
        self._cancelling = False
        self._watching: asyncio.Task[None] | None = None
        self._expected: range = range(0)
        """Ranks that have yet to connect to this one."""
        mesh.on_link = self._adopt
        mesh.on_newer = self._left_behind

    async def watch(self, every_s: float) -> None:
        """Check periodically for collectives that do not end because other ranks call different ones.

        Rank 0 keeps a link to every rank. It therefore notices a lost rank early, and can report a failure to ranks
        that are still waiting. Returns once the links of this rank are open."""
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
            self._watching = mesh.host.spawn(watch(mesh, self.mismatches, every_s), name="watch over operations")

    # The end.

    def fail(self, error: CollectiveError) -> None:
        """Break the group for this reason; only the first reason counts."""
        if self.error is None:
            self.error = error
            waits = ((each.id, began_s, *each.waiting_for()) for each, began_s in self.in_flight.items())
            idle = None, self.ended_s, None, ""
            waiting, since_s, self.waited_for, phase = next((each for each in waits if each[2] is not None), idle)
            self.standing_s = self.mesh.host.clock.elapsed() - since_s
            self.skipped = None if waiting is None else self._skipped(waiting, self.waited_for, phase)
            self._failing.set()
            self.mesh.host.trace("group failed", self.mesh.us.rank, str(error))
            self._end((Kind.ABORT, str(error)), error, [rank for rank in self._expected if rank not in self.mesh.links])

    async def broken(self, error: CollectiveError) -> None:
        """Break the group and wait until the links are closed."""
        self.fail(error)
        await self.ended()

    async def leave(self) -> None:
        """Leave in an orderly way; no operation may be in flight."""
        if self.error is None:
            self.error = CollectiveError("the group is closed")
            self._end((Kind.BYE, ""), self.error)
        await self.ended()

    async def ended(self) -> None:
        """Wait until the links are closed."""
        if self._ending is not None:
            await asyncio.shield(self._ending)

    def _end(self, parting: tuple[Kind, str], error: HcsimError, late: Sequence[int] = ()) -> None:
        if self._watching is not None:
            self._watching.cancel()
        self.notices.stop()
        for observer in self.observers:
            observer.ended(error)
        for link in self.mesh.links.values():
            link.fail(error)
        self._ending = self.mesh.host.spawn(self.mesh.close(parting, error, late), name="end the group")

    # Why an operation failed.

    async def reason(self, operation: Operation, error: CollectiveError) -> CollectiveError:
        """Return the error to raise. A peer that disconnects may have sent the actual reason just before."""
        cause = error.__cause__
        if not isinstance(cause, ChannelError) or isinstance(cause, RemoteProtocolError):
            return error  # a peer that says something wrong has not hung up, and that is the reason
        for each in self.mesh.links.values():
            each.attend(True)  # its reason may lie behind frames that are no longer asked for
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
            return CollectiveError(f"{operation} failed: {told}", peer=told.peer, phase=TOLD)
        link = self.mesh.links.get(error.peer) if error.peer is not None else None
        if link is not None and link.leaving:  # its goodbye lay behind what we had still to read
            text = f"{operation} failed while {error.phase}: rank {error.peer} has left the group"
            return CollectiveError(text, peer=error.peer, phase=error.phase)
        if isinstance(told, CollectiveError) and told.peer not in (None, error.peer):
            # Another is lost, too: that is why this one hung up, and its reason may have been lost on the way.
            return CollectiveError(f"{operation} failed: {told}", peer=told.peer, phase=told.phase)
        return error

    def not_started(self, operation: Operation) -> CollectiveError:
        because = self.error if isinstance(self.error, CollectiveError) else CollectiveError("")
        return CollectiveError(f"{operation} was not started: {self.error}", peer=because.peer, phase=because.phase)

    def timeout(self, operation: Operation, timeout_s: float) -> CollectiveTimeout:
        peer, phase = operation.waiting_for()
        text = f"{operation} took longer than {timeout_s:g} s: {phase}{self.mesh.doubts(peer)}"
        late = CollectiveTimeout(text, peer=peer, phase=phase)
        late.__cause__ = self._skipped(operation.id, peer, phase)
        return late

    def _skipped(self, waiting: OperationId, peer: int | None, phase: str) -> RemoteProtocolError | None:
        """Return evidence that the peer skipped what is waited for.

        Frames arrive in the order of plans, so a peer that has sent other frames of this operation, or of a later one,
        has skipped it. Point-to-point messages have an order of their own, so only frames of the same message count."""
        link = None if peer is None else self.mesh.links.get(peer)
        if link is None or not phase.startswith(RECEIVING):
            return None
        in_order = not waiting.group & POINT_TO_POINT
        if not link.holds(waiting.group, waiting.number, waiting.bucket, or_later=in_order):
            return None
        return RemoteProtocolError(
            f"rank {peer} sent frames that {waiting} does not have, and not what it has", str(peer)
        )

    # What the links report.

    def cancelling(self) -> None:
        """Record that an operation is being cancelled, which may cut a frame; later link failures are ignored."""
        self._cancelling = True

    def _adopt(self, link: Link) -> None:
        link.on_abort = lambda header, text: self._aborted(link, header, text)
        link.on_failure = self._link_failed
        link.on_stray = self._look_at
        link.on_computing = self.notices.received
        if self.error is not None:
            link.fail(self.error)
        for observer in self.observers:
            observer.joined(link)

    def _aborted(self, link: Link, header: Header, text: str) -> None:
        messenger = link.peer_rank
        reason = text.removeprefix(_GAVE_UP.format(messenger))
        culprit = culprit_in(header, self.mesh.us.world)
        peer = messenger if culprit is None else culprit
        self.fail(CollectiveError(_GAVE_UP.format(messenger) + reason, peer=peer, phase=TOLD))

    def _computes(self) -> bool:
        """Give all that is waited for as much time again: a rank still computes. Return whether anything is."""
        self.mesh.postpone_calls()
        for limit, timeout_s in self.deadlines.values():
            self.mesh.host.clock.postpone(limit, timeout_s)
        return bool(self.in_flight)

    def _look_at(self, link: Link, header: Header) -> None:
        trouble = self.mismatches.objection(link.peer_rank, header)
        if trouble is not None:
            self.fail(trouble)

    def _left_behind(self, rank: int, epoch: int) -> None:
        self.fail(CollectiveError(f"rank {rank} has moved on to epoch {epoch}", peer=rank, phase=TOLD))

    def _link_failed(self, link: Link, error: HcsimError) -> None:
        # A peer that said goodbye may go while it is not needed; an operation that does need it has failed by itself.
        if link.leaving:
            for observer in self.observers:
                observer.lost(link.peer_rank, error)
        elif not self._cancelling:
            failure = CollectiveError(f"the link to rank {link.peer_rank} failed: {error}", peer=link.peer_rank)
            failure.__cause__ = error
            self.fail(failure)
