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
"""Up to this size, an extra step costs more than sending the whole message instead of a half, a quarter, …"""
_FEW = 8
"""The largest group in which all ranks may communicate with each other at once."""
_SEGMENT_BYTES = 1 << 20
_SEGMENTS = 64
"""The maximum number of segments of a buffer in an estimate; enough to show the gain of pipelining."""

_ALIKE = 1.05
"""Costs within this ratio differ no more than two measurements of a link."""
_LONG_BYTES, _WORTH_IT = 8 << 20, 1.5
"""The parts of a long message that many peers send at once wait in memory, which then takes as much as the message
itself. Such an algorithm has to gain more. So has one that reduces a whole message at once, unless the message
is short."""

_UNMEASURED = {
    "reduce": ("tree", "ring"),
    "broadcast": ("tree", "ring"),
    "all_gather": ("recursive_doubling", "ring"),
    "reduce_scatter": ("halving", "ring"),
    "gather": ("tree", "centralized"),
    "scatter": ("tree", "centralized"),
}
"""The algorithms for short and for long messages."""


@lru_cache(maxsize=1024)
def choose(
    operation: str, shape: Shape, element_bytes: int, links: Links | None, segment_bytes: int = _SEGMENT_BYTES
) -> str:
    """Return the name of the algorithm. Ranks that pass equal arguments get the same one.

    Hierarchical is a candidate if the shape has groups."""
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
    """Return the maximum number of peers of a rank. More peers have costs outside of the model, such as many senders
    to one port."""
    return max(len({a.peer for actions in rounds for a in actions if not isinstance(a, Finish)}) for rounds in planned)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults of the operations of a group."""

    timeout_s: float = 60.0
    """The timeout of an operation, after which it fails on every rank."""
    arity: int = 2
    """Branches of a tree; more make it flatter, with busier inner ranks."""
    order: tuple[int, ...] = ()
    """The order of the ring; empty for 0, 1, 2, …"""
    groups: tuple[tuple[int, ...], ...] = ()
    """For the hierarchical algorithm: groups of well-connected ranks."""
    local: str = "tree"
    cross: str = "ring"
    views_change: bool = False
    """Whether the caller ends this group. Otherwise it ends when a member connects with a later epoch."""
    watch_s: float | None = None
    """The interval of checks for mismatched collectives and for lost ranks that are not needed yet. None: these are
    detected only when frames reveal them, or at the timeout."""
    links: Links | None = None
    """Measured links, equal on all ranks; `auto` then chooses by cost."""

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
    """Return an integer, possibly a numpy one, as a plain int, for comparisons between ranks and for traces."""
    try:
        return index(number)
    except TypeError:
        raise UsageError(f"{what} is a whole number, not {number!r}") from None
