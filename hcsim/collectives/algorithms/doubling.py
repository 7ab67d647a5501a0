"""Algorithms in which the distance between partners doubles or halves in each step: few steps, for any world size.

Recursive doubling: in step s, ranks at distance 2^s exchange all they have. An all_reduce costs log2(n)
(latency + L / bandwidth): the fewest steps, so it suits short messages. An all_gather costs log2(n) latency +
(n - 1) / n L / bandwidth.

Halving, then doubling: in the reduce-scatter by halving, partners at distance n/2, n/4, … 1 each give the other
half of the range they still share and reduce the half they keep. The all-gather by doubling retraces it. An
all_reduce costs 2 log2(n) latency + 2 (n - 1) / n L / bandwidth: logarithmically many steps and the least
possible bytes.

Both need a power of two. With e ranks too many, the first 2e are folded into pairs: the odd rank gives its data
to the even one, idles, and receives the result. The remaining ranks are renumbered in order, so that each still
stands for a range of ranks. Folding costs up to 2 (latency + L / bandwidth).

The dissemination barrier: after step s every rank has a signal from the 2^(s + 1) ranks up to itself. This
takes ceil(log2 n) latencies for any n, and no rank is special.

R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in MPICH, IJHPCA 19
(2005).

R. Rabenseifner: Optimization of collective reduction operations, ICCS 2004.

D. Hensgen, R. Finkel, U. Manber: Two algorithms for barrier synchronization, IJPP 17 (1988).
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from hcsim.collectives.plan import Plan, Recv, Reduce, Round, Rounds, Send, Shape, finished, offsets, split

_Range: TypeAlias = tuple[int, int]


class FoldedWorld(NamedTuple):
    """The folding of `world` ranks into `active` ones, a power of two: the first 2 × `extra` ranks form pairs.

    In a pair, the even rank is the host and works, the odd rank is the guest and idles. Any other rank is its own
    host and guest."""

    active: int
    extra: int

    @classmethod
    def of(cls, world: int) -> FoldedWorld:
        """Return the folding into the largest power of two that fits."""
        active = 1 << (world.bit_length() - 1)
        return cls(active, world - active)

    def host(self, rank: int) -> int:
        """Return the rank that works for this one."""
        return rank & ~1 if rank < 2 * self.extra else rank

    def guest(self, rank: int) -> int:
        """Return the rank that this rank's host works for."""
        return rank | 1 if rank < 2 * self.extra else rank

    def number(self, rank: int) -> int:
        """Return the active number of this rank's host."""
        return rank // 2 if rank < 2 * self.extra else rank - self.extra

    def rank(self, number: int) -> int:
        """Return the rank of an active number; for `active` itself, the world size."""
        return 2 * number if number < self.extra else number + self.extra

    def distances(self) -> list[int]:
        """Return 1, 2, 4, … below `active`."""
        return [1 << step for step in range(self.active.bit_length() - 1)]

    def around(self, rank: int, work: Rounds, take: type[Recv | Reduce], given: _Range, returned: _Range) -> Rounds:
        """Wrap the host's rounds: the guest first gives the host a range, and finally receives one."""
        host, guest = self.host(rank), self.guest(rank)
        if not self.extra:
            return work
        if host == guest:
            return ((), *work, ())
        if rank == host:
            return ((take(guest, *given),), *work, (Send(guest, *returned),))
        return ((Send(host, *given),), *((),) * len(work), (Recv(host, *returned),))


def doubling_all_reduce(rank: int, shape: Shape) -> Plan:
    """Exchange and reduce with each partner, so that both end with the sum."""
    fold, everything = FoldedWorld.of(shape.world), (0, shape.length)
    peers = [fold.rank(fold.number(rank) ^ distance) for distance in fold.distances()]
    work = tuple((Send(peer, *everything), Reduce(peer, *everything)) for peer in peers)
    return Plan(fold.around(rank, finished(work, *everything), Reduce, everything, everything))


def _doubling_rounds(rank: int, fold: FoldedWorld, cuts: tuple[int, ...]) -> Rounds:
    """All-gather among the active ranks: number v starts with [cuts[v], cuts[v + 1]) and ends with everything."""
    rounds: list[Round] = []
    number = fold.number(rank)
    for distance in fold.distances():
        peer, mine = fold.rank(number ^ distance), number - number % distance
        theirs = mine ^ distance
        send = Send(peer, cuts[mine], cuts[mine + distance])
        rounds.append((send, Recv(peer, cuts[theirs], cuts[theirs + distance])))
    return tuple(rounds)


def doubling_all_gather(rank: int, shape: Shape) -> Plan:
    """Exchange all parts so far with each partner."""
    fold, parts = FoldedWorld.of(shape.world), offsets(shape.counts)
    cuts = tuple(parts[fold.rank(number)] for number in range(fold.active + 1))
    guest = fold.guest(rank)
    given, returned = (parts[guest], parts[guest + 1]), (0, parts[-1])
    return Plan(fold.around(rank, _doubling_rounds(rank, fold, cuts), Recv, given, returned), in_step=fold.extra == 0)


def _halving_rounds(rank: int, fold: FoldedWorld, cuts: tuple[int, ...]) -> Rounds:
    """Reduce-scatter among the active ranks: number v ends with the sum of [cuts[v], cuts[v + 1])."""
    rounds: list[Round] = []
    number = fold.number(rank)
    for distance in reversed(fold.distances()):
        peer, kept = fold.rank(number ^ distance), number - number % distance
        given = kept ^ distance
        send = Send(peer, cuts[given], cuts[given + distance])
        rounds.append((send, Reduce(peer, cuts[kept], cuts[kept + distance])))
    return finished(tuple(rounds), cuts[number], cuts[number + 1])


def halving_doubling_all_reduce(rank: int, shape: Shape) -> Plan:
    fold, everything = FoldedWorld.of(shape.world), (0, shape.length)
    cuts = split(shape.length, fold.active)
    work = _halving_rounds(rank, fold, cuts) + _doubling_rounds(rank, fold, cuts)
    return Plan(fold.around(rank, work, Reduce, everything, everything), in_step=fold.extra == 0)


def halving_reduce_scatter(rank: int, shape: Shape) -> Plan:
    """Reduce-scatter by halving, with given parts: a host's chunk is its own and its guest's part."""
    fold, parts = FoldedWorld.of(shape.world), offsets(shape.counts)
    cuts = tuple(parts[fold.rank(number)] for number in range(fold.active + 1))
    guest = fold.guest(rank)
    given, returned = (0, parts[-1]), (parts[guest], parts[guest + 1])
    return Plan(fold.around(rank, _halving_rounds(rank, fold, cuts), Reduce, given, returned), in_step=fold.extra == 0)


def dissemination_barrier(rank: int, shape: Shape) -> Plan:
    """Signal the rank 1, 2, 4, … further on, and wait for the rank as far behind."""
    n = shape.world
    distances = [1 << step for step in range((n - 1).bit_length())]
    return Plan(tuple((Send((rank + d) % n, 0, 0), Recv((rank - d) % n, 0, 0)) for d in distances))
