"""DistributedDataParallel on hcsim trains as one process does, step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from tests.torch_backend.models import (
    STEPS,
    alone,
    batch,
    compare,
    loss_of,
    made,
    optimizer_of,
    weights_of,
)
from tests.torch_backend.ranks import Ranks

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "buckets": {"bucket_cap_mb": 0.002},
    "views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.002},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}


def train(way: str) -> None:
    side = way == "unused"
    model = made(side=side)
    parallel = DistributedDataParallel(model, **WAYS[way])
    optimizer = optimizer_of(model)
    rank, size = dist.get_rank(), dist.get_world_size()
    history = []
    for step in range(STEPS):
        inputs, targets = batch(step, rank, size)
        optimizer.zero_grad()
        outputs = parallel(inputs, aside=step % 2 == 1) if side else parallel(inputs)
        loss_of(outputs, targets).backward()
        for parameter in model.parameters():  # one that nobody used has no gradient, and counts as zero
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
        history.append(weights_of(model))
    # Of two summands there is one order. With more, and with parameters in buckets, parts are summed in another.
    compare(history, alone(size, side=side), exact=size == 2)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_ddp_trains_as_one_process_does(ranks: Ranks, way: str) -> None:
    for size in (2, 3, 4) if way == "plain" else (3,):
        ranks.run(train, way, size=size)


def accumulate() -> None:
    """Two shares of a step on each rank, of which only the second synchronises."""
    model = made()
    parallel = DistributedDataParallel(model)
    optimizer = optimizer_of(model)
    rank, size = dist.get_rank(), dist.get_world_size()
    history = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with parallel.no_sync():
            inputs, targets = batch(step, 2 * rank, 2 * size)
            (loss_of(parallel(inputs), targets) / 2).backward()
        inputs, targets = batch(step, 2 * rank + 1, 2 * size)
        (loss_of(parallel(inputs), targets) / 2).backward()
        optimizer.step()
        history.append(weights_of(model))
    compare(history, alone(), exact=False)


@pytest.mark.slow
def test_gradients_may_be_accumulated_without_synchronising(ranks: Ranks) -> None:
    ranks.run(accumulate, size=2)


def uneven() -> list[Tensor]:
    model = made()
    parallel = DistributedDataParallel(model)
    optimizer = optimizer_of(model)
    with Join([parallel]):
        for step in range(3 + dist.get_rank()):
            optimizer.zero_grad()
            inputs, targets = batch(step, dist.get_rank(), dist.get_world_size())
            loss_of(parallel(inputs), targets).backward()
            optimizer.step()
    return weights_of(model)


def test_ranks_with_unlike_numbers_of_steps_join(ranks: Ranks) -> None:
    of_hcsim = ranks.run(uneven, size=2)
    of_gloo = ranks.run(uneven, size=2, backend="gloo")
    compare(of_hcsim, [of_hcsim[0]] * 2, exact=True)
    compare(of_hcsim, of_gloo, exact=True)


def embed() -> None:
    torch.manual_seed(0)
    table = nn.EmbeddingBag(20, 4, mode="sum", sparse=True)
    expected = table.weight.detach().clone()
    parallel = DistributedDataParallel(table)
    size = dist.get_world_size()
    for step in range(3):
        rows = [torch.tensor([[(step + rank) % 20, (3 * rank) % 20]]) for rank in range(size)]
        parallel.zero_grad()
        parallel(rows[dist.get_rank()]).sum().backward()
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse
        with torch.no_grad():
            table.weight -= 0.5 * table.weight.grad.to_dense()
        for row in torch.cat(rows).flatten():
            expected[row] -= 0.5 / size
    torch.testing.assert_close(table.weight.detach(), expected)


def test_sparse_gradients_are_averaged(ranks: Ranks) -> None:
    ranks.run(embed, size=3)
