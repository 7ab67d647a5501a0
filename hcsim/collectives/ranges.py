"""A buffer described by ranges instead of elements.

What is known about a buffer changes at a few addresses only. So the work depends on how many pieces
there are, and a billion elements take as long as ten.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Generic, TypeVar

T = TypeVar("T")


class Ranges(Generic[T]):
    """A value for every address in [0, size), kept as pieces of equal value."""

    def __init__(self, size: int, value: T) -> None:
        self.size = size
        self._starts = [0]
        self._values = [value]

    def _cut(self, at: int) -> int:
        """The index of the piece that starts there, after making one."""
        if at == self.size:
            return len(self._starts)
        index = bisect_right(self._starts, at) - 1
        if self._starts[index] == at:
            return index
        self._starts.insert(index + 1, at)
        self._values.insert(index + 1, self._values[index])
        return index + 1

    def values(self, lo: int, hi: int) -> list[T]:
        """The values in [lo, hi), in order."""
        first = self._cut(lo)
        return self._values[first : self._cut(hi)]

    def pieces(self, lo: int, hi: int) -> list[tuple[int, int, T]]:
        """The values in [lo, hi), each with where it starts and stops."""
        first = self._cut(lo)
        last = self._cut(hi)
        stops = [*self._starts[first + 1 : last], hi]
        return list(zip(self._starts[first:last], stops, self._values[first:last], strict=False))

    def put(self, lo: int, hi: int, value: T) -> None:
        """Give all of [lo, hi) one value."""
        if lo < hi:
            first = self._cut(lo)
            last = self._cut(hi)
            self._starts[first:last] = [lo]
            self._values[first:last] = [value]
