"""The largest elements, or coefficients, of blocks."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import scipy.fft

from hcsim.compressors.base import Array, Ident
from hcsim.compressors.block_sparse import BlockTopK, DctTopK, dct_basis
from hcsim.compressors.encoding import HEADER_BYTES
from hcsim.compressors.registry import make
from hcsim.errors import CompressionError

OF = Ident("layer.weight", 3)


def decoded(spec: str, tensor: Array) -> Array:
    out = np.full_like(tensor, np.nan)
    compressor = make(spec, seed=1, rank=0)
    compressor.decode(compressor.encode(tensor, OF), out, OF)
    return out


def normal(*shape: int) -> Array:
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("elements", [1, 4095, 4096, 4097, 40 * 4096 + 1000])
@pytest.mark.parametrize("fill", ["normal", "ties"])
def test_of_each_block_the_largest_are_sent_and_of_equals_the_first(elements, fill):
    x = normal(elements)
    x = np.rint(x) if fill == "ties" else x
    expected = np.zeros_like(x)
    for lo in range(0, elements, 4096):
        block = x[lo : lo + 4096]
        count = math.ceil(Fraction("0.03") * block.size)
        largest = lo + np.argsort(-np.abs(block), kind="stable")[:count]
        expected[largest] = x[largest]
    np.testing.assert_array_equal(decoded("blocktopk:0.03", x), expected)


def test_an_index_takes_twelve_bits_and_a_value_four_bytes_or_two_bits():
    blocks, each = 10, 128
    count = blocks * each
    plain, short = (make(f"blocktopk:0.03125{bits}", seed=0, rank=0) for bits in ("", ",bits=2"))
    assert plain.size_bytes((blocks * 4096,)) == HEADER_BYTES + count * 12 // 8 + 4 * count
    assert short.size_bytes((blocks * 4096,)) == HEADER_BYTES + count * 12 // 8 + count * 2 // 8 + 4 * blocks


def test_a_value_of_two_bits_is_the_mean_of_the_smaller_or_the_larger_half():
    x = np.zeros(4096, np.float32)
    x[[5, 100, 2000, 4095]] = [1, -2, 8, -16]
    out = decoded("blocktopk:0.0009765625,bits=2", x)
    assert {int(i): float(out[i]) for i in np.flatnonzero(out)} == {5: 1.5, 100: -1.5, 2000: 12, 4095: -12}


@pytest.mark.parametrize("shape", [(64, 64), (128, 192), (50, 30), (64, 8, 8)])
def test_where_sides_fit_the_coefficients_are_those_of_scipy(shape):
    x = normal(*shape)
    matrix = x.reshape(shape[0], -1).astype(np.float64)
    expected = np.zeros_like(matrix)
    for row in range(0, matrix.shape[0], 64):
        for column in range(0, matrix.shape[1], 64):
            block = matrix[row : row + 64, column : column + 64]
            of_block = scipy.fft.dctn(block, norm="ortho")
            count = math.ceil(Fraction("0.1") * block.size)
            kept = np.zeros_like(of_block).reshape(-1)
            largest = np.argsort(-np.abs(of_block).reshape(-1))[:count]
            kept[largest] = of_block.reshape(-1)[largest]
            expected[row : row + 64, column : column + 64] = scipy.fft.idctn(kept.reshape(block.shape), norm="ortho")
    np.testing.assert_allclose(decoded("dcttopk:0.1", x), expected.reshape(shape), atol=1e-5)


@pytest.mark.parametrize("shape", [(7,), (65,), (100, 65), (1733, 3), (129, 3, 3, 1)])
def test_all_coefficients_give_back_the_tensor(shape):
    x = normal(*shape)
    np.testing.assert_allclose(decoded("dcttopk:1", x), x, atol=1e-5)


def test_little_is_added_where_sides_do_not_fit():
    for rows, columns in [(65, 65), (1733, 127), (50257, 768)]:
        plain = make("blocktopk:0.5", seed=0, rank=0).size_bytes((rows, columns))
        assert make("dcttopk:0.5", seed=0, rank=0).size_bytes((rows, columns)) < 1.05 * plain


def test_a_smooth_tensor_costs_few_coefficients():
    row = np.sin(np.linspace(0, 3, 256))
    x = np.multiply.outer(row, row).astype(np.float32)
    wrong = {name: np.linalg.norm(decoded(f"{name}:0.01", x) - x) for name in ("dcttopk", "blocktopk")}
    assert wrong["dcttopk"] < 0.01 * wrong["blocktopk"]


@pytest.mark.parametrize("side", [1, 2, 3, 17, 62, 64])
def test_the_basis_is_the_same_on_any_machine(side):
    """A platform's cosine may err in its last bits: no element is so near the border between two floats."""
    mpmath.mp.prec = 100
    exact = [
        [
            mpmath.cos(mpmath.pi / side * frequency * (place + mpmath.mpf("0.5")))
            * mpmath.sqrt(mpmath.mpf(2 if frequency else 1) / side)
            for place in range(side)
        ]
        for frequency in range(side)
    ]
    basis = dct_basis(side)
    for found, expected in zip(basis.reshape(-1), itertools.chain(*exact), strict=True):
        if abs(expected) < 1e-15:
            assert abs(found) < 1e-15
            continue
        step = mpmath.mpf(float(np.spacing(np.abs(found))))
        assert abs(float(found) - expected) < step * (0.5 - 1e-6)


def hostile(spec: str, change: str) -> None:
    compressor = make(spec, seed=1, rank=0)
    payload = compressor.encode(normal(5000), OF).copy()
    body = payload[HEADER_BYTES:]
    if change == "indices":
        body[:3] = 255
    elif change == "magnitude":
        body[-(5000 // 100) :] = 255
    with pytest.raises(CompressionError, match=r"^layer\.weight: "):
        compressor.decode(payload, np.zeros(5000, np.float32), OF)


@pytest.mark.parametrize("spec", ["blocktopk:0.01", "blocktopk:0.01,bits=2", "dcttopk:0.01"])
def test_indices_out_of_order_are_refused(spec):
    hostile(spec, "indices")


@pytest.mark.parametrize("spec", ["blocktopk:0.01", "blocktopk:0.01,bits=2", "dcttopk:0.01,bits=2"])
def test_values_that_are_no_numbers_are_refused(spec):
    hostile(spec, "magnitude")


@pytest.mark.parametrize("kind", [BlockTopK, DctTopK])
def test_with_error_feedback_all_is_sent_in_the_end(kind):
    compressor = make(f"{kind.name}:0.05,bits=2+ef", seed=1, rank=0)
    x, sent, out = normal(100, 90), np.zeros((100, 90)), np.empty((100, 90), np.float32)
    for step in range(60):
        of = Ident("w", step)
        compressor.decode(compressor.encode(x, of), out, of)
        compressor.commit(step)
        sent += out
    assert np.linalg.norm(sent / 60 - x) < 0.35 * np.linalg.norm(x)
