"""Numbers that channels add as they come, against torch: floats of 16 bits above all, every one of them.

The loops take many at a time and then the rest, one by one; short sums are all rest.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from hcsim.collectives import arithmetic
from hcsim.collectives.arithmetic import BFLOAT16, DTYPES, HALF_WIDTH, added_as, combiner, dtype_named
from hcsim.real.shm.stream import ForwardState, rings
from hcsim.real.tcp import receive_sum

Array = np.ndarray[Any, np.dtype[Any]]
Added = Callable[[Array, Array], None]
"""The second to the first."""
REST = 60
"""So many come one by one."""
WHOLE = 1 << 16

pytestmark = pytest.mark.skipif(
    rings is None or receive_sum is None, reason="there was no C compiler when hcsim was installed"
)


def by_socket(ours: Array, theirs: Array) -> None:
    there, here = socket.socketpair()
    with there, here:
        there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * WHOLE)
        there.sendall(theirs.tobytes())
        place, room = ours.view(np.uint8).data, memoryview(bytearray(ours.nbytes))
        assert receive_sum(here.fileno(), room, place, added_as("sum", ours.dtype), 0, ours.nbytes) == ours.nbytes


@contextmanager
def two_ends() -> Iterator[tuple[rings.Rings, rings.Rings]]:
    memory = rings.memory()
    first, second = socket.socketpair()
    try:
        ends = rings.Rings(memory, first.fileno(), True), rings.Rings(memory, second.fileno(), False)
        with first, second, closing(ends[0]), closing(ends[1]):
            yield ends
    finally:
        os.close(memory)


def by_ring(ours: Array, theirs: Array) -> None:
    with two_ends() as (writer, reader):
        assert writer.write([theirs.tobytes()]) == theirs.nbytes
        place = ours.view(np.uint8).data
        assert reader.add(place, added_as("sum", ours.dtype), 0, ours.nbytes) == ours.nbytes


def by_belt(ours: Array, theirs: Array, divisor: int = 1) -> None:
    """Not here, but on the way to the next one; or here, where it is divided."""
    with two_ends() as (there, here):
        there.write([b"in", theirs.tobytes()])
        leg = (b"in", b"out", ours.view(np.uint8).data, added_as("sum", ours.dtype), False, divisor)
        assert here.belt(here, [leg]).run(b"") == ForwardState.COMPLETE
        came = memoryview(bytearray(3 + ours.nbytes))
        assert there.read(came) == len(came)
        assert divisor == 1 or came[3:] == ours.tobytes()
        ours.view(np.uint8)[:] = came[3:]


def by_us(ours: Array, theirs: Array) -> None:
    combiner("sum", ours.dtype)(ours, theirs, ours)


def everything(dtype: np.dtype[Any], seed: int) -> Array:
    """All numbers that there are, infinities and those that are none among them, in some order."""
    return np.random.default_rng(seed).permutation(WHOLE).astype(np.uint16).view(dtype)


def by_torch(dtype: np.dtype[Any], *of: Array) -> list[torch.Tensor]:
    return [torch.from_numpy(array.view(np.int16)).view(getattr(torch, dtype.name)) for array in of]


def same(found: Array, expected: torch.Tensor) -> None:
    """Bit by bit; but whatever is no number is none, with whichever bits."""
    none = expected.isnan().numpy()
    np.testing.assert_array_equal(np.isnan(found.astype(np.float32)), none)
    bits = expected.view(torch.int16).numpy()
    np.testing.assert_array_equal(found.view(np.int16)[~none], bits[~none])


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("dtype", HALF_WIDTH, ids=str)
@pytest.mark.parametrize("added", [by_socket, by_ring, by_belt, by_us])
@pytest.mark.parametrize("at_once", [WHOLE, REST])
def test_every_half_is_added_as_torch_adds_it(dtype: np.dtype[Any], added: Added, at_once: int) -> None:
    ours, theirs = everything(dtype, 1), everything(dtype, 2)
    us, them = by_torch(dtype, ours.copy(), theirs)
    for lo in range(0, WHOLE, at_once):
        added(ours[lo : lo + at_once], theirs[lo : lo + at_once])
    same(ours, us + them)


@pytest.mark.parametrize("dtype", HALF_WIDTH, ids=str)
@pytest.mark.parametrize("added", [by_socket, by_ring, by_belt])
@pytest.mark.parametrize("at_once", [WHOLE, REST])
def test_what_is_no_number_is_the_same_whoever_adds_to_it(dtype: np.dtype[Any], added: Added, at_once: int) -> None:
    """To the bit, where only one of the two is none."""
    ours, theirs = everything(dtype, 6), np.ones(WHOLE, dtype)
    expected = ours.copy()
    by_us(expected, theirs)
    for lo in range(0, WHOLE, at_once):
        added(ours[lo : lo + at_once], theirs[lo : lo + at_once])
    np.testing.assert_array_equal(ours.view(np.uint16), expected.view(np.uint16))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", HALF_WIDTH, ids=str)
@pytest.mark.parametrize("divisor", [2, 3, 7, 300])
@pytest.mark.parametrize("at_once", [WHOLE, REST])
def test_every_half_is_divided_as_torch_divides_floats(dtype: np.dtype[Any], divisor: int, at_once: int) -> None:
    """By numbers, too, that a bfloat16 cannot be."""
    halves = everything(dtype, 3)
    given, nothing = halves.copy(), np.full(WHOLE, -0.0, dtype)
    by_hand = halves.copy()
    for lo in range(0, WHOLE, at_once):
        by_belt(halves[lo : lo + at_once], nothing[lo : lo + at_once], divisor)
        arithmetic.divide(by_hand[lo : lo + at_once], divisor)
    (tensor,) = by_torch(dtype, given)
    for found in (halves, by_hand):
        same(found, (tensor.float() / divisor).to(tensor.dtype))


@pytest.mark.parametrize("dtype", HALF_WIDTH, ids=str)
def test_without_a_compiler_halves_are_the_same(dtype: np.dtype[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic.kernels, "COMPILED", False)
    ours, theirs = everything(dtype, 4), everything(dtype, 5)
    us, them = by_torch(dtype, ours.copy(), theirs)
    by_us(ours, theirs)
    same(ours, us + them)


@pytest.mark.quick_cases(24)
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.kind != "b"], ids=str)
@pytest.mark.parametrize("added", [by_socket, by_ring, by_belt])
@pytest.mark.parametrize("count", [1, 15, REST, 1000, 4099])
def test_numbers_of_any_kind_are_added_as_by_us(dtype: np.dtype[Any], added: Added, count: int) -> None:
    """The integers' sums do not fit."""
    random = np.random.default_rng(count)
    raw = random.integers(0, 255, (2, count * dtype.itemsize), np.uint8, endpoint=True)
    if dtype.kind in "iu":
        ours, theirs = raw.view(dtype)
    else:
        ours, theirs = random.normal(size=(2, count)).astype(dtype)
    expected = ours.copy()
    by_us(expected, theirs)
    added(ours, theirs)
    assert ours.tobytes() == expected.tobytes()


def test_only_sums_are_added_on_the_way() -> None:
    assert added_as("mean", BFLOAT16) == "E"
    assert [added_as(op, np.dtype(np.float32)) for op in ("min", "max", "product")] == ["", "", ""]
    assert added_as("sum", dtype_named("bool")) == ""  # it is an or
