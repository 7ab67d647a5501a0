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

from collections.abc import Callable
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from hcsim.collectives.plan import Plan, Recv, Reduce, Send, offsets, split
from hcsim.collectives.shape import Shape, finished

_Chunks: TypeAlias = tuple[tuple[int, int], ...]
"""Each position's range."""


class _Seat(NamedTuple):
    order: tuple[int, ...]
    position: int
    before: int
    after: int


def _seat(rank: int, shape: Shape) -> _Seat:
    order = shape.order or tuple(range(shape.world))
    position = order.index(rank)
    return _Seat(order, position, order[position - 1], order[(position + 1) % shape.world])


@lru_cache(maxsize=16)
def _equal_chunks(length: int, world: int) -> _Chunks:
    """Hundreds of simulated ranks share them: their numbers then stay in the processor's cache."""
    return tuple(pairwise(split(length, world)))


def _rank_chunks(shape: Shape, seat: _Seat) -> _Chunks:
    """Parts belong to ranks, wherever these sit in the ring."""
    cuts = offsets(shape.counts)
    return tuple((cuts[rank], cuts[rank + 1]) for rank in seat.order)


def _scatter_phase(seat: _Seat, chunks: _Chunks) -> Plan:
    """Every position ends with the sum of its own chunk."""
    return _rounds(seat, chunks, (seat.position - 1) % len(chunks), Reduce)


def _gather_phase(seat: _Seat, chunks: _Chunks) -> Plan:
    """Every position starts with its own chunk and ends with all of them."""
    return _rounds(seat, chunks, seat.position, Recv)


def _rounds(seat: _Seat, chunks: _Chunks, first: int, take: Callable[[int, int, int], Reduce | Recv]) -> Plan:
    """Send the chunk at position `first`, then in each round that which came in the one before: the next lower one.

    In whole columns: hundreds of ranks have half a million of these rounds."""
    los, his = zip(*chunks[first::-1], *chunks[:first:-1], strict=True)
    sends = map(partial(Send, seat.after), los[:-1], his[:-1])
    return tuple(zip(sends, map(partial(take, seat.before), los[1:], his[1:]), strict=True))


def all_reduce(rank: int, shape: Shape) -> Plan:
    """Reduce-scatter, finish the own chunk, all-gather."""
    seat, chunks = _seat(rank, shape), _equal_chunks(shape.length, shape.world)
    return finished(_scatter_phase(seat, chunks), *chunks[seat.position]) + _gather_phase(seat, chunks)


def reduce_scatter(rank: int, shape: Shape) -> Plan:
    """The first half of an all_reduce, with the parts given."""
    seat = _seat(rank, shape)
    chunks = _rank_chunks(shape, seat)
    return finished(_scatter_phase(seat, chunks), *chunks[seat.position])


def all_gather(rank: int, shape: Shape) -> Plan:
    """The second half of an all_reduce, with the parts given."""
    seat = _seat(rank, shape)
    return _gather_phase(seat, _rank_chunks(shape, seat))


def reduce(rank: int, shape: Shape) -> Plan:
    """Reduce-scatter, then everybody hands the finished chunk to the root."""
    seat, chunks = _seat(rank, shape), _equal_chunks(shape.length, shape.world)
    if rank == shape.root:
        last = tuple(Recv(peer, *chunk) for peer, chunk in zip(seat.order, chunks, strict=True) if peer != rank)
        return (*finished(_scatter_phase(seat, chunks), *chunks[seat.position]), last)
    own = chunks[seat.position]
    return (*finished(_scatter_phase(seat, chunks), *own), (Send(shape.root, *own),))


def broadcast(rank: int, shape: Shape) -> Plan:
    """The root deals out the chunks, then all-gather; the root has everything and is sent nothing."""
    seat, chunks = _seat(rank, shape), _equal_chunks(shape.length, shape.world)
    if rank == shape.root:
        deal = tuple(Send(peer, *chunk) for peer, chunk in zip(seat.order, chunks, strict=True) if peer != rank)
        return (deal, *(tuple(a for a in r if not isinstance(a, Recv)) for r in _gather_phase(seat, chunks)))
    rounds = _gather_phase(seat, chunks)
    if seat.after == shape.root:
        rounds = tuple(tuple(a for a in r if not isinstance(a, Send)) for r in rounds)
    return ((Recv(shape.root, *chunks[seat.position]),), *rounds)
