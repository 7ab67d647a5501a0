"""The inner loops of the compressors with numpy and torch: the reference, and the fallback without a compiler.

`loops.h` and `choice.h` implement the same in C, in one pass each and to the same bits, as does `outer` of
`products.h`. Only its `dots` and `sums` add in another order than BLAS. Arrays are processed in pieces, so that
a piece is converted and checked while it is in the cache. Arrays are flat and contiguous, and their sizes
match. Where a function returns that not all values were finite, its output is undefined.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "choose",
    "choose_few",
    "copy",
    "dequantise",
    "dots",
    "from_bf16",
    "from_fp16",
    "join",
    "largest",
    "marked",
    "outer",
    "pack_signs",
    "quantise",
    "quantise_at_random",
    "reaching",
    "scatter",
    "split",
    "sums",
    "take_listed",
    "take_marked",
    "to_bf16",
    "to_fp16",
    "unpack_signs",
]

Array = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.uint16]
Multiples = npt.NDArray[np.int8]
Bits = npt.NDArray[np.uint32]
Words = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]

PIECE = 1 << 16
ROWS_BYTES = 1 << 20
"""How many bytes of a product are computed at a time where it is added to an array."""
FLOAT_BYTES = 4
WORD_BITS = 64
FEW_BITS, FEW_MOST = 16, 1 << 26
"""The bits of a number within a block of a list, and the upper bound of the numbers."""
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_SIGN = 0x8000
_GRAIN = np.float32(2.0**-16)


def copy(x: Array, out: Array, /) -> bool:
    """Copy; return whether x is finite."""
    for lo, hi in _pieces(x.size):
        if not np.isfinite(x[lo:hi]).all():
            return False
        out[lo:hi] = x[lo:hi]
    return True


def to_bf16(x: Array, out: Halves, /) -> bool:
    """Round to the nearest, ties to even; return whether all results are finite."""
    _convert(x, "float32", out, "bfloat16")
    return _are_finite(out, 0x7F80)


def from_bf16(x: Halves, out: Array, /) -> bool:
    """Convert to float32; return whether all are finite."""
    _convert(x, "bfloat16", out, "float32")
    return _are_finite(x, 0x7F80)


def to_fp16(x: Array, out: Halves, /) -> bool:
    """Round to the nearest, ties to even; return whether all results are finite."""
    _convert(x, "float32", out, "float16")
    return _are_finite(out, 0x7C00)


def from_fp16(x: Halves, out: Array, /) -> bool:
    """Convert to float32; return whether all are finite."""
    _convert(x, "float16", out, "float32")
    return _are_finite(x, 0x7C00)


def split(x: Array, out: Bytes, /) -> bool:
    """Write all lowest bytes, then the next ones, and finally those with sign and exponent. Return whether x is
    finite."""
    np.copyto(out.reshape(FLOAT_BYTES, x.size), x.view(np.uint8).reshape(x.size, FLOAT_BYTES).T)
    return _is_finite(x)


def join(x: Bytes, out: Array, /) -> bool:
    """Invert `split`; return whether the floats are finite."""
    np.copyto(out.view(np.uint8).reshape(out.size, FLOAT_BYTES), x.reshape(FLOAT_BYTES, out.size).T)
    return _is_finite(out)


def largest(x: Array, out: Array, block: int, /) -> None:
    """Compute the largest magnitude of each block; a NaN counts as the largest."""
    if block > PIECE:
        for at in range(out.size):
            some = x[at * block : (at + 1) * block]
            out[at] = np.max([_largest(some[lo:hi]) for lo, hi in _pieces(some.size)])
        return
    for lo, hi in _pieces(x.size):
        first, whole = lo // block, (hi - lo) // block
        end = lo + whole * block
        np.abs(x[lo:end]).reshape(whole, block).max(axis=1, out=out[first : first + whole])
        if end < hi:
            out[first + whole] = _largest(x[end:hi])


def quantise(x: Array, inverses: Array, out: Multiples, block: int, /) -> None:
    """Multiply by the block's factor, rounded to the nearest, ties to even."""
    for lo, hi in _pieces(x.size):
        quotient = _scaled(np.multiply, x[lo:hi], inverses[lo // block :], block)
        np.copyto(out[lo:hi], np.rint(quotient, out=quotient), casting="unsafe")


def dequantise(x: Multiples, scales: Array, out: Array, block: int, /) -> None:
    for lo, hi in _pieces(x.size):
        out[lo:hi] = _scaled(np.multiply, x[lo:hi].astype(np.float32), scales[lo // block :], block)


def quantise_at_random(x: Array, scales: Array, draws: Halves, out: Multiples, block: int, /) -> None:
    """Divide by the block's scale, up to 127; round up where the draw plus the fraction exceeds one."""
    for lo, hi in _pieces(x.size):
        quotient = _scaled(np.divide, x[lo:hi], scales[lo // block :], block)
        np.clip(quotient, -127, 127, out=quotient)
        quotient += np.multiply(draws[lo:hi], _GRAIN, dtype=np.float32)
        quotient += _GRAIN / 2
        np.copyto(out[lo:hi], np.floor(quotient, out=quotient), casting="unsafe")


def pack_signs(x: Array, out: Bytes, /) -> float:
    """Write a bit for each element, the lowest of a byte first, 1 where it is negative. Return the sum of
    magnitudes in float32."""
    out[:] = np.packbits(x < 0, bitorder="little")
    with np.errstate(all="ignore"):
        return float(np.abs(x).sum())  # not by BLAS, whose sum depends on its number of threads


def unpack_signs(x: Bytes, table: Array, out: Array, /) -> None:
    """Write the table's eight elements for each byte; for the last byte, as many as `out` has room for."""
    whole = out.size // 8
    # With "clip" numpy writes to `out` itself; no byte is out of range.
    np.take(table, x[:whole], 0, out[: 8 * whole].reshape(whole, 8), "clip")
    if out.size % 8:
        out[8 * whole :] = table[x[whole], : out.size % 8]


def reaching(x: Array, least: int, indices: Bits, bits: Bits, /) -> int:
    """Return how many magnitudes have at least these bits. Write the indices and bits of the first of them, as
    far as there is room."""
    found = 0
    for lo, hi in _pieces(x.size):
        piece = x[lo:hi].view(np.uint32)
        places = np.flatnonzero((piece & _MAGNITUDE) >= np.uint32(least))
        room = places[: max(0, indices.size - found)]
        indices[found : found + room.size] = room + lo
        bits[found : found + room.size] = piece[room]
        found += places.size
    return found


def scatter(indices: Places, values: Array, out: Array, /) -> None:
    """Write the values at their ascending indices, and zeros everywhere else."""
    out.fill(0)
    out[indices] = values


def choose(stream: Words, count: int, population: int, seen: Words, room: Bits, /) -> None:
    """Set the bits of `count` distinct numbers below `population`, and no others.

    It draws as many as are missing until none is. `stream` is the state of an SFC64, which is advanced.
    `room` is scratch memory, a little more than `count`; its contents are undefined, and less is slower."""
    seen.fill(0)
    source = np.random.SFC64(0)
    source.state = {**source.state, "state": {"state": stream}}
    while count:
        places = (source.random_raw(count) >> np.uint64(11)) * 2.0**-53 * population
        # 32-bit numbers are sorted in less than half the time.
        drawn = np.sort(places.astype(np.uint32 if population < 1 << 32 else np.uint64)).astype(np.uint64)
        count -= _mark(drawn, seen)
    stream[:] = source.state["state"]["state"]


def marked(seen: Words, out: Places, /) -> None:
    """Write the indices of the set bits in ascending order, as many as `out` holds."""
    words = np.flatnonzero(seen)
    places = np.flatnonzero(np.unpackbits(seen[words].view(np.uint8), bitorder="little"))
    out[:] = words[places // WORD_BITS] * WORD_BITS + places % WORD_BITS


def take_marked(x: Array, seen: Words, factor: float, out: Array, /) -> float:
    """Take the elements whose bits are set, times the factor. Return their largest magnitude; NaN if not all of
    x is finite."""
    places = np.empty(out.size, np.int64)
    marked(seen, places)
    with np.errstate(all="ignore"):
        np.multiply(x.take(places), np.float32(factor), out=out)
    return float(np.abs(out).max(initial=0)) if _is_finite(x) else np.nan


def choose_few(stream: Words, count: int, population: int, room: Bits, /) -> bool:
    """List `count` distinct numbers below `population`, at most 2²⁶, at the beginning of `room`; drawn as by
    `choose`.

    Numbers are grouped by multiples of 2¹⁶ in ascending order, within a group in the order of their first
    draws. A compiled loop may run out of room and return False; the contents of `stream` and `room` are then
    undefined."""
    if not 0 <= count <= min(population, room.size) or population > FEW_MOST:
        raise ValueError("the arrays' sizes do not fit each other")
    source = np.random.SFC64(0)
    source.state = {**source.state, "state": {"state": stream}}
    drawn = np.empty(0, np.uint64)
    while drawn.size < count:
        more = (source.random_raw(count - drawn.size) >> np.uint64(11)) * 2.0**-53 * population
        drawn = np.concatenate([drawn, more.astype(np.uint64)])
        _, first = np.unique(drawn, return_index=True)
        drawn = drawn[np.sort(first)]
    room[:count] = drawn[np.argsort(drawn >> np.uint64(FEW_BITS), kind="stable")]
    stream[:] = source.state["state"]["state"]
    return True


def take_listed(x: Array, places: Bits, factor: float, out: Array, /) -> float:
    """Take the elements at these indices times the factor, and return their largest magnitude. No others are
    read."""
    if places.size != out.size or (places.size and int(places.max()) >= x.size):
        raise ValueError("the arrays' sizes do not fit each other")
    with np.errstate(all="ignore"):
        np.multiply(x.take(places), np.float32(factor), out=out)
    return float(np.abs(out).max(initial=0))


def dots(thin: Array, matrix: Array, out: Array, rank: int, /) -> None:
    """Compute T Mᵀ, where T has `rank` rows. A NaN or an infinity is in all sums of its row."""
    columns, rows = thin.size // rank, out.size // rank
    with np.errstate(over="ignore", invalid="ignore"):
        np.matmul(thin.reshape(rank, columns), matrix.reshape(rows, columns).T, out=out.reshape(rank, rows))


def sums(thin: Array, matrix: Array, out: Array, rank: int, /) -> None:
    """Compute T M, where T has `rank` rows: weighted sums of the matrix's rows."""
    rows, columns = thin.size // rank, out.size // rank
    with np.errstate(over="ignore", invalid="ignore"):
        np.matmul(thin.reshape(rank, rows), matrix.reshape(rows, columns), out=out.reshape(rank, columns))


def outer(left: Array, right: Array, out: Array, rank: int, sign: int, /) -> None:
    """Compute Lᵀ R, where both have `rank` rows: stored in `out` if the sign is 0, otherwise added (1) or
    subtracted (-1).

    Products are rounded and then added one after the other, as in C, since all ranks must compute the same
    bits."""
    rows, columns = left.size // rank, right.size // rank
    p, q, there = left.reshape(rank, rows), right.reshape(rank, columns), out.reshape(rows, columns)
    step = max(1, ROWS_BYTES // (FLOAT_BYTES * max(1, columns)))
    with np.errstate(over="ignore", invalid="ignore"):
        for row in range(0, rows, step):
            some = there[row : row + step]
            if sign == 0:
                some.fill(0)
            for one, other in zip(p[:, row : row + step], q, strict=True):
                (np.subtract if sign < 0 else np.add)(some, np.multiply.outer(one, other), out=some)


def _mark(drawn: Words, seen: Words) -> int:
    """Set the bits of these ascending numbers; return how many were not set before."""
    words, bits = drawn >> np.uint64(6), np.uint64(1) << (drawn & np.uint64(WORD_BITS - 1))
    fresh = (seen[words] & bits) == 0
    fresh[1:] &= drawn[1:] != drawn[:-1]
    np.bitwise_or.at(seen, words[fresh], bits[fresh])
    return int(np.count_nonzero(fresh))


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    """Yield ranges that fit the cache. They do not split blocks, except where one block is the whole array."""
    return ((lo, min(size, lo + PIECE)) for lo in range(0, size, PIECE))


def _scaled(operation: np.ufunc, piece: Array, factors: Array, block: int) -> Array:
    out = np.empty_like(piece)
    if block >= piece.size:
        operation(piece, factors[0], out=out)
        return out
    whole = piece.size // block
    end = whole * block
    operation(piece[:end].reshape(whole, block), factors[:whole, None], out=out[:end].reshape(whole, block))
    if end < piece.size:
        operation(piece[end:], factors[whole], out=out[end:])
    return out


def _largest(x: Array) -> np.float32:
    return np.maximum(x.max(), -x.min())  # type: ignore[no-any-return]


def _is_finite(x: Array) -> bool:
    """Return whether all are finite, with numpy's own loops. BLAS is quicker alone, and a hundred times slower
    where other work keeps the cores busy."""
    return all(bool(np.isfinite(x[lo:hi]).all()) for lo, hi in _pieces(x.size))


def _are_finite(halves: Halves, infinity: int) -> bool:
    """Return whether all are finite, from their bits: positive infinities and NaNs are the largest signed
    numbers, negative ones the largest unsigned numbers."""
    largest, most_negative = halves.view(np.int16).max(initial=0), halves.max(initial=0)
    return bool(largest < infinity and most_negative < _SIGN + infinity)


def _convert(x: npt.NDArray[Any], as_dtype: str, out: npt.NDArray[Any], to_dtype: str) -> None:
    """Convert with torch, which runs at memory speed where numpy takes ten times as long."""
    import torch

    # torch warns of memory that it may not write to, even where it only reads.
    source = torch.from_numpy(x if x.flags.writeable else x.copy()).view(getattr(torch, as_dtype))
    torch.from_numpy(out).view(getattr(torch, to_dtype)).copy_(source)
