"""What went wrong when other systems trained over a network, and does not here: one test each."""

from __future__ import annotations

import numpy as np
import pytest

import hcsim
from hcsim.collectives.group import Group
from hcsim.compressors.base import ByteArray, Ident
from hcsim.compressors.registry import make
from hcsim.config import Training
from hcsim.errors import CompressionError, HcsimError
from hcsim.launch.virtual import simulate_training
from hcsim.runtime.frame import HEADER_BYTES
from hcsim.training.aggregation import OneLevel
from hcsim.training.data import Batches
from hcsim.training.layout import Layout
from hcsim.training.learner import TimeAccounting
from hcsim.training.task import Indices, Replica
from hcsim.training.tasks import task
from tests.training.clusters import Parameters, quiet_cluster

RANKS = 4
LAYOUT = Layout.of([[("weight", (64, 100))]])
BUCKET = LAYOUT.buckets(1 << 20)[0]


@pytest.mark.parametrize("spec", ["topk:0.01", "int8", "onebit", "fp16", "bf16", "zstd", "randomk:0.5", "powersgd:64"])
def test_encoded_bytes_summed(spec: str) -> None:
    """Every rank has the same tensor of small whole numbers in a few places, so each compressor's sum is known."""
    tensor = np.zeros((64, 100), np.float32)
    tensor.reshape(-1)[:: 100 if spec == "topk:0.01" else 1] = 2.0

    async def program(group: Group) -> tuple[float, float]:
        flat = tensor.reshape(-1).copy()
        await OneLevel(group, TimeAccounting(group.host), make(spec, seed=1, rank=group.rank)).total(
            flat, BUCKET, 1.0, 0
        )
        kept = flat[flat != 0]
        return float(kept.min()), float(kept.max())

    scale = 2.0 if spec == "randomk:0.5" else 1.0  # unbiased: half of the elements, twice as large
    for least, most in hcsim.simulate(quiet_cluster(RANKS), program).values():
        assert (least, most) == pytest.approx((scale * 2 * RANKS, scale * 2 * RANKS), rel=1e-3)


def test_claimed_not_sent() -> None:
    """What the compressor says it sends is what crosses the wire, byte by byte, headers included."""

    async def program(group: Group) -> list[int]:
        sent = []
        for spec in ("none", "topk:0.01", "int8", "onebit", "powersgd:2"):
            before = group.bytes_sent, group.wire_bytes
            flat = np.ones(LAYOUT.length, np.float32)
            aggregator = OneLevel(group, TimeAccounting(group.host), make(spec, seed=1, rank=group.rank), "ring")
            await aggregator.total(flat, BUCKET, 1.0, 0)
            sent.append(group.bytes_sent - before[0])
            frames, rest = divmod(group.wire_bytes - before[1] - sent[-1], HEADER_BYTES)
            assert frames > 0
            assert rest == 0
        return sent

    dense, topk, int8, onebit, powersgd = np.sum(hcsim.simulate(quiet_cluster(RANKS), program).values(), axis=0)
    elements, others = LAYOUT.length, RANKS - 1
    assert dense == 2 * others * 4 * elements
    assert topk == RANKS * others * make("topk:0.01", seed=1, rank=0).size_bytes((64, 100))
    part = make("int8", seed=1, rank=0).size_bytes((elements // RANKS,))
    assert int8 == 2 * RANKS * others * part < 0.27 * dense
    assert onebit < 0.05 * dense
    assert powersgd == 2 * others * 4 * 2 * (64 + 100)


def test_decode_failure_kept_local(monkeypatch: pytest.MonkeyPatch) -> None:
    """A payload that cannot be decoded ends the step on every rank; nobody goes on with its own gradient."""
    whole = type(make("topk:0.1", seed=1, rank=0)).encode

    def damaged(self: object, tensor: np.ndarray, of: Ident) -> ByteArray:
        payload = whole(self, tensor, of).copy()  # type: ignore[arg-type]
        if of.step == 3:
            payload[16:20] = 0xFF  # the first index
        return payload

    monkeypatch.setattr(type(make("topk:0.1", seed=1, rank=0)), "encode", damaged)
    settings = Training(task="convex", compressor="topk:0.1", steps=5)
    results = simulate_training(quiet_cluster(3), settings).results
    assert all(isinstance(result, HcsimError) for result in results)
    assert any(isinstance(result, CompressionError) and "weight" in str(result) for result in results)


def test_clip_before_average() -> None:
    """The first step, against both orders by hand: ours is the one that averages first."""
    ranks, limit, lr = 4, 0.5, 0.1
    convex = task("convex")
    batches = Batches.of(convex, (8,) * ranks, 1)
    gradients = [_gradient(convex.replica(seed=1), batches.batch(0, rank)) for rank in range(ranks)]
    mean = np.mean(gradients, axis=0)
    clipped_last = _clipped(mean, limit)
    clipped_first = np.mean([_clipped(gradient, limit) for gradient in gradients], axis=0)
    assert np.abs(clipped_first - clipped_last).max() > 1e-3, "the order matters here"

    seen = Parameters()
    settings = Training(task="convex", steps=1, batch=8, momentum=0.0, lr=lr, clip=limit)
    simulate_training(quiet_cluster(ranks), settings, observer=seen).values()
    start = convex.replica(seed=1).parameters
    assert not isinstance(start, hcsim.Phantom)
    np.testing.assert_allclose(seen.by_rank[0], start - lr * clipped_last, atol=1e-6)


def _gradient(replica: Replica, batch: Indices) -> np.ndarray:
    replica.forward(batch)
    for block in reversed(range(len(replica.layout.blocks))):
        replica.backward(block)
    assert not isinstance(replica.gradients, hcsim.Phantom)
    return replica.gradients.astype(np.float64)


def _clipped(gradient: np.ndarray, limit: float) -> np.ndarray:
    return gradient * min(1.0, limit / float(np.linalg.norm(gradient)))


def test_optimizer_stale_params() -> None:
    """The optimizer writes to the very parameters that the next forward pass reads, and that strategies replace."""
    for name in ("convex", "digits"):
        replica = task(name).replica(seed=1)
        batch = np.arange(8)
        before = replica.forward(batch)
        assert not isinstance(replica.parameters, hcsim.Phantom)
        replica.parameters[:] = 0.0
        assert replica.forward(batch) != before
        settings = Training(task=name, strategy="local_sgd:2", steps=4, batch=4, evaluate_every=1)
        losses = [
            point.score.loss
            for point in simulate_training(quiet_cluster(2), settings).values()[0].points
            if point.score
        ]
        assert len(dict.fromkeys(losses)) == 4
