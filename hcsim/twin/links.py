"""What the links between machines carry: alone, both ways, two into one, and all at once.

Every machine runs `survey` with the others, step by step. A step is one or more flows: a machine sends to another one
as fast as it can, and the receiver looks at when the data come. Two groups are needed: one for flows, and one, with
connections of its own, for round trips meanwhile.

A shaped line lets a burst pass faster than what it sustains, since tokens were saved while nothing was sent. So a flow
is as long as a second and more at the rate that comes later, by a rough rate that is itself the increment between two
bursts; what arrives in its first half does not count, and it is repeated, longer, until its rate no longer falls.

Of flows at the same time, one may end before the others, which are then faster. All are sent as many bytes as they
would take the same time alone. Whoever is last takes no less than the sum of all over the shared capacity, so in the
first half of each flow's own time all others go on: only that counts, less its beginning.

The sender also notes how many segments were lost, and the round trips of small messages meanwhile. After its flow
alone it sends at half of the rate that it found: what is lost then, no full queue has dropped. Two flows into one
machine fill the queue of its port, and round trips then show how long that is.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from itertools import combinations, permutations
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from hcsim.collectives.group import Group
from hcsim.errors import RemoteProtocolError
from hcsim.runtime.channel import SegmentCounts
from hcsim.runtime.clock import Clock

KIB = 1024
_FLOW, _TURN = 1, 2
_CALL, _STOP = 0, 1
"""The tags of messages, and what a call says."""
_BURSTS = (64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB, 16384 * KIB)
_LONG_ENOUGH_S = 0.05
_CHUNK_S = 0.02
_SMALLEST, _LARGEST = 8 * KIB, 4096 * KIB
_MOST_CHUNKS = 1 << 20
_STEADY = 0.03
"""A rate that changes by less from one quarter of a flow to the next has settled."""
_LONGER = 2
"""Repeats of a flow whose rate has not settled, each twice as long."""
_LONG_ENOUGH_SHARE = 0.5
"""A flow that takes less than this share of its time, since the rough rate was that of a beginning, is repeated too."""
_CALL_EVERY_S = 0.01
_IDLE_EVERY_S = 5e-3
_CALLED = ("alone", "paced", "two into one")
"""The kinds of flows during which there are round trips."""
_PACED_SHARE, _PACED_EVERY_S, _SMALLEST_PACED = 0.5, 2e-3, 4 * KIB
"""A paced flow takes this share of the rate, in pieces that do not fill a queue."""
_HELD_OUT_S, _HELD_OUT_REPEATS = 1.0, 5

Bytes8: TypeAlias = npt.NDArray[np.uint8]
Kind: TypeAlias = Literal["alone", "both ways", "two into one", "all"]
SendingKind: TypeAlias = Literal["alone", "paced", "both ways", "two into one", "all"]


class Pace(msgspec.Struct, frozen=True):
    """How long is measured."""

    alone_s: float = 1.5
    together_s: float = 1.0
    paced_s: float = 1.0
    calls: int = 100
    """Round trips while nothing else is sent."""
    most_bytes: int = 4 << 30
    """Of a flow."""


class Flow(msgspec.Struct, frozen=True):
    """What one rank received from another one."""

    kind: Kind
    step: int
    """Flows of one step were at the same time."""
    source: int
    target: int
    rate_Bps: float
    """Of the data in messages, without headers."""
    spread: float
    """As in `Basis`."""
    steady: bool
    """Whether the rate had settled."""


class Calls(msgspec.Struct, frozen=True):
    """The round trips of small messages between two ranks."""

    source: int
    target: int
    idle_s: tuple[float, ...]
    lasted_s: float = 0.0
    """Of all together."""


class Sending(msgspec.Struct, frozen=True):
    """What the sender of a flow saw."""

    kind: SendingKind
    step: int
    source: int
    target: int
    trips_s: tuple[float, ...] = ()
    """The round trips of small messages meanwhile."""
    lasted_s: float = 0.0
    segments: int = 0
    """Sent meanwhile; 0 if the system does not tell."""
    lost: int = 0


class Surveyed(msgspec.Struct, frozen=True):
    """What one rank has measured, or all."""

    flows: tuple[Flow, ...] = ()
    calls: tuple[Calls, ...] = ()
    sendings: tuple[Sending, ...] = ()
    held_out_bytes: int = 0
    """The size of an all-reduce that the figures of the links do not rest on."""
    held_out_s: tuple[float, ...] = ()
    """Its times."""
    media: tuple[tuple[int, int, str], ...] = ()
    """The medium of the first rank's interface to the second one."""

    def rate_Bps(self, source: int, target: int) -> float:
        """Return the rate from one rank to another one, alone."""
        return next(
            flow.rate_Bps for flow in self.flows if (flow.kind, flow.source, flow.target) == ("alone", source, target)
        )

    def sendings_of(self, kind: SendingKind) -> tuple[Sending, ...]:
        """Return what the senders of all flows of a kind saw."""
        return tuple(sending for sending in self.sendings if sending.kind == kind)

    def media_of(self, rank: int, other: int) -> str:
        """Return the medium of the rank's interface to another one; empty if it is not known."""
        return next((medium for one, two, medium in self.media if (one, two) == (rank, other)), "")


def joined(parts: Sequence[Surveyed]) -> Surveyed:
    """Return what all ranks have measured."""
    slowest = [max(times) for times in zip(*(part.held_out_s for part in parts), strict=True)]
    flows = (flow for part in parts for flow in part.flows)
    calls = (call for part in parts for call in part.calls)
    sendings = (sending for part in parts for sending in part.sendings)
    size_bytes = max(part.held_out_bytes for part in parts)
    media = (each for part in parts for each in part.media)
    in_order = sorted(flows, key=lambda flow: (flow.step, flow.source, flow.target))
    return Surveyed(tuple(in_order), tuple(calls), tuple(sendings), size_bytes, tuple(slowest), tuple(media))


class _Step(msgspec.Struct, frozen=True):
    kind: Kind
    pairs: tuple[tuple[int, int], ...]


def steps_of(size: int) -> tuple[_Step, ...]:
    """Return the steps for so many ranks."""
    ranks = range(size)
    steps = [_Step("alone", (pair,)) for pair in permutations(ranks, 2)]
    steps += [_Step("both ways", ((one, other), (other, one))) for one, other in combinations(ranks, 2)]
    if size > 2:
        steps += [_Step("two into one", (((k + 1) % size, k), ((k + 2) % size, k))) for k in ranks]
        steps.append(_Step("all", tuple((k, (k + 1) % size) for k in ranks)))
    return tuple(steps)


async def survey(
    flows: Group,
    calls: Group,
    tell: Callable[[str], None] = lambda what: None,
    pace: Pace | None = None,
    part: Callable[[Surveyed], None] = lambda found: None,
) -> Surveyed:
    """Measure all links between the ranks of the two groups, which have the same ranks. Every rank has to call it.

    `part` is called when what the media follow from has been measured."""
    measuring = _Measuring(flows, calls, pace or Pace())
    steps = steps_of(flows.size)
    for number, step in enumerate(steps):
        if step.kind == "two into one" and steps[number - 1].kind == "both ways":
            part(measuring.found)
        tell(f"step {number + 1} of {len(steps)}: {_words(step)}")
        await calls.barrier()
        await measuring.do(number, step)
    return measuring.found


async def held_out(flows: Group, found: Surveyed) -> Surveyed:
    """Time an all-reduce that the figures of the links do not rest on. Every rank has to call it."""
    rates = np.array([min(flow.rate_Bps for flow in found.flows)])
    slowest_Bps = min(float(np.asarray(part)[0]) for part in await flows.all_gather(rates))
    size_bytes = int(min(max(slowest_Bps * _HELD_OUT_S, 256 * KIB), 65536 * KIB)) // KIB * KIB
    times_s = await all_reduce_times(flows, size_bytes)
    return msgspec.structs.replace(found, held_out_bytes=size_bytes, held_out_s=times_s)


async def all_reduce_times(flows: Group, size_bytes: int) -> tuple[float, ...]:
    """Return the times of a few all-reduces by the ring, after a first one that does not count."""
    data, clock, times_s = np.zeros(size_bytes // 4, np.float32), flows.host.clock, []
    for _ in range(1 + _HELD_OUT_REPEATS):
        await flows.barrier()
        began_s = clock.elapsed()
        await flows.all_reduce(data, algorithm="ring")
        times_s.append(clock.elapsed() - began_s)
    return tuple(times_s[1:])


def _words(step: _Step) -> str:
    return f"{step.kind}, {', '.join(f'{source} → {target}' for source, target in step.pairs)}"


class _Measuring:
    """One rank's part of all steps."""

    def __init__(self, flows: Group, calls: Group, pace: Pace) -> None:
        self._flows = flows
        self._calls = calls
        self._pace = pace
        self._clock: Clock = flows.host.clock
        self._known: dict[tuple[int, int], float] = {}
        """The rates that this rank knows, of flows from and to it."""
        self.found = Surveyed()

    async def do(self, number: int, step: _Step) -> None:
        work = []
        for source, target in step.pairs:
            if self._flows.rank == source:
                send = self._send_alone if step.kind == "alone" else self._send
                work.append(send(number, step.kind, target))
            elif self._flows.rank == target:
                receive = self._receive_alone if step.kind == "alone" else self._receive
                work.append(receive(number, step.kind, source))
        await asyncio.gather(*work)

    async def _send_alone(self, number: int, kind: Kind, target: int) -> None:
        pair, rough_Bps = (self._flows.rank, target), 0.0
        await self._call(target)  # opens the connection
        began_s, idle_s = self._clock.elapsed(), []
        for _ in range(self._pace.calls):
            idle_s.append(await self._call(target))
            await self._clock.sleep(_IDLE_EVERY_S)
        calls = Calls(*pair, tuple(idle_s), self._clock.elapsed() - began_s)
        rough_Bps = await _rough_Bps(self._flows, target)
        sendings: list[Sending] = []
        lasts_s, again = self._pace.alone_s, True
        while again:
            chunk, count = _chunks(rough_Bps, lasts_s, self._pace.most_bytes)
            await self._flows.send(np.array([chunk, count], np.int64), target, tag=_TURN)
            sending, answer = await self._watched(Sending(kind, number, *pair), chunk, count)
            sendings = [sending]
            again, rough_Bps, lasts_s = bool(answer[0]), float(answer[1]), 2 * lasts_s
        chunk, count, every_s = _paced(rough_Bps, self._pace.paced_s)
        await self._flows.send(np.array([chunk, count], np.int64), target, tag=_TURN)
        sendings.append((await self._watched(Sending("paced", number, *pair), chunk, count, every_s))[0])
        await self._stop_calls(target)
        self._known[pair] = rough_Bps
        self._note(calls=calls, sendings=sendings)

    async def _send(self, number: int, kind: Kind, target: int) -> None:
        pair = self._flows.rank, target
        chunk, count = _chunks(self._known[pair], self._pace.together_s, self._pace.most_bytes)
        sending, _ = await self._watched(Sending(kind, number, *pair), chunk, count)
        if kind == "two into one":
            await self._stop_calls(target)
        self._note(sendings=[sending])

    async def _watched(
        self, sending: Sending, chunk: int, count: int, every_s: float = 0.0
    ) -> tuple[Sending, npt.NDArray[np.float64]]:
        """Send a flow, with round trips until all has arrived; return what was seen, and what the target answers."""
        target, trips_s, answer = sending.target, [], np.zeros(2)

        async def flow() -> None:
            await _send_chunks(self._flows, target, chunk, count, every_s)
            await self._flows.recv(answer, target, tag=_TURN)

        before, began_s = self._segments_to(target), self._clock.elapsed()
        task = self._flows.host.spawn(flow(), name="a flow")
        try:
            while sending.kind in _CALLED and not task.done():
                trips_s.append(await self._call(target))
                await self._clock.sleep(_CALL_EVERY_S)
            await task
        finally:
            task.cancel()
        after = self._segments_to(target)
        seen = msgspec.structs.replace(
            sending, trips_s=tuple(trips_s), lasted_s=self._clock.elapsed() - began_s,
            segments=after.sent - before.sent, lost=after.lost - before.lost,
        )  # fmt: skip
        return seen, answer

    def _segments_to(self, target: int) -> SegmentCounts:
        told = [group.segments_to(target) or SegmentCounts(0, 0) for group in (self._flows, self._calls)]
        return SegmentCounts(*map(sum, zip(*told, strict=True)))

    async def _call(self, target: int) -> float:
        """Return the time of a round trip."""
        message = np.array([_CALL], np.uint8)
        began_s = self._clock.elapsed()
        await self._calls.send(message, target)
        await self._calls.recv(message, target)
        return self._clock.elapsed() - began_s

    async def _stop_calls(self, target: int) -> None:
        await self._calls.send(np.array([_STOP], np.uint8), target)

    async def _receive_alone(self, number: int, kind: Kind, source: int) -> None:
        pair, flows = (source, self._flows.rank), self._flows
        answering = flows.host.spawn(_answer(self._calls, source), name="answer calls")
        await _answer_bursts(flows, source)
        again, turn = True, 0
        while again:
            chunk, arrivals_s = await self._receive_planned(source)
            rate_Bps, spread, steady = _settled(arrivals_s, chunk, 0.5, 1.0)
            is_short = arrivals_s[-1] - arrivals_s[0] < _LONG_ENOUGH_SHARE * self._pace.alone_s
            is_short = is_short and chunk * len(arrivals_s) < _LONG_ENOUGH_SHARE * self._pace.most_bytes
            again, turn = (is_short or not steady) and turn < _LONGER, turn + 1
            await self._answer_flow(source, float(again), rate_Bps)
        await self._receive_planned(source)
        await self._answer_flow(source)
        await answering
        self._known[pair] = rate_Bps
        self._note(flow=Flow(kind, number, *pair, rate_Bps, spread, steady))

    async def _answer_flow(self, source: int, *answer: float) -> None:
        await self._flows.send(np.array(answer or (0.0, 0.0)), source, tag=_TURN)

    async def _receive_planned(self, source: int) -> tuple[int, list[float]]:
        """Receive the flow that the source announces; return the size of its chunks, and when they came."""
        plan = np.zeros(2, np.int64)
        await self._flows.recv(plan, source, tag=_TURN)
        chunk, count = map(int, plan)
        _check(self._flows, source, 0 < chunk <= _LARGEST and 0 < count <= _MOST_CHUNKS)
        return chunk, await _receive_chunks(self._flows, source, chunk, count)

    async def _receive(self, number: int, kind: Kind, source: int) -> None:
        pair = source, self._flows.rank
        chunk, count = _chunks(self._known[pair], self._pace.together_s, self._pace.most_bytes)
        called = kind in _CALLED
        answering = self._calls.host.spawn(_answer(self._calls, source), name="answer calls") if called else None
        arrivals_s = await _receive_chunks(self._flows, source, chunk, count)
        await self._answer_flow(source)
        if answering is not None:
            await answering
        rate_Bps, spread, _ = _settled(arrivals_s, chunk, 0.15, 0.5)
        self._note(flow=Flow(kind, number, *pair, rate_Bps, spread, True))

    def _note(self, *, flow: Flow | None = None, calls: Calls | None = None, sendings: Sequence[Sending] = ()) -> None:
        known = self.found
        self.found = Surveyed(
            (*known.flows, flow) if flow is not None else known.flows,
            (*known.calls, calls) if calls is not None else known.calls,
            (*known.sendings, *sendings),
        )


def _chunks(rate_Bps: float, lasts_s: float, most_bytes: int) -> tuple[int, int]:
    """Return the size and the number of the chunks of a flow that lasts so long at that rate."""
    chunk = int(min(max(_SMALLEST, rate_Bps * _CHUNK_S), _LARGEST)) // 64 * 64
    return chunk, min(_MOST_CHUNKS, max(16, int(min(rate_Bps * lasts_s, most_bytes) / chunk)))


def _paced(rate_Bps: float, lasts_s: float) -> tuple[int, int, float]:
    """Return the size and the number of the chunks of a paced flow, and the time from one to the next."""
    paced_Bps = max(_PACED_SHARE * rate_Bps, 1.0)
    chunk = int(min(max(_SMALLEST_PACED, paced_Bps * _PACED_EVERY_S), _LARGEST)) // 64 * 64
    return chunk, max(1, int(paced_Bps * lasts_s / chunk)), chunk / paced_Bps


async def _send_chunks(flows: Group, target: int, chunk: int, count: int, every_s: float = 0.0) -> None:
    data, clock = np.zeros(chunk, np.uint8), flows.host.clock
    began_s = clock.elapsed()
    for number in range(count):
        early_s = began_s + number * every_s - clock.elapsed()
        if early_s > 0.0:
            await clock.sleep(early_s)
        await flows.send(data, target, tag=_FLOW)


async def _receive_chunks(flows: Group, source: int, chunk: int, count: int) -> list[float]:
    """Return when each chunk had arrived."""
    into, clock = np.zeros(chunk, np.uint8), flows.host.clock
    arrivals_s = []
    for _ in range(count):
        await flows.recv(into, source, tag=_FLOW)
        arrivals_s.append(clock.elapsed())
    return arrivals_s


def _settled(arrivals_s: Sequence[float], chunk: int, begin: float, end: float) -> tuple[float, float, bool]:
    """Return the rate between these shares of the time, its spread, and whether it had settled by then."""
    first_s, last_s = arrivals_s[0], arrivals_s[-1]
    low_s, high_s = (first_s + share * (last_s - first_s) for share in (begin, end))
    within = [at_s for at_s in arrivals_s if low_s <= at_s <= high_s]
    if len(within) < 3:  # a handful of chunks that came at once
        within = list(arrivals_s)
    rate_Bps = _rate_Bps(within, chunk)
    part = max(1, len(within) // 4)
    parts = [_rate_Bps(within[i : i + part + 1], chunk) for i in range(0, len(within) - 1, part)]
    half = len(within) // 2
    before_Bps, after_Bps = _rate_Bps(within[: half + 1], chunk), _rate_Bps(within[half:], chunk)
    tenths = statistics.quantiles(parts, n=10, method="inclusive") if len(parts) > 1 else [rate_Bps, rate_Bps]
    return rate_Bps, (tenths[-1] - tenths[0]) / 2 / rate_Bps, before_Bps < after_Bps * (1 + _STEADY)


def _rate_Bps(arrivals_s: Sequence[float], chunk: int) -> float:
    lasted_s = arrivals_s[-1] - arrivals_s[0]
    return chunk * (len(arrivals_s) - 1) / max(lasted_s, 1e-9)


async def _rough_Bps(flows: Group, target: int) -> float:
    """Return the increment between two bursts, of which the later one takes long enough."""
    clock, before, rate_Bps = flows.host.clock, (0, 0.0), 0.0
    for burst in _BURSTS:
        await flows.send(np.array([burst]), target, tag=_TURN)
        began_s = clock.elapsed()
        await flows.send(np.zeros(burst, np.uint8), target, tag=_FLOW)
        await flows.recv(np.zeros(1, np.uint8), target, tag=_TURN)
        took_s = clock.elapsed() - began_s
        more_s = took_s - before[1]
        rate_Bps = (burst - before[0]) / more_s if more_s > took_s / 4 else burst / max(took_s, 1e-9)
        before = burst, took_s
        if took_s > _LONG_ENOUGH_S:
            break
    await flows.send(np.array([0]), target, tag=_TURN)
    return rate_Bps


def _check(flows: Group, source: int, is_valid: bool) -> None:
    if not is_valid:
        peer = flows.addresses[source]
        raise RemoteProtocolError(f"{peer} announced data of a size that no member sends", peer)


async def _answer_bursts(flows: Group, source: int) -> None:
    burst = np.zeros(1, np.int64)
    while True:
        await flows.recv(burst, source, tag=_TURN)
        if not burst[0]:
            return
        _check(flows, source, int(burst[0]) in _BURSTS)
        await flows.recv(np.zeros(int(burst[0]), np.uint8), source, tag=_FLOW)
        await flows.send(np.zeros(1, np.uint8), source, tag=_TURN)


async def _answer(calls: Group, source: int) -> None:
    message: npt.NDArray[Any] = np.zeros(1, np.uint8)
    while True:
        await calls.recv(message, source)
        if message[0] == _STOP:
            return
        await calls.send(message, source)
