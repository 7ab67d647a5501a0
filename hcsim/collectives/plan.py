"""Plans: the building blocks of collectives.

A plan is what one rank does, as rounds of actions over ranges of its buffer. An algorithm is a pure function
that returns a plan; it transfers no data and uses no clock.

An action names its peer by a number, which in most plans is the rank. Where ranks do the same with different
peers, as in a ring, the numbers are indices into the plan's `peers`. Then all ranks can share their rounds, and
hundreds of simulated ranks read a few objects instead of a million.

Semantics: a rank behaves as if it performed its actions one after the other, round by round and in the order
within a round; a `Send` carries the values that its range has at that point. The executor may overlap whatever
this order does not forbid. A message from i to j is a `Send` in i's round s and a `Recv` or `Reduce` of the
same size in j's round s; there is at most one per (s, i, j). All ranks therefore number their rounds alike, and
an idle round is empty.

Ranges are in elements, half open. The addresses are the operation's:
  all_reduce, reduce, broadcast   [0, length)
  all_gather, gather              [0, sum(counts)): rank r's part lies at its offset
  reduce_scatter, scatter         [0, sum(counts)): rank r is to end with the part at its offset
  all_to_all                      [0, sum(sent)) is the input, the output follows it

An empty range is a message without payload, used as a signal. A planner omits messages that neither carry data
nor signal.

Code that examines every message compares its `type`: for a struct, a negative `isinstance` takes six times as
long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias, final

import msgspec

from hcsim.errors import UsageError


@final
class Send(msgspec.Struct, frozen=True, gc=False):
    """Send the values of the range to a peer."""

    peer: int
    lo: int
    hi: int


@final
class Recv(msgspec.Struct, frozen=True, gc=False):
    """Replace the values of the range by those that the peer sends."""

    peer: int
    lo: int
    hi: int


@final
class Reduce(msgspec.Struct, frozen=True, gc=False):
    """Combine the values of the range with those that the peer sends; the lower rank's are the left operand.

    Because of the fixed order, partners that exchange values compute identical bits."""

    peer: int
    lo: int
    hi: int


@final
class Finish(msgspec.Struct, frozen=True, gc=False):
    """Apply the last step of the reduction (the division of a mean) to a range with the complete result."""

    lo: int
    hi: int


Action: TypeAlias = Send | Recv | Reduce | Finish
Round: TypeAlias = tuple[Action, ...]
Rounds: TypeAlias = tuple[Round, ...]


class PlanSummary(NamedTuple):
    """What an executor needs to know of a plan in advance."""

    numbers: tuple[int, ...]
    """The numbers of its peers, in order of first use."""
    sent: int
    """Elements sent."""
    longest: int
    scratch: int
    """Scratch memory in elements: the size of the buffer, or more if a round that also sends combines more, so that
    ranks do not wait for each other."""
    deferred: frozenset[tuple[int, int]] = frozenset()
    """The receives, by round and index in it, whose range is still in use in the previous round."""


class Plan(msgspec.Struct, frozen=True):
    """The actions of one rank."""

    rounds: Rounds
    peers: tuple[int, ...] | None = None
    """The rank of each peer number; None if the numbers are ranks."""
    summary: PlanSummary | None = None
    """The summary, if the planner knows it; otherwise the executor computes it in one pass over the plan."""
    in_step: bool = False
    """Whether rounds run in lockstep: each round is an exchange with another peer that saturates the link both ways,
    so an early send of a later round only delays what the partner waits for. (Not set where a rank has a guest, for
    which it forwards data. Where one link is slower than the others, lockstep costs 10 to 20 %, though less than
    messages that are not cut.)"""

    def rank(self, number: int) -> int:
        """Return the rank of a peer number."""
        return number if self.peers is None else self.peers[number]

    def among(self, members: Sequence[int]) -> Plan:
        """Return the same plan for a subset of a larger group, in which member i has rank i."""
        peers = members if self.peers is None else [members[peer] for peer in self.peers]
        return Plan(self.rounds, tuple(peers), self.summary, self.in_step)

    def by_rank(self) -> Rounds:
        """Return the rounds with every peer named by its rank."""
        if self.peers is None:
            return self.rounds
        return tuple(tuple([self._named(action) for action in actions]) for actions in self.rounds)

    def _named(self, action: Action) -> Action:
        return action if isinstance(action, Finish) else type(action)(self.rank(action.peer), action.lo, action.hi)


class Shape(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """The shape of a collective. It is equal on all ranks, except for `sent` and `received`.

    A planner reads only the fields that concern its operation and algorithm."""

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
    """The rank that has or gets the data; in a tree or centralized all_reduce, the rank at the top."""
    arity: int = 2
    """Branches of a tree; more make it flatter, with busier inner ranks."""
    order: tuple[int, ...] = ()
    """The order of the ring, in which each rank sends to the next; empty for 0, 1, 2, …"""
    groups: tuple[tuple[int, ...], ...] = ()
    """Hierarchical: every rank is in exactly one group; the first rank of a group leads it."""
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
"""An algorithm: maps a rank and a shape to a plan. The number of rounds is the same on all ranks."""


def finished(rounds: Rounds, lo: int, hi: int) -> Rounds:
    """Append a `Finish` of the range to the last round."""
    *before, last = rounds or ((),)
    return (*before, (*last, Finish(lo, hi)))


def offsets(counts: Sequence[int]) -> tuple[int, ...]:
    """Return the start of each part, followed by the end of the last one."""
    return (0, *accumulate(counts))


def split(length: int, parts: int) -> tuple[int, ...]:
    """Return the `parts + 1` boundaries of `parts` nearly equal parts of [0, length).

    The first `length % parts` parts are longer by one; any of them may be empty."""
    small, extra = divmod(length, parts)
    return tuple(i * small + min(i, extra) for i in range(parts + 1))


def input_elements(operation: str, shape: Shape, rank: int) -> int:
    """Return how many elements a rank passes to a collective; for a scatter, those that the root passes."""
    if operation in ("all_gather", "gather"):
        return shape.counts[rank]
    return shape.length + sum(shape.counts) + sum(shape.sent)
