"""One rank in the middle: a single step each way.

Everything goes through the root, whose link carries all of it: an all_reduce costs
2 (latency + (n - 1) L / bandwidth). With two or three ranks, or with short messages and a
well-connected root, little is quicker.
"""

from __future__ import annotations

from hcsim.collectives.plan import Plan, Recv, Reduce, Send, offsets
from hcsim.collectives.shape import Shape, finished


def others(rank: int, shape: Shape, step: int) -> list[int]:
    """Everybody else, from the next rank on, upwards or downwards: so all start with different peers."""
    return [(rank + step * distance) % shape.world for distance in range(1, shape.world)]


def reduce(rank: int, shape: Shape) -> Plan:
    """Everybody sends to the root, which adds up in the order of ranks."""
    if rank != shape.root:
        return Plan(((Send(shape.root, 0, shape.length),),))
    peers = [peer for peer in range(shape.world) if peer != rank]
    return Plan(finished((tuple(Reduce(peer, 0, shape.length) for peer in peers),), 0, shape.length))


def broadcast(rank: int, shape: Shape) -> Plan:
    """The root sends to everybody."""
    if rank != shape.root:
        return Plan(((Recv(shape.root, 0, shape.length),),))
    return Plan((tuple(Send(peer, 0, shape.length) for peer in others(rank, shape, 1)),))


def all_reduce(rank: int, shape: Shape) -> Plan:
    """Reduce to the root, finish there, broadcast."""
    return Plan(reduce(rank, shape).rounds + broadcast(rank, shape).rounds)


def gather(rank: int, shape: Shape) -> Plan:
    """Everybody sends the own part to the root."""
    cuts = offsets(shape.counts)
    if rank != shape.root:
        return Plan(((Send(shape.root, cuts[rank], cuts[rank + 1]),),))
    return Plan((tuple(Recv(peer, cuts[peer], cuts[peer + 1]) for peer in others(rank, shape, 1)),))


def scatter(rank: int, shape: Shape) -> Plan:
    """The root sends everybody their part."""
    cuts = offsets(shape.counts)
    if rank != shape.root:
        return Plan(((Recv(shape.root, cuts[rank], cuts[rank + 1]),),))
    return Plan((tuple(Send(peer, cuts[peer], cuts[peer + 1]) for peer in others(rank, shape, 1)),))
