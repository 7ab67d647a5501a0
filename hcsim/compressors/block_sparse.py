"""The largest elements of every block, with short indices: `blocktopk:RATIO` and `dcttopk:RATIO`.

`blocktopk`: a tensor is cut into blocks of 4096 elements. Of each block the k = max(1, ⌈ratio · n⌉) elements of
largest magnitude are sent; among equals those with the lowest indices.

    payload: the index of each within its block (12 bits, ascending; the first of two in the lower half of three
             bytes), then the values: k floats for each block
    with `bits=2`: first a pair of magnitudes (bf16) for each block, then for each value its sign and whether it has
             the larger magnitude, in two bits (the first in the lowest)

Indices of 12 bits in place of 32, and values of two bits, are what SparseLoCo sends (Sarfi et al., arXiv 2508.15706,
which leaves the levels open). Here a value has the larger magnitude if it exceeds the mean of its block's chosen
magnitudes; each magnitude is the mean of those that it replaces.

`dcttopk`: the same, of the cosine transform of blocks (DeMo: Peng et al., arXiv 2411.19870). A tensor is seen as a
matrix of its first dimension by the rest, or as one row. Each side is cut into the fewest equal parts of at most 64;
where they do not fit the tensor is continued with zeros. Each block is transformed along both sides by the
orthonormal DCT-II, so a coefficient's square is what leaving it out costs. Every rank transforms what it receives
back in single multiplications and additions in a fixed order: all get the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from math import prod
from typing import NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from hcsim.compressors import kernels
from hcsim.compressors.base import Array, ByteArray, Ident, PayloadKind, TensorShape
from hcsim.compressors.codec import BaseCompressor, Mix
from hcsim.compressors.encoding import (
    CHUNK,
    FLOAT_BYTES,
    HEADER_BYTES,
    MAGNITUDE,
    Codec,
    check_decoded,
    check_input,
    is_finite,
)
from hcsim.compressors.sparse import count_of, scatter
from hcsim.errors import CompressionError

Indices = npt.NDArray[np.int64]
BLOCK = 4096
"""As many elements as an index of 12 bits can tell apart."""
SIDE = 64
"""The most elements along the side of a block that is transformed."""


class BlockTopK(BaseCompressor):
    """A lower ratio gives fewer bytes, and leaves more unsent."""

    codec = Codec.BLOCKTOPK
    kind = PayloadKind.SPARSE
    name = "blocktopk"

    def __init__(self, ratio: Fraction, bits: int = 32) -> None:
        super().__init__(f"{self.name}:{float(ratio):g}" + ",bits=2" * (bits == 2))
        self._ratio = ratio
        self.parameter = bits

    def size_bytes(self, shape: TensorShape) -> int:
        chosen = self._chosen(prod(shape), self._block(shape))
        return HEADER_BYTES + _index_bytes(chosen.total) + self._value_bytes(chosen)

    def _block(self, shape: TensorShape) -> int:
        return BLOCK

    def _encode(self, flat: Array, shape: TensorShape, of: Ident) -> ByteArray:
        if not is_finite(flat):
            check_input(flat, of.name)
        return self._encode_blocks(flat, shape, of)

    def _encode_blocks(self, flat: Array, shape: TensorShape, of: Ident) -> ByteArray:
        """Encode the largest of each block of `flat`, which may be the tensor's transform."""
        payload = self._payload(of.name, shape)
        body = payload[HEADER_BYTES:]
        chosen = self._chosen(flat.size, self._block(shape))
        indices = np.concatenate([*chosen.largest(flat), np.empty(0, np.int64)])
        split = _index_bytes(chosen.total)
        body[:split] = _packed_indices(indices % chosen.block)
        self._pack_values(flat[indices], chosen, body[split:])
        return payload

    def _mix_body(self, body: ByteArray, flat: Array, shape: TensorShape, of: Ident, mix: Mix) -> None:
        indices, values = self._decoded(body, flat.size, shape, of)
        scatter(flat, indices, values, mix)

    def _decoded(self, body: ByteArray, elements: int, shape: TensorShape, of: Ident) -> tuple[Indices, Array]:
        """Return the ascending indices of the elements that were sent, and their values."""
        chosen = self._chosen(elements, self._block(shape))
        split = _index_bytes(chosen.total)
        within, unused = _unpacked_indices(body[:split], chosen.total)
        indices = within + chosen.starts()
        if unused or not (indices[1:] > indices[:-1]).all() or (within >= chosen.lengths()).any():
            raise CompressionError("the payload's indices are not ascending, or beyond their block", of.name)
        values = self._unpack_values(body[split:], chosen, of)
        check_decoded(values, of.name)
        return indices, values

    def _chosen(self, elements: int, block: int) -> _BlockCounts:
        return _BlockCounts(elements, block, count_of(self._ratio, block), count_of(self._ratio, elements % block))

    def _value_bytes(self, chosen: _BlockCounts) -> int:
        if self.parameter == 2:
            return _LEVEL_BYTES * chosen.blocks + -(-chosen.total // 4)
        return FLOAT_BYTES * chosen.total

    def _pack_values(self, values: Array, chosen: _BlockCounts, into: ByteArray) -> None:
        if self.parameter != 2:
            into[:] = values.view(np.uint8)
            return
        split = _LEVEL_BYTES * chosen.blocks
        levels, is_large = _levels(np.abs(values), chosen)
        into[:split] = levels.astype(ml_dtypes.bfloat16).reshape(-1).view(np.uint8)
        codes = np.zeros(4 * (into.size - split), np.uint8)
        codes[: values.size] = (values < 0) | is_large.astype(np.uint8) << 1
        into[split:] = codes[::4] | codes[1::4] << 2 | codes[2::4] << 4 | codes[3::4] << 6

    def _unpack_values(self, body: ByteArray, chosen: _BlockCounts, of: Ident) -> Array:
        if self.parameter != 2:
            return body.view(np.float32)
        split = _LEVEL_BYTES * chosen.blocks
        levels = body[:split].view(ml_dtypes.bfloat16).astype(np.float32).reshape(-1, 2)
        if not (levels >= 0).all():  # a NaN fails too
            raise CompressionError("the payload has a magnitude that no encoder writes", of.name)
        codes = (body[split:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(-1)
        if codes[chosen.total :].any():
            raise CompressionError("the payload has more values than the tensor has", of.name)
        codes = codes[: chosen.total]
        values: Array = levels[chosen.numbers(), codes >> 1]
        values[codes & 1 == 1] *= -1
        return values


_LEVEL_BYTES = 4
"""Two magnitudes of two bytes."""


class _BlockCounts(NamedTuple):
    """How many elements of each block are chosen."""

    elements: int
    block: int
    each: int
    """Of a whole block."""
    last: int
    """Of the rest, if there is one."""

    @property
    def whole(self) -> int:
        return self.elements // self.block

    @property
    def blocks(self) -> int:
        return -(-self.elements // self.block)

    @property
    def total(self) -> int:
        return self.whole * self.each + self.last

    def numbers(self) -> Indices:
        """Return the block of each chosen element."""
        return np.minimum(np.arange(self.total) // self.each, self.whole)

    def starts(self) -> Indices:
        return self.numbers() * self.block

    def lengths(self) -> Indices:
        return np.minimum(self.block, self.elements - self.starts())

    def largest(self, flat: Array) -> Iterator[Indices]:
        """Yield the ascending indices of the elements of largest magnitude."""
        whole = self.whole * self.block
        rows = max(1, CHUNK // self.block)
        for lo in range(0, whole, rows * self.block):
            piece = flat[lo : min(whole, lo + rows * self.block)]
            yield lo + _largest(piece.reshape(-1, self.block), self.each)
        if self.last:
            yield whole + _largest(flat[None, whole:], self.last)


def _largest(rows: Array, count: int) -> Indices:
    """Return the ascending flat indices of the `count` largest magnitudes of each row; among equals the first."""
    magnitudes = rows.view(np.uint32) & MAGNITUDE
    at = magnitudes.shape[1] - count
    least = np.partition(magnitudes, at, axis=1)[:, at, None]
    taken = magnitudes > least
    missing = count - np.count_nonzero(taken, axis=1)[:, None]
    is_tie = magnitudes == least
    if (np.count_nonzero(is_tie, axis=1)[:, None] > missing).any():
        is_tie &= np.cumsum(is_tie, axis=1, dtype=np.int32) <= missing
    return np.flatnonzero(taken | is_tie)


def _levels(magnitudes: Array, chosen: _BlockCounts) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Return the two magnitudes of each block, and which of its values have the larger one."""
    numbers = chosen.numbers()

    def means(weights: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        sums = np.bincount(numbers, np.where(weights, magnitudes, 0), chosen.blocks)
        return sums / np.maximum(1, np.bincount(numbers, weights, chosen.blocks))

    is_large = magnitudes > means(np.ones(magnitudes.shape, np.bool_))[numbers]
    levels = np.stack([means(~is_large), means(is_large)], axis=1)
    return np.minimum(levels, _LARGEST_LEVEL).astype(np.float32), is_large


_LARGEST_LEVEL = float(np.array(0x7F7F, np.uint16).view(ml_dtypes.bfloat16))


def _index_bytes(count: int) -> int:
    return -(-count * 3 // 2)


def _packed_indices(within: Indices) -> ByteArray:
    pairs = np.zeros((-(-within.size // 2), 2), np.uint32)
    pairs.reshape(-1)[: within.size] = within
    packed = (pairs[:, 0] | pairs[:, 1] << 12).astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3]
    return packed.reshape(-1)[: _index_bytes(within.size)]


def _unpacked_indices(body: ByteArray, count: int) -> tuple[Indices, bool]:
    """Return the indices, and whether bits are set that belong to none."""
    triples = np.zeros((-(-count // 2), 3), np.uint8)
    triples.reshape(-1)[: body.size] = body
    first, second, third = triples.T.astype(np.int64)
    both = np.stack([first | (second & 15) << 8, second >> 4 | third << 4], axis=1).reshape(-1)
    return both[:count], bool(both[count:].any())


class DctTopK(BlockTopK):
    """A lower ratio gives fewer bytes, and leaves more unsent."""

    codec = Codec.DCTTOPK
    name = "dcttopk"

    def size_bytes(self, shape: TensorShape) -> int:
        chosen = self._chosen(_Grid.of(shape).elements, self._block(shape))
        return HEADER_BYTES + _index_bytes(chosen.total) + self._value_bytes(chosen)

    def _block(self, shape: TensorShape) -> int:
        grid = _Grid.of(shape)
        return max(1, grid.high * grid.wide)

    def _encode(self, flat: Array, shape: TensorShape, of: Ident) -> ByteArray:
        if not is_finite(flat):
            check_input(flat, of.name)
        coefficients = _Grid.of(shape).transformed(flat)
        check_decoded(coefficients, of.name)
        return self._encode_blocks(coefficients, shape, of)

    def _mix_body(self, body: ByteArray, flat: Array, shape: TensorShape, of: Ident, mix: Mix) -> None:
        grid = _Grid.of(shape)
        coefficients = np.zeros(grid.elements, np.float32)
        indices, values = self._decoded(body, grid.elements, shape, of)
        coefficients[indices] = values
        decoded = grid.inverted(coefficients)
        check_decoded(decoded, of.name)
        np.copyto(flat, decoded) if mix is None else mix(flat, decoded, out=flat)


class _Grid(NamedTuple):
    """A matrix in blocks of `high` × `wide`."""

    rows: int
    columns: int
    high: int
    wide: int

    @classmethod
    def of(cls, shape: TensorShape) -> _Grid:
        rows, columns = (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))
        return cls(rows, columns, _side(rows), _side(columns))

    @property
    def down(self) -> int:
        """The blocks above each other."""
        return -(-self.rows // self.high)

    @property
    def across(self) -> int:
        return -(-self.columns // self.wide)

    @property
    def elements(self) -> int:
        """Those of all blocks."""
        return self.down * self.high * self.across * self.wide if self.rows and self.columns else 0

    def transformed(self, flat: Array) -> Array:
        """Return the coefficients block by block."""
        if not self.elements:
            return flat[:0]
        whole = np.zeros((self.down * self.high, self.across * self.wide), np.float32)
        whole[: self.rows, : self.columns] = flat.reshape(self.rows, self.columns)
        blocks = whole.reshape(self.down, self.high, self.across, self.wide).transpose(0, 2, 1, 3)
        along = _product(blocks, dct_basis(self.wide).T)
        return _product(along.transpose(0, 1, 3, 2), dct_basis(self.high).T).reshape(-1)

    def inverted(self, coefficients: Array) -> Array:
        if not self.elements:
            return coefficients
        blocks = coefficients.reshape(self.down, self.across, self.wide, self.high)
        along = _product(_product(blocks, dct_basis(self.high)).transpose(0, 1, 3, 2), dct_basis(self.wide))
        whole = along.transpose(0, 2, 1, 3).reshape(self.down * self.high, self.across * self.wide)
        return whole[: self.rows, : self.columns].reshape(-1)


def _side(length: int) -> int:
    """Return the length of the fewest equal parts of at most `SIDE`."""
    return -(-length // max(1, -(-length // SIDE)))


def _product(blocks: Array, basis: Array) -> Array:
    """Multiply along the last axis, in the same order of additions on any machine."""
    side = blocks.shape[-1]
    factors = np.ascontiguousarray(blocks.reshape(-1, side).T)
    out = np.empty(blocks.shape, np.float32)
    kernels.outer(factors.reshape(-1), np.ascontiguousarray(basis).reshape(-1), out.reshape(-1), side, 0)
    return out


@cache
def dct_basis(side: int) -> Array:
    """Return the orthonormal DCT-II: a row for each frequency.

    Angles are reduced to half a quadrant as integers, so that all platforms' sines and cosines agree as floats."""
    frequency, place = np.ogrid[:side, :side]
    angle = frequency * (2 * place + 1) % (4 * side)  # in units of a quadrant / side
    angle = np.minimum(angle, 4 * side - angle)
    is_negative = angle > side
    angle = np.where(is_negative, 2 * side - angle, angle)
    unit = np.pi / (2 * side)
    waves = np.where(2 * angle > side, np.sin(unit * (side - angle)), np.cos(unit * angle))
    waves = np.where(is_negative, -waves, waves) * np.sqrt(2 / side)
    waves[0] = np.sqrt(1 / side)
    return np.asarray(waves, np.float32)
