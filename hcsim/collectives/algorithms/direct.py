"""Algorithms without ranks in between: every message goes from where its data are to where they are needed.

Centralized: a single step each way. Everything goes through the root, whose link carries all of it: an all_reduce
costs 2 (latency + (n - 1) L / bandwidth). With two or three ranks, or with short messages and a well-connected
root, little is quicker.

Direct: the buffer is cut into one part per rank. Every rank sends each part to the rank it belongs to, which
adds up, and then sends the sum to all others. An all_reduce of L bytes costs
2 (latency + (n - 1) / n L / bandwidth): as few bytes as the ring, in two steps instead of
2 (n - 1). The price is a connection and a message per pair of ranks, and n - 1 senders at every
port at once, which a home's switch with a handful of Macs takes easily and a large one does not.

Pairwise exchange, for all-to-all: in step s every rank sends to the one s further on. Each step is a permutation, so no
two ranks send to the same one at once. It costs n - 1 steps of latency + part / bandwidth, and the parts may all
differ in size. What a rank sends to itself is no message: the caller puts it into the output.

R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in MPICH, IJHPCA 19 (2005).
"""

from __future__ import annotations

from hcsim.collectives.plan import Plan, Recv, Reduce, Rounds, Send, Shape, finished, offsets, split
from hcsim.errors import UsageError


def _others(rank: int, shape: Shape, step: int) -> list[int]:
    """All other ranks, from the next one on, upwards or downwards: so all start with different peers."""
    return [(rank + step * distance) % shape.world for distance in range(1, shape.world)]


def centralized_reduce(rank: int, shape: Shape) -> Plan:
    """All send to the root, which adds up in the order of ranks."""
    if rank != shape.root:
        return Plan(((Send(shape.root, 0, shape.length),),))
    peers = [peer for peer in range(shape.world) if peer != rank]
    return Plan(finished((tuple(Reduce(peer, 0, shape.length) for peer in peers),), 0, shape.length))


def centralized_broadcast(rank: int, shape: Shape) -> Plan:
    """The root sends to all."""
    if rank != shape.root:
        return Plan(((Recv(shape.root, 0, shape.length),),))
    return Plan((tuple(Send(peer, 0, shape.length) for peer in _others(rank, shape, 1)),))


def centralized_all_reduce(rank: int, shape: Shape) -> Plan:
    """Reduce to the root, finish there, broadcast."""
    return Plan(centralized_reduce(rank, shape).rounds + centralized_broadcast(rank, shape).rounds)


def centralized_gather(rank: int, shape: Shape) -> Plan:
    """Every rank sends its part to the root."""
    cuts = offsets(shape.counts)
    if rank != shape.root:
        return Plan(((Send(shape.root, cuts[rank], cuts[rank + 1]),),))
    return Plan((tuple(Recv(peer, cuts[peer], cuts[peer + 1]) for peer in _others(rank, shape, 1)),))


def centralized_scatter(rank: int, shape: Shape) -> Plan:
    """The root sends every rank its part."""
    cuts = offsets(shape.counts)
    if rank != shape.root:
        return Plan(((Recv(shape.root, cuts[rank], cuts[rank + 1]),),))
    return Plan((tuple(Send(peer, cuts[peer], cuts[peer + 1]) for peer in _others(rank, shape, 1)),))


def direct_all_gather(rank: int, shape: Shape) -> Plan:
    """Every rank sends its part to all others."""
    return Plan(_spread(rank, shape, offsets(shape.counts)))


def direct_reduce_scatter(rank: int, shape: Shape) -> Plan:
    """Every rank sends each part to the rank it belongs to."""
    return Plan(_collect(rank, shape, offsets(shape.counts)))


def direct_all_reduce(rank: int, shape: Shape) -> Plan:
    """Collect the parts, finish the own one, spread it."""
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
    """One exchange per distance."""
    if shape.sent[rank] != shape.received[rank]:
        raise UsageError(f"rank {rank} sends itself {shape.sent[rank]} elements and expects {shape.received[rank]}")
    n, out = shape.world, offsets(shape.sent)
    into = [out[-1] + offset for offset in offsets(shape.received)]
    peers = [((rank + distance) % n, (rank - distance) % n) for distance in range(1, n)]
    return Plan(tuple((Send(to, out[to], out[to + 1]), Recv(of, into[of], into[of + 1])) for to, of in peers))
