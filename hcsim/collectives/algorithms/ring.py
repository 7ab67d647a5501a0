"""Ring algorithms: each rank communicates with its two neighbours only, and all links are always busy.

The buffer is cut into one chunk per rank. In the reduce-scatter phase partial sums travel around the ring, one
chunk per step, until the rank at position p holds the whole sum of chunk p. In the all-gather phase the
finished chunks travel around once more. The phases differ in their indices: a step of the first sends chunk p -
s - 1, a step of the second chunk p - s.

Cost of an all_reduce of L bytes over n ranks: 2 (n - 1) steps of latency + L / n / bandwidth. The bytes are the
least possible, the steps are the most.

P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 69 (2009).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from hcsim.collectives.plan import Plan, PlanSummary, Recv, Reduce, Round, Rounds, Send, Shape, finished, offsets, split

CHUNK = 1 << 18
"""Elements per chunk in `chunked_all_reduce`, with one chunk per rank; sized for a processor's cache."""
_BEFORE, _AFTER = 0, 1
"""Symbolic names of a rank's neighbours in the rounds, so that all ranks share their rounds."""

_Chunks: TypeAlias = tuple[tuple[int, int], ...]
"""The range of each position."""


class _RingPosition(NamedTuple):
    order: tuple[int, ...]
    position: int
    before: int
    after: int

    def plan(self, rounds: Rounds, summary: PlanSummary | None = None) -> Plan:
        return Plan(rounds, (self.before, self.after), summary)


def _ring_position(rank: int, shape: Shape) -> _RingPosition:
    order = shape.order or tuple(range(shape.world))
    position = order.index(rank)
    return _RingPosition(order, position, order[position - 1], order[(position + 1) % shape.world])


@lru_cache(maxsize=16)
def _equal_chunks(length: int, world: int) -> _Chunks:
    return tuple(pairwise(split(length, world)))


def _rank_chunks(shape: Shape, ring: _RingPosition) -> _Chunks:
    """Return the chunks by position; parts belong to ranks, wherever they are in the ring."""
    cuts = offsets(shape.counts)
    return tuple((cuts[rank], cuts[rank + 1]) for rank in ring.order)


def _scatter_phase(ring: _RingPosition, chunks: _Chunks) -> Rounds:
    """Return the reduce-scatter rounds: every position ends with the sum of its own chunk."""
    return _rounds(chunks, (ring.position - 1) % len(chunks), Reduce)


def _gather_phase(ring: _RingPosition, chunks: _Chunks) -> Rounds:
    """Return the all-gather rounds: every position starts with its own chunk and ends with all."""
    return _rounds(chunks, ring.position, Recv)


def _rounds(chunks: _Chunks, first: int, take: type[Reduce | Recv]) -> Rounds:
    """Send the chunk at position `first`, then in each round the chunk received in the previous one, which is the next
    lower one."""
    start = len(chunks) - 1 - first
    return _twice_around(chunks, take)[start : start + len(chunks) - 1]


@lru_cache(maxsize=32)
def _twice_around(chunks: _Chunks, take: type[Reduce | Recv]) -> Rounds:
    """Return the rounds of every chunk in descending order, twice, so that the rounds of any rank are a slice of them.

    Hundreds of simulated ranks run half a million rounds, but share these few objects."""
    downwards = chunks[::-1]
    once = [(Send(_AFTER, *sent), take(_BEFORE, *taken)) for sent, taken in pairwise((*downwards, downwards[0]))]
    return (*once, *once)


def all_reduce(rank: int, shape: Shape) -> Plan:
    ring, chunks = _ring_position(rank, shape), _equal_chunks(shape.length, shape.world)
    rounds = finished(_scatter_phase(ring, chunks), *chunks[ring.position]) + _gather_phase(ring, chunks)
    return ring.plan(rounds, _summary(ring, chunks) if shape.world > 1 else None)


def chunked_all_reduce(rank: int, shape: Shape) -> Plan:
    """Run the ring all_reduce for one portion of the buffer after the other, so that the data in flight fit the
    caches.

    This takes many more steps; it is for ranks that share a machine."""
    ring, portions = _ring_position(rank, shape), -(-shape.length // (CHUNK * shape.world))
    rounds: list[Round] = []
    for start, end in pairwise(split(shape.length, portions) if portions else ()):
        chunks = tuple((start + lo, start + hi) for lo, hi in _equal_chunks(end - start, shape.world))
        rounds += finished(_scatter_phase(ring, chunks), *chunks[ring.position]) + _gather_phase(ring, chunks)
    return ring.plan(tuple(rounds))


def _summary(ring: _RingPosition, chunks: _Chunks) -> PlanSummary:
    """Summarise the plan: a rank sends every chunk but its own, then all but that of the next rank. No receive
    overwrites data still in use."""
    kept = sum(hi - lo for lo, hi in (chunks[ring.position], chunks[(ring.position + 1) % len(chunks)]))
    length = chunks[-1][1]
    return PlanSummary((_AFTER, _BEFORE), 2 * length - kept, chunks[0][1], length)


def reduce_scatter(rank: int, shape: Shape) -> Plan:
    """Run the first half of an all_reduce, with given parts."""
    ring = _ring_position(rank, shape)
    chunks = _rank_chunks(shape, ring)
    return ring.plan(finished(_scatter_phase(ring, chunks), *chunks[ring.position]))


def all_gather(rank: int, shape: Shape) -> Plan:
    """Run the second half of an all_reduce, with given parts."""
    ring = _ring_position(rank, shape)
    return ring.plan(_gather_phase(ring, _rank_chunks(shape, ring)))


def reduce(rank: int, shape: Shape) -> Plan:
    """Reduce-scatter, then send every finished chunk to the root."""
    ring, chunks = _ring_position(rank, shape), _equal_chunks(shape.length, shape.world)
    own = chunks[ring.position]
    rounds = finished(ring.plan(_scatter_phase(ring, chunks)).by_rank(), *own)
    if rank != shape.root:
        return Plan((*rounds, (Send(shape.root, *own),)))
    last = tuple(Recv(peer, *chunk) for peer, chunk in zip(ring.order, chunks, strict=True) if peer != rank)
    return Plan((*rounds, last))


def broadcast(rank: int, shape: Shape) -> Plan:
    """Distribute the chunks from the root, then all-gather; nothing is sent to the root."""
    ring, chunks = _ring_position(rank, shape), _equal_chunks(shape.length, shape.world)
    rounds = ring.plan(_gather_phase(ring, chunks)).by_rank()
    if rank == shape.root:
        deal = tuple(Send(peer, *chunk) for peer, chunk in zip(ring.order, chunks, strict=True) if peer != rank)
        return Plan((deal, *(tuple(a for a in r if not isinstance(a, Recv)) for r in rounds)))
    if ring.after == shape.root:
        rounds = tuple(tuple(a for a in r if not isinstance(a, Send)) for r in rounds)
    return Plan(((Recv(shape.root, *chunks[ring.position]),), *rounds))
