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
_CALL_EVERY_S = 0.01
_HELD_OUT_S, _HELD_OUT_REPEATS = 1.0, 5

Bytes8: TypeAlias = npt.NDArray[np.uint8]
Kind: TypeAlias = Literal["alone", "both ways", "two into one", "all"]


class Pace(msgspec.Struct, frozen=True):
    """How long is measured."""

    alone_s: float = 1.5
    together_s: float = 1.0
    calls: int = 40
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
    loaded_s: tuple[float, ...] = ()
    """While the source sends to the target as fast as it can."""


class Surveyed(msgspec.Struct, frozen=True):
    """What one rank has measured, or all."""

    flows: tuple[Flow, ...] = ()
    calls: tuple[Calls, ...] = ()
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

    def media_of(self, rank: int, other: int) -> str:
        """Return the medium of the rank's interface to another one; empty if it is not known."""
        return next((medium for one, two, medium in self.media if (one, two) == (rank, other)), "")


def joined(parts: Sequence[Surveyed]) -> Surveyed:
    """Return what all ranks have measured."""
    slowest = [max(times) for times in zip(*(part.held_out_s for part in parts), strict=True)]
    flows = (flow for part in parts for flow in part.flows)
    calls = (call for part in parts for call in part.calls)
    size_bytes = max(part.held_out_bytes for part in parts)
    media = (each for part in parts for each in part.media)
    in_order = sorted(flows, key=lambda flow: (flow.step, flow.source, flow.target))
    return Surveyed(tuple(in_order), tuple(calls), size_bytes, tuple(slowest), tuple(media))


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
    pace = pace or Pace()
    found: list[Flow] = []
    called: list[Calls] = []
    known: dict[tuple[int, int], float] = {}
    """The rates that this rank knows, of flows from and to it."""
    steps = steps_of(flows.size)
    for number, step in enumerate(steps):
        if step.kind == "two into one" and steps[number - 1].kind == "both ways":
            part(Surveyed(tuple(found), tuple(called)))
        tell(f"step {number + 1} of {len(steps)}: {_words(step)}")
        await calls.barrier()
        work = []
        for source, target in step.pairs:
            if flows.rank == source:
                work.append(_send(flows, calls, step, target, known, pace, called))
            elif flows.rank == target:
                work.append(_receive(flows, calls, step, number, source, known, pace, found))
        await asyncio.gather(*work)
    return Surveyed(tuple(found), tuple(called))


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


async def _send(
    flows: Group,
    calls: Group,
    step: _Step,
    target: int,
    known: dict[tuple[int, int], float],
    pace: Pace,
    called: list[Calls],
) -> None:
    pair = flows.rank, target
    if step.kind != "alone":
        await _send_chunks(flows, target, *_chunks(known[pair], pace.together_s, pace.most_bytes))
        return
    idle_s = [await _call(calls, target) for _ in range(pace.calls)]
    rough_Bps = await _rough_Bps(flows, target)
    loaded_s: list[float] = []
    lasts_s, again = pace.alone_s, True
    while again:
        plan = _chunks(rough_Bps, lasts_s, pace.most_bytes)
        await flows.send(np.array(plan, np.int64), target, tag=_TURN)
        sending = flows.host.spawn(_send_chunks(flows, target, *plan), name="a flow")
        while not sending.done():
            loaded_s.append(await _call(calls, target))
            await flows.host.clock.sleep(_CALL_EVERY_S)
        await sending
        answer = np.zeros(2)
        await flows.recv(answer, target, tag=_TURN)
        again, rough_Bps, lasts_s = bool(answer[0]), float(answer[1]), 2 * lasts_s
    known[pair] = rough_Bps
    await calls.send(np.array([_STOP], np.uint8), target)
    called.append(Calls(*pair, tuple(idle_s), tuple(loaded_s)))


async def _receive(
    flows: Group,
    calls: Group,
    step: _Step,
    number: int,
    source: int,
    known: dict[tuple[int, int], float],
    pace: Pace,
    found: list[Flow],
) -> None:
    pair = source, flows.rank
    if step.kind != "alone":
        chunk, count = _chunks(known[pair], pace.together_s, pace.most_bytes)
        arrivals_s = await _receive_chunks(flows, source, chunk, count)
        rate_Bps, spread, _ = _settled(arrivals_s, chunk, 0.15, 0.5)
        found.append(Flow(step.kind, number, *pair, rate_Bps, spread, True))
        return
    answering = calls.host.spawn(_answer(calls, source), name="answer calls")
    await _answer_bursts(flows, source)
    again, turn = True, 0
    while again:
        plan = np.zeros(2, np.int64)
        await flows.recv(plan, source, tag=_TURN)
        chunk, count = map(int, plan)
        _check(flows, source, 0 < chunk <= _LARGEST and 0 < count <= _MOST_CHUNKS)
        arrivals_s = await _receive_chunks(flows, source, chunk, count)
        rate_Bps, spread, steady = _settled(arrivals_s, chunk, 0.5, 1.0)
        again, turn = not steady and turn < _LONGER, turn + 1
        await flows.send(np.array([again, rate_Bps]), source, tag=_TURN)
    await answering
    known[pair] = rate_Bps
    found.append(Flow(step.kind, number, *pair, rate_Bps, spread, steady))


def _chunks(rate_Bps: float, lasts_s: float, most_bytes: int) -> tuple[int, int]:
    """Return the size and the number of the chunks of a flow that lasts so long at that rate."""
    chunk = int(min(max(_SMALLEST, rate_Bps * _CHUNK_S), _LARGEST)) // 64 * 64
    return chunk, min(_MOST_CHUNKS, max(16, int(min(rate_Bps * lasts_s, most_bytes) / chunk)))


async def _send_chunks(flows: Group, target: int, chunk: int, count: int) -> None:
    data = np.zeros(chunk, np.uint8)
    for _ in range(count):
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


async def _call(calls: Group, target: int) -> float:
    """Return the time of a round trip."""
    clock: Clock = calls.host.clock
    message = np.array([_CALL], np.uint8)
    began_s = clock.elapsed()
    await calls.send(message, target)
    await calls.recv(message, target)
    return clock.elapsed() - began_s


async def _answer(calls: Group, source: int) -> None:
    message: npt.NDArray[Any] = np.zeros(1, np.uint8)
    while True:
        await calls.recv(message, source)
        if message[0] == _STOP:
            return
        await calls.send(message, source)
