"""The executor: runs the schedule of any operation.

Sequential, for short messages: one task runs the plan, action by action. The receives of a round are posted
while the previous round still waits for its own, so that data are received directly into place. Messages to be
combined get scratch memory in the order of the plan, while there is some left.

Forwarding, within a sequential schedule: channels may forward what a round receives only for the next round to
send, over several rounds, without the executor. The sequential executor continues where forwarding ends.

Pipelined, for messages that are cut into segments: one task per lane. A segment is combined as soon as it has
arrived and its turn has come, and is sent on while the next one is still in flight. If everything before it is
done, it may be added on receive. Otherwise it is received into scratch memory. A segment whose turn has come
always gets scratch memory (there is at most one such segment per range); the rest goes to segments received
ahead of their turn.

In both modes scratch memory is no larger than the buffer itself (or a small reserve), so an operation needs at
most twice its data. Messages without a place wait in the system's buffers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any, NamedTuple, TypeAlias

from hcsim.collectives.buffers import RESERVE_BYTES, Buffer
from hcsim.collectives.operation import RECEIVING, RUNNING, SENDING, Activity, Operation
from hcsim.collectives.plan import Finish, Recv, Reduce, Send
from hcsim.collectives.schedule import ForwardStages, Lane, Schedule, Segment, Taken
from hcsim.runtime.channel import Fold, Leg, Payload
from hcsim.transport.link import Link

WORTH_FORWARDING_BYTES = 2**15
"""Shorter messages are not forwarded; rings, which forward most, are for long messages."""
POSTED = 2
"""The number of posted segments per lane: the one that is arriving and those behind it."""
_STAGES_AT_ONCE = 32
"""The number of stages prepared before the first starts; the limit lets the other ranks begin meanwhile."""

_Posted: TypeAlias = list[tuple[asyncio.Future[Payload], int] | None]
"""For each action of a round, the pending receive and its scratch memory in elements. The latter is that of the
largest reduction so far, because that memory may be reused for a smaller one."""


def execute(operation: Operation, activity: Activity) -> Coroutine[Any, Any, object]:
    """Run the operation's schedule from the first frame to the last. Its links must be open."""
    # What runs is not awaited by a coroutine in between: each wake-up would take a step more.
    operation.enter(RUNNING)
    schedule = operation.schedule
    if schedule.lanes:
        return _pipelined(operation, schedule)
    sequential = _Sequential(operation, schedule)
    if sequential.forwarder is None:
        return sequential.run(_START, activity)
    return sequential.run_with(sequential.forwarder, activity)


class _Position(NamedTuple):
    """The progress of a sequential operation: the next round, and whether its send is done."""

    step: int
    sent: bool


_START = _Position(0, sent=False)


class _Sequential:
    """The rounds of one operation and their posted receives."""

    __slots__ = ("_deferred", "_largest", "_links", "_operation", "_rounds", "_space", "_spaceless", "forwarder")

    def __init__(self, operation: Operation, schedule: Schedule) -> None:
        self._operation = operation
        self._rounds = schedule.plan.rounds
        links = operation.links
        if schedule.plan.peers is not None:
            links = {number: links[rank] for number, rank in schedule.ranks.items()}
        self._links = links
        self._deferred = schedule.deferred
        buffer = operation.buffer
        self._space = max(schedule.scratch, RESERVE_BYTES // buffer.element_bytes)
        self._largest = 0
        self._spaceless: deque[tuple[_Posted, int, int, Reduce]] = deque()
        """Reductions of the rounds so far that have no scratch memory yet."""
        self.forwarder: _Forwarder | None = None
        if schedule.sent * buffer.element_bytes >= WORTH_FORWARDING_BYTES and not buffer.is_phantom:
            for link in operation.links.values():
                if link.outlet is not None:
                    self.forwarder = _Forwarder(operation, links, schedule.forward_stages)
                    break

    async def run_with(self, forwarder: _Forwarder, activity: Activity) -> None:
        at = _START
        while at.step < len(self._rounds):
            at = await forwarder.run(at, activity)
            at = await self.run(at, activity)

    async def run(self, at: _Position, activity: Activity) -> _Position:
        """Run at least one round, and continue to the end or to a round where forwarding may begin."""
        operation, links, forwarder = self._operation, self._links, self.forwarder
        rank = operation.id.rank
        step, sent = at
        ahead = self._post(step)
        for actions in self._rounds[step:]:
            activity.step = step
            posted = ahead
            sending = True
            number = -1
            for action in actions:
                number += 1  # not by `enumerate`: among hundreds of ranks each object more is one that no cache holds
                if type(action) is Send:
                    if sent:
                        sent = False  # it was forwarded as it came
                        continue
                    link = links[action.peer]
                    activity.doing, activity.peer = SENDING, link.peer_rank
                    await operation.send(link, action, step)
                    continue
                if sending:  # all sends of a round come first
                    sending = False
                    if forwarder is None or not forwarder.may_begin(step + 1):
                        ahead = self._post(step + 1)
                if type(action) is Finish:
                    await operation.finish(action.lo, action.hi)
                    continue
                link = links[action.peer]
                activity.doing, activity.peer = RECEIVING, link.peer_rank
                if (known := posted[number]) is not None:
                    arrived, taken = known
                else:
                    arrived = operation.post(link, action, step, operation.buffer.place(action.lo, action.hi))
                payload = arrived.result() if arrived.done() else await arrived
                if type(action) is Reduce:
                    await operation.combine((step, number), action, payload, received_left=link.peer_rank < rank)
                    self._space += taken
                    while self._spaceless and self._post_reduce(*self._spaceless[0]):
                        self._spaceless.popleft()
            step += 1
            if forwarder is not None and forwarder.may_begin(step):
                break
            if sending:
                ahead = self._post(step)
        return _Position(step, sent=False)

    def _post(self, step: int) -> _Posted:
        """Post the receives of a round, once the previous round has sent everything.

        A reduction is received into scratch memory, where it can wait for its turn. Any other receive is deferred while
        its range is still read or written."""
        if step == len(self._rounds):
            return []
        operation, deferred, spaceless, actions = self._operation, self._deferred, self._spaceless, self._rounds[step]
        posted: _Posted = [None] * len(actions)
        for number, action in enumerate(actions):
            if type(action) is Send:
                continue
            if type(action) is Reduce:
                if spaceless or not self._post_reduce(posted, step, number, action):
                    spaceless.append((posted, step, number, action))
            elif type(action) is Recv and not (deferred and (step, number) in deferred):
                place = operation.buffer.place(action.lo, action.hi)
                posted[number] = operation.post(self._links[action.peer], action, step, place), 0
        return posted

    def _post_reduce(self, posted: _Posted, step: int, number: int, action: Reduce) -> bool:
        """Post the next reduction; return False without scratch memory. When its turn comes, all of it is free."""
        largest = self._largest = max(self._largest, action.hi - action.lo)
        if largest > self._space:
            return False
        operation, which = self._operation, (step, number)
        self._space -= largest
        room = operation.scratch(which, action, now=which not in self._deferred)
        posted[number] = operation.post(self._links[action.peer], action, step, room), largest
        return True


class _Forwarder:
    """Runs the stages of an operation that its links can forward, with one leg per received frame.

    A stage that sends what the previous one received is part of the same leg."""

    def __init__(self, operation: Operation, links: dict[int, Link], stages: ForwardStages) -> None:
        self._operation = operation
        self._links = links
        self._stages = stages
        size = operation.buffer.element_bytes
        self._least = WORTH_FORWARDING_BYTES // size
        self._most = {peer: link.outlet.most_bytes // size if link.outlet else -1 for peer, link in links.items()}
        """The longest message that can be forwarded, in elements, by peer."""

    def may_begin(self, step: int) -> bool:
        return self._ends(step) is not None

    async def run(self, at: _Position, activity: Activity) -> _Position:
        """Forward as many rounds as possible; return where the sequential executor continues."""
        while (ends := self._ends(at.step)) is not None:
            source, to = ends
            legs, reached = self._legs(at, source, to)
            activity.doing, activity.peer, activity.step = RECEIVING, source.peer_rank, at.step

            def moved(done: int, reached: list[_Position] = reached) -> None:
                nonlocal at
                at = reached[done - 1]
                activity.step = at.step

            await source.forward(legs, to, moved)
            if at != reached[-1]:
                break
        return at

    def _ends(self, step: int) -> tuple[Link, Link] | None:
        """Return the links from and to which frames would be forwarded, starting with this round."""
        stage = self._stages[step] if step < len(self._stages) else None
        if stage is None or stage.take is None or stage.send is None:
            return None
        if not (self._can_take(stage.take) and self._can_move(stage.send)):
            return None
        return self._links[stage.take.peer], self._links[stage.send.peer]

    def _legs(self, at: _Position, source: Link, to: Link) -> tuple[list[Leg], list[_Position]]:
        """Return the following legs between these two links, and the position after each."""
        operation, buffer, links = self._operation, self._operation.buffer, self._links
        us, source_rank = operation.id.rank, source.peer_rank
        legs: list[Leg] = []
        reached: list[_Position] = []
        forwarded = False
        for step in range(at.step, min(at.step + _STAGES_AT_ONCE, len(self._stages))):
            stage = self._stages[step]
            if stage is None:
                break
            send, take = stage.send, stage.take
            if send is not None and at != (step, True):
                if links[send.peer] is not to or not self._can_move(send):
                    break
                goes = operation.header(send, step, us)
                if forwarded:
                    legs[-1] = legs[-1]._replace(goes=goes)
                    reached[-1] = _Position(step, sent=True)
                else:
                    legs.append(Leg(None, goes, _place(buffer, send), "", stays=True))
                    reached.append(_Position(step, sent=True))
            if take is None or links[take.peer] is not source or not self._can_take(take):
                break
            comes = operation.header(take, step, source_rank)
            numbers = buffer.numbers if type(take) is Reduce else ""
            divisor = buffer.divisor if stage.finishes else 1
            legs.append(Leg(comes, None, _place(buffer, take), numbers, stage.kept, divisor))
            reached.append(_Position(step + 1, sent=False))
            forwarded = stage.forwarded
        return legs, reached

    def _can_take(self, take: Taken) -> bool:
        return self._can_move(take) and (type(take) is Recv or self._operation.buffer.numbers != "")

    def _can_move(self, action: Send | Taken) -> bool:
        return self._least <= action.hi - action.lo <= self._most[action.peer]


def _place(buffer: Buffer, action: Send | Taken) -> memoryview:
    place = buffer.place(action.lo, action.hi)
    assert place is not None  # a phantom is not forwarded
    return place


async def _pipelined(operation: Operation, schedule: Schedule) -> None:
    lanes = _Lanes(operation, schedule)
    try:
        async with asyncio.TaskGroup() as group:
            for lane in schedule.lanes:
                group.create_task(lanes.run(lane), name=f"{operation}: {lane.kind.__name__} {lane.peer}")
    except BaseExceptionGroup as failures:
        first = failures.exceptions[0]
        raise first from first.__cause__  # a peer that hung up may still say why


class _Lanes:
    """The state shared by the lanes of one operation: the progress of each cell of the buffer."""

    def __init__(self, operation: Operation, schedule: Schedule) -> None:
        self._operation = operation
        self._writes = [0] * schedule.cells
        self._sends = [0] * schedule.cells
        self._space = schedule.scratch - schedule.combined
        self._before_turn: dict[tuple[int, int], int] = {}
        """Scratch memory given out ahead of turn, in elements, by lane and segment number."""
        self._waiters: dict[int, list[asyncio.Future[None]]] = {}
        self._sent = 0
        self._turns: dict[int, asyncio.Future[None]] = {}
        """Waiting segments that are ready to be sent."""

    async def run(self, lane: Lane) -> None:
        with self._operation.activity() as activity:
            activity.peer = lane.peer
            if lane.kind is Send:
                await self._send(activity, lane)
            elif lane.kind is Finish:
                await self._finish(lane)
            else:
                await self._receive(activity, lane)

    async def _send(self, activity: Activity, lane: Lane) -> None:
        link = self._operation.links[lane.peer]
        for number, segment in enumerate(lane.segments):
            if not self._is_ready(segment, sends=False):
                activity.doing = ""
                await self._ready(segment, sends=False)
            if self._sent < segment.turn:
                activity.doing = ""
                self._turns[segment.turn] = turn = asyncio.get_running_loop().create_future()
                await turn
            _enter(activity, SENDING, lane, number)
            await self._operation.send(link, segment, segment.step, segment.offset, segment.total)
            self._count(self._sends, segment)
            self._sent += 1
            following = self._turns.pop(self._sent, None)
            if following is not None and not following.done():
                following.set_result(None)

    async def _receive(self, activity: Activity, lane: Lane) -> None:
        operation, segments, reduces = self._operation, lane.segments, lane.reduces
        received_left = lane.peer < operation.id.rank
        posted: deque[asyncio.Future[Payload]] = deque()
        for number, segment in enumerate(segments):
            if not posted:
                activity.doing = ""
                await self._ready(segment, sends=not reduces[number])
            self._post_ahead(lane, number, posted)
            _enter(activity, RECEIVING, lane, number)
            arrived = posted.popleft()
            payload = arrived.result() if arrived.done() else await arrived
            if reduces[number]:
                if not self._is_ready(segment, sends=True):
                    activity.doing = ""
                    await self._ready(segment, sends=True)
                await operation.combine((lane.peer, number), segment, payload, received_left=received_left)
                self._space += self._before_turn.pop((lane.peer, number), 0)
            self._count(self._writes, segment)

    async def _finish(self, lane: Lane) -> None:
        for segment in lane.segments:
            await self._ready(segment, sends=True)
            await self._operation.finish(segment.lo, segment.hi)
            self._count(self._writes, segment)

    def _post_ahead(self, lane: Lane, number: int, posted: deque[asyncio.Future[Payload]]) -> None:
        """Post the next segments as far as their place is known; a reduction is received into scratch memory."""
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

    def _post(self, lane: Lane, number: int) -> asyncio.Future[Payload]:
        segment, operation = lane.segments[number], self._operation
        into: memoryview | Fold | None
        if lane.reduces[number]:
            into = operation.scratch((lane.peer, number), segment, now=self._is_ready(segment, sends=True))
        else:
            into = operation.buffer.place(segment.lo, segment.hi)
        return operation.post(operation.links[lane.peer], segment, segment.step, into, segment.offset, segment.total)

    # Which segments may go ahead.

    def _is_ready(self, segment: Segment, *, sends: bool) -> bool:
        for cell, writes_before, sends_before in segment.needs:
            if self._writes[cell] < writes_before or (sends and self._sends[cell] < sends_before):
                return False
        return True

    async def _ready(self, segment: Segment, *, sends: bool) -> None:
        """Wait until everything that must precede the segment is done."""
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


def _enter(activity: Activity, doing: str, lane: Lane, number: int) -> None:
    activity.doing = doing
    activity.step = lane.segments[number].step
    activity.segment = f", segment {number + 1} of {len(lane.segments)}"
