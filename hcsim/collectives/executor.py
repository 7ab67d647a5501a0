"""The executor: carries out the schedule of any operation.

Sequential, for short messages: the plan, action by action, in one task. A round's messages are given their places while
the round before it still waits for its own, so that their bytes find them without a detour. Those that are combined
get scratch memory, in the plan's order, as long as there is some left.

Forwarding, within a sequential schedule: what a round receives only for the next one to send, channels may pass on as
it comes, round after round, without a stop here. The sequential executor goes on where that ends.

Pipelined, for messages that are cut into segments: one task per lane. A segment is combined as soon as it is there and
its turn has come, and is passed on at once, while the next one is still under way. Where all that comes before it has
happened, it may be added on its way in. Otherwise it comes into scratch memory: where it is its range's turn to be
combined, it always gets some (there is one such segment for each range at most), and the rest goes to segments that
come before their turn.

In either way scratch memory is no larger than the buffer itself (or a small reserve): so an operation needs at most
twice its data. Whatever finds no place waits with the system.
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
"""What is shorter gains little: rings, in which most is only passed on, are for long messages."""
POSTED = 2
"""Segments of a lane that have their place: the one that is coming, and those behind it."""
_STAGES_AT_ONCE = 32
"""How many are prepared before the first of them moves: the other ranks can begin meanwhile."""

_Posted: TypeAlias = list[tuple[asyncio.Future[Payload], int] | None]
"""What comes, for each action of a round, and the scratch memory that it takes, in elements: as much as the largest
before it, which may be used again for less."""


def execute(operation: Operation, activity: Activity) -> Coroutine[Any, Any, object]:
    """Carry out its schedule, from the first frame to the last; its links are open."""
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
    """How far a sequential operation is: which round comes next, and whether what it sends has left."""

    step: int
    sent: bool


_START = _Position(0, sent=False)


class _Sequential:
    """One operation's rounds, and what of them is posted."""

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
        """Those of the rounds so far that have no scratch memory yet."""
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
        """From there on, to the end or to where forwarding may begin, behind the first round at least."""
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
        """Say where a round's messages go, once the round before it has sent all it sends.

        A reduction is received into scratch memory, where it can wait for its turn. Anything else has to
        wait for whatever still reads or writes its range.
        """
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
        """Whether there was space for the one that comes next. One whose turn it is finds all of it free."""
        largest = self._largest = max(self._largest, action.hi - action.lo)
        if largest > self._space:
            return False
        operation, which = self._operation, (step, number)
        self._space -= largest
        room = operation.scratch(which, action, now=which not in self._deferred)
        posted[number] = operation.post(self._links[action.peer], action, step, room), largest
        return True


class _Forwarder:
    """Runs those stages of an operation that its links can pass on: one leg for each frame that comes.

    Where a stage sends what the one before has taken, that is one leg."""

    def __init__(self, operation: Operation, links: dict[int, Link], stages: ForwardStages) -> None:
        self._operation = operation
        self._links = links
        self._stages = stages
        size = operation.buffer.element_bytes
        self._least = WORTH_FORWARDING_BYTES // size
        self._most = {peer: link.outlet.most_bytes // size if link.outlet else -1 for peer, link in links.items()}
        """Elements of a message that can be passed on, by peer."""

    def may_begin(self, step: int) -> bool:
        return self._ends(step) is not None

    async def run(self, at: _Position, activity: Activity) -> _Position:
        """As far as that goes. What comes then is to be done in the usual way."""
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
        """From where to where frames would be forwarded, beginning with the round."""
        stage = self._stages[step] if step < len(self._stages) else None
        if stage is None or stage.take is None or stage.send is None:
            return None
        if not (self._can_take(stage.take) and self._can_move(stage.send)):
            return None
        return self._links[stage.take.peer], self._links[stage.send.peer]

    def _legs(self, at: _Position, source: Link, to: Link) -> tuple[list[Leg], list[_Position]]:
        """The legs from there on that come from one peer and go to another, and how far we are after each."""
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
    """What the lanes of one operation share: how far each cell of the buffer is."""

    def __init__(self, operation: Operation, schedule: Schedule) -> None:
        self._operation = operation
        self._writes = [0] * schedule.cells
        self._sends = [0] * schedule.cells
        self._space = schedule.scratch - schedule.combined
        self._before_turn: dict[tuple[int, int], int] = {}
        """Elements of scratch memory that were given out before their turn, by lane and number."""
        self._waiters: dict[int, list[asyncio.Future[None]]] = {}
        self._sent = 0
        self._turns: dict[int, asyncio.Future[None]] = {}
        """Of segments that are ready to leave."""

    async def run(self, lane: Lane) -> None:
        """Run one lane to its end."""
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
        """Say where the next segments go, as far as that is known: a reduction is received into scratch memory."""
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


def _enter(activity: Activity, doing: str, lane: Lane, number: int) -> None:
    activity.doing = doing
    activity.step = lane.segments[number].step
    activity.segment = f", segment {number + 1} of {len(lane.segments)}"
