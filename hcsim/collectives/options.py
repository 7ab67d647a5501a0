"""What the members of a group decide once, rather than with every call."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real
from operator import index
from typing import SupportsIndex

import msgspec
from msgspec.structs import force_setattr

from hcsim.collectives.cost import Links
from hcsim.errors import UsageError


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How a group works where a call does not say."""

    timeout_s: float = 60.0
    """How long an operation may take before it fails on every rank."""
    arity: int = 2
    """Branches of a tree: higher is flatter, with busier inner ranks."""
    order: tuple[int, ...] = ()
    """The ring's order; empty for 0, 1, 2, …"""
    groups: tuple[tuple[int, ...], ...] = ()
    """Hierarchical: ranks that reach each other quickly."""
    local: str = "tree"
    cross: str = "ring"
    conducted: bool = False
    """The caller decides when this group is over. Otherwise it is when a member calls from a later epoch."""
    watch_s: float | None = None
    """How often to look for ranks that wait for each other in unlike collectives, or have been lost before they
    were needed; None: they are noticed when frames show it, or at the time limit."""
    links: Links | None = None
    """Measured links, the same on all ranks: `auto` then chooses by price."""

    def __post_init__(self) -> None:
        if not (isinstance(self.timeout_s, Real) and self.timeout_s >= 0):  # nor is it NaN
            raise UsageError(f"a time limit is a number of seconds, not {self.timeout_s!r}")
        if self.watch_s is not None and not (isinstance(self.watch_s, Real) and self.watch_s > 0):
            raise UsageError(f"who watches looks again after a number of seconds, not {self.watch_s!r}")
        # Lists would do, too, but plans are kept by what they are made of.
        force_setattr(self, "arity", whole_number("an arity", self.arity))
        force_setattr(self, "order", _ranks("an order", self.order))
        if not isinstance(self.groups, Iterable):
            raise UsageError(f"groups are a list of lists of ranks, not {self.groups!r}")
        force_setattr(self, "groups", tuple(_ranks("a group", group) for group in self.groups))


def _ranks(what: str, given: Iterable[int]) -> tuple[int, ...]:
    if not isinstance(given, Iterable):
        raise UsageError(f"{what} is a list of ranks, not {given!r}")
    return tuple(whole_number("a rank", rank) for rank in given)


def whole_number(what: str, number: SupportsIndex) -> int:
    """A number that may be numpy's, as the plain one that ranks compare and traces hold."""
    try:
        return index(number)
    except TypeError:
        raise UsageError(f"{what} is a whole number, not {number!r}") from None
