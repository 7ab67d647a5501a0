"""What went wrong in other systems' compression, and does not here: one test each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from hcsim.compressors.base import Array, Ident, LinearCompressor, PayloadKind
from hcsim.compressors.registry import make, specs

EVERY = [
    "none", "topk:0.1", "blocktopk:0.1", "dcttopk:0.1", "randomk:0.1", "fp16", "bf16", "int8", "int8:block=64", "int4",
    "int2", "onebit", "powersgd:2", "zstd",
]  # fmt: skip


def gradient(step: int, rank: int = 0) -> Array:
    return np.random.default_rng([step, rank]).standard_normal((40, 50)).astype(np.float32)


def total_by_rounds(ranks: Sequence[LinearCompressor], inputs: Sequence[Array], of: Ident) -> Array:
    """The sum of all ranks' tensors as an all-reduce of their factors gives it."""
    totals = [tensor.copy() for tensor in inputs]
    rounds = [rank.rounds(total, of) for rank, total in zip(ranks, totals, strict=True)]
    factors = [next(each) for each in rounds]
    for size_bytes in ranks[0].round_bytes(inputs[0].shape):
        assert {factor.nbytes for factor in factors} == {size_bytes}
        summed = np.sum(factors, axis=0, dtype=np.float32)
        factors = []
        for each in rounds:
            try:
                factors.append(each.send(summed.copy()))
            except StopIteration:
                continue
    return totals[0]


@pytest.mark.parametrize("spec", EVERY)
def test_encoded_bytes_summed(spec):
    """Only a linear compressor offers something to sum, and that is floats whose sum decodes to the sum of inputs."""
    ranks = [make(spec, seed=1, rank=rank) for rank in range(3)]
    linear = ranks[0].kind is PayloadKind.LINEAR
    assert hasattr(ranks[0], "rounds") == linear
    if linear:
        inputs = [gradient(0, rank) for rank in range(3)]
        alone = make(spec, seed=1, rank=0)
        of_the_sum = total_by_rounds([alone], [np.sum(inputs, axis=0, dtype=np.float32)], Ident("w"))
        np.testing.assert_allclose(total_by_rounds(ranks, inputs, Ident("w")), of_the_sum, atol=2e-3)


def test_random_k_double_scale():
    """With feedback a gradient is delivered once, not n / k times over; without, once on average."""
    x = gradient(0)
    for spec, exactly in (("randomk:0.1+ef", True), ("randomk:0.1", False)):
        compressor = make(spec, seed=3, rank=0)
        delivered, out = np.zeros(x.shape), np.empty_like(x)
        for step in range(300):
            compressor.decode(compressor.encode(x, Ident("w", step)), out, Ident("w", step))
            compressor.commit(step)
            delivered += out
        if exactly:
            owed = compressor.state()["own/residual/w"]
            np.testing.assert_allclose(delivered + owed, 300.0 * x, rtol=1e-3, atol=1e-2)
        assert (delivered * x).sum() / (300.0 * x * x).sum() == pytest.approx(1, abs=0.06)


@pytest.mark.parametrize("spec", ["fp16", "bf16", "int8", "int8:block=64", "int8:stochastic", "onebit"])
def test_quantizer_no_residual(spec):
    """A quantiser's error is kept, and int8 does not shrink what it sends."""
    compressor = make(spec + "+ef", seed=1, rank=0)
    x, out = gradient(0), np.empty((40, 50), np.float32)
    compressor.decode(compressor.encode(x, Ident("w")), out, Ident("w"))
    compressor.commit(0)
    residual = compressor.state()["own/residual/w"]
    np.testing.assert_array_equal(residual, x - out)
    assert np.abs(residual).max() > 0
    if spec.startswith("int8"):
        assert (out * x).sum() / (x * x).sum() == pytest.approx(1, abs=1e-3)


def test_powersgd_stub():
    """PowerSGD sends thin factors: their bytes, and no more."""
    shape, rank = (200, 300), 2
    compressor = make(f"powersgd:{rank}", seed=1, rank=0)
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    rounds = compressor.rounds(x, Ident("w"))
    p = next(rounds)
    q = rounds.send(p.copy())
    assert p.nbytes + q.nbytes == sum(compressor.round_bytes(shape)) == 4 * rank * (200 + 300)
    assert p.nbytes + q.nbytes < x.nbytes / 50
    with pytest.raises(StopIteration):
        rounds.send(q.copy())
    assert np.linalg.matrix_rank(x) == rank


def test_every_compressor_is_here():
    names = {spec.partition(":")[0] for spec in EVERY}
    assert names == {spec.form.partition(":")[0].partition("[")[0] for spec in specs()[:-1]}
