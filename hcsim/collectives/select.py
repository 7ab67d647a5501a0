"""The options of a group, and which algorithm `auto` stands for.

That is the cheapest over the measured links; of several, that with few peers.

Within one machine, where what comes is passed on without a stop, a ring costs less than its price says: long messages
take that. With nothing measured, a rule: few steps (a tree, doubling, halving) for short messages, few bytes (the ring)
for long ones. In a small group too: of three ranks the tree's root would carry half as much again as each does in the
ring. An all-reduce goes up a tree and down again; a rank that can talk to its partners at once needs half the steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from numbers import Real
from operator import index
from typing import SupportsIndex

import msgspec
from msgspec.structs import force_setattr

from hcsim.collectives.algorithms import AUTO, buffer_elements, plans
from hcsim.collectives.algorithms.ring import CHUNK
from hcsim.collectives.cost import Links, price
from hcsim.collectives.plan import Finish, Reduce, Rounds, Shape
from hcsim.errors import UsageError

SHORT_BYTES = 1 << 20
_SHORTEST_BYTES = 1 << 16
"""Up to here a step costs more than to send all of a message rather than a half of it, then a quarter, …"""
_FEW = 8
"""So many can all talk to each other at once, if that is what their number asks for."""
_SEGMENT_BYTES = 1 << 20
_SEGMENTS = 64
"""Into how many segments a price cuts the buffer at most: enough to see what pipelining gains."""

_ALIKE = 1.05
"""Prices that differ by less than this differ by no more than two measurements of a link do."""
_LONG_BYTES, _WORTH_IT = 8 << 20, 1.5
"""The parts of a long message that many peers send at once wait for each other in memory, as large as the message
itself: that has to gain more. So has an algorithm that adds all of a message at once, unless the message is short."""

_UNMEASURED = {
    "reduce": ("tree", "ring"),
    "broadcast": ("tree", "ring"),
    "all_gather": ("recursive_doubling", "ring"),
    "reduce_scatter": ("halving", "ring"),
    "gather": ("tree", "centralized"),
    "scatter": ("tree", "centralized"),
}
"""For short messages, and for long ones."""


@lru_cache(maxsize=1024)
def choose(
    operation: str, shape: Shape, element_bytes: int, links: Links | None, segment_bytes: int = _SEGMENT_BYTES
) -> str:
    """The algorithm's name. Ranks that pass equal arguments choose alike.

    Hierarchical takes part when the shape has groups."""
    names = [name for name in AUTO[operation] if name != "hierarchical" or shape.groups]
    if operation == "all_reduce":
        names.remove("chunked_ring")  # the ring, to a price
    if len(names) == 1:
        return names[0]
    size_bytes = buffer_elements(operation, shape) * element_bytes
    if links is None:
        if operation == "all_reduce":
            return _unmeasured_all_reduce(shape.world, size_bytes)
        short, long = _UNMEASURED[operation]
        return short if size_bytes < SHORT_BYTES else long
    if len(links.latency_s) != shape.world:
        raise UsageError(f"the links of {len(links.latency_s)} ranks say nothing about a group of {shape.world}")
    if links.pass_on and operation == "all_reduce" and size_bytes >= SHORT_BYTES and not shape.groups:
        return "chunked_ring" if shape.length > shape.world * CHUNK else "ring"
    segment = max(segment_bytes, -(-size_bytes // _SEGMENTS), element_bytes)
    planned = {name: plans(operation, name, shape) for name in names}
    prices_s = {name: price(planned[name], links, element_bytes, segment) for name in names}
    limit_s = (_ALIKE if size_bytes < _LONG_BYTES else _WORTH_IT) * min(prices_s.values())
    if size_bytes >= SHORT_BYTES:
        for name in names:  # but not what the caller has arranged groups for
            if name != "hierarchical" and _adds_all_at_once(planned[name], size_bytes // element_bytes):
                prices_s[name] *= _WORTH_IT
    limit_s = max(limit_s, _ALIKE * min(prices_s.values()))
    return min((name for name in names if prices_s[name] <= limit_s), key=lambda name: _peers(planned[name]))


def _unmeasured_all_reduce(world: int, size_bytes: int) -> str:
    if size_bytes >= SHORT_BYTES:
        return "ring"
    if world & (world - 1) == 0:  # else doubling and halving leave some out, which send all they have and get all back
        return "recursive_doubling" if world == 2 or size_bytes < _SHORTEST_BYTES else "halving_doubling"
    return "direct" if world <= _FEW else "tree"


def _adds_all_at_once(planned: Sequence[Rounds], length: int) -> bool:
    return any(type(a) is Reduce and a.hi - a.lo == length for rounds in planned for actions in rounds for a in actions)


def _peers(planned: Sequence[Rounds]) -> int:
    """With how many others a rank talks at most: what a price does not see, many senders to one port among it."""
    return max(len({a.peer for actions in rounds for a in actions if not isinstance(a, Finish)}) for rounds in planned)


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
