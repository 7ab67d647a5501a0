"""The best order of a ring over unequal links.

A ring is as fast as its slowest link, so the order maximises that bandwidth. Among the orders that reach it, it
takes the one with the least sum of latencies (or of 1 / bandwidth). Links are directed: i → j may differ from j
→ i.

Up to `EXACT_UP_TO` ranks the result is exact. The slowest link is found by bisection over the occurring
bandwidths, testing each time whether the links at least that fast contain a Hamiltonian cycle; the least sum is
found by dynamic programming over those links. Both enumerate all subsets of ranks, in O(2^n n^2) (M. Held, R.
M. Karp: A dynamic programming approach to sequencing problems, J. SIAM 10, 1962). For more ranks, each rank is
inserted at the best position, followed by local moves while they help.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TypeAlias

from hcsim.collectives.cost import Links
from hcsim.errors import UsageError

EXACT_UP_TO = 12
_LONGEST_MOVE = 3
"""The maximum number of ranks moved together."""
_PASSES = 4
"""The maximum number of passes; a few are enough."""
_AS_FAST = 0.8
_CHUNK_BYTES = 2**20
"""The typical message on a ring is a few of these; shorter messages use other algorithms."""
_DEAD = 1e30
"""The cost of a link without bandwidth. It is finite, so that two of them cost more than one."""

LinkMatrix: TypeAlias = Sequence[Sequence[float]]


def ring_order(bandwidth: LinkMatrix, latency: LinkMatrix | None = None) -> tuple[int, ...]:
    """Return the best ring order over these links (row: sender, column: receiver), starting with rank 0."""
    n = len(bandwidth)
    if n == 0 or any(len(row) != n for row in (*bandwidth, *(latency or bandwidth))) or len(latency or bandwidth) != n:
        raise UsageError("the order of a ring needs square matrices of one size, with at least one rank")
    if n <= 2:
        return tuple(range(n))
    cost = latency or [[1 / speed if speed > 0 else _DEAD for speed in row] for row in bandwidth]
    return _exact(bandwidth, cost) if n <= EXACT_UP_TO else _inserted(bandwidth, cost)


def order_over(links: Links) -> tuple[int, ...]:
    """Return the best order over measured links, whose figures are accurate to a fifth.

    Links within this accuracy of the slowest link of the best ring count as equally fast; the time of a chunk
    decides between them."""
    first = ring_order(links.bandwidth_Bps, links.latency_s)
    slowest_Bps = min(links.bandwidth_Bps[a][b] for a, b in zip(first, (*first[1:], first[0]), strict=True))
    enough_Bps = _AS_FAST * slowest_Bps
    level = [[min(speed, enough_Bps) for speed in row] for row in links.bandwidth_Bps]
    chunk_s = [
        [latency + _CHUNK_BYTES / speed if speed > 0 else _DEAD for latency, speed in zip(*rows, strict=True)]
        for rows in zip(links.latency_s, links.bandwidth_Bps, strict=True)
    ]
    return ring_order(level, chunk_s)


def _exact(bandwidth: LinkMatrix, cost: LinkMatrix) -> tuple[int, ...]:
    n = len(bandwidth)
    speeds = sorted({bandwidth[i][j] for i in range(n) for j in range(n) if i != j})
    low, high = 0, len(speeds) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if _has_cycle(bandwidth, speeds[middle]):
            low = middle
        else:
            high = middle - 1
    return _cheapest_cycle(bandwidth, speeds[low], cost)


def _has_cycle(bandwidth: LinkMatrix, slowest: float) -> bool:
    """Return whether a ring exists over links of at least this speed. Sets of ranks are bit masks."""
    n = len(bandwidth)
    into = [sum(1 << i for i in range(n) if i != j and bandwidth[i][j] >= slowest) for j in range(n)]
    ends = [0] * (1 << n)  # where a path from 0 through exactly these ranks can end
    ends[1] = 1
    for visited in range(1, 1 << n, 2):
        if ends[visited]:
            for j in range(1, n):
                if not visited >> j & 1 and ends[visited] & into[j]:
                    ends[visited | 1 << j] |= 1 << j
    return bool(ends[-1] & into[0])


def _cheapest_cycle(bandwidth: LinkMatrix, slowest: float, cost: LinkMatrix) -> tuple[int, ...]:
    n = len(bandwidth)
    best: list[dict[int, tuple[float, int]]] = [{} for _ in range(1 << n)]  # by set, then end: cost, rank before
    best[1][0] = (0.0, 0)
    for visited in range(1, 1 << n, 2):
        for i, (spent, _) in best[visited].items():
            for j in range(1, n):
                if visited >> j & 1 or bandwidth[i][j] < slowest:
                    continue
                there = best[visited | 1 << j]
                if j not in there or spent + cost[i][j] < there[j][0]:
                    there[j] = (spent + cost[i][j], i)
    closing = [(spent + cost[i][0], i) for i, (spent, _) in best[-1].items() if bandwidth[i][0] >= slowest]
    visited, end = (1 << n) - 1, min(closing)[1]
    backwards = []
    while end:
        backwards.append(end)
        visited, end = visited ^ 1 << end, best[visited][end][1]
    return (0, *reversed(backwards))


def _inserted(bandwidth: LinkMatrix, cost: LinkMatrix) -> tuple[int, ...]:
    n = len(bandwidth)
    ring = [0]
    for rank in range(1, n):
        ring = _with(ring, [rank], bandwidth, cost)
    best = _quality(ring, bandwidth, cost)
    for _ in range(_PASSES):
        before = best
        for size in range(1, _LONGEST_MOVE + 1):
            for start in range(1, n - size + 1):
                moved = _with(ring[:start] + ring[start + size :], ring[start : start + size], bandwidth, cost)
                quality = _quality(moved, bandwidth, cost)
                if quality > best:
                    ring, best = moved, quality
        if best == before:
            break
    return tuple(ring)


def _with(ring: list[int], path: list[int], bandwidth: LinkMatrix, cost: LinkMatrix) -> list[int]:
    """Insert some ranks into the ring at the best position; rank 0 stays first."""
    speeds = [bandwidth[a][b] for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)]
    slowest, second = sorted([*speeds, inf])[:2]
    first, last = path[0], path[-1]
    best, place = (-inf, -inf), 0
    for i, before in enumerate(ring):
        after = ring[(i + 1) % len(ring)]
        # The link that the newcomers replace no longer counts.
        others = second if speeds[i] == slowest else slowest
        speed = min(others, bandwidth[before][first], bandwidth[last][after])
        gain = cost[before][after] - cost[before][first] - cost[last][after]
        if (speed, gain) > best:
            best, place = (speed, gain), i
    return [*ring[: place + 1], *path, *ring[place + 1 :]]


def _quality(ring: list[int], bandwidth: LinkMatrix, cost: LinkMatrix) -> tuple[float, float]:
    links = list(zip(ring, [*ring[1:], ring[0]], strict=True))
    return min(bandwidth[a][b] for a, b in links), -sum(cost[a][b] for a, b in links)
