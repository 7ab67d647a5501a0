"""Memory that a rank and the simulator share, for the arrays of its calls.

Both sides map an anonymous file, in memory where the system supports it. The rank allocates and frees slots.
When no slot is free, it extends the file by a part with its own mapping, so arrays in older parts keep their
address. The simulator only accesses slots that it is told of.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from bisect import insort
from pathlib import Path

import ml_dtypes
import numpy as np

from hcsim.collectives.buffers import Array
from hcsim.scripts.ipc import Grown, SharedArray

_IN_MEMORY = Path("/dev/shm")
_ALIGNED_BYTES = 64
_SMALLEST_PART_BYTES = 4 << 20
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def shared_file() -> int:
    """Return the descriptor of an anonymous file, which is deleted with its last user. The caller owns the
    descriptor."""
    with tempfile.TemporaryFile(dir=_IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None) as file:
        return os.dup(file.fileno())


class SharedMemoryMap:
    """The parts of the file that are mapped in this process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._parts: list[tuple[int, mmap.mmap]] = []

    def map(self, part: Grown) -> None:
        self._parts.append((part.start, mmap.mmap(self._descriptor, part.size_bytes, offset=part.start)))

    def at(self, slot: SharedArray) -> Array:
        start, memory = next(part for part in reversed(self._parts) if part[0] <= slot.start)
        dtype = _BFLOAT16 if slot.dtype == _BFLOAT16.name else np.dtype(slot.dtype)
        return np.frombuffer(memory, dtype, slot.length, slot.start - start)

    def close(self) -> None:
        """Unmap the file. Arrays that are still in use keep their part."""
        os.close(self._descriptor)
        self._parts.clear()


class SharedMemoryAllocator:
    """The rank's side: the allocator of slots."""

    def __init__(self, descriptor: int) -> None:
        self.mapped = SharedMemoryMap(descriptor)
        self._descriptor = descriptor
        self._size_bytes = 0
        self._free: list[tuple[int, int]] = []
        """Free ranges (start, end) in ascending order; none spans two parts."""
        self._ends: list[int] = []

    def take(self, like: Array) -> tuple[SharedArray, Grown | None]:
        """Allocate a slot for such an array. Also return the part that was added for it, if any."""
        size_bytes = max(1, -(-like.nbytes // _ALIGNED_BYTES)) * _ALIGNED_BYTES
        grown = None if any(end - start >= size_bytes for start, end in self._free) else self._grow(size_bytes)
        place, (start, end) = next(
            (place, room) for place, room in enumerate(self._free) if room[1] - room[0] >= size_bytes
        )
        if end - start == size_bytes:
            del self._free[place]
        else:
            self._free[place] = (start + size_bytes, end)
        return SharedArray(start, like.size, like.dtype.name), grown

    def give_back(self, slot: SharedArray, size_bytes: int) -> None:
        """Free the slot and merge it with free neighbours."""
        start = slot.start
        end = start + max(1, -(-size_bytes // _ALIGNED_BYTES)) * _ALIGNED_BYTES
        insort(self._free, (start, end))
        place = self._free.index((start, end))
        if place + 1 < len(self._free) and self._free[place + 1][0] == end and end not in self._ends:
            self._free[place : place + 2] = [(start, self._free[place + 1][1])]
        if place and self._free[place - 1][1] == start and start not in self._ends:
            self._free[place - 1 : place + 1] = [(self._free[place - 1][0], self._free[place][1])]

    def _grow(self, size_bytes: int) -> Grown:
        """Add a part at least as large as the file, so that there are few parts."""
        page = mmap.ALLOCATIONGRANULARITY
        part_bytes = -(-max(size_bytes, self._size_bytes, _SMALLEST_PART_BYTES) // page) * page
        part = Grown(self._size_bytes, part_bytes)
        self._size_bytes += part_bytes
        os.ftruncate(self._descriptor, self._size_bytes)
        self.mapped.map(part)
        self._free.append((part.start, self._size_bytes))
        self._ends.append(self._size_bytes)
        return part
