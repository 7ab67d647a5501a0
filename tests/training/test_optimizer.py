"""Optimizers beside torch's own, on the same parameters and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hcsim.errors import UsageError
from hcsim.rng import generator
from hcsim.runtime.channel import Phantom
from hcsim.training.optimizer import CHUNK, AdamW, Optimizer, Sgd, clip, scaled_lr, warmup

LENGTH = CHUNK + 1000
PAIRS: list[tuple[Optimizer, Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
    (Sgd(0.1), torch.optim.SGD, {"lr": 0.1}),
    (Sgd(0.1, 0.9), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (Sgd(0.1, 0.9, nesterov=True), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (Sgd(0.1, 0.9, weight_decay=0.01), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    (AdamW(), torch.optim.AdamW, {}),
    (AdamW(0.01, 0.8, 0.95, 1e-6, 0.1), torch.optim.AdamW,
     {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}),
]  # fmt: skip
OPTIMIZERS = [ours for ours, _, _ in PAIRS]


def drawn(name: str, length: int = LENGTH) -> np.ndarray[Any, np.dtype[np.float32]]:
    return generator(0, name).standard_normal(length, np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(("ours", "theirs", "settings"), PAIRS, ids=repr)
def test_it_follows_gradients_as_torch_does(
    ours: Optimizer, theirs: Callable[..., torch.optim.Optimizer], settings: dict[str, Any]
) -> None:
    parameters = drawn("parameters")
    tensor = torch.from_numpy(parameters.copy()).requires_grad_()
    stepper, reference = ours.open(parameters), theirs([tensor], **settings)
    for step in range(12):
        lr = ours.lr * (1 + step)  # a schedule's
        gradients = drawn(f"gradients {step}")
        kept = gradients.copy()
        stepper.step(gradients, lr)
        assert np.array_equal(gradients, kept)
        tensor.grad = torch.from_numpy(gradients)
        reference.param_groups[0]["lr"] = lr
        reference.step()
        np.testing.assert_allclose(parameters, tensor.detach().numpy(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_without_a_schedule_it_uses_its_own_learning_rate(optimizer: Optimizer) -> None:
    plain, told = drawn("parameters", 50), drawn("parameters", 50)
    optimizer.open(plain).step(drawn("gradients", 50))
    optimizer.open(told).step(drawn("gradients", 50), optimizer.lr)
    assert np.array_equal(plain, told)
    assert not np.array_equal(plain, drawn("parameters", 50))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_what_is_restored_goes_on_bit_for_bit(optimizer: Optimizer) -> None:
    parameters = drawn("parameters", 300)
    stepper = optimizer.open(parameters)
    for step in range(3):
        stepper.step(drawn(f"{step}", 300))
    state, elsewhere = stepper.state(), parameters.copy()
    other = optimizer.open(elsewhere)
    other.restore(state)
    for step in range(3, 6):
        stepper.step(drawn(f"{step}", 300))
        other.step(drawn(f"{step}", 300))
        assert parameters.tobytes() == elsewhere.tobytes()


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_parts_stepped_apart_are_the_whole_stepped_at_once(optimizer: Optimizer) -> None:
    whole, parts = drawn("parameters"), drawn("parameters")
    at_once = optimizer.open(whole)
    apart = [(span, optimizer.open(parts[span])) for span in (slice(0, 777), slice(777, None))]
    for step in range(3):
        gradients = drawn(f"{step}")
        at_once.step(gradients)
        for span, stepper in apart:
            stepper.step(gradients[span])
    assert whole.tobytes() == parts.tobytes()


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_a_state_is_a_copy_and_another_models_is_refused(optimizer: Optimizer) -> None:
    stepper = optimizer.open(drawn("parameters", 10))
    before = stepper.state()
    kept = {name: array.copy() for name, array in before.items()}
    stepper.step(drawn("gradients", 10))
    assert all(np.array_equal(before[name], kept[name]) for name in kept)
    with pytest.raises(UsageError, match="nothing"):
        stepper.restore({})
    with pytest.raises(UsageError, match="these are not the gradients"):
        stepper.step(drawn("gradients", 9))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_phantoms_cost_the_same_and_change_nothing(optimizer: Optimizer) -> None:
    stepper = optimizer.open(Phantom(400))
    stepper.step(Phantom(400))
    assert stepper.state() == {}
    stepper.restore({})
    assert np.isnan(clip(Phantom(400), 1.0))
    assert optimizer.work(100).moved_bytes in (1200, 2000, 2800)
    assert optimizer.work(200).flops == 2 * optimizer.work(100).flops


@pytest.mark.parametrize("max_norm", [0.5, 10.0, 1e6])
def test_clipping_is_by_the_norm_of_all_gradients_as_in_torch(max_norm: float) -> None:
    gradients = drawn("gradients")
    tensors = [torch.zeros(len(part), requires_grad=True) for part in np.split(gradients, [100, 5000])]
    for tensor, part in zip(tensors, np.split(gradients, [100, 5000]), strict=True):
        tensor.grad = torch.from_numpy(part.copy())
    theirs = torch.nn.utils.clip_grad_norm_(tensors, max_norm)
    ours = clip(gradients, max_norm)
    assert ours == pytest.approx(float(theirs), rel=1e-5)
    clipped = np.concatenate([tensor.grad.numpy() for tensor in tensors if tensor.grad is not None])
    np.testing.assert_allclose(gradients, clipped, rtol=1e-5)


def test_gradients_of_nothing_stay_nothing() -> None:
    gradients = np.zeros(10, np.float32)
    assert clip(gradients, 1.0) == 0.0
    assert not gradients.any()


def test_the_learning_rate_rises_from_the_base_to_the_worlds_multiple() -> None:
    rates = [scaled_lr(0.1, 8, step, warmup_steps=7) for step in range(10)]
    assert rates == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.8, 0.8, 0.8])
    assert scaled_lr(0.1, 8, 0) == pytest.approx(0.8)
    assert scaled_lr(0.1, 1, 3, warmup_steps=100) == pytest.approx(0.1)
    assert [warmup(step, 4) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Sgd(-0.1), "lr = -0.1"),
        (lambda: Sgd(float("nan")), "lr = nan"),
        (lambda: Sgd(0.1, 1.0), "momentum = 1.0"),
        (lambda: Sgd(0.1, nesterov=True), "nesterov needs momentum"),
        (lambda: AdamW(beta2=1.5), "beta2 = 1.5"),
        (lambda: AdamW(eps=-1), "eps = -1"),
    ],
)
def test_settings_without_a_meaning_are_refused(make: Callable[[], Optimizer], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        make()
