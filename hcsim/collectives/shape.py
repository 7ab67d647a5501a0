"""What a planner is told: who takes part, how much there is, and how the group is arranged."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from hcsim.collectives.plan import Finish, Plan, Rounds
from hcsim.errors import UsageError


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
    """Who has or gets the data; in an all_reduce by tree or centre, who stands at the top."""
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
