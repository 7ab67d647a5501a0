"""Lanes: segments of large messages, received, combined and passed on side by side.

A segment is combined as soon as it is there and its turn has come, and is passed on at once,
while the next one is still under way.

Where all that comes before it has happened, it may be added on its way in. Otherwise
it comes into a room beside the buffer. Where it is its range's turn to be combined, it always gets one: of these
there is one for each range at most. The rest of what may lie beside the buffer goes to segments that come
before their turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any

from hcsim.collectives.plan import Finish, Send
from hcsim.collectives.schedule import Lane, Schedule, Segment
from hcsim.collectives.wiring import RECEIVING, Progress, Wiring
from hcsim.runtime.channel import Fold, Payload

POSTED = 2
"""Segments of a lane that have their place: the one that is coming, and those behind it."""


class Lanes:
    """What the lanes of one operation share: how far each cell of the buffer is."""

    def __init__(self, wiring: Wiring, schedule: Schedule) -> None:
        self._wiring = wiring
        self._writes = [0] * schedule.cells
        self._sends = [0] * schedule.cells
        self._space = schedule.beside - schedule.combined
        self._before_turn: dict[tuple[int, int], int] = {}
        """Elements of what was given a room before its turn, by lane and number."""
        self._waiters: dict[int, list[asyncio.Future[None]]] = {}
        self._sent = 0
        self._turns: dict[int, asyncio.Future[None]] = {}
        """Of segments that are ready to leave."""

    def run(self, lane: Lane, state: Progress) -> Coroutine[Any, Any, None]:
        """Run one lane to its end."""
        state.peer = lane.peer
        if lane.kind is Send:
            return self._send(state, lane)
        if lane.kind is Finish:
            return self._finish(lane)
        return self._receive(state, lane)

    async def _send(self, state: Progress, lane: Lane) -> None:
        link = self._wiring.links[lane.peer]
        for number, segment in enumerate(lane.segments):
            if not self._is_ready(segment, sends=False):
                state.doing = ""
                await self._ready(segment, sends=False)
            if self._sent < segment.turn:
                state.doing = ""
                self._turns[segment.turn] = turn = asyncio.get_running_loop().create_future()
                await turn
            _enter(state, "sending to", lane, number)
            await self._wiring.send(link, segment, segment.step, segment.offset, segment.total)
            self._count(self._sends, segment)
            self._sent += 1
            following = self._turns.pop(self._sent, None)
            if following is not None and not following.done():
                following.set_result(None)

    async def _receive(self, state: Progress, lane: Lane) -> None:
        wiring, segments, reduces = self._wiring, lane.segments, lane.reduces
        received_left = lane.peer < wiring.ticket.rank
        posted: deque[asyncio.Future[Payload]] = deque()
        for number, segment in enumerate(segments):
            if not posted:
                state.doing = ""
                await self._ready(segment, sends=not reduces[number])
            self._post_ahead(lane, number, posted)
            _enter(state, RECEIVING, lane, number)
            arrived = posted.popleft()
            payload = arrived.result() if arrived.done() else await arrived
            if reduces[number]:
                if not self._is_ready(segment, sends=True):
                    state.doing = ""
                    await self._ready(segment, sends=True)
                await wiring.combine((lane.peer, number), segment, payload, received_left=received_left)
                self._space += self._before_turn.pop((lane.peer, number), 0)
            self._count(self._writes, segment)

    def _post_ahead(self, lane: Lane, number: int, posted: deque[asyncio.Future[Payload]]) -> None:
        """Say where the next segments go, as far as that is known: a reduction is received beside the buffer."""
        following = number + len(posted)
        while len(posted) < POSTED and following < len(lane.segments):
            segment, reduces = lane.segments[following], lane.reduces[following]
            if not self._is_ready(segment, sends=not reduces):
                elements = segment.hi - segment.lo
                if not reduces or elements > self._space:
                    return
                self._space -= elements
                self._before_turn[lane.peer, following] = elements
            posted.append(self._post(lane, following))
            following += 1

    async def _finish(self, lane: Lane) -> None:
        for segment in lane.segments:
            await self._ready(segment, sends=True)
            await self._wiring.finish(segment.lo, segment.hi)
            self._count(self._writes, segment)

    def _post(self, lane: Lane, number: int) -> asyncio.Future[Payload]:
        segment, wiring = lane.segments[number], self._wiring
        into: memoryview | Fold | None
        if lane.reduces[number]:
            into = wiring.scratch((lane.peer, number), segment, now=self._is_ready(segment, sends=True))
        else:
            into = wiring.buffer.place(segment.lo, segment.hi)
        return wiring.post(wiring.links[lane.peer], segment, segment.step, into, segment.offset, segment.total)

    # Which segments may go ahead.

    def _is_ready(self, segment: Segment, *, sends: bool) -> bool:
        for cell, writes_before, sends_before in segment.needs:
            if self._writes[cell] < writes_before or (sends and self._sends[cell] < sends_before):
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


def _enter(state: Progress, doing: str, lane: Lane, number: int) -> None:
    state.doing = doing
    state.step = lane.segments[number].step
    state.segment = f", segment {number + 1} of {len(lane.segments)}"
