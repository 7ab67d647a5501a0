"""Ring algorithms: each rank speaks to its two neighbours alone, and every link is busy all the time.

The buffer is cut into one chunk per rank. In the reduce-scatter phase partial sums travel around
the ring, one chunk per step, until the rank at position p holds the whole sum of chunk p. In the
all-gather phase the finished chunks travel around once more. The phases differ in their indices:
a step of the first sends chunk p - s - 1, a step of the second chunk p - s.

Cost of an all_reduce of L bytes over n ranks: 2 (n - 1) steps of latency + L / n / bandwidth. The
bytes are the least possible, the steps are the most.

P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations,
JPDC 69 (2009).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from hcsim.collectives.plan import Plan, Recv, Reduce, Round, Rounds, Send, Shape, Survey, finished, offsets, split

CHUNK = 1 << 18
"""Elements of a chunk, of which there is one per rank, in `chunked_all_reduce`: what a processor has beside it."""
_BEFORE, _AFTER = 0, 1
"""What the rounds call a rank's neighbours: whoever sends a chunk does the same with it, whoever that is."""

_Chunks: TypeAlias = tuple[tuple[int, int], ...]
"""Each position's range."""


class _Seat(NamedTuple):
    order: tuple[int, ...]
    position: int
    before: int
    after: int

    def plan(self, rounds: Rounds, survey: Survey | None = None) -> Plan:
        """Of rounds that name the neighbours."""
        return Plan(rounds, (self.before, self.after), survey)


def _seat(rank: int, shape: Shape) -> _Seat:
    order = shape.order or tuple(range(shape.world))
    position = order.index(rank)
    return _Seat(order, position, order[position - 1], order[(position + 1) % shape.world])


@lru_cache(maxsize=16)
def _equal_chunks(length: int, world: int) -> _Chunks:
    return tuple(pairwise(split(length, world)))


def _rank_chunks(shape: Shape, seat: _Seat) -> _Chunks:
    """Parts belong to ranks, wherever these sit in the ring."""
    cuts = offsets(shape.counts)
    return tuple((cuts[rank], cuts[rank + 1]) for rank in seat.order)


def _scatter_phase(seat: _Seat, chunks: _Chunks) -> Rounds:
    """Every position ends with the sum of its own chunk."""
    return _rounds(chunks, (seat.position - 1) % len(chunks), Reduce)


def _gather_phase(seat: _Seat, chunks: _Chunks) -> Rounds:
    """Every position starts with its own chunk and ends with all of them."""
    return _rounds(chunks, seat.position, Recv)


def _rounds(chunks: _Chunks, first: int, take: type[Reduce | Recv]) -> Rounds:
    """Send the chunk at position `first`, then in each round that which came in the one before: the next lower one."""
    start = len(chunks) - 1 - first
    return _twice_around(chunks, take)[start : start + len(chunks) - 1]


@lru_cache(maxsize=32)
def _twice_around(chunks: _Chunks, take: type[Reduce | Recv]) -> Rounds:
    """Every chunk's round, from the last one downwards, and once more: so wherever a rank starts, its rounds are there.

    Hundreds of simulated ranks have half a million rounds between them, but these few only."""
    downwards = chunks[::-1]
    once = [(Send(_AFTER, *sent), take(_BEFORE, *taken)) for sent, taken in pairwise((*downwards, downwards[0]))]
    return (*once, *once)


def all_reduce(rank: int, shape: Shape) -> Plan:
    """Reduce-scatter, finish the own chunk, all-gather."""
    seat, chunks = _seat(rank, shape), _equal_chunks(shape.length, shape.world)
    rounds = finished(_scatter_phase(seat, chunks), *chunks[seat.position]) + _gather_phase(seat, chunks)
    return seat.plan(rounds, _survey(seat, chunks) if shape.world > 1 else None)


def chunked_all_reduce(rank: int, shape: Shape) -> Plan:
    """The same for one portion of the buffer after the other: what is under way stays small enough for the caches.

    That takes many more steps: it is for ranks that share a machine."""
    seat, portions = _seat(rank, shape), -(-shape.length // (CHUNK * shape.world))
    rounds: list[Round] = []
    for start, end in pairwise(split(shape.length, portions) if portions else ()):
        chunks = tuple((start + lo, start + hi) for lo, hi in _equal_chunks(end - start, shape.world))
        rounds += finished(_scatter_phase(seat, chunks), *chunks[seat.position]) + _gather_phase(seat, chunks)
    return seat.plan(tuple(rounds))


def _survey(seat: _Seat, chunks: _Chunks) -> Survey:
    """Every chunk is sent but our own, then all but that of the next; what comes disturbs nothing still in use."""
    kept = sum(hi - lo for lo, hi in (chunks[seat.position], chunks[(seat.position + 1) % len(chunks)]))
    length = chunks[-1][1]
    return Survey((_AFTER, _BEFORE), 2 * length - kept, chunks[0][1], length)


def reduce_scatter(rank: int, shape: Shape) -> Plan:
    """The first half of an all_reduce, with the parts given."""
    seat = _seat(rank, shape)
    chunks = _rank_chunks(shape, seat)
    return seat.plan(finished(_scatter_phase(seat, chunks), *chunks[seat.position]))


def all_gather(rank: int, shape: Shape) -> Plan:
    """The second half of an all_reduce, with the parts given."""
    seat = _seat(rank, shape)
    return seat.plan(_gather_phase(seat, _rank_chunks(shape, seat)))


def reduce(rank: int, shape: Shape) -> Plan:
    """Reduce-scatter, then everybody hands the finished chunk to the root."""
    seat, chunks = _seat(rank, shape), _equal_chunks(shape.length, shape.world)
    own = chunks[seat.position]
    rounds = finished(seat.plan(_scatter_phase(seat, chunks)).by_rank(), *own)
    if rank != shape.root:
        return Plan((*rounds, (Send(shape.root, *own),)))
    last = tuple(Recv(peer, *chunk) for peer, chunk in zip(seat.order, chunks, strict=True) if peer != rank)
    return Plan((*rounds, last))


def broadcast(rank: int, shape: Shape) -> Plan:
    """The root deals out the chunks, then all-gather; the root has everything and is sent nothing."""
    seat, chunks = _seat(rank, shape), _equal_chunks(shape.length, shape.world)
    rounds = seat.plan(_gather_phase(seat, chunks)).by_rank()
    if rank == shape.root:
        deal = tuple(Send(peer, *chunk) for peer, chunk in zip(seat.order, chunks, strict=True) if peer != rank)
        return Plan((deal, *(tuple(a for a in r if not isinstance(a, Recv)) for r in rounds)))
    if seat.after == shape.root:
        rounds = tuple(tuple(a for a in r if not isinstance(a, Send)) for r in rounds)
    return Plan(((Recv(shape.root, *chunks[seat.position]),), *rounds))
