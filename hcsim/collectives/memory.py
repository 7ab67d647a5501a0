"""The memory that a collective works on: arrays, or phantoms that have a size and no data.

The executor names ranges by the plan's addresses, in elements. It never learns what lies there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, Protocol

import numpy as np

from hcsim.collectives.arithmetic import Combine, divide
from hcsim.errors import UsageError
from hcsim.runtime.channel import Fold, Payload, Phantom

Array = np.ndarray[Any, np.dtype[Any]]

KEPT_BYTES = 8 * 2**20
"""How much scratch memory is kept between operations."""
RESERVE_BYTES = 128 * 2**10
"""How much there is from the start, so that short messages need not wait for room, however short the buffer is."""
WORTH_FOLDING_BYTES = 128 * 2**10
"""From here on it takes longer to fetch what was received from memory once more than to say how it is to be added."""
_size_bytes = attrgetter("nbytes")


class ScratchPool:
    """Rooms beside the buffers, used again: the system takes longer to clear fresh memory than we to fill it."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        """In rising size."""
        self._fresh = True

    def take(self, size_bytes: int) -> memoryview:
        """A room of at least that size. Where there is none, the smaller ones go: the new one serves in their place."""
        if self._fresh:  # not before: phantoms need none
            self._fresh = False
            self._free = [np.zeros(RESERVE_BYTES // 2, np.uint8).data for _ in range(2)]
        fitting = bisect_left(self._free, size_bytes, key=_size_bytes)
        if fitting < len(self._free):
            return self._free.pop(fitting)
        self._free.clear()
        return np.empty(size_bytes, np.uint8).data

    def give_back(self, room: memoryview) -> None:
        """A room that nothing writes into any more."""
        insort(self._free, room, key=_size_bytes)
        while sum(map(_size_bytes, self._free)) > KEPT_BYTES:
            self._free.pop(0)


class Memory(Protocol):
    """A range of elements that can be sent, received into, combined and finished."""

    element_bytes: int
    is_phantom: bool
    numbers: str
    """What ranges are added as, where a channel may do that; see `Fold`. Empty: they are combined otherwise."""
    divisor: int
    """What a range is divided by when it is finished."""

    def payload(self, lo: int, hi: int) -> Payload:
        """The range, to be sent."""

    def place(self, lo: int, hi: int) -> memoryview | None:
        """The range, to be received into; None when it has no bytes of its own."""

    def fold(self, lo: int, hi: int, room: memoryview) -> Fold | None:
        """The range, to be added to as bytes come, if that is how it is combined and if it pays."""

    def combine(self, lo: int, hi: int, received: Payload, *, received_left: bool) -> None:
        """Combine the range with what was received, which is the left or the right operand."""

    def finish(self, lo: int, hi: int) -> None:
        """Apply what comes last to the range."""


_phantom = lru_cache(maxsize=1024)(Phantom)
"""Simulated ranks share them: what they send has few sizes."""


class PhantomMemory:
    """Sizes alone."""

    __slots__ = ("element_bytes",)
    is_phantom = True
    numbers = ""
    divisor = 1

    def __init__(self, element_bytes: int = 1) -> None:
        self.element_bytes = element_bytes

    def payload(self, lo: int, hi: int) -> Payload:
        """See `Memory.payload`."""
        return _phantom((hi - lo) * self.element_bytes)

    def place(self, lo: int, hi: int) -> memoryview | None:
        """See `Memory.place`."""
        return None

    def fold(self, lo: int, hi: int, room: memoryview) -> Fold | None:
        """See `Memory.fold`."""
        return None

    def combine(self, lo: int, hi: int, received: Payload, *, received_left: bool) -> None:
        """See `Memory.combine`."""

    def finish(self, lo: int, hi: int) -> None:
        """See `Memory.finish`."""


class ArrayMemory:
    """Flat arrays of one dtype that follow each other in the address space, the first at `base`.

    A range that is sent or received lies within one of them.
    """

    is_phantom = False

    def __init__(
        self,
        arrays: Sequence[Array],
        *,
        base: int = 0,
        combine: Combine | None = None,
        divisor: int = 1,
        numbers: str = "",
    ) -> None:
        self._arrays = [flat(array) for array in arrays]
        self._bytes = [array.view(np.uint8).data for array in self._arrays]
        self.dtype = self._arrays[0].dtype
        self.element_bytes = self.dtype.itemsize
        self._starts = [base]
        for array in self._arrays[:-1]:
            self._starts.append(self._starts[-1] + array.size)
        self._combine = combine
        self.divisor = divisor
        self.numbers = numbers

    def payload(self, lo: int, hi: int) -> memoryview:
        """See `Memory.payload`."""
        which = 0 if len(self._starts) == 1 else bisect_right(self._starts, lo) - 1
        start, size = self._starts[which], self.element_bytes
        return self._bytes[which][(lo - start) * size : (hi - start) * size]

    place = payload

    def fold(self, lo: int, hi: int, room: memoryview) -> Fold | None:
        """See `Memory.fold`."""
        size_bytes = (hi - lo) * self.element_bytes
        if not self.numbers or size_bytes < WORTH_FOLDING_BYTES:
            return None
        return Fold(self.payload(lo, hi), room, self.numbers)

    def combine(self, lo: int, hi: int, received: Payload, *, received_left: bool) -> None:
        """See `Memory.combine`."""
        if isinstance(received, Phantom) or self._combine is None:
            raise UsageError("a phantom cannot be combined with data: all ranks use phantoms, or none does")
        mine = self._range(lo, hi)
        theirs = np.frombuffer(received, mine.dtype)
        if received_left:
            self._combine(theirs, mine, mine)
        else:
            self._combine(mine, theirs, mine)

    def finish(self, lo: int, hi: int) -> None:
        """See `Memory.finish`."""
        if self.divisor != 1:
            divide(self._range(lo, hi), self.divisor)

    def _range(self, lo: int, hi: int) -> Array:
        which = 0 if len(self._starts) == 1 else bisect_right(self._starts, lo) - 1
        start = self._starts[which]
        return self._arrays[which][lo - start : hi - start]


def flat(array: Array) -> Array:
    """The array as one row of elements, sharing its memory."""
    if not array.flags.c_contiguous:
        raise UsageError("the array's elements must lie in one piece: pass np.ascontiguousarray(array)")
    return array.reshape(-1)
