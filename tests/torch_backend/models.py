"""Small models and data for training tests, the same on every rank, and what one process makes of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

STEPS = 20
BATCH = 12
"""Samples of a step on all ranks together: divisible by 2, 3 and 4."""
WIDTH = 12


class Net(nn.Module):
    """Layers of unlike sizes. The side branch is for who leaves parameters unused."""

    def __init__(self, *, side: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 36)
        self.second = nn.Linear(36, 24)
        self.side = nn.Linear(36, 24) if side else None
        self.last = nn.Linear(24, WIDTH)

    def forward(self, inputs: Tensor, *, aside: bool = False) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        through = self.side if aside and self.side is not None else self.second
        return self.last(torch.tanh(through(hidden)))


def made(*, side: bool = False) -> Net:
    """The model, as it is before the first step."""
    torch.manual_seed(1)
    return Net(side=side)


def batch(step: int, rank: int = 0, size: int = 1) -> tuple[Tensor, Tensor]:
    """A rank's share of a step's samples."""
    generator = torch.Generator().manual_seed(100 + step)
    inputs, targets = (torch.randn(BATCH, WIDTH, generator=generator) for _ in range(2))
    return inputs.chunk(size)[rank], targets.chunk(size)[rank]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, targets)


def weights_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def alone(shares: int = 1, *, side: bool = False, steps: int = STEPS) -> list[list[Tensor]]:
    """One process: the weights after each step. Gradients of the shares are summed in rank order, and divided."""
    model = made(side=side)
    optimizer = optimizer_of(model)
    history = []
    for step in range(steps):
        optimizer.zero_grad()
        gradients: list[list[Tensor]] = []
        for rank in range(shares):
            inputs, targets = batch(step, rank, shares)
            loss = loss_of(model(inputs, aside=side and step % 2 == 1), targets)
            gradients.append(list(torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)))
        for parameter, *parts in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = torch.stack(parts).sum(0) / shares
        optimizer.step()
        history.append(weights_of(model))
    return history


def compare(actual: list[list[Tensor]], expected: list[list[Tensor]], *, exact: bool) -> None:
    """Step by step: the same bits, or nearly so."""
    assert len(actual) == len(expected)
    for step, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            close = torch.equal(one, other) if exact else torch.allclose(one, other, rtol=1e-4, atol=1e-6)
            assert close, f"step {step}, parameter {number}: {(one - other).abs().max()} apart"
