"""What a collective is made of.

A plan is what one rank does, as rounds of actions over ranges of its buffer. An algorithm is
a pure function that returns it; nothing in it moves a byte or knows a clock.

An action names its peer by a number. In most plans that is its rank. Where ranks do the same with
different peers, as in a ring, the numbers are places in the plan's `peers`: then they can have
their rounds in common, and hundreds of simulated ranks read a few objects instead of a million.

Meaning: a rank behaves as if it performed its actions one after the other, round by round and
in the order within a round; a `Send` carries the values that its range has at that point.
The executor may overlap whatever this order does not forbid. A message from i to j is a `Send`
in i's round s and a `Recv` or `Reduce` of the same size in j's round s; there is at most one
per (s, i, j). All ranks therefore number their rounds alike, and an idle round is empty.

Ranges are in elements, half open. The addresses are the operation's:
  all_reduce, reduce, broadcast   [0, length)
  all_gather, gather              [0, sum(counts)): rank r's part lies at its offset
  reduce_scatter, scatter         [0, sum(counts)): rank r is to end with the part at its offset
  all_to_all                      [0, sum(sent)) is the input, the output follows it

An empty range is a message without payload: it signals. A planner leaves out messages that
neither carry nor signal anything.

Code that looks at every message compares its `type`: of a struct, `isinstance` takes six times as long to say no.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias, final

import msgspec

from hcsim.errors import UsageError


@final
class Send(msgspec.Struct, frozen=True, gc=False):
    """Send the range's values to a peer."""

    peer: int
    lo: int
    hi: int


@final
class Recv(msgspec.Struct, frozen=True, gc=False):
    """Replace the range's values by what the peer sends."""

    peer: int
    lo: int
    hi: int


@final
class Reduce(msgspec.Struct, frozen=True, gc=False):
    """Combine the range's values with what the peer sends, the lower rank's on the left.

    The fixed side makes partners that exchange values compute the same bits."""

    peer: int
    lo: int
    hi: int


@final
class Finish(msgspec.Struct, frozen=True, gc=False):
    """The range now holds the whole reduction: apply what comes last (the mean's division)."""

    lo: int
    hi: int


Action: TypeAlias = Send | Recv | Reduce | Finish
Round: TypeAlias = tuple[Action, ...]
Rounds: TypeAlias = tuple[Round, ...]


class PlanSummary(NamedTuple):
    """What an executor has to know of a plan beforehand."""

    numbers: tuple[int, ...]
    """By which it names its peers, in the order in which it does."""
    sent: int
    """Elements that it sends."""
    longest: int
    """The longest message."""
    scratch: int
    """Scratch memory, in elements: as much as the buffer; or all that a round combines if it also sends, so that ranks
    do not wait for each other."""
    deferred: frozenset[tuple[int, int]] = frozenset()
    """What of the rounds, by round and number in it, is received into a range that is still in use a round before."""


class Plan(msgspec.Struct, frozen=True):
    """What one rank does."""

    rounds: Rounds
    peers: tuple[int, ...] | None = None
    """Which rank is meant by each number; None where the numbers are ranks."""
    summary: PlanSummary | None = None
    """If the planner knows it; else the executor goes through the whole plan once."""
    in_step: bool = False
    """Each round is an exchange with another peer that fills our line both ways: what a later one sends early only
    slows down what the partner waits for. (Not where a rank has a guest, for which it passes on what comes. And
    where one line is slower than the others it costs a tenth or two, though less than messages that are not cut.)"""

    def rank(self, number: int) -> int:
        """The rank that a number stands for."""
        return number if self.peers is None else self.peers[number]

    def among(self, members: Sequence[int]) -> Plan:
        """The same plan for some members of a larger group: member i plays rank i."""
        peers = members if self.peers is None else [members[peer] for peer in self.peers]
        return Plan(self.rounds, tuple(peers), self.summary, self.in_step)

    def by_rank(self) -> Rounds:
        """The rounds with every peer named by its rank."""
        if self.peers is None:
            return self.rounds
        return tuple(tuple([self._named(action) for action in actions]) for actions in self.rounds)

    def _named(self, action: Action) -> Action:
        return action if isinstance(action, Finish) else type(action)(self.rank(action.peer), action.lo, action.hi)


class Shape(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """One collective's shape. All ranks hold equal ones, but for `sent` and `received`.

    A planner reads the fields that concern its operation and algorithm, and no others."""

    world: int
    length: int = 0
    """Elements of an all_reduce, a reduce or a broadcast."""
    counts: tuple[int, ...] = ()
    """Elements of each rank's part, for all_gather, gather, reduce_scatter and scatter."""
    sent: tuple[int, ...] = ()
    """all_to_all: elements that this rank sends to each rank."""
    received: tuple[int, ...] = ()
    """all_to_all: elements that this rank receives from each rank."""
    root: int = 0
    """The rank that has or gets the data; in an all_reduce by tree or centre, the rank at the top."""
    arity: int = 2
    """How many ways a tree branches: more make it flatter and its inner ranks busier."""
    order: tuple[int, ...] = ()
    """The ring's order: each rank sends to the next; empty for 0, 1, 2, …"""
    groups: tuple[tuple[int, ...], ...] = ()
    """Hierarchical: every rank in exactly one group; a group's first rank leads it."""
    local: str = "tree"
    """Hierarchical: the algorithm within a group."""
    cross: str = "ring"
    """Hierarchical: the algorithm among the leaders."""

    def __post_init__(self) -> None:
        if self.world < 1:
            raise UsageError(f"a group has at least one rank, not {self.world}")
        if not 0 <= self.root < self.world:
            raise UsageError(f"root {self.root} is not one of the ranks 0 to {self.world - 1}")
        if self.arity < 2:
            raise UsageError(f"a tree branches at least two ways, not {self.arity}")
        if self.length < 0:
            raise UsageError(f"a length cannot be {self.length}")
        for name in ("counts", "sent", "received"):
            sizes = getattr(self, name)
            if sizes and (len(sizes) != self.world or min(sizes) < 0):
                raise UsageError(f"{name} has one size per rank, none negative; {sizes} is not that for {self.world}")
        everyone = list(range(self.world))
        if self.order and sorted(self.order) != everyone:
            raise UsageError(f"order {self.order} does not name each of {self.world} ranks once")
        if self.groups and (sorted(rank for group in self.groups for rank in group) != everyone or () in self.groups):
            raise UsageError(f"groups {self.groups} do not hold each of {self.world} ranks once, or one is empty")


Planner: TypeAlias = Callable[[int, Shape], Plan]
"""An algorithm: what this rank does. The number of rounds is the same for all ranks."""


def finished(rounds: Rounds, lo: int, hi: int) -> Rounds:
    """The rounds, with a `Finish` of the range at the end of the last one."""
    *before, last = rounds or ((),)
    return (*before, (*last, Finish(lo, hi)))


def offsets(counts: Sequence[int]) -> tuple[int, ...]:
    """Where each part starts, and at the end where the last one stops."""
    return (0, *accumulate(counts))


def split(length: int, parts: int) -> tuple[int, ...]:
    """Boundaries of `parts` nearly equal parts of [0, length): `parts + 1` numbers.

    The first `length % parts` parts are one longer; any of them may be empty."""
    small, extra = divmod(length, parts)
    return tuple(i * small + min(i, extra) for i in range(parts + 1))
