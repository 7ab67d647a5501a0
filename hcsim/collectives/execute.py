"""The executor: runs any schedule over links, all lanes side by side.

A received segment is combined as soon as it is there and its turn has come, and is passed on at
once, while the next one is still under way. One segment is posted ahead per lane, so that its
bytes find their place without a detour.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from hcsim.collectives.memory import Memory
from hcsim.collectives.plan import Finish, Send
from hcsim.collectives.schedule import Lane, Schedule, Segment
from hcsim.errors import CollectiveError, HcsimError
from hcsim.runtime.channel import Payload
from hcsim.runtime.device import Device
from hcsim.runtime.frame import Header, Kind
from hcsim.transport.link import Link


class Ticket(msgspec.Struct, frozen=True):
    """What identifies one operation on the wire, and to people."""

    name: str
    rank: int
    epoch: int
    group: int
    operation: int
    bucket: int
    signature: int

    def __str__(self) -> str:
        return f"{self.name} #{self.operation}"


class _Progress:
    """Where a lane is, for the report of a failure."""

    __slots__ = ("doing", "lane", "number")

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.number = 0
        self.doing = "opening the link"

    def __str__(self) -> str:
        lane = self.lane
        segment = lane.segments[min(self.number, len(lane.segments) - 1)]
        where = f"segment {self.number + 1} of {len(lane.segments)}, round {segment.step}"
        return f"{self.doing} {'to' if lane.kind is Send else 'from'} rank {lane.peer} ({where})"


class Execution:
    """One operation on its way."""

    def __init__(
        self,
        schedule: Schedule,
        memory: Memory,
        ticket: Ticket,
        link_to: Callable[[int], Awaitable[Link]],
        device: Device,
    ) -> None:
        self._schedule = schedule
        self._memory = memory
        self._ticket = ticket
        self._link_to = link_to
        self._device = device
        self._writes = [0] * schedule.cells
        self._sends = [0] * schedule.cells
        self._waiters: dict[int, list[asyncio.Future[None]]] = {}
        self._progress = [_Progress(lane) for lane in schedule.lanes]

    async def run(self) -> None:
        """Run all lanes to their ends. A failure of one ends all, as a `CollectiveError`."""
        lanes = [(self._runner(state.lane), state) for state in self._progress]
        if len(lanes) == 1:
            await self._guarded(*lanes[0])
            return
        try:
            async with asyncio.TaskGroup() as group:
                for run, state in lanes:
                    group.create_task(
                        self._guarded(run, state), name=f"{self._ticket}: {state.lane.kind.__name__} {state.lane.peer}"
                    )
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    def blame(self) -> tuple[int | None, str]:
        """The rank that we wait for, and what for: a lane that waits for a peer before one that waits for others."""
        waiting = [state for state in self._progress if state.doing not in ("done", "waiting")]
        receiving = [state for state in waiting if state.lane.kind is not Send]
        for state in (*receiving, *waiting):
            return state.lane.peer, str(state)
        return None, "waiting"

    def _runner(self, lane: Lane) -> Callable[[_Progress], Awaitable[None]]:
        if lane.kind is Send:
            return self._send
        return self._finish if lane.kind is Finish else self._receive

    async def _guarded(self, run: Callable[[_Progress], Awaitable[None]], state: _Progress) -> None:
        try:
            await run(state)
            state.doing = "done"
        except CollectiveError:
            raise
        except HcsimError as error:
            text = f"{self._ticket} failed while {state}: {error}"
            raise CollectiveError(text, peer=state.lane.peer, phase=str(state)) from error

    async def _send(self, state: _Progress) -> None:
        lane, ticket, memory = state.lane, self._ticket, self._memory
        size = memory.element_bytes
        link = await self._link_to(lane.peer)
        for number, segment in enumerate(lane.segments):
            state.number = number
            state.doing = "waiting"
            await self._ready(segment, sends=False)
            header = Header(
                (segment.hi - segment.lo) * size, Kind.DATA, ticket.rank, ticket.bucket, ticket.epoch, ticket.group,
                ticket.operation, ticket.signature, segment.step, segment.offset * size, segment.total * size,
            )  # fmt: skip
            state.doing = "sending"
            await link.send(header, memory.payload(segment.lo, segment.hi), number)
            self._count(self._sends, segment)

    async def _receive(self, state: _Progress) -> None:
        lane, memory, device = state.lane, self._memory, self._device
        link = await self._link_to(lane.peer)
        received_left = lane.peer < self._ticket.rank
        segments, reduces = lane.segments, lane.reduces
        largest = max((s.hi - s.lo for s, r in zip(segments, reduces, strict=True) if r), default=0)
        scratch = [memory.scratch(largest * memory.element_bytes) for _ in range(min(2, sum(reduces)))]
        ahead: asyncio.Future[Payload] | None = None
        for number, segment in enumerate(segments):
            state.number = number
            state.doing = "waiting"
            if ahead is None:
                await self._ready(segment, sends=True)
                ahead = self._post(link, lane, number, scratch)
            arrived, ahead = ahead, None
            if number + 1 < len(segments) and (reduces[number + 1] or self._is_ready(segments[number + 1])):
                ahead = self._post(link, lane, number + 1, scratch)
            state.doing = "receiving"
            payload = arrived.result() if arrived.done() else await arrived
            if reduces[number]:
                state.doing = "waiting"
                await self._ready(segment, sends=True)
                memory.combine(segment.lo, segment.hi, payload, received_left=received_left)
                await device.touch(3 * payload.nbytes)
            self._count(self._writes, segment)

    async def _finish(self, state: _Progress) -> None:
        state.doing = "waiting"
        for segment in state.lane.segments:
            await self._ready(segment, sends=True)
            self._memory.finish(segment.lo, segment.hi)
            await self._device.touch(2 * (segment.hi - segment.lo) * self._memory.element_bytes)
            self._count(self._writes, segment)

    def _post(
        self, link: Link, lane: Lane, number: int, scratch: list[memoryview | None]
    ) -> asyncio.Future[Payload]:
        segment, memory, ticket = lane.segments[number], self._memory, self._ticket
        size = memory.element_bytes
        if lane.reduces[number]:
            room = scratch[number % len(scratch)]
            into = None if room is None else room[: (segment.hi - segment.lo) * size]
        else:
            into = memory.place(segment.lo, segment.hi)
        tag = (ticket.group, ticket.operation, ticket.bucket, segment.step, segment.offset * size)
        return link.post(tag, into, ticket.signature, segment.total * size)

    # Which segments may go ahead.

    def _is_ready(self, segment: Segment) -> bool:
        for cell, writes, sends in segment.needs:
            if self._writes[cell] < writes or self._sends[cell] < sends:
                return False
        return True

    async def _ready(self, segment: Segment, *, sends: bool) -> None:
        """Wait until what must come before the segment has happened."""
        for cell, writes_before, sends_before in segment.needs:
            while self._writes[cell] < writes_before or (sends and self._sends[cell] < sends_before):
                change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._waiters.setdefault(cell, []).append(change)
                await change

    def _count(self, counts: list[int], segment: Segment) -> None:
        for cell, _, _ in segment.needs:
            counts[cell] += 1
            for change in self._waiters.pop(cell, ()):
                if not change.done():
                    change.set_result(None)
