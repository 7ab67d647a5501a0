"""Training of MLX models on several ranks: averaged and compressed gradients, local SGD and DiLoCo."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

import hcsim.mlx as dist
from hcsim.errors import UsageError
from hcsim.training.optimizer import Sgd
from tests.mlx_programs.conftest import InWorld, OnRanks, alike

MODEL = """
    import mlx.optimizers as optimizers

    mx.random.seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    draws = np.random.default_rng(0)
    inputs = mx.array(draws.standard_normal((5, 24, 6)).astype(np.float32))
    targets = mx.array(draws.standard_normal((5, 24, 3)).astype(np.float32))
    loss_and_gradients = nn.value_and_grad(model, lambda x, y: nn.losses.mse_loss(model(x), y))
    rank, size = dist.init().rank(), dist.init().size()

    def ours(batch):
        return batch[rank * 24 // size : (rank + 1) * 24 // size]

    def parameters():
        return [np.array(each).ravel().tolist() for _, each in tree_flatten(model.parameters())]
"""
SYNCHRONOUS = (
    MODEL
    + """
    optimizer = optimizers.SGD(0.1, momentum=0.9)
    for x, y in zip(inputs, targets):
        _, gradients = loss_and_gradients(ours(x), ours(y))
        optimizer.update(model, dist.average_gradients(gradients))
    tell(parameters())
"""
)


def test_ranks_learn_what_one_process_learns_from_the_joined_batch(in_world: InWorld) -> None:
    """The sums of 24 and of 3 × 8 samples differ in the order of additions."""
    (alone,) = in_world(1, SYNCHRONOUS)
    together = in_world(3, SYNCHRONOUS)
    assert alike(together)
    for ours, theirs in zip(alone, together[0], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


PERIODIC = (
    MODEL
    + """
    optimizer = optimizers.AdamW(0.01)
    mx.random.seed(rank)
    model.update(tree_map(lambda each: mx.random.normal(each.shape), model.parameters()))  # rank 0's are taken
    outer = dist.DiLoCo(model, every=2, compressor="topk:0.3+ef")
    for x, y in zip(inputs, targets):
        _, gradients = loss_and_gradients(ours(x), ours(y))
        optimizer.update(model, gradients)
        outer.step(len(ours(x)))
    outer.exchange()
    tell(parameters())
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("training", [SYNCHRONOUS, PERIODIC], ids=["average_gradients", "diloco"])
def test_both_worlds_end_with_the_same_parameters(on_ranks: OnRanks, simulated: OnRanks, training: str) -> None:
    assert alike([rank.value for run in (on_ranks, simulated) for rank in run(3, training)])


LOCAL = (
    MODEL
    + """
    optimizer = optimizers.SGD(0.1)
    outer = dist.local_sgd(model, every=2)
    talked = []
    for x, y in zip(inputs[:2], targets[:2]):
        _, gradients = loss_and_gradients(ours(x), ours(y))
        optimizer.update(model, gradients)
        before = parameters()
        talked.append(outer.step(1 + rank))
    tell([talked, before, parameters()])
"""
)


def test_local_sgd_averages_the_parameters_by_samples(in_world: InWorld) -> None:
    ranks = in_world(3, LOCAL)
    for talked, _, after in ranks:
        assert talked == [False, True]
        for number, tensor in enumerate(after):
            mean = sum((rank + 1) / 6 * np.array(before[number]) for rank, (_, before, _) in enumerate(ranks))
            np.testing.assert_allclose(tensor, mean, rtol=0, atol=1e-6)


COMPRESSED = """
    group = dist.init()
    draws = np.random.default_rng(group.rank())
    gradients = {
        "layers": [{"weight": mx.array(draws.standard_normal((40, 30)).astype(np.float32))} for _ in range(3)],
        "bias": mx.array(draws.standard_normal(7).astype(np.float32)),
        "half": mx.array(draws.standard_normal(50).astype(np.float32)).astype(mx.bfloat16),
    }
    exact = dist.average_gradients(gradients)
    def flat(tree):
        return np.concatenate([np.array(each.astype(mx.float32)).ravel() for _, each in tree_flatten(tree)])

    found = {}
    for spec in ("bf16", "int8", "topk:0.1+ef", "powersgd:2+ef"):
        compression = dist.GradientCompression(spec, name=spec)
        total, steps = np.zeros_like(flat(exact)), 40
        for step in range(steps):
            total += flat(dist.average_gradients(gradients, compressor=compression))
        error = np.linalg.norm(total / steps - flat(exact)) / np.linalg.norm(flat(exact))
        state = compression.state_dict()
        further = flat(dist.average_gradients(gradients, compressor=compression))
        compression.load_state_dict(state)
        again = flat(dist.average_gradients(gradients, compressor=compression))
        found[spec] = [float(error), bool(np.array_equal(further, again)), total.tobytes().hex()]
    plain = flat(dist.average_gradients(gradients, compressor="int8"))
    found["plain int8"] = [float(np.linalg.norm(plain - flat(exact)) / np.linalg.norm(flat(exact))), True, ""]
    assert [each.dtype for _, each in tree_flatten(exact)] == [each.dtype for _, each in tree_flatten(gradients)]
    numbered = dist.average_gradients({"0": (mx.ones(2), mx.ones(3)), "1": [mx.zeros(1)]})
    assert [*numbered] == ["0", "1"] and isinstance(numbered["0"], tuple)
    tell(found)
"""


@pytest.mark.slow
def test_what_is_not_sent_is_sent_later(in_world: InWorld) -> None:
    """Of constant gradients, error feedback loses in the mean over the steps only what the last steps still owe: topk
    would lose 0.7 of them without it, and powersgd 0.9."""
    ranks = in_world(3, COMPRESSED)
    assert alike(ranks)
    for spec, (error, resumes, _) in ranks[0].items():
        assert resumes
        assert error < {"topk:0.1+ef": 0.2, "powersgd:2+ef": 0.25}.get(spec, 0.02), spec


LORA = """
    class Adapted(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.linear = nn.Linear(width, width)
            self.linear.freeze()
            self.down = mx.random.normal((width, 4)) * 0.1
            self.up = mx.zeros((4, width))

        def __call__(self, x):
            return self.linear(x) + (x @ self.down) @ self.up

    mx.random.seed(0)
    model = nn.Sequential(*[Adapted(16) for _ in range(12)])
    rank = dist.init().rank()
    x = mx.random.normal((8, 16))[4 * rank : 4 * rank + 4]
    _, gradients = nn.value_and_grad(model, lambda x: model(x).square().mean())(x)
    for _ in range(3):
        averages = dist.average_gradients(gradients)
    tell([name for name, _ in tree_flatten(averages)])
"""


def test_the_adapters_of_a_lora_travel_together(simulated: OnRanks) -> None:
    for rank in simulated(2, LORA):
        assert len(rank.value) == 2 * 12
        assert not any("linear" in name for name in rank.value)
        assert rank.calls == 3


def model_of_one() -> nn.Module:
    model = nn.Linear(2, 1)
    model.weight, model.bias = mx.array([[1.0, 2.0]]), mx.array([3.0])
    return model


def test_a_model_alone_takes_the_outer_optimizers_steps() -> None:
    model = model_of_one()
    outer = dist.DiLoCo(model, every=2, outer=Sgd(lr=0.5), compressor="topk:0.1+ef")
    for _ in range(2):
        model.weight = model.weight + 1.0
        outer.step()
    assert model.weight.tolist() == [[2.0, 3.0]]
    assert outer.steps == 0


def test_diloco_goes_on_from_its_saved_state() -> None:
    def trained(resume_at: int | None) -> list[float]:
        model = model_of_one()
        outer = dist.DiLoCo(model, every=2)
        for step in range(5):
            if step == resume_at:
                state, weight = outer.state_dict(), model.weight
                model = model_of_one()
                outer = dist.DiLoCo(model, every=2)
                outer.load_state_dict(state)
                model.weight, model.bias = weight, model.bias
            model.weight = model.weight * 0.9
            outer.step()
        found: list[float] = model.weight.tolist()
        return found

    assert trained(3) == trained(None)


def test_half_precision_stays_so() -> None:
    model = model_of_one()
    model.set_dtype(mx.bfloat16)
    outer = dist.local_sgd(model, every=1)
    model.weight = model.weight + 1
    outer.step()
    assert model.weight.dtype == mx.bfloat16
    assert model.weight.tolist() == [[2.0, 3.0]]


def test_what_makes_no_sense_is_refused() -> None:
    gradients = {"w": mx.ones(3)}
    with pytest.raises(UsageError, match=r"make an hcsim\.mlx\.GradientCompression"):
        dist.average_gradients(gradients, compressor="topk:0.1+ef")
    with pytest.raises(UsageError, match="every 1, 2"):
        dist.DiLoCo(model_of_one(), every=0)
    frozen = model_of_one()
    frozen.freeze()
    with pytest.raises(UsageError, match="no trainable parameters"):
        dist.DiLoCo(frozen, every=2)
    assert tree_flatten(dist.average_gradients(gradients))[0][1].tolist() == [1.0, 1.0, 1.0]
