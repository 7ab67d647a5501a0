"""Everybody with everybody: each part has a home, and goes there and comes from there directly.

The buffer is cut into one part per rank. Everybody sends each part to the rank it belongs to, which
adds up, and then sends the sum to everybody. An all_reduce of L bytes costs
2 (latency + (n - 1) / n L / bandwidth): as few bytes as the ring, in two steps instead of
2 (n - 1). The price is a connection and a message per pair of ranks, and n - 1 senders at every
port at once, which a home's switch with a handful of Macs takes easily and a large one does not.
"""

from __future__ import annotations

from hcsim.collectives.centralized import others
from hcsim.collectives.plan import Plan, Recv, Reduce, Rounds, Send, offsets, split
from hcsim.collectives.shape import Shape, finished


def all_gather(rank: int, shape: Shape) -> Plan:
    """Everybody sends the own part to everybody."""
    return Plan(_spread(rank, shape, offsets(shape.counts)))


def reduce_scatter(rank: int, shape: Shape) -> Plan:
    """Everybody sends each part to the rank it belongs to."""
    return Plan(_collect(rank, shape, offsets(shape.counts)))


def all_reduce(rank: int, shape: Shape) -> Plan:
    """Collect the parts, finish the own one, spread it."""
    cuts = split(shape.length, shape.world)
    return Plan(_collect(rank, shape, cuts) + _spread(rank, shape, cuts))


def _collect(rank: int, shape: Shape, cuts: tuple[int, ...]) -> Rounds:
    own = (cuts[rank], cuts[rank + 1])
    sends = [Send(peer, cuts[peer], cuts[peer + 1]) for peer in others(rank, shape, 1)]
    return finished(((*sends, *(Reduce(peer, *own) for peer in others(rank, shape, -1))),), *own)


def _spread(rank: int, shape: Shape, cuts: tuple[int, ...]) -> Rounds:
    sends = [Send(peer, cuts[rank], cuts[rank + 1]) for peer in others(rank, shape, 1)]
    return ((*sends, *(Recv(peer, cuts[peer], cuts[peer + 1]) for peer in others(rank, shape, -1))),)
