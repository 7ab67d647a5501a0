"""Start-up of a group: wait until all ranks have connected, and measure the links.

Ranks measure in pairs, as in a round-robin tournament (the circle method), so that measurements disturb each
other as little as possible: n − 1 rounds until each has met all others. A pair measures the shortest of a few
round trips, the extra cost per message when many follow each other, and the time of large messages in each
direction. A line that is shaped passes a burst faster than what comes after it. So the number of large messages
doubles until they take long enough, and the rate is that of what the last burst has more than the one before.
Then all ranks exchange their rows, so that all have the same figures; `auto` and the ring order depend on them.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, Self, TypeAlias

import numpy as np

from hcsim.collectives.cost import Links
from hcsim.runtime.host import Host

LARGE_BYTES = 2**20
_ROUND_TRIPS = 5
_BURST = 16
_REPEATS = 3
_MOST_LARGE = 64
_LONG_ENOUGH_S = 0.05
_TAG = 65535

Missing: TypeAlias = Callable[[list[int]], None]
"""Called with the ranks that are still missing, whenever that changes."""


class Ranks(Protocol):
    """What is asked of the group."""

    rank: int
    size: int

    @property
    def host(self) -> Host:
        """The machine that this rank runs on."""

    @property
    def passes_on(self) -> bool:
        """Whether what comes over any link can go on over any other without a stop."""

    def within(self, timeout_s: float) -> Self:
        """It, with another time limit."""

    def subgroup(self, ranks: Sequence[int]) -> Self:
        """A group of these ranks."""

    def send(self, data: Any, to: int, *, tag: int = 0) -> Awaitable[object]:
        """Send to a rank."""

    def recv(self, out: Any, source: int, *, tag: int = 0) -> Awaitable[object]:
        """Receive from a rank."""

    def all_gather(self, data: Any, *, algorithm: str = "auto") -> Awaitable[Sequence[Any]]:
        """Everybody's data, by rank."""


async def assemble(group: Ranks, wait_s: float, missing: Missing) -> None:
    """Wait until all ranks are present. They connect to rank 0, which reports the missing ones to the others."""
    if group.size == 1:
        return
    patient = group.subgroup(range(group.size)).within(wait_s)
    if group.rank:
        missing([0])
        await patient.send(np.zeros(1, np.uint8), 0)
        while True:
            is_absent = np.zeros(group.size, np.uint8)
            await patient.recv(is_absent, 0)
            missing(np.flatnonzero(is_absent).tolist())
            if not is_absent.any():
                return
    absent = list(range(1, group.size))

    async def arrival(rank: int) -> None:
        await patient.recv(np.zeros(1, np.uint8), rank)
        absent.remove(rank)
        missing(absent)
        is_absent = np.isin(np.arange(group.size), absent).astype(np.uint8)
        await asyncio.gather(*(patient.send(is_absent, there) for there in np.flatnonzero(is_absent == 0)[1:].tolist()))

    missing(absent)
    await asyncio.gather(*(arrival(rank) for rank in range(1, group.size)))


async def measure_links(group: Ranks) -> Links:
    """Measure all links between the ranks of the group. Every member has to call it."""
    n, rank = group.size, group.rank
    row = np.zeros((3, n))
    for partner in partners(rank, n):
        row[:, partner] = await _meet(group, partner)
    row[0, rank] = group.passes_on
    rows = await group.all_gather(row, algorithm="ring")
    figures = np.stack([np.asarray(part) for part in rows])
    pass_on = bool(figures[:, 0].diagonal().all())
    latency_s = np.minimum(figures[:, 0], figures[:, 0].T)
    np.fill_diagonal(latency_s, 0.0)
    overheads_s = [float(figures[i, 1, j]) for i in range(n) for j in range(n) if i != j]
    return Links(
        latency_s=tuple(tuple(float(value) for value in line) for line in latency_s),
        bandwidth_Bps=tuple(tuple(float(value) for value in line) for line in figures[:, 2]),
        overhead_s=statistics.median(overheads_s) if overheads_s else 0.0,
        pass_on=pass_on,
    )


def partners(rank: int, size: int) -> list[int]:
    """Return the rank's partner in each round.

    No two pairs of one round share a rank. If the number is odd, one rank idles in each round."""
    seats = size + size % 2
    met = []
    for round_number in range(seats - 1):
        # The last seat stays, the others move on; the one that faces the last seat is where 2·seat = round.
        if rank == seats - 1:
            other = next(seat for seat in range(seats - 1) if (2 * seat - round_number) % (seats - 1) == 0)
        else:
            other = (round_number - rank) % (seats - 1)
            if other == rank:
                other = seats - 1
        if other < size:
            met.append(other)
    return met


async def _meet(group: Ranks, partner: int) -> tuple[float, float, float]:
    """Return latency, overhead per message and bandwidth towards the partner; the lower rank measures first."""
    if group.rank < partner:
        figures = await _time(group, partner)
        await _answer(group, partner)
    else:
        await _answer(group, partner)
        figures = await _time(group, partner)
    return figures


async def _time(group: Ranks, partner: int) -> tuple[float, float, float]:
    clock, small, large = group.host.clock, np.zeros(1, np.uint8), np.zeros(LARGE_BYTES, np.uint8)
    trips_s = []
    for _ in range(_ROUND_TRIPS):
        started_s = clock.elapsed()
        await group.send(small, partner, tag=_TAG)
        await group.recv(small, partner, tag=_TAG)
        trips_s.append(clock.elapsed() - started_s)
    trip_s = min(trips_s)

    async def beyond_a_trip_s(data: np.ndarray[tuple[int], np.dtype[np.uint8]], count: int) -> float:
        started_s = clock.elapsed()
        for _ in range(count):
            await group.send(data, partner, tag=_TAG)
        await group.recv(small, partner, tag=_TAG)
        whole_s = clock.elapsed() - started_s
        # On a busy machine the round trip may have been the slower one; half of it all is then the better guess.
        return max(whole_s - trip_s, whole_s / 2) / count

    overhead_s = await beyond_a_trip_s(small, _BURST)

    async def large_s(count: int) -> float:
        # The quickest, as of the round trips: with fewer cores than ranks the slower ones measure the other ranks.
        bursts_s: list[float] = []
        while not bursts_s or (len(bursts_s) < _REPEATS and bursts_s[0] < _LONG_ENOUGH_S):
            await group.send(np.array([count]), partner, tag=_TAG)
            bursts_s.append(count * await beyond_a_trip_s(large, count))
        return min(bursts_s)

    count, took_s, before_s = 1, await large_s(1), 0.0
    while count == 1 or (took_s < _LONG_ENOUGH_S and count < _MOST_LARGE):
        count, before_s = 2 * count, took_s
        took_s = await large_s(count)
    await group.send(np.array([0]), partner, tag=_TAG)
    more_s = took_s - before_s
    # Where the increment says little, as the shorter burst was held up, what was sent in all says more.
    each_s = more_s / (count / 2) if more_s > took_s / 4 else took_s / count
    return trip_s / 2, overhead_s, LARGE_BYTES / each_s


async def _answer(group: Ranks, partner: int) -> None:
    small, large = np.zeros(1, np.uint8), np.zeros(LARGE_BYTES, np.uint8)
    for _ in range(_ROUND_TRIPS):
        await group.recv(small, partner, tag=_TAG)
        await group.send(small, partner, tag=_TAG)
    for _ in range(_BURST):
        await group.recv(small, partner, tag=_TAG)
    await group.send(small, partner, tag=_TAG)
    count = np.zeros(1, np.int64)
    while True:
        await group.recv(count, partner, tag=_TAG)
        if not count[0]:
            return
        for _ in range(int(count[0])):
            await group.recv(large, partner, tag=_TAG)
        await group.send(small, partner, tag=_TAG)
