"""What torch builds on process groups trains on hcsim as one process does: FSDP2, tensor and pipeline parallelism.

Ranks have loaded all of torch, and import it here where they use it: it takes two seconds, and no test needs it itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.torch_backend.models import (
    STEPS,
    WIDTH,
    alone,
    batch,
    compare,
    loss_of,
    made,
    optimizer_of,
)
from tests.torch_backend.ranks import Ranks


def whole(model: nn.Module) -> list[Tensor]:
    """The weights, put together from all ranks."""
    from torch.distributed.tensor import DTensor

    return [(each.full_tensor() if isinstance(each, DTensor) else each).detach().clone() for each in model.parameters()]


def sharded(**options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = made()
    for layer in (model.first, model.second, model.last):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int, size: int) -> None:
    inputs, targets = batch(step, rank, size)
    optimizer.zero_grad()
    loss_of(model(inputs).float(), targets).backward()
    optimizer.step()


def train_sharded(options: dict[str, Any]) -> None:
    model = sharded(**options)
    optimizer = optimizer_of(model)
    rank, size = dist.get_rank(), dist.get_world_size()
    history = []
    for step in range(STEPS):
        step_of(model, optimizer, step, rank, size)
        history.append(whole(model))
    compare(history, alone(size), exact=False)


@pytest.mark.slow
@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
def test_fully_shard_trains_as_one_process_does(ranks: Ranks, reshard: bool) -> None:
    for size in (2, 3, 4) if reshard else (3,):
        ranks.run(train_sharded, {"reshard_after_forward": reshard}, size=size)


def train_mixed() -> list[Tensor]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(mp_policy=policy)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        step_of(model, optimizer, step, dist.get_rank(), dist.get_world_size())
    return whole(model)


@pytest.mark.slow
def test_fully_shard_in_mixed_precision_trains_as_with_gloo(ranks: Ranks) -> None:
    of_hcsim = ranks.run(train_mixed, size=2)
    compare(of_hcsim, ranks.run(train_mixed, size=2, backend="gloo"), exact=True)
    compare([of_hcsim[0]], [of_hcsim[1]], exact=True)


def train_split() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    model = parallelize_module(made(), mesh, plan)
    optimizer = optimizer_of(model)
    history = []
    for step in range(STEPS):
        step_of(model, optimizer, step, 0, 1)
        history.append(whole(model))
    compare(history, alone(), exact=False)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_layers_split_by_columns_and_rows_train_as_whole_ones(ranks: Ranks, size: int) -> None:
    ranks.run(train_split, size=size)


MICROBATCHES = 4


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(2)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def piped_alone(count: int) -> list[list[list[Tensor]]]:
    """By stage: the weights after each step, of one process that takes the same microbatches."""
    model = nn.Sequential(*layers(count))
    optimizer = optimizer_of(model)
    history: list[list[list[Tensor]]] = [[] for _ in range(count)]
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = batch(step)
        for part, target in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
            (loss_of(model(part), target) / MICROBATCHES).backward()
        optimizer.step()
        for stage, layer in enumerate(model):
            history[stage].append([parameter.detach().clone() for parameter in layer.parameters()])
    return history


def train_piped(name: str) -> None:
    from torch.distributed import pipelining

    rank, size = dist.get_rank(), dist.get_world_size()
    count = 2 * size if name == "Interleaved1F1B" else size
    ours = {number: layer for number, layer in enumerate(layers(count)) if number % size == rank}
    stages = [pipelining.PipelineStage(layer, number, count, torch.device("cpu")) for number, layer in ours.items()]
    kind: Any = getattr(pipelining, f"Schedule{name}")
    several = name == "Interleaved1F1B"
    schedule = kind(stages if several else stages[0], MICROBATCHES, loss_fn=loss_of)
    optimizers = [optimizer_of(layer) for layer in ours.values()]
    expected = piped_alone(count)
    for step in range(STEPS):
        inputs, targets = batch(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        given = (inputs,) if rank == 0 else ()
        schedule.step(*given, **({"target": targets} if rank == size - 1 else {}))
        for optimizer in optimizers:
            optimizer.step()
        for number, layer in ours.items():
            now = [parameter.detach() for parameter in layer.parameters()]
            compare([now], [expected[number][step]], exact=True)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_a_pipeline_trains_as_one_process_does(ranks: Ranks, name: str) -> None:
    for size in (2, 4) if name == "1F1B" else (2,):
        ranks.run(train_piped, name, size=size)


def save(folder: str) -> list[Tensor]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = sharded()
    optimizer = optimizer_of(model)
    for step in range(3):
        step_of(model, optimizer, step, dist.get_rank(), dist.get_world_size())
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    return whole(model)


def load(folder: str) -> tuple[list[Tensor], list[Tensor]]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = sharded()
    optimizer = optimizer_of(model)
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    before = whole(model)
    step_of(model, optimizer, 3, dist.get_rank(), dist.get_world_size())
    return before, whole(model)


@pytest.mark.slow
@pytest.mark.parametrize(("savers", "loaders"), [(4, 2), (2, 3)])
def test_a_checkpoint_of_some_ranks_is_loaded_by_others(
    ranks: Ranks, tmp_path: Path, savers: int, loaders: int
) -> None:
    saved = ranks.run(save, str(tmp_path), size=savers)[0]
    for before, after in ranks.run(load, str(tmp_path), size=loaders):
        compare([before], [saved], exact=True)
        compare([after], [alone(steps=4)[3]], exact=False)
