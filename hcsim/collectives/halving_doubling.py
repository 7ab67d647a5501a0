"""Recursive halving, then doubling: logarithmically many steps and the least possible bytes.

In the reduce-scatter by halving, partners at distance n/2, n/4, … 1 each give the other half of the
range they still share and add up the half they keep. The all-gather by doubling retraces it. An
all_reduce costs 2 log2(n) latency + 2 (n - 1) / n L / bandwidth. A world that is no power of two is
folded as in recursive doubling.

R. Rabenseifner: Optimization of collective reduction operations, ICCS 2004.
"""

from __future__ import annotations

from hcsim.collectives.plan import Plan, Reduce, Round, Rounds, Send, offsets, split
from hcsim.collectives.recursive_doubling import Fold, gather_rounds
from hcsim.collectives.shape import Shape, finished


def _halving_rounds(rank: int, fold: Fold, cuts: tuple[int, ...]) -> Rounds:
    """Reduce-scatter among the active: number v ends with the sum of [cuts[v], cuts[v + 1])."""
    rounds: list[Round] = []
    number = fold.number(rank)
    for distance in reversed(fold.distances()):
        peer, kept = fold.rank(number ^ distance), number - number % distance
        given = kept ^ distance
        send = Send(peer, cuts[given], cuts[given + distance])
        rounds.append((send, Reduce(peer, cuts[kept], cuts[kept + distance])))
    return finished(tuple(rounds), cuts[number], cuts[number + 1])


def all_reduce(rank: int, shape: Shape) -> Plan:
    """Reduce-scatter by halving, finish the own chunk, all-gather by doubling."""
    fold, everything = Fold.of(shape.world), (0, shape.length)
    cuts = split(shape.length, fold.active)
    work = _halving_rounds(rank, fold, cuts) + gather_rounds(rank, fold, cuts)
    return Plan(fold.around(rank, work, Reduce, everything, everything), in_step=fold.extra == 0)


def reduce_scatter(rank: int, shape: Shape) -> Plan:
    """The first half of an all_reduce, with the parts given: a host's chunk is its own and its guest's part."""
    fold, parts = Fold.of(shape.world), offsets(shape.counts)
    cuts = tuple(parts[fold.rank(number)] for number in range(fold.active + 1))
    guest = fold.guest(rank)
    given, returned = (0, parts[-1]), (parts[guest], parts[guest + 1])
    return Plan(fold.around(rank, _halving_rounds(rank, fold, cuts), Reduce, given, returned), in_step=fold.extra == 0)
