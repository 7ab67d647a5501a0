"""What is alike on all ranks is saved once; what differs is each rank's own, and goes back to that rank alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from hcsim.checkpoints.loader import Checkpoint, load
from hcsim.checkpoints.parts import step_folder
from hcsim.checkpoints.saver import Saver
from hcsim.errors import CheckpointError
from hcsim.training.modules.pipeline import Pipeline
from hcsim.training.modules.sharded import Sharded
from tests.checkpoints.programs import adam, same, tensors
from tests.torch_backend.ranks import Ranks


def like_stage() -> nn.Module:
    """As a transformer's are: names and shapes are those of every other stage."""
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))


def unlike_stage() -> nn.Module:
    """Some layers of one name have unlike shapes, and each rank has one, with buffers, that no other has."""
    rank = dist.get_rank()
    stage = nn.Sequential(nn.Linear(6, 6 + rank), nn.Linear(6 + rank, 6))
    stage.add_module(f"norm {rank}", nn.BatchNorm1d(6))
    return stage


STAGES: dict[str, Callable[[], nn.Module]] = {"like": like_stage, "unlike": unlike_stage}


def pipeline(kind: str, folder: str) -> None:
    rank = dist.get_rank()

    def begun(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed + rank)
        stage = STAGES[kind]()
        return stage, torch.optim.AdamW(stage.parameters(), lr=0.01 * (1 + rank))

    def go(stage: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        moving = Pipeline(stage, entering=(4, 6), microbatches=2)
        for _ in range(steps):
            optimizer.zero_grad()
            moving.step(torch.randn(8, 6), torch.randn(8, 6), mse_loss)
            optimizer.step()

    ours = begun(1)
    go(*ours, 2)
    saver = Saver(folder, *ours)
    saver.save(2)
    go(*ours, 2)
    saver.wait()
    dist.barrier()
    again = begun(5)
    load(folder).restore(*again)
    assert again[1].param_groups[0]["lr"] == 0.01 * (1 + rank)
    go(*again, 2)
    same(tensors(*again), tensors(*ours))


@pytest.mark.parametrize("kind", STAGES)
def test_each_rank_has_its_stage_of_a_pipeline_again(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    ranks.run(pipeline, kind, str(tmp_path), size=3)
    found = Checkpoint.open(tmp_path)
    message = "0.bias differs among the 3 ranks that saved it: only 3 ranks can go on from it"
    with pytest.raises(CheckpointError, match=message):
        found.model()
    with pytest.raises(CheckpointError, match=message):
        found.restore(like_stage())


def all_but(values: dict[str, Tensor], other: dict[str, Tensor]) -> nn.Module:
    """A model of these parameters, but for the last rank, which has others."""
    last = dist.get_rank() == dist.get_world_size() - 1
    made = nn.Module()
    for name, value in (values | (other if last else {})).items():
        made.register_parameter(name, nn.Parameter(value, requires_grad=False))
    return made


def table(row: int) -> Tensor:
    """One row is of ones."""
    made = torch.zeros(4, 128)
    made[row] = 1
    return made


VALUES = {
    "nan": torch.full((3,), float("nan")),
    "narrow": torch.ones(5, dtype=torch.bfloat16),
    "nothing": torch.zeros(0, 2),
    "scalar": torch.tensor(2.0),
    "rows": table(0),
    "signs": torch.tensor([1.0, 2.0], dtype=torch.float64),
    "zero": torch.zeros(2),
}
OTHERS = {
    "narrow": torch.tensor([1, 1, 1, 1, 1.0078125], dtype=torch.bfloat16),
    "scalar": torch.tensor(2.0).nextafter(torch.tensor(3.0)),
    "rows": table(1),
    "signs": torch.tensor([-1.0, -2.0], dtype=torch.float64),
    "zero": torch.tensor([0.0, -0.0]),
}


def bits(of: nn.Module) -> dict[str, bytes]:
    return {
        name: value.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for name, value in of.named_parameters()
    }


def save_all_but(folder: str, other: dict[str, Tensor]) -> None:
    ours = all_but(VALUES, other)
    saver = Saver(folder, ours)
    saver.save(1)
    saver.wait()
    dist.barrier()
    again = all_but({name: torch.zeros_like(value) for name, value in VALUES.items()}, {})
    load(folder).restore(again)
    assert bits(again) == bits(ours)


def written(folder: Path) -> dict[str, int]:
    """How many ranks wrote a parameter."""
    files = [load_file(path) for path in step_folder(folder, 1).glob("*.safetensors")]
    return {name: sum(f"model/{name}" in file for file in files) for name in VALUES}


def test_what_is_alike_is_saved_once_and_what_differs_by_a_bit_by_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save_all_but, str(tmp_path / "alike"), {}, size=3)
    assert written(tmp_path / "alike") == dict.fromkeys(VALUES, 1)
    assert Checkpoint.open(tmp_path / "alike").model().keys() == VALUES.keys()
    ranks.run(save_all_but, str(tmp_path / "unlike"), OTHERS, size=3)
    assert written(tmp_path / "unlike") == {name: 3 if name in OTHERS else 1 for name in VALUES}


def in_halves(folder: str, apart: bool) -> None:
    """Shards within each half of the ranks; the halves hold the same, or go their own ways."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = dist.get_rank() // 2

    def begun(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        made = nn.Sequential(Sharded(nn.Linear(5, 3), group=halves[half]))
        return made, adam(made)

    ours, optimizer = begun(1)
    ours(torch.ones(1, 5) * (1 + half * apart)).square().sum().backward()
    optimizer.step()
    saver = Saver(folder, ours, optimizer)
    saver.save(1)
    saver.wait()
    dist.barrier()
    again = begun(2)
    load(folder).restore(*again)
    same(tensors(*again), tensors(ours, optimizer))


def test_shards_in_each_half_of_the_ranks_are_one_model(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(in_halves, str(tmp_path), False, size=4)
    found = Checkpoint.open(tmp_path)
    plain = nn.Sequential(nn.Linear(5, 3))
    found.restore(plain, adam(plain))
    same(found.model(), dict(plain.state_dict()))


def test_halves_that_go_their_own_ways_have_their_own_shards_again(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(in_halves, str(tmp_path), True, size=4)
    with pytest.raises(CheckpointError, match=r"0\.\w+ differs among the 4 ranks that saved it"):
        Checkpoint.open(tmp_path).model()


def replicas(folder: str) -> dict[str, Any]:
    """Rank 1 rounds differently, and has seen other batches."""
    rank = dist.get_rank()

    def begun() -> nn.Module:
        return DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))

    ours = begun()
    with torch.no_grad():
        for tensor in (*ours.parameters(), ours.module[1].running_mean):
            tensor += rank * 1e-6
    saver = Saver(folder, ours)
    saver.save(1)
    saver.wait()
    dist.barrier()
    again = begun()
    load(folder).restore(again)
    same(dict(again.state_dict()), dict(ours.state_dict()))
    return ours.module.state_dict()


def test_one_rank_goes_on_from_the_first_replica_of_those_that_ddp_keeps_alike(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(replicas, str(tmp_path), size=2)
    assert not torch.equal(first["0.weight"], second["0.weight"])
    alone = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    Checkpoint.open(tmp_path).restore(alone)
    same(dict(alone.state_dict()), dict(first))
    same(Checkpoint.open(tmp_path).model(), dict(first))
