"""`zstd`: lossless compression.

    payload: for each chunk of 2²⁰ elements the length of its frame (u32), then the zstd frames

The exponents of a gradient's elements are similar, while their last bits are noise. So the four bytes of the
elements are stored separately in each chunk: first all lowest bytes, last all bytes with sign and exponent. On
gradients of a transformer that gives a ratio of 1.65 at level 1, against 1.44 unsplit.

The size of a payload depends on the data; without data that ratio is assumed. The content size that a frame
claims is compared with the chunk's size before decompression, so a small payload cannot cause a large
allocation.
"""

from __future__ import annotations

import math
from itertools import pairwise
from math import prod

import numpy as np
import zstandard

from hcsim.compressors import kernels
from hcsim.compressors.base import Array, ByteArray, Ident, PayloadKind, TensorShape
from hcsim.compressors.codec import ChunkedCompressor, Unpack
from hcsim.compressors.encoding import (
    FLOAT_BYTES,
    HEADER_BYTES,
    Codec,
    decodes_badly,
    not_finite,
)
from hcsim.errors import CompressionError

USUAL_RATIO = 1.65
_LENGTH_BYTES = 4


class Lossless(ChunkedCompressor):
    """A higher level gives a few bytes fewer and is much slower. `ratio` is the expected ratio where there is
    no data."""

    codec = Codec.ZSTD
    kind = PayloadKind.QUANTISED
    sized = False
    chunk = 1 << 20

    def __init__(self, level: int | None = None, ratio: float = USUAL_RATIO) -> None:
        super().__init__("zstd" if level is None else f"zstd:{level}")
        self._level = 1 if level is None else level
        self._ratio = ratio
        self._planes = np.empty(FLOAT_BYTES * self.chunk, np.uint8)

    def size_bytes(self, shape: TensorShape) -> int:
        """Return an estimate."""
        return HEADER_BYTES + math.ceil(FLOAT_BYTES * prod(shape) / self._ratio)

    def most_bytes(self, shape: TensorShape) -> int:
        """Return zstd's size of incompressible data, which is a little larger than the input."""
        size_bytes, frames = FLOAT_BYTES * prod(shape), -(-prod(shape) // self.chunk)
        return HEADER_BYTES + size_bytes + size_bytes // 128 + (_LENGTH_BYTES + 512) * frames

    def _encode(self, flat: Array, shape: TensorShape, of: Ident) -> ByteArray:
        coder = zstandard.ZstdCompressor(level=self._level)
        starts = range(0, flat.size, self.chunk)
        end = HEADER_BYTES + _LENGTH_BYTES * len(starts)
        payload = self._room(of.name, self.most_bytes(shape))
        payload[:HEADER_BYTES] = np.frombuffer(self._header(flat.size), np.uint8)
        lengths = payload[HEADER_BYTES:end].view("<u4")
        for at, lo in enumerate(starts):
            frame = coder.compress(self._split(flat, lo, of))
            payload[end : end + len(frame)] = np.frombuffer(frame, np.uint8)
            lengths[at] = len(frame)
            end += len(frame)
        return payload[:end]

    def _room(self, name: str, size_bytes: int) -> ByteArray:
        """Return the reused buffer; its pages beyond a payload's end are never touched."""
        if name not in self._payloads or self._payloads[name].size < size_bytes:
            self._payloads[name] = np.empty(size_bytes, np.uint8)
        return self._payloads[name]

    def _split(self, flat: Array, lo: int, of: Ident) -> memoryview:
        chunk = flat[lo : lo + self.chunk]
        planes = self._planes[: chunk.nbytes]
        if not kernels.split(chunk, planes):
            raise not_finite(flat, of.name)
        return planes.data

    def _unpacker(self, body: ByteArray, elements: int, of: Ident) -> Unpack:
        frames = _frames(body, -(-elements // self.chunk), of)
        decoder = zstandard.ZstdDecompressor()

        def unpack(lo: int, into: Array) -> None:
            for at in range(0, into.size, self.chunk):
                piece = into[at : at + self.chunk]
                planes = _decompressed(decoder, frames[(lo + at) // self.chunk], piece.nbytes, of)
                if not kernels.join(planes, piece):
                    raise decodes_badly(of.name)

        return unpack


def _frames(body: ByteArray, count: int, of: Ident) -> list[memoryview]:
    start = _LENGTH_BYTES * count
    if body.size < start:
        raise CompressionError("the payload ends within its lengths", of.name)
    ends = start + np.cumsum(body[:start].view("<u4"), dtype=np.int64)
    expected = int(ends[-1]) if count else 0
    if body.size != expected:
        raise CompressionError(f"the payload has {body.size} bytes, but its lengths say {expected}", of.name)
    return [body[lo:hi].data for lo, hi in pairwise((start, *ends))]


def _decompressed(decoder: zstandard.ZstdDecompressor, frame: memoryview, size_bytes: int, of: Ident) -> ByteArray:
    try:
        claimed = zstandard.frame_content_size(frame)
        if claimed != size_bytes:
            raise CompressionError(f"the payload unpacks to {claimed} bytes, but {size_bytes} were expected", of.name)
        return np.frombuffer(decoder.decompress(frame, allow_extra_data=False), np.uint8)
    except zstandard.ZstdError as problem:
        raise CompressionError(f"the payload cannot be decompressed ({problem})", of.name) from problem
