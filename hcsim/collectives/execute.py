"""The executor: runs any plan over links.

Short messages go in order: the plan, action by action, in one task; see `in_order.py`. Messages that are
cut into segments go in lanes, side by side; see `lanes.py`. Either way what comes next is posted ahead,
so that its bytes find their place without a detour.

What is to be combined is received beside the buffer. Either way that takes no more room than the buffer
itself (or a small reserve): so an operation needs at most twice its data. Whatever finds no room waits
with the system.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hcsim.collectives.in_order import InOrder
from hcsim.collectives.lanes import Lanes
from hcsim.collectives.schedule import Lane, Schedule
from hcsim.collectives.wiring import RECEIVING, Progress, Ticket, Wiring
from hcsim.errors import CollectiveError, HcsimError
from hcsim.transport.mesh import Mesh

_OPENING = "opening a link to"


class Execution:
    """One operation on its way."""

    def __init__(
        self,
        schedule: Schedule,
        wiring: Wiring,
        mesh: Mesh,
        on_cancel: Callable[[], None],
    ) -> None:
        self._schedule = schedule
        self._wiring = wiring
        self._mesh = mesh
        self._on_cancel = on_cancel
        self._progress: list[Progress] = []

    @property
    def ticket(self) -> Ticket:
        """Which operation it is."""
        return self._wiring.ticket

    @property
    def sent_bytes(self) -> int:
        """What it sends from begin to end."""
        return self._schedule.sent * self._wiring.buffer.element_bytes

    async def run(self) -> None:
        """Run the plan to its end. A failure anywhere ends all of it, as a `CollectiveError`."""
        wiring, schedule, mesh = self._wiring, self._schedule, self._mesh
        with self._guard() as state:
            if not all(peer in mesh.links for peer in schedule.peers):
                await self._open_links(state)
            for peer in schedule.peers:
                wiring.links[peer] = mesh.links[peer]
            if schedule.lanes:
                await self._side_by_side()
            else:
                await InOrder(wiring, schedule).run(state)
                state.rest()
            wiring.check_over()

    async def _open_links(self, state: Progress) -> None:
        mesh, peers = self._mesh, self._schedule.peers
        state.doing, state.peer = _OPENING, mesh.unreached(peers)
        try:
            await mesh.reach(peers)
        finally:
            if (unreached := mesh.unreached(peers)) is not None:
                state.peer = unreached
        state.rest()

    async def _side_by_side(self) -> None:
        lanes = Lanes(self._wiring, self._schedule)
        try:
            async with asyncio.TaskGroup() as group:
                for lane in self._schedule.lanes:
                    name = f"{self._wiring.ticket}: {lane.kind.__name__} {lane.peer}"
                    group.create_task(self._run_lane(lanes, lane), name=name)
        except BaseExceptionGroup as failures:
            first = failures.exceptions[0]
            raise first from first.__cause__  # a peer that hung up may still say why

    async def _run_lane(self, lanes: Lanes, lane: Lane) -> None:
        with self._guard() as state:
            await lanes.run(lane, state)

    def blame(self) -> tuple[int | None, str]:
        """The rank that we wait for, and what for: a receiver knows better than a sender who is late."""
        for doing in (RECEIVING, _OPENING, "sending to"):
            for state in self._progress:
                if state.doing == doing:
                    if doing == _OPENING and (unreached := self._mesh.unreached(self._schedule.peers)) is not None:
                        state.peer = unreached
                    return state.peer, str(state)
        return None, "waiting"

    def _guard(self) -> _Guard:
        guard = _Guard(self._wiring.ticket, self._on_cancel)
        self._progress.append(guard.state)
        return guard


class _Guard:
    """Names the operation, and what it was doing, in an error that ends it.

    A coroutine that awaits another would do as well, but costs every wake-up of the operation a step of its own."""

    __slots__ = ("_on_cancel", "_ticket", "state")

    def __init__(self, ticket: Ticket, on_cancel: Callable[[], None]) -> None:
        self._ticket = ticket
        self._on_cancel = on_cancel
        self.state = Progress()

    def __enter__(self) -> Progress:
        return self.state

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        state = self.state
        if error is None:
            state.rest()
        elif isinstance(error, asyncio.CancelledError):
            self._on_cancel()
        elif isinstance(error, CollectiveError):  # the group has ended; whom we wait for may be why the others gave up
            if state.doing:
                text = f"{error}; {self._ticket} was {state} here"
                raise type(error)(text, peer=error.peer, phase=error.phase) from error.__cause__
        elif isinstance(error, HcsimError):
            text = f"{self._ticket} failed while {state}: {error}"
            raise CollectiveError(text, peer=state.peer, phase=str(state)) from error
