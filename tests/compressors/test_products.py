"""Products with thin matrices, compiled and plain, against numpy's in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_tensors import COMPILED_LOOPS, LOOPS, quick

from hcsim.compressors import kernels
from hcsim.compressors.base import Array, Ident
from hcsim.compressors.kernels import plain
from hcsim.compressors.powersgd import THIN, PowerSGD
from hcsim.errors import CompressionError

SHAPES = [(0, 5), (5, 0), (1, 1), (1, 9), (9, 1), (2, 3), (4, 4), (5, 7), (7, 1030), (33, 18), (3, 40_003)]
RANKS = [1, 2, 3, 4, 5, 7, 8, 9, 64]


def drawn(rows: int, columns: int, seed: int = 0, offset: int = 0) -> Array:
    """Normally distributed, in memory that begins so many bytes beyond a multiple of 64."""
    room = np.zeros(4 * rows * columns + 128, np.uint8)
    start = -room.ctypes.data % 64 + offset
    array = room[start : start + 4 * rows * columns].view(np.float32).reshape(rows, columns)
    array[:] = np.random.default_rng(seed).standard_normal((rows, columns))
    return array


def bound(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """What sums of products may err by in float32: so many roundings of the sum of magnitudes."""
    return (left.shape[1] + 2) * 2.0**-23 * (np.abs(left).astype(np.float64) @ np.abs(right).astype(np.float64))


def exact(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return left.astype(np.float64) @ right.astype(np.float64)


@pytest.mark.quick_cases(16)
@pytest.mark.parametrize("loops", LOOPS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", RANKS)
def test_every_product_is_the_exact_one_but_for_rounding(loops, shape, rank):
    rows, columns = shape
    m, p, q = drawn(rows, columns, 1), drawn(rank, rows, 2), drawn(rank, columns, 3)
    dots, sums = np.full((rank, rows), np.nan, np.float32), np.full((rank, columns), np.nan, np.float32)
    loops.dots(q, m, dots, rank)
    loops.sums(p, m, sums, rank)
    assert (np.abs(dots - exact(q, m.T)) <= bound(q, m.T)).all()
    assert (np.abs(sums - exact(p, m)) <= bound(p, m)).all()
    for sign, start in ((0, np.full_like(m, np.nan)), (1, m.copy()), (-1, m.copy())):
        expected = sign * exact(p.T, q) + m if sign else exact(p.T, q)
        loops.outer(p, q, start, rank, sign)
        assert (np.abs(start - expected) <= bound(p.T, q) + (rank + 1) * 2.0**-23 * np.abs(m)).all()


@pytest.mark.parametrize("loops", COMPILED_LOOPS)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 70),
    rank=st.integers(1, 9),
    offsets=st.tuples(*[st.integers(0, 67)] * 3),
)
@quick
def test_bits_do_not_depend_on_where_the_arrays_lie(loops, rows, columns, rank, offsets):
    results = []
    for first, second, third in ((0, 0, 0), offsets):
        m, p, q = drawn(rows, columns, 1, first), drawn(rank, rows, 2, second), drawn(rank, columns, 3, third)
        dots, sums, out = drawn(rank, rows, 4, second), drawn(rank, columns, 4, third), drawn(rows, columns, 4, first)
        loops.dots(q, m, dots, rank)
        loops.sums(p, m, sums, rank)
        loops.outer(p, q, out, rank, -1)
        results.append((dots.tobytes(), sums.tobytes(), out.tobytes()))
    assert results[0] == results[1]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("loops", COMPILED_LOOPS)
@pytest.mark.parametrize("sign", [0, 1, -1])
def test_the_product_of_both_factors_is_the_same_bits_compiled_and_plain(loops, sign):
    """Each rank computes it, and replicas must not part."""
    for rank, (rows, columns) in itertools.product(RANKS, SHAPES):
        p, q = drawn(rank, rows, 2), drawn(rank, columns, 3)
        found = [drawn(rows, columns, 4) for _ in range(2)]
        loops.outer(p, q, found[0], rank, sign)
        plain.outer(p, q, found[1], rank, sign)
        assert found[0].tobytes() == found[1].tobytes()


@pytest.mark.parametrize("loops", LOOPS)
@pytest.mark.parametrize("rank", [1, 3, 4, 6])
def test_nothing_beyond_the_arrays_is_written(loops, rank):
    for rows, columns in ((5, 7), (6, 1030), (3, 2)):
        for size, call in (
            (rank * rows, lambda out, m, p, q: loops.dots(q, m, out, rank)),
            (rank * columns, lambda out, m, p, q: loops.sums(p, m, out, rank)),
            (rows * columns, lambda out, m, p, q: loops.outer(p, q, out, rank, 0)),
        ):
            room = np.full(size + 32, 5, np.float32)
            call(room[16:-16], drawn(rows, columns), drawn(rank, rows), drawn(rank, columns))
            assert (room[:16] == 5).all()
            assert (room[-16:] == 5).all()


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("loops", COMPILED_LOOPS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rank", [1, 4, THIN, THIN + 1])
def test_a_nan_or_an_infinity_anywhere_in_a_matrix_is_found(loops, value, rank):
    """In a row of four or at the end, in a column of four or at the end; even where it meets a zero."""
    for rows, columns in ((10, 11), (23, 34), (4, 40_002)):
        for row, column in {(row, column) for row in (0, 3, rows - 1) for column in (0, 5, columns // 2, columns - 1)}:
            m = drawn(rows, columns)
            m[row, column] = value
            p = np.empty((rank, rows), np.float32)
            for q in (drawn(rank, columns), np.zeros((rank, columns), np.float32)):
                loops.dots(q, m, p, rank)
                assert not np.isfinite(p[:, row]).any()
                assert np.isfinite(np.delete(p, row, axis=1)).all()


@pytest.mark.parametrize("rank", [4, 9])
@pytest.mark.parametrize("at", [(0, 0), (29, 40), (17, 22)])
def test_powersgd_says_which_element_of_which_tensor_it_is(rank, at):
    x = drawn(30, 41)
    x[at] = -np.inf
    with pytest.raises(CompressionError, match=rf"^w: element {41 * at[0] + at[1]} of the tensor is -inf"):
        PowerSGD(rank, seed=0).encode(x, Ident("w"))
    with pytest.raises(CompressionError, match=rf"^w: element {41 * at[0] + at[1]} of the tensor is -inf"):
        next(PowerSGD(rank, seed=0).rounds(x, Ident("w")))


@pytest.mark.skipif(not kernels.COMPILED, reason="the install found no compiler")
@pytest.mark.parametrize("call", [
    lambda one: kernels.dots(one(6), one(12), one(8), 0),
    lambda one: kernels.dots(one(6), one(12), one(8), -1),
    lambda one: kernels.dots(one(6), one(11), one(8), 2),
    lambda one: kernels.dots(one(7), one(12), one(8), 2),
    lambda one: kernels.dots(one(0), one(12), one(8), 2),
    lambda one: kernels.sums(one(6), one(12), one(10), 2),
    lambda one: kernels.sums(one(6), one(12), one(9), 2),
    lambda one: kernels.outer(one(6), one(8), one(11), 2, 0),
    lambda one: kernels.outer(one(6), one(8), one(13), 2, 1),
    lambda one: kernels.outer(one(6), one(8), one(12), 0, 0),
])  # fmt: skip
def test_matrices_that_do_not_fit_are_refused(call):
    with pytest.raises(ValueError, match="sizes do not fit"):
        call(lambda elements: np.ones(elements, np.float32))
