"""Recursive doubling: in step s, ranks at distance 2^s exchange all they have.

An all_reduce costs log2(n) (latency + L / bandwidth): the fewest steps, so it suits short messages.
An all_gather costs log2(n) latency + (n - 1) / n L / bandwidth.

It needs a power of two. With e ranks too many, the first 2e are folded into pairs: the odd rank
gives its data to the even one, rests, and is given the result. The remaining ranks are
numbered anew, in order, so that what each stands for is still a range of ranks. Folding costs
up to 2 (latency + L / bandwidth).

R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in MPICH,
IJHPCA 19 (2005).
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from hcsim.collectives.plan import Plan, Recv, Reduce, Round, Rounds, Send, offsets
from hcsim.collectives.shape import Shape, finished

Range: TypeAlias = tuple[int, int]


class Fold(NamedTuple):
    """How `world` ranks become `active` ones, a power of two: the first 2 × `extra` ranks pair up.

    A pair's even rank is the host and works, its odd rank is the guest and rests; any other
    rank is its own host and guest."""

    active: int
    extra: int

    @classmethod
    def of(cls, world: int) -> Fold:
        """The largest power of two that fits."""
        active = 1 << (world.bit_length() - 1)
        return cls(active, world - active)

    def host(self, rank: int) -> int:
        """Who works for this rank."""
        return rank & ~1 if rank < 2 * self.extra else rank

    def guest(self, rank: int) -> int:
        """For whom this rank's host works."""
        return rank | 1 if rank < 2 * self.extra else rank

    def number(self, rank: int) -> int:
        """The number that this rank's host has among the active."""
        return rank // 2 if rank < 2 * self.extra else rank - self.extra

    def rank(self, number: int) -> int:
        """The rank of an active number; for `active` itself, the world size."""
        return 2 * number if number < self.extra else number + self.extra

    def distances(self) -> list[int]:
        """1, 2, 4, … below `active`."""
        return [1 << step for step in range(self.active.bit_length() - 1)]

    def around(self, rank: int, work: Rounds, take: type[Recv | Reduce], given: Range, returned: Range) -> Rounds:
        """The host's rounds of work; before them the guest gives it a range, after them it returns one."""
        host, guest = self.host(rank), self.guest(rank)
        if not self.extra:
            return work
        if host == guest:
            return ((), *work, ())
        if rank == host:
            return ((take(guest, *given),), *work, (Send(guest, *returned),))
        return ((Send(host, *given),), *((),) * len(work), (Recv(host, *returned),))


def all_reduce(rank: int, shape: Shape) -> Plan:
    """Partners exchange and add; each ends with the sum of both."""
    fold, everything = Fold.of(shape.world), (0, shape.length)
    peers = [fold.rank(fold.number(rank) ^ distance) for distance in fold.distances()]
    work = tuple((Send(peer, *everything), Reduce(peer, *everything)) for peer in peers)
    return Plan(fold.around(rank, finished(work, *everything), Reduce, everything, everything))


def gather_rounds(rank: int, fold: Fold, cuts: tuple[int, ...]) -> Rounds:
    """All-gather among the active: number v starts with [cuts[v], cuts[v + 1]) and ends with everything."""
    rounds: list[Round] = []
    number = fold.number(rank)
    for distance in fold.distances():
        peer, mine = fold.rank(number ^ distance), number - number % distance
        theirs = mine ^ distance
        send = Send(peer, cuts[mine], cuts[mine + distance])
        rounds.append((send, Recv(peer, cuts[theirs], cuts[theirs + distance])))
    return tuple(rounds)


def all_gather(rank: int, shape: Shape) -> Plan:
    """Partners exchange all the parts they have."""
    fold, parts = Fold.of(shape.world), offsets(shape.counts)
    cuts = tuple(parts[fold.rank(number)] for number in range(fold.active + 1))
    guest = fold.guest(rank)
    given, returned = (parts[guest], parts[guest + 1]), (0, parts[-1])
    return Plan(fold.around(rank, gather_rounds(rank, fold, cuts), Recv, given, returned), in_step=fold.extra == 0)
