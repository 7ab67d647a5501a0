"""Algorithms without forwarding: every message goes directly from the rank that has the data to the one that needs
them.

Centralized: a single step each way. Everything goes through the root, whose link carries all of it: an
all_reduce costs 2 (latency + (n - 1) L / bandwidth). This is fast for two or three ranks, or for short messages
and a well-connected root.

Direct: the buffer is cut into one part per rank. Every rank sends each part to its owner, which reduces it and
sends the result to all others. An all_reduce of L bytes costs 2 (latency + (n - 1) / n L / bandwidth): as few
bytes as the ring, in two steps instead of 2 (n - 1). It needs a connection and a message per pair of ranks, and
n - 1 senders compete at every port. A switch handles this for a handful of ranks, but not for many.

Pairwise exchange, for all-to-all: in step s every rank sends to the rank s further on. Each step is a
permutation, so no two ranks send to the same one at once. It costs n - 1 steps of latency + part / bandwidth,
and the parts may all differ in size. The caller copies a rank's part for itself; it is not a message.

R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in MPICH, IJHPCA 19
(2005).
"""

from __future__ import annotations

from hcsim.collectives.plan import Plan, Recv, Reduce, Rounds, Send, Shape, finished, offsets, split
from hcsim.errors import UsageError


def _others(rank: int, shape: Shape, step: int) -> list[int]:
    """Return all other ranks from the next one on, up or down, so that each rank starts with another peer."""
    return [(rank + step * distance) % shape.world for distance in range(1, shape.world)]


def centralized_reduce(rank: int, shape: Shape) -> Plan:
    """Send all data to the root, which reduces them in rank order."""
    if rank != shape.root:
        return Plan(((Send(shape.root, 0, shape.length),),))
    peers = [peer for peer in range(shape.world) if peer != rank]
    return Plan(finished((tuple(Reduce(peer, 0, shape.length) for peer in peers),), 0, shape.length))


def centralized_broadcast(rank: int, shape: Shape) -> Plan:
    if rank != shape.root:
        return Plan(((Recv(shape.root, 0, shape.length),),))
    return Plan((tuple(Send(peer, 0, shape.length) for peer in _others(rank, shape, 1)),))


def centralized_all_reduce(rank: int, shape: Shape) -> Plan:
    """Reduce to the root, finish there, broadcast."""
    return Plan(centralized_reduce(rank, shape).rounds + centralized_broadcast(rank, shape).rounds)


def centralized_gather(rank: int, shape: Shape) -> Plan:
    cuts = offsets(shape.counts)
    if rank != shape.root:
        return Plan(((Send(shape.root, cuts[rank], cuts[rank + 1]),),))
    return Plan((tuple(Recv(peer, cuts[peer], cuts[peer + 1]) for peer in _others(rank, shape, 1)),))


def centralized_scatter(rank: int, shape: Shape) -> Plan:
    cuts = offsets(shape.counts)
    if rank != shape.root:
        return Plan(((Recv(shape.root, cuts[rank], cuts[rank + 1]),),))
    return Plan((tuple(Send(peer, cuts[peer], cuts[peer + 1]) for peer in _others(rank, shape, 1)),))


def direct_all_gather(rank: int, shape: Shape) -> Plan:
    return Plan(_spread(rank, shape, offsets(shape.counts)))


def direct_reduce_scatter(rank: int, shape: Shape) -> Plan:
    """Send each part to the rank that owns it."""
    return Plan(_collect(rank, shape, offsets(shape.counts)))


def direct_all_reduce(rank: int, shape: Shape) -> Plan:
    """Reduce-scatter directly, finish the own part, all-gather directly."""
    cuts = split(shape.length, shape.world)
    return Plan(_collect(rank, shape, cuts) + _spread(rank, shape, cuts))


def _collect(rank: int, shape: Shape, cuts: tuple[int, ...]) -> Rounds:
    own = (cuts[rank], cuts[rank + 1])
    sends = [Send(peer, cuts[peer], cuts[peer + 1]) for peer in _others(rank, shape, 1)]
    return finished(((*sends, *(Reduce(peer, *own) for peer in _others(rank, shape, -1))),), *own)


def _spread(rank: int, shape: Shape, cuts: tuple[int, ...]) -> Rounds:
    sends = [Send(peer, cuts[rank], cuts[rank + 1]) for peer in _others(rank, shape, 1)]
    return ((*sends, *(Recv(peer, cuts[peer], cuts[peer + 1]) for peer in _others(rank, shape, -1))),)


def pairwise_all_to_all(rank: int, shape: Shape) -> Plan:
    """Exchange with the rank at each distance."""
    if shape.sent[rank] != shape.received[rank]:
        raise UsageError(f"rank {rank} sends itself {shape.sent[rank]} elements and expects {shape.received[rank]}")
    n, out = shape.world, offsets(shape.sent)
    into = [out[-1] + offset for offset in offsets(shape.received)]
    peers = [((rank + distance) % n, (rank - distance) % n) for distance in range(1, n)]
    return Plan(tuple((Send(to, out[to], out[to + 1]), Recv(of, into[of], into[of + 1])) for to, of in peers))
