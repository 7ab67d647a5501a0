"""Tensors of all sorts, all the loops there are, and ranks that take their rounds together."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from hcsim.compressors.base import Array, Ident, LinearCompressor
from hcsim.compressors.kernels import plain
from hcsim.selftest.machine import compiled_loops

COMPILED_LOOPS = compiled_loops()
LOOPS = [*COMPILED_LOOPS, plain]
quick = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], derandomize=True)

EXACT = ["none", "zstd", "zstd:3"]
SPARSE = ["topk:0.01", "topk:0.3", "topk:1", "blocktopk:0.1", "randomk:0.01", "randomk:0.3", "randomk:1"]
QUANTISED = [
    "fp16",
    "bf16",
    "int8",
    "int8:block=16",
    "int8:block=256,stochastic",
    "int8:stochastic",
    "int4",
    "int4:block=16,stochastic",
    "onebit",
]
COARSE = ["int2", "int2:block=16", "blocktopk:0.1,bits=2", "dcttopk:0.1", "dcttopk:0.3,bits=2"]
"""Encoding what they decode to may change it."""
LOW_RANK = ["powersgd:1", "powersgd:4"]
ALL = [*EXACT, *SPARSE, *QUANTISED, *COARSE, *LOW_RANK]
LINEAR = ["none", *SPARSE[4:], *LOW_RANK]

shapes = st.one_of(
    st.tuples(st.integers(0, 70)),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(0, 4), st.integers(1, 3)),
)
"""No dimension, one, or several; some without an element."""


@st.composite
def tensors(draw: st.DrawFn) -> Array:
    """Normal, constant, zero, with ties, subnormal, near the largest float, or of mixed magnitudes."""
    shape = draw(shapes)
    noise = np.random.default_rng(draw(st.integers(0, 2**32))).standard_normal(prod(shape)).astype(np.float32)
    sort = draw(st.sampled_from(["normal", "constant", "zero", "ties", "subnormal", "huge", "mixed"]))
    flat = {
        "normal": noise,
        "constant": np.full_like(noise, -0.37),
        "zero": np.zeros_like(noise),
        "ties": np.rint(noise),
        "subnormal": noise * np.float32(1e-41),
        "huge": np.clip(noise, -1, 1) * np.float32(3.4028234e38),
        "mixed": noise * np.float32(10.0) ** np.rint(6 * np.roll(noise, 1)).clip(-25, 25),
    }[sort]
    return flat.astype(np.float32).reshape(shape)


def exchanged(ranks: Sequence[LinearCompressor], inputs: Sequence[Array], of: Ident) -> list[Array]:
    """Drive all ranks' rounds in lockstep, summing factors in the order of ranks; each rank's total."""
    totals = [tensor.copy() for tensor in inputs]
    rounds = [rank.rounds(total, of) for rank, total in zip(ranks, totals, strict=True)]
    factors: list[Array] = [next(each) for each in rounds]
    while True:
        summed = np.sum(np.stack(factors), axis=0, dtype=np.float32)
        ended, factors = 0, []
        for each in rounds:
            try:
                factors.append(each.send(summed.copy()))
            except StopIteration:
                ended += 1
        if ended:
            assert ended == len(rounds)
            return totals
