"""From which members the others get their parts when a model is shared out among other ranks than before.

All members hold parts of the same step. What a member is to hold it takes from itself, as far as it has that, and else
from one of those who have it, whoever has to give least by then.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hcsim.collectives.buffers import length_of, part_of
from hcsim.errors import HcsimError
from hcsim.runtime.channel import Phantom
from hcsim.training.layout import Bucket
from hcsim.training.learner import StateArray
from hcsim.training.shards import HeldShards, Partition, Piece
from hcsim.training.task import Flat

Range: TypeAlias = tuple[int, int]
"""Of the flat array."""
Route: TypeAlias = tuple[int, int]
"""The giving rank and the taking rank."""
_PARAMETERS, _EACH, _ALL = "parameters", "each/", "all/"


class Holding(NamedTuple):
    """One of the shards of a partition."""

    shards: int
    shard: int

    def spans(self, buckets: tuple[Bucket, ...]) -> list[Range]:
        return Partition(buckets, self.shards).spans(self.shard)


class Lost(HcsimError):
    """No member has a part of the model."""


def plan(
    buckets: tuple[Bucket, ...], have: Sequence[Sequence[Holding]], want: Sequence[Sequence[Holding]]
) -> dict[Route, list[Range]]:
    """Return which ranges each member gives to which other, given by rank what they have and are to have."""
    spans = {each: each.spans(buckets) for member in (*have, *want) for each in member}
    edges = sorted({edge for ranges in spans.values() for each in ranges for edge in each})

    def cut(holdings: Iterable[Holding]) -> dict[int, int]:
        """Return the elementary ranges, by where they begin."""
        found = {}
        for lo, hi in (each for holding in holdings for each in spans[holding]):
            inside = edges[bisect_left(edges, lo) : bisect_left(edges, hi) + 1]
            found.update(dict(pairwise(inside)))
        return found

    having = [cut(holdings) for holdings in have]
    given = [0] * len(have)
    routes: dict[Route, list[Range]] = {}
    for taker, holdings in enumerate(want):
        for lo, hi in sorted(cut(holdings).items()):
            if lo in having[taker]:
                continue
            givers = [rank for rank, parts in enumerate(having) if lo in parts]
            if not givers:
                raise Lost(f"elements {lo} to {hi} of the model are gone with the members that are lost")
            giver = min(givers, key=lambda rank: (given[rank], rank))
            given[giver] += hi - lo
            _add(routes.setdefault((giver, taker), []), lo, hi)
    return routes


def _add(ranges: list[Range], lo: int, hi: int) -> None:
    if ranges and ranges[-1][1] == lo:
        lo = ranges.pop()[0]
    ranges.append((lo, hi))


class Source(NamedTuple):
    """Values of a range, with the optimizer's state."""

    lo: int
    values: Flat
    each: Mapping[str, npt.NDArray[np.generic]]
    """State of each element."""
    common: Mapping[str, npt.NDArray[np.generic]]

    @classmethod
    def of(cls, piece: Piece) -> Source:
        return cls(piece.lo, piece.values, *piece.state())

    @property
    def hi(self) -> int:
        return self.lo + length_of(self.values)

    def part(self, lo: int, hi: int) -> Source:
        """Return what it has of a range."""
        lo, hi = max(lo, self.lo), max(min(hi, self.hi), max(lo, self.lo))
        at = slice(lo - self.lo, hi - self.lo)
        each = {name: array[at] for name, array in self.each.items()}
        return Source(lo, part_of(self.values, at.start, at.stop), each, self.common)


def packed(pieces: Sequence[Piece], ranges: Sequence[Range]) -> dict[str, StateArray]:
    """Return the arrays of these ranges, joined. Each range lies in one or several pieces."""
    sources = [Source.of(piece) for piece in pieces]
    parts = [part for lo, hi in ranges for part in _covering(sources, lo, hi)]
    if any(isinstance(part.values, Phantom) for part in parts):
        return {_PARAMETERS: Phantom(sum(part.values.nbytes for part in parts))}
    arrays: dict[str, StateArray] = {_PARAMETERS: _joined([part.values for part in parts])}
    for name in parts[0].each:
        arrays[_EACH + name] = _joined([part.each[name] for part in parts])
    return {**arrays, **{_ALL + name: array for name, array in parts[0].common.items()}}


def _joined(arrays: Sequence[object]) -> npt.NDArray[np.generic]:
    return np.concatenate(arrays)  # type: ignore[arg-type]


def _covering(sources: Sequence[Source], lo: int, hi: int) -> Iterable[Source]:
    """Yield parts of sources that make up the range, in order."""
    while lo < hi:
        found = next(source for source in sources if source.lo <= lo < source.hi)
        part = found.part(lo, hi)
        yield part
        lo = part.hi


def unpacked(arrays: Mapping[str, StateArray], ranges: Sequence[Range]) -> list[Source]:
    """Return what was packed, range by range."""
    values, sources, at = arrays[_PARAMETERS], list[Source](), 0
    common = {n.removeprefix(_ALL): array for n, array in arrays.items() if n.startswith(_ALL)}
    each = {n.removeprefix(_EACH): array for n, array in arrays.items() if n.startswith(_EACH)}
    if isinstance(values, Phantom):
        return []
    for lo, hi in ranges:
        end = at + hi - lo
        own = {name: array[at:end] for name, array in each.items() if not isinstance(array, Phantom)}
        plain = {name: array for name, array in common.items() if not isinstance(array, Phantom)}
        sources.append(Source(lo, values[at:end], own, plain))  # type: ignore[arg-type]
        at = end
    return sources


def fill(state: HeldShards, sources: Sequence[Source]) -> None:
    """Give the shards these values, each element of which is in one of the sources."""
    common = dict(sources[0].common) if sources else {}
    for piece in state.each():
        if isinstance(piece.values, Phantom):
            continue
        each, _ = piece.state()
        for source in _covering(sources, piece.lo, piece.hi):
            at = slice(source.lo - piece.lo, source.hi - piece.lo)
            if not np.may_share_memory(piece.values, source.values):
                piece.values[at] = source.values  # type: ignore[assignment]
            for name, array in each.items():
                array[at] = source.each[name]
        piece.stepper.restore({**common, **each})


def whole_of(sources: Sequence[Source], length: int) -> dict[str, StateArray]:
    """Return the model and the optimizer's state as a checkpoint has them, of sources of all elements."""
    parameters = np.empty(length, np.float32)
    each = {name: np.empty(length, np.float32) for name in sources[0].each}
    for source in sources:
        assert not isinstance(source.values, Phantom)
        parameters[source.lo : source.hi] = source.values
        for name, array in source.each.items():
            each[name][source.lo : source.hi] = array
    state = {f"optimizer/{name}": array for name, array in {**each, **source.common}.items()}
    return {"parameters": parameters, **state}
