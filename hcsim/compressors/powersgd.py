"""`powersgd:RANK`: a matrix as the product of two thin ones (Vogels, Karimireddy, Jaggi 2019).

The tensor is seen as a matrix M of its first dimension by the rest, m × n. With Q (n × r) from the last step:

    P = M Q, summed over all ranks;  P̂ = P made orthonormal;  Q' = Mᵀ P̂, summed;  the total is P̂ Q'ᵀ

Both maps are linear in M once Q and P̂ are shared, so factors are summed and the total is that of the sum of
all matrices: the mean of gradients is compressed, not each gradient. There is one power iteration for each
step. Since Q' is the next step's Q, the iterations accumulate. The first Q is drawn from the seed and the name,
the same on all ranks. A zero column of Q' (from a zero matrix, or one of lower rank) would stay zero and is
drawn again.

Cost: 4 m n r FLOPs and two passes over M to encode, half of that to decode; (m + n) r floats are sent. A tensor
that this does not make smaller, or that has fewer than two dimensions, is sent as it is.

Factors are stored and sent transposed, r × m and r × n, since long rows are quick to multiply with. Up to rank
8 the loops of this package are used, in 0.6 of BLAS's time at rank 4; above, BLAS is quicker. Each rank's own P
and Q' may be rounded in a platform-dependent way, since only their sums are used. Every rank computes P̂, the
total and the next Q from these sums, and all must get the same bits on any processor. So these are computed by
single additions, multiplications, divisions and square roots in an order that the shapes alone decide, without
BLAS, LAPACK or fused multiply-add.

A factor or a total that is too large for float32 is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from types import ModuleType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hcsim.compressors import kernels
from hcsim.compressors.base import (
    Array,
    ByteArray,
    CompressorStateDict,
    Ident,
    PayloadKind,
    ReductionRounds,
    TensorShape,
)
from hcsim.compressors.cast import exchange_dense
from hcsim.compressors.codec import BaseCompressor, CompressorMemory, Mix
from hcsim.compressors.draws import bits, uniform
from hcsim.compressors.encoding import (
    FLOAT_BYTES,
    HEADER_BYTES,
    Codec,
    check_decoded,
    check_input,
    is_finite,
    not_finite,
)
from hcsim.compressors.kernels import plain
from hcsim.errors import NotFinite

THIN = 8
"""The highest rank at which BLAS is slower than the loops of this package."""
LARGEST = 0.999 * float(np.finfo(np.float32).max)
"""Sums of products below this in exact arithmetic are finite in float32."""
DEPENDENT = 2.0**-46
"""A column depends on earlier ones if at most this fraction of its square is left: the magnitude of
float32's rounding."""
SIGNS: dict[Mix, int] = {None: 0, np.add: 1, np.subtract: -1}
"""The sign argument of `outer` for each way of combining."""


Doubles: TypeAlias = npt.NDArray[np.float64]


class PowerSGD(BaseCompressor):
    """A lower rank gives fewer bytes, and leaves more unsent."""

    codec = Codec.POWERSGD
    kind = PayloadKind.LINEAR

    def __init__(self, rank: int, seed: int, loops: ModuleType = kernels) -> None:
        """`loops` replaces this machine's loops for comparison: the total does not depend on them."""
        super().__init__(f"powersgd:{rank}")
        self.parameter = rank
        self._seed = seed
        self._loops = loops
        self._memory = CompressorMemory("shared/q/")

    def factors(self, shape: TensorShape) -> tuple[int, int, int] | None:
        """Return the rows, columns and rank of the factors for this shape; None where the tensor is sent as it is."""
        if len(shape) < 2 or 0 in shape:
            return None
        rows, columns = shape[0], prod(shape[1:])
        rank = min(self.parameter, rows, columns)
        return (rows, columns, rank) if (rows + columns) * rank < rows * columns else None

    def size_bytes(self, shape: TensorShape) -> int:
        return HEADER_BYTES + sum(self.round_bytes(shape))

    def round_bytes(self, shape: TensorShape) -> tuple[int, ...]:
        """Return one round per factor, or one round for the whole tensor."""
        if (factors := self.factors(shape)) is None:
            return (FLOAT_BYTES * prod(shape),)
        rows, columns, rank = factors
        return FLOAT_BYTES * rows * rank, FLOAT_BYTES * columns * rank

    def rounds(self, tensor: Array, of: Ident, total: Array | None = None) -> ReductionRounds:
        if (factors := self.factors(tensor.shape)) is None:
            yield from exchange_dense(tensor, total, of)
            return
        rows, columns, rank = factors
        matrix = tensor.reshape(rows, columns)
        p = self._first_factor(matrix, rank, of)
        p = _orthonormal((yield p.reshape(-1)).reshape(rank, rows), of)
        ours = np.empty((rank, columns), np.float32)
        self._quickest(rank).sums(p, matrix, ours, rank)
        if total is not None:
            _check_factor(ours, of)
            self._mix_product(matrix, p, ours, np.subtract, of)
        q = (yield ours.reshape(-1)).reshape(rank, columns)
        _check_factor(q, of)
        self._remember(q, of)
        self._mix_product(matrix if total is None else total.reshape(rows, columns), p, q, None, of)

    def _encode(self, flat: Array, shape: TensorShape, of: Ident) -> ByteArray:
        """Encode P̂ and Q' of this tensor alone, for a receiver that sums decoded tensors."""
        payload = self._payload(of.name, shape)
        values = payload[HEADER_BYTES:].view(np.float32)
        if (factors := self.factors(shape)) is None:
            if not kernels.copy(flat, values):
                raise not_finite(flat, of.name)
            return payload
        rows, columns, rank = factors
        matrix = flat.reshape(rows, columns)
        p = _orthonormal(self._first_factor(matrix, rank, of), of)
        values[: p.size] = p.reshape(-1)
        q = values[p.size :].reshape(rank, columns)
        self._quickest(rank).sums(p, matrix, q, rank)
        _check_factor(q, of)
        self._remember(q, of)
        return payload

    def _mix_body(self, body: ByteArray, flat: Array, shape: TensorShape, of: Ident, mix: Mix) -> None:
        values = body.view(np.float32)
        check_decoded(values, of.name)
        if (factors := self.factors(shape)) is None:
            np.copyto(flat, values) if mix is None else mix(flat, values, out=flat)
            return
        rows, columns, rank = factors
        p, q = values[: rows * rank].reshape(rank, rows), values[rows * rank :].reshape(rank, columns)
        self._mix_product(flat.reshape(rows, columns), p, q, mix, of)

    def _first_factor(self, matrix: Array, rank: int, of: Ident) -> Array:
        """Compute P. A NaN or an infinity of the matrix appears in its row of P, so the matrix is read only once."""
        p = np.empty((rank, matrix.shape[0]), np.float32)
        self._quickest(rank).dots(self._start(matrix.shape[1], rank, of), matrix, p, rank)
        if not is_finite(p.reshape(-1)):
            check_input(matrix.reshape(-1), of.name)
            raise _too_large(of)
        return p

    def _start(self, columns: int, rank: int, of: Ident) -> Array:
        """Return this step's Q: that of the last step, or an initial one."""
        kept = self._memory.kept(of.name, (rank, columns))
        return self._drawn((rank, columns), of.name, "first") if kept is None else kept

    def _drawn(self, shape: TensorShape, name: str, when: str | int) -> Array:
        draws = uniform(bits(self._seed, "powersgd", name, when), prod(shape))
        return (2 * draws - 1).astype(np.float32).reshape(shape)

    def _remember(self, q: Array, of: Ident) -> None:
        """Keep Q for the next step, each column scaled to 1 so that products do not overflow. The scale is lost in
        orthonormalisation anyway."""
        largest = np.abs(q).max(axis=1)
        remembered = self._memory.propose(of.name, q.shape, of.step)
        np.divide(q, np.where(largest > 0, largest, 1)[:, None], out=remembered)
        if not largest.all():
            remembered[largest == 0] = self._drawn(q.shape, of.name, of.step)[largest == 0]

    def commit(self, step: int) -> None:
        self._memory.commit(step)

    def abandon(self, step: int) -> None:
        self._memory.abandon(step)

    def state(self) -> CompressorStateDict:
        return self._memory.state()

    def restore(self, state: Mapping[str, npt.NDArray[np.generic]]) -> None:
        self._memory.restore(state)

    def _quickest(self, rank: int) -> ModuleType:
        """Return the quickest loops, for products that only this rank uses."""
        return plain if rank > THIN and self._loops is kernels else self._loops

    def _mix_product(self, out: Array, p: Array, q: Array, mix: Mix, of: Ident) -> None:
        """Put, add or subtract P Qᵀ."""
        rank = p.shape[0]
        if _bound(p, q) < LARGEST:
            self._loops.outer(p, q, out, rank, SIGNS[mix])
            return
        # Sums on the way may be too large where the product is not.
        product = np.zeros(out.shape, np.float64)
        for one, other in zip(p.astype(np.float64), q.astype(np.float64), strict=True):
            product += np.multiply.outer(one, other)
        if not np.abs(product).max() < LARGEST:
            raise NotFinite("the product of the factors is too large for float32", of.name)
        np.copyto(out, product, casting="same_kind") if mix is None else mix(out, product.astype(np.float32), out=out)


def _check_factor(factor: Array, of: Ident) -> None:
    if not is_finite(factor.reshape(-1)):
        raise _too_large(of)


def _too_large(of: Ident) -> NotFinite:
    return NotFinite("the sum of a factor is too large for float32", of.name)


def _bound(p: Array, q: Array) -> float:
    """Return an upper bound of the sums of products of their elements."""
    largest = np.abs(p).max(axis=1).astype(np.float64) * np.abs(q).max(axis=1)
    return float(_added(largest))


def _orthonormal(p: Array, of: Ident) -> Array:
    """Return orthonormal columns that span at least the given ones; dependent columns are replaced by others.

    It is the modified Gram-Schmidt process in float64. Its error is far below float32's, since no column is
    kept of which less is left than float32 has rounded."""
    _check_factor(p, of)
    largest = np.abs(p).max(axis=1, keepdims=True)
    columns = p.astype(np.float64) / np.where(largest > 0, largest, np.float32(1))
    squares = _added(columns * columns)
    for number, column in enumerate(columns):
        square = _added(column * column)
        if not square > DEPENDENT * squares[number]:
            column[:] = _axis_beside(columns[:number])
            square = _added(column * column)
        column /= np.sqrt(square)
        rest = columns[number + 1 :]
        rest -= _added(rest * column)[:, None] * column
    return columns.astype(np.float32)


def _axis_beside(columns: Doubles) -> Doubles:
    """Return the axis that is furthest from these orthonormal columns, less its projection on them. There must
    be fewer columns than rows."""
    axis = np.zeros(columns.shape[1])
    axis[int(np.argmin(_added((columns * columns).T)))] = 1
    for column in columns:
        axis -= _added(axis * column) * column
    return axis


def _added(x: Doubles) -> Doubles:
    """Sum over the last axis, one element after the other; `np.sum` may add in any order."""
    if x.shape[-1] == 0:
        return np.zeros(x.shape[:-1])
    return np.add.accumulate(x, axis=-1)[..., -1]
