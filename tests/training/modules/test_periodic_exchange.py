"""Local SGD and DiLoCo move every rank as a plain emulation of all ranks in one process moves it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from hcsim.training.modules.periodic import DiLoCo, local_sgd
from tests.torch_backend.ranks import Ranks

EVERY = 3
INNER = 0.05


def model(rank: int) -> nn.Linear:
    torch.manual_seed(rank)
    return nn.Linear(4, 2).double()


def flat(module: nn.Module) -> NDArray[np.float64]:
    return np.concatenate([parameter.detach().numpy().reshape(-1) for parameter in module.parameters()])


def goal(rank: int, step: int) -> NDArray[np.float64]:
    """Where a rank's data pull the parameters at a step."""
    return np.random.default_rng(100 * rank + step).normal(size=10)


def samples(rank: int, step: int) -> int:
    """The second rank has nothing in the first period."""
    return 0 if rank == 1 and step < EVERY else 1 + rank + step % 2


def emulated(world: int, steps: int, outer_lr: float, momentum: float) -> list[list[NDArray[np.float64]]]:
    """By rank: the parameters after each step."""
    anchor = flat(model(0))
    ours = [anchor.copy() for _ in range(world)]
    speed = np.zeros_like(anchor)
    seen = [0] * world
    history: list[list[NDArray[np.float64]]] = [[] for _ in range(world)]
    for step in range(steps):
        for rank in range(world):
            ours[rank] = ours[rank] - INNER * (ours[rank] - goal(rank, step))
            seen[rank] += samples(rank, step)
        if step % EVERY == EVERY - 1:
            went = sum(seen[rank] * (anchor - ours[rank]) for rank in range(world)) / sum(seen)
            speed = momentum * speed + went
            anchor = anchor - outer_lr * (went + momentum * speed)
            ours = [anchor.copy() for _ in range(world)]
            seen = [0] * world
        for rank in range(world):
            history[rank].append(ours[rank].copy())
    return history


def inner_step(module: nn.Module, rank: int, step: int) -> None:
    with torch.no_grad():
        pulled = torch.from_numpy(flat(module) - INNER * (flat(module) - goal(rank, step)))
        at = 0
        for parameter in module.parameters():
            parameter.copy_(pulled[at : at + parameter.numel()].view_as(parameter))
            at += parameter.numel()


def train(kind: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    module = model(rank)
    ours = DiLoCo(module, every=EVERY) if kind == "diloco" else local_sgd(module, every=EVERY)
    expected = emulated(world, 10, *((0.7, 0.9) if kind == "diloco" else (1.0, 0.0)))[rank]
    for step in range(10):
        inner_step(module, rank, step)
        assert ours.step(samples(rank, step)) == (step % EVERY == EVERY - 1)
        np.testing.assert_allclose(flat(module), expected[step], rtol=1e-9, atol=1e-9)
        assert ours.steps == (step + 1) % EVERY
        if step == 7:  # in the middle of a period: a new program goes on from there
            state, other = ours.state_dict(), model(rank + 50)
            with torch.no_grad():
                for theirs, mine in zip(other.parameters(), module.parameters(), strict=True):
                    theirs.copy_(mine)
            again = DiLoCo(other, every=EVERY) if kind == "diloco" else local_sgd(other, every=EVERY)
            again.load_state_dict(state)
            with torch.no_grad():
                for theirs, mine in zip(other.parameters(), module.parameters(), strict=True):
                    theirs.copy_(mine)
            module, ours = other, again


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size"), [("diloco", 2), ("diloco", 3), ("local sgd", 4)])
def test_ranks_move_as_the_emulation_does_weighted_by_samples_and_after_a_restart(
    ranks: Ranks, kind: str, size: int
) -> None:
    ranks.run(train, kind, size=size)


def test_it_runs_on_gloo_too(ranks: Ranks) -> None:
    ranks.run(train, "diloco", size=2, backend="gloo")


def edges() -> None:
    module = model(dist.get_rank())
    frozen = module.bias.requires_grad_(False).clone()
    exchanged = []

    def counting(tensor: Tensor) -> None:
        exchanged.append(tensor.numel())
        dist.all_reduce(tensor)
        tensor.div_(dist.get_world_size())

    ours = DiLoCo(module, every=5, exchange=counting)
    assert torch.equal(module.bias, frozen)
    before = flat(module)
    ours.exchange()
    assert exchanged == []
    ours.step(samples=0)
    ours.exchange()
    assert exchanged == [8]
    np.testing.assert_array_equal(flat(module), before)
    assert ours.steps == 0
    with pytest.raises(ValueError, match="every 0"):
        DiLoCo(module, every=0)


def test_an_exchange_can_be_asked_for_and_made_otherwise_and_frozen_parameters_stay(ranks: Ranks) -> None:
    ranks.run(edges, size=2)
