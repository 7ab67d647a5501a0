"""A model in stages has the gradients of the whole one; schedules end, and 1F1B keeps less than GPipe."""

from __future__ import annotations

import copy
from collections import deque

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hcsim.training.modules.pipeline import Pipeline
from hcsim.training.pipeline.schedule import Schedule, turns
from tests.torch_backend.ranks import Ranks

WIDTH = 8


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 9), st.integers(1, 20))
def test_every_schedule_ends_with_each_microbatch_forward_then_backward(
    schedule: Schedule, world: int, microbatches: int
) -> None:
    """Run the messages: forwards travel up and gradients down, each link in order; a rank takes a turn if it can."""
    todo = [deque(turns(schedule, rank, world, microbatches)) for rank in range(world)]
    up: list[deque[int]] = [deque() for _ in range(world)]
    down: list[deque[int]] = [deque() for _ in range(world)]
    under_way = [0] * world
    most = [0] * world
    moved = True
    while moved:
        moved = False
        for rank in range(world):
            while todo[rank]:
                kind, number = todo[rank][0]
                coming = (up[rank] if rank else None) if kind == "F" else (down[rank] if rank < world - 1 else None)
                if coming is not None and not coming:
                    break
                assert coming is None or coming.popleft() == number
                todo[rank].popleft()
                moved = True
                under_way[rank] += 1 if kind == "F" else -1
                most[rank] = max(most[rank], under_way[rank])
                if kind == "F" and rank < world - 1:
                    up[rank + 1].append(number)
                if kind == "B" and rank:
                    down[rank - 1].append(number)
    assert not any(todo)
    assert under_way == [0] * world
    expected = [min(world - rank, microbatches) if schedule == "1f1b" else microbatches for rank in range(world)]
    assert most == expected


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 9), st.integers(1, 20))
def test_each_rank_runs_each_microbatch_once_each_way(schedule: Schedule, world: int, microbatches: int) -> None:
    for rank in range(world):
        order = list(turns(schedule, rank, world, microbatches))
        assert sorted(order) == sorted((kind, number) for kind in "FB" for number in range(microbatches))
        assert all(order.index(("F", number)) < order.index(("B", number)) for number in range(microbatches))


def train(schedule: Schedule, microbatches: int) -> int:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(world)]
    one, stage = nn.Sequential(*copy.deepcopy(stages)), stages[rank]
    rows = 2 * microbatches
    ours = Pipeline(stage, entering=(2, WIDTH) if rank else None, schedule=schedule, microbatches=microbatches)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.2, momentum=0.9) for each in (one, stage)]
    for step in range(3):
        torch.manual_seed(step)
        inputs, targets = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = F.mse_loss(one(inputs), targets)
        expected.backward()
        loss = ours.step(inputs if rank == 0 else None, targets if rank == world - 1 else None, F.mse_loss)
        assert loss == (pytest.approx(float(expected), rel=1e-5) if rank == world - 1 else None)
        for mine, theirs in zip(stage.parameters(), one[rank].parameters(), strict=True):
            assert theirs.grad is not None
            assert float(theirs.grad.abs().sum()) > 0
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
    return ours.most_kept


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_gradients_are_those_of_the_whole_model_and_1f1b_keeps_less(ranks: Ranks, size: int) -> None:
    assert ranks.run(train, "gpipe", 6, size=size) == [6] * size
    assert ranks.run(train, "1f1b", 6, size=size) == [size - rank for rank in range(size)]


def test_it_runs_on_gloo_too_and_with_fewer_microbatches_than_stages(ranks: Ranks) -> None:
    assert ranks.run(train, "1f1b", 1, size=2, backend="gloo") == [1, 1]


class Deaf(nn.Module):
    """Passes on a parameter, whatever comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.said = nn.Parameter(torch.ones(2, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.said * 1.0


def edges() -> None:
    rank = dist.get_rank()
    stage = Deaf() if rank else nn.Linear(WIDTH, WIDTH)
    ours = Pipeline(stage, entering=(2, WIDTH), microbatches=2)
    ours.step(torch.ones(4, WIDTH), torch.zeros(4, WIDTH), F.mse_loss)
    for parameter in stage.parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad.abs().sum()) == bool(rank)

    with pytest.raises(ValueError, match="needs the inputs"):
        ours.step()
    with pytest.raises(ValueError, match="3 cannot be cut into 2"):
        ours.step(torch.ones(3, WIDTH), torch.zeros(3, WIDTH), F.mse_loss)
    with pytest.raises(ValueError, match="no schedule"):
        Pipeline(stage, schedule="2f2b")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one"):
        Pipeline(stage, microbatches=0)
    if rank:
        with pytest.raises(ValueError, match="say the shape"):
            Pipeline(stage)


def test_a_stage_that_hears_nothing_sends_zeros_and_mistakes_are_named(ranks: Ranks) -> None:
    ranks.run(edges, size=2)
