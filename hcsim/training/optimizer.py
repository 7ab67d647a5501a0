"""Optimizers on flat arrays.

Optimizers work in place on flat arrays, or on any range of one, with numpy's elementwise arithmetic. That never
fuses a multiplication with an addition and does not depend on the number of threads. So replicas with the same
gradients keep the same bits, whatever their processors. The update rules are those of torch.optim, to within
rounding. For a phantom there is only the work.
"""

from __future__ import annotations

from math import sqrt
from typing import Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from hcsim.errors import UsageError
from hcsim.runtime.channel import Phantom
from hcsim.runtime.host import KernelGroup, Work
from hcsim.training.layout import FLOAT_BYTES
from hcsim.training.task import Flat

Array: TypeAlias = npt.NDArray[np.float32]
OptimizerStateDict: TypeAlias = dict[str, npt.NDArray[np.generic]]

CHUNK = 1 << 16
"""The elements of a temporary array, which stays in the cache."""


class Stepper(Protocol):
    """An optimizer bound to certain parameters."""

    def step(self, gradients: Flat, lr: float | None = None) -> None:
        """Change the parameters; `lr` replaces the configured learning rate in this call."""

    def state(self) -> OptimizerStateDict:
        """Return a copy of the state, for a checkpoint or a newcomer."""

    def restore(self, state: OptimizerStateDict) -> None: ...


class Optimizer(Protocol):
    """An optimizer's configuration."""

    @property
    def lr(self) -> float: ...

    def open(self, parameters: Flat) -> Stepper:
        """Bind it to these parameters, which it keeps and writes to."""

    def work(self, length: int) -> Work: ...


class Sgd(msgspec.Struct, frozen=True, tag="sgd", tag_field="kind"):
    """Stochastic gradient descent with torch's momentum: the learning rate is not part of the momentum."""

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_rates(lr=self.lr, weight_decay=self.weight_decay)
        _check_shares(momentum=self.momentum)
        if self.nesterov and not self.momentum:
            raise UsageError("nesterov needs momentum")

    def open(self, parameters: Flat) -> Stepper:
        return _Idle() if isinstance(parameters, Phantom) else _SgdStepper(self, parameters)

    def work(self, length: int) -> Work:
        """Parameters and momentum are read and written, gradients read."""
        flops, arrays = (4.0, 5.0) if self.momentum else (2.0, 3.0)
        return update_work(flops * length, arrays * FLOAT_BYTES * length)


class AdamW(msgspec.Struct, frozen=True, tag="adamw", tag_field="kind"):
    """Adam with decoupled weight decay (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101)."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        _check_rates(lr=self.lr, weight_decay=self.weight_decay, eps=self.eps)
        _check_shares(beta1=self.beta1, beta2=self.beta2)

    def open(self, parameters: Flat) -> Stepper:
        return _Idle() if isinstance(parameters, Phantom) else _AdamWStepper(self, parameters)

    def work(self, length: int) -> Work:
        """Parameters and both moments are read and written, gradients read."""
        return update_work(14.0 * length, 7.0 * FLOAT_BYTES * length)


def update_work(flops: float, moved_bytes: float) -> Work:
    """Return the work of an update in place."""
    return Work(flops, moved_bytes, groups=(KernelGroup("update", flops, moved_bytes),), estimated=True)


class _Idle:
    """A stepper on phantoms."""

    def step(self, gradients: Flat, lr: float | None = None) -> None:
        pass

    def state(self) -> OptimizerStateDict:
        return {}

    def restore(self, state: OptimizerStateDict) -> None:
        pass


class _SgdStepper:
    def __init__(self, rule: Sgd, parameters: Array) -> None:
        self._rule = rule
        self._parameters = parameters
        self._momentum = np.zeros_like(parameters) if rule.momentum else np.zeros(0, np.float32)

    def step(self, gradients: Flat, lr: float | None = None) -> None:
        for part, g in _chunks(self._parameters, gradients):
            p = self._parameters[part]
            if self._rule.weight_decay:
                g = g + np.float32(self._rule.weight_decay) * p
            if self._rule.momentum:
                # It starts at zero, so that the first step takes the gradient as it is.
                m = self._momentum[part]
                m *= np.float32(self._rule.momentum)
                m += g
                g = g + np.float32(self._rule.momentum) * m if self._rule.nesterov else m
            p -= np.float32(self._rule.lr if lr is None else lr) * g

    def state(self) -> OptimizerStateDict:
        return {"momentum": self._momentum.copy()}

    def restore(self, state: OptimizerStateDict) -> None:
        _refill(self._momentum, "momentum", state)


class _AdamWStepper:
    def __init__(self, rule: AdamW, parameters: Array) -> None:
        self._rule = rule
        self._parameters = parameters
        self._mean = np.zeros_like(parameters)
        self._square = np.zeros_like(parameters)
        self._steps = np.zeros(1, np.int64)

    def step(self, gradients: Flat, lr: float | None = None) -> None:
        rule, rate = self._rule, self._rule.lr if lr is None else lr
        self._steps += 1
        steps = int(self._steps[0])
        size = np.float32(rate / (1 - rule.beta1**steps))
        correction = np.float32((1 - rule.beta2**steps) ** 0.5)
        for part, g in _chunks(self._parameters, gradients):
            p, mean, square = self._parameters[part], self._mean[part], self._square[part]
            p *= np.float32(1 - rate * rule.weight_decay)
            mean += np.float32(1 - rule.beta1) * (g - mean)
            square *= np.float32(rule.beta2)
            square += np.float32(1 - rule.beta2) * (g * g)
            p -= size * (mean / (np.sqrt(square) / correction + np.float32(rule.eps)))

    def state(self) -> OptimizerStateDict:
        return {"mean": self._mean.copy(), "square": self._square.copy(), "steps": self._steps.copy()}

    def restore(self, state: OptimizerStateDict) -> None:
        for name, array in (("mean", self._mean), ("square", self._square), ("steps", self._steps)):
            _refill(array, name, state)


def clip(gradients: Flat, max_norm: float) -> float:
    """Scale the gradients so that their L2 norm is at most `max_norm`; return the norm before.

    Only for averaged gradients: clipping before the mean would change the mean."""
    if isinstance(gradients, Phantom):
        return float("nan")
    norm = sqrt(sum_of_squares(gradients))
    if (scale := clip_scale(norm, max_norm)) is not None:
        gradients *= scale
    return norm


def sum_of_squares(gradients: Array) -> float:
    """Return the sum of the squares. Partial sums are in a fixed order and in double precision: every rank gets the
    same bits."""
    chunks = (gradients[at : at + CHUNK].astype(np.float64) for at in range(0, len(gradients), CHUNK))
    return sum(float(np.sum(chunk * chunk)) for chunk in chunks)


def clip_scale(norm: float, max_norm: float) -> np.float32 | None:
    """Return by what gradients are multiplied whose norm is `norm`, or parts of them; None if they are left as they
    are."""
    scale = max_norm / (norm + 1e-6)  # the addend is torch's, against a division by zero
    return np.float32(scale) if scale < 1 else None


def scaled_lr(base: float, world: int, step: int, warmup_steps: int = 0) -> float:
    """Return the learning rate for a global batch `world` times as large, reached by a linear warm-up.

    The linear scaling rule, with a warm-up from the base rate (Goyal et al., https://arxiv.org/abs/1706.02677)."""
    return base * (1 + (world - 1) * warmup(step, warmup_steps))


def warmup(step: int, warmup_steps: int) -> float:
    """Return the warm-up factor of a step, counted from 0: it rises linearly to 1 and stays there."""
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0


def _chunks(parameters: Array, gradients: Flat) -> list[tuple[slice, Array]]:
    if isinstance(gradients, Phantom) or len(gradients) != len(parameters):
        raise UsageError(f"these are not the gradients of {len(parameters)} parameters: {gradients!r}")
    return [(part := slice(at, at + CHUNK), gradients[part]) for at in range(0, len(parameters), CHUNK)]


def _refill(array: npt.NDArray[np.generic], name: str, state: OptimizerStateDict) -> None:
    if name not in state or state[name].shape != array.shape:
        there = state[name].shape if name in state else "nothing"
        raise UsageError(f"the optimizer's state is of other parameters: {name} is {there}, not {array.shape}")
    array[...] = state[name]


def _check_rates(**rates: float) -> None:
    for name, rate in rates.items():
        if not 0 <= rate < float("inf"):
            raise UsageError(f"{name} = {rate} cannot be used: expected a number from 0 upwards")


def _check_shares(**shares: float) -> None:
    for name, share in shares.items():
        if not 0 <= share < 1:
            raise UsageError(f"{name} = {share} cannot be used: expected a number from 0 to less than 1")
