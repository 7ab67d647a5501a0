"""Where an operation's parts lie: in the caller's own arrays where its plan allows that, and beside them where not.

A rank that only passes its own part on, or only receives it, needs no room for the others'. One that combines no
more than its own part can send the rest straight from the input. What a plan touches says which it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hcsim.collectives.algorithms import plan
from hcsim.collectives.data import Data, array_of, copy_into, empty_like, in_one_piece, moving, part_of, reducing
from hcsim.collectives.memory import Array, Memory
from hcsim.collectives.plan import Send, Shape
from hcsim.errors import UsageError
from hcsim.runtime.channel import Phantom

WORTH_SPARING = 4096
"""Elements from which on a look at the plan is quicker than a copy of everything."""


class Span(NamedTuple):
    """A range of the buffer."""

    lo: int
    hi: int

    def around(self, lo: int, hi: int) -> Span:
        """The smallest that also has this range in it; an empty one is nowhere."""
        return Span(min(self.lo, lo), max(self.hi, hi)) if lo < hi else self


@lru_cache(maxsize=256)
def touched(operation: str, algorithm: str, rank: int, shape: Shape, own: Span) -> Span:
    """What the rank's plan sends or receives, and its own part."""
    span = own
    for actions in plan(operation, algorithm, rank, shape).rounds:
        for action in actions:
            span = span.around(action.lo, action.hi)
    return span


@lru_cache(maxsize=256)
def written(operation: str, algorithm: str, rank: int, shape: Shape, own: Span) -> Span:
    """What the rank's plan changes, its own part, and whatever is sent together with some of that."""
    actions = [action for round_ in plan(operation, algorithm, rank, shape).rounds for action in round_]
    span = own
    for action in actions:
        if not isinstance(action, Send):
            span = span.around(action.lo, action.hi)
    before = None
    while span != before:
        before = span
        for action in actions:
            if action.lo < span.hi and span.lo < action.hi:
                span = span.around(action.lo, action.hi)
    return span


def parts_of(whole: Data, cuts: tuple[int, ...], like: Data, counts: Sequence[int] | None) -> list[Data]:
    """Everybody's part; equal ones have the shape of ours."""
    parts = [part_of(whole, lo, hi) for lo, hi in pairwise(cuts)]
    if counts is None and not isinstance(like, Phantom):
        return [array_of(part).reshape(like.shape) for part in parts]
    return parts


def dealt(data: Sequence[Data] | Data | None, into: Data, cuts: tuple[int, ...]) -> Data:
    """All parts that the root of a scatter deals out, in one piece."""
    ranks = len(cuts) - 1
    if isinstance(data, np.ndarray) and not isinstance(into, Phantom):
        if data.size != cuts[-1] or data.dtype != into.dtype:
            raise UsageError(
                f"the root of a scatter has {cuts[-1]} of {into.dtype} for all, not {data.size} of {data.dtype}"
            )
        return in_one_piece(data)
    if data is None or isinstance(data, np.ndarray | Phantom) or len(data) != ranks:
        raise UsageError(f"the root of a scatter has one part for each of the {ranks} ranks")
    whole = empty_like(into, cuts[-1])
    for part, (lo, hi) in zip(data, pairwise(cuts), strict=True):
        copy_into(part_of(whole, lo, hi), part)
    return whole


def spanning(part: Data, own: Span, reach: Span) -> tuple[Memory, Data]:
    """Memory for what is reached, and where in it our own part lies: in `part` itself if that is all."""
    if reach == own:
        return moving([part], base=own.lo), part
    room = empty_like(part, reach.hi - reach.lo)
    return moving([room], base=reach.lo), part_of(room, own.lo - reach.lo, own.hi - reach.lo)


def combining(data: Data, into: Data | None, own: Span, changed: Span, op: str, world: int) -> tuple[Memory, Data]:
    """Memory for a reduction of data that stay as they are, and where in it our own part lies."""
    if isinstance(data, Phantom):
        return reducing([data], op, world), part_of(data, *own)
    flat = data.reshape(-1)
    if changed == own and into is not None and _may_be_written(array_of(into), flat, own):
        work = array_of(into)
    else:
        work = np.empty(changed.hi - changed.lo, flat.dtype)
    copy_into(work, flat[changed.lo : changed.hi])
    pieces = [piece for piece in (flat[: changed.lo], work, flat[changed.hi :]) if piece.size]
    memory = reducing(pieces or [work], op, world)
    return memory, part_of(work, own.lo - changed.lo, own.hi - changed.lo)


def _may_be_written(into: Array, flat: Array, own: Span) -> bool:
    """Whether that spoils nothing that has still to be sent."""
    return not (np.may_share_memory(into, flat[: own.lo]) or np.may_share_memory(into, flat[own.hi :]))
