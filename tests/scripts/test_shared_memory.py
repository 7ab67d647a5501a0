"""The memory that a rank and the simulator share: no two arrays in one place, and none that is lost."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hcsim.scripts.ipc import IN_MEMORY, SharedArray, SharedMemoryAllocator, SharedMemoryMap, shared_file

Turn = tuple[bool, int]


@pytest.mark.parametrize("folder", [IN_MEMORY, Path("/absent")], ids=["in memory", "as on macOS"])
@settings(max_examples=30)
@given(turns=st.lists(st.tuples(st.booleans(), st.integers(0, 3 << 20)), max_size=40))
def test_arrays_never_overlap_and_both_sides_see_the_same(folder: Path, turns: list[Turn]) -> None:
    descriptor = shared_file(folder)
    assert os.fstat(descriptor).st_nlink == 0, "it goes with its last user"
    arena, other = SharedMemoryAllocator(descriptor), SharedMemoryMap(os.dup(descriptor))
    held: list[tuple[SharedArray, np.ndarray, int]] = []
    for number, (give_back, size) in enumerate(turns):
        if give_back and held:
            slot, array, value = held.pop(size % len(held))
            assert (other.at(slot) == value).all()
            arena.give_back(slot, array.nbytes)
            continue
        like = np.empty(size, np.uint8)
        slot, grown = arena.take(like)
        if grown is not None:
            other.map(grown)
        arena.mapped.at(slot)[:] = number % 256
        held.append((slot, like, number % 256))
    for slot, _, value in held:
        assert (other.at(slot) == value).all()
    for slot, array, _ in held:
        arena.give_back(slot, array.nbytes)
    other.close()
    arena.mapped.close()


def test_what_was_given_back_is_used_again() -> None:
    arena = SharedMemoryAllocator(shared_file())
    large = np.empty(10 << 20, np.uint8)
    grown = []
    for _ in range(20):
        slots = [arena.take(large) for _ in range(2)]
        grown += [part for _, part in slots if part is not None]
        for slot, _ in slots:
            arena.give_back(slot, large.nbytes)
    assert len(grown) <= 2
    arena.mapped.close()
