"""The time that compressors take on this machine, against the size of the tensor.

Each is measured in its usual setting, on normally distributed float32 numbers in a square matrix, and as it runs in a
training step: once, after something else. A plugin's compressor that needs an argument is left out: nobody knows which.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import cache
from math import isqrt

import numpy as np
import numpy.typing as npt

from hcsim.compressors.base import Ident
from hcsim.compressors.registry import make, specs
from hcsim.config.machine import Basis, CodecCurve
from hcsim.twin.timing import Timing, timed_apart

KIB = 1024
SIZES = (256, 2 * KIB, *(16 * KIB * 4**power for power in range(7)))
"""256 bytes to 64 MiB."""
POINT_S = 0.03
"""For encoding, and for decoding, at each size."""
LONGEST_S = 0.2
"""A curve ends at the size at which one call takes so long; above that, time is in proportion."""
_USUAL = {
    "topk": ("topk:0.01",),
    "blocktopk": ("blocktopk:0.01",),
    "dcttopk": ("dcttopk:0.01",),
    "randomk": ("randomk:0.01",),
    "powersgd": ("powersgd:4",),
    "int8": ("int8", "int8:block=256", "int8:stochastic"),
}
_FLOAT_BYTES = 4


def usual_specs() -> tuple[str, ...]:
    """Return all registered compressors, in their usual settings."""
    found: list[str] = []
    for each in specs():
        name, colon, _ = each.form.partition(":")
        optional = "[" in name
        name = name.partition("[")[0]
        if name in _USUAL:
            found += _USUAL[name]
        elif not name.startswith("…") and (optional or not colon):
            found.append(name)
    return tuple(found)


def measure_codec(spec: str, basis: Callable[[float], Basis], sizes: Sequence[int] = SIZES) -> CodecCurve:
    """Measure one compressor. `basis` makes the provenance from the spread."""
    encode: list[tuple[float, float]] = []
    decode: list[tuple[float, float]] = []
    spreads: list[float] = []
    for size_bytes in sizes:
        encoded, decoded = _measure(spec, size_bytes)
        encode.append((float(size_bytes), encoded.seconds))
        decode.append((float(size_bytes), decoded.seconds))
        spreads += encoded.spread, decoded.spread
        if encoded.seconds > LONGEST_S:
            break
    return CodecCurve(spec, tuple(encode), tuple(decode), basis(statistics.median(spreads)))


@cache
def _tensor(elements: int) -> npt.NDArray[np.float32]:
    rows = 1 << (isqrt(elements).bit_length() - 1)
    tensor = np.random.default_rng(0).standard_normal((rows, elements // rows), np.float32)
    tensor.flags.writeable = False
    return tensor


def _measure(spec: str, size_bytes: int) -> tuple[Timing, Timing]:
    tensor = _tensor(size_bytes // _FLOAT_BYTES)
    out = np.empty_like(tensor)
    compressor = make(spec, seed=0, rank=0)
    step = 0

    def encode() -> object:
        nonlocal step
        step += 1
        payload = compressor.encode(tensor, Ident("tensor", step))
        compressor.commit(step)
        return payload

    encoded = timed_apart(encode, POINT_S)
    payload = compressor.encode(tensor, Ident("tensor", step + 1))
    return encoded, timed_apart(lambda: compressor.decode(payload, out, Ident("tensor", step + 1)), POINT_S)
