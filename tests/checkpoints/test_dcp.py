"""Checkpoints are torch's: `save` and `load` take our storage, and the converter and sharded models what we save."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import format_utils
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hcsim.checkpoints.loader import Checkpoint, load
from hcsim.checkpoints.parts import step_folder
from hcsim.checkpoints.saver import Saver
from hcsim.checkpoints.storage import Reader, Writer
from hcsim.errors import CheckpointError
from tests.checkpoints.programs import adam, model, same, sharded, tensors, train
from tests.torch_backend.ranks import Ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def fully_sharded(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    made = small()
    fully_shard(made[0])
    fully_shard(made)
    return made, adam(made)


def whole(of: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything there is, put together from all ranks."""
    found = tensors(of, optimizer)
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in found.items()}


def save_sharded(folder: str) -> dict[str, Tensor]:
    ours = fully_sharded(1)
    torch.manual_seed(3)
    train(*ours, 2)
    saver = Saver(folder, *ours)
    saver.save(2)
    saver.wait()
    dist.barrier()
    return whole(*ours)


def load_sharded(folder: str, step: int) -> dict[str, Tensor]:
    """By ours, or by torch's own."""
    again = fully_sharded(2)
    if step == 2:
        load(folder).restore(*again)
        return whole(*again)
    weights, states = get_state_dict(*again)
    dcp.load({"model": weights, "optimizer": states}, storage_reader=Reader(folder))
    set_state_dict(*again, model_state_dict=weights, optim_state_dict=states)
    return whole(*again)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["hcsim", "gloo"])
def test_what_fully_shard_divides_is_loaded_by_any_number_of_ranks(ranks: Ranks, tmp_path: Path, backend: str) -> None:
    saved = ranks.run(save_sharded, str(tmp_path), size=3, backend=backend)[0]
    for size in (3, 2) if backend == "hcsim" else (2,):
        for step in (2, 0):
            for found in ranks.run(load_sharded, str(tmp_path), step, size=size, backend=backend):
                same(found, saved)
    torch.manual_seed(4)
    alone = small()
    optimizer = adam(alone)
    Checkpoint.open(tmp_path).restore(alone, optimizer)
    same(tensors(alone, optimizer), saved)


def piped(folder: str, names: list[str]) -> None:
    """Each half of the ranks divides a stage of its own, under a name of its own or that of the other half's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "shards"))
    stage = mesh.get_local_rank("stages")

    def begun(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed + stage)
        made = nn.Sequential(OrderedDict([(names[stage], nn.Linear(4, 3))]))
        fully_shard(made, mesh=mesh["shards"])
        return made, adam(made)

    ours = begun(1)
    for parameter in ours[0].parameters():
        parameter.grad = torch.ones_like(parameter) * (1 + stage)
    ours[1].step()
    saver = Saver(folder, *ours)
    saver.save(1)
    saver.wait()
    dist.barrier()
    again = begun(5)
    load(folder).restore(*again)
    same(whole(*again), whole(*ours))


@pytest.mark.slow
@pytest.mark.parametrize("names", [["first", "second"], ["stage", "stage"]])
def test_stages_that_fully_shard_divides_go_back_to_their_ranks(ranks: Ranks, tmp_path: Path, names: list[str]) -> None:
    ranks.run(piped, str(tmp_path), names, size=4)
    if names[0] == names[1]:
        with pytest.raises(CheckpointError, match=r"stage\.bias differs among the 4 ranks"):
            Checkpoint.open(tmp_path).model()
    else:
        assert [*Checkpoint.open(tmp_path).model()] == ["first.bias", "first.weight", "second.bias", "second.weight"]


def test_to_save_is_no_step_of_an_optimizer_that_has_taken_none(tmp_path: Path) -> None:
    ours, again = small(), small()
    optimizer, fresh = adam(ours), adam(again)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("it took a step"))
    fresh.register_step_pre_hook(lambda *_: pytest.fail("it took a step"))
    saver = Saver(tmp_path, ours, optimizer)
    saver.save(0)
    saver.wait()
    load(tmp_path).restore(again, fresh)
    assert not optimizer.state
    assert not fresh.state
    same(tensors(again, fresh), tensors(ours, optimizer))


def save_blocks(folder: str) -> dict[str, Tensor]:
    ours = sharded()
    optimizer = adam(ours)
    train(ours, optimizer, 2)
    saver = Saver(folder, ours, optimizer)
    saver.save(1)
    saver.wait()
    return ours[0].full_parameters()  # type: ignore[operator, no-any-return]


def test_torch_loads_what_blocks_of_ours_saved(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks.run(save_blocks, str(tmp_path), size=3)[0]
    plain = model(seed=4)
    optimizer = adam(plain)
    train(plain, optimizer, 1)
    weights, states = get_state_dict(plain, optimizer)
    dcp.load({"model": weights, "optimizer": states}, storage_reader=Reader(tmp_path))
    set_state_dict(plain, optimizer, model_state_dict=weights, optim_state_dict=states)
    again = model(seed=5)
    fresh = adam(again)
    Checkpoint.open(tmp_path).restore(again, fresh)
    same(tensors(plain, optimizer), tensors(again, fresh))
    assert torch.equal(plain[0][1].weight, saved["1.weight"])  # type: ignore[index, union-attr]


def test_torch_converts_what_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = model()
    optimizer = adam(ours)
    train(ours, optimizer, 2)
    saver = Saver(tmp_path / "saved", ours, optimizer)
    saver.save(1, loss=0.5)
    saver.wait()
    monkeypatch.setattr(format_utils, "FileSystemReader", Reader)
    format_utils.dcp_to_torch_save(tmp_path / "saved", tmp_path / "converted.pt")
    found = torch.load(tmp_path / "converted.pt", weights_only=True)
    weights, states = get_state_dict(ours, optimizer)
    assert found["model"].keys() == weights.keys()
    same(found["model"], weights)  # type: ignore[arg-type]
    for name, state in states["state"].items():  # type: ignore[union-attr]
        same(found["optimizer"]["state"][name], state)  # type: ignore[arg-type]
    assert found["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)


def save_by_torch(folder: str, step: int, value: float) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    state = {"weight": torch.full((3, 2), value), "seen": [1, {"two": (2, None)}], "mine": {f"{rank}": value}}
    dcp.save(state, storage_writer=Writer(folder, step))


def load_by_torch(folder: str | Path, step: int | None = None) -> dict[str, Any]:
    state: dict[str, Any] = {"weight": torch.zeros(3, 2), "seen": [0, {"two": ()}], "mine": {"1": 0.0}}
    dcp.load(state, storage_reader=Reader(folder, step))
    return state


def test_torch_saves_to_our_storage_and_what_is_damaged_is_passed_over(ranks: Ranks, tmp_path: Path) -> None:
    for step in (1, 2):
        ranks.run(save_by_torch, str(tmp_path), step, float(step), size=2)
    for found in [load_by_torch(tmp_path), *ranks.run(load_by_torch, str(tmp_path), size=3)]:
        assert torch.equal(found.pop("weight"), torch.full((3, 2), 2.0))
        assert found == {"seen": [1, {"two": (2, None)}], "mine": {"1": 2.0}}
    (step_folder(tmp_path, 2) / "rank-1-of-2.json").unlink()
    assert float(load_by_torch(tmp_path)["weight"][0, 0]) == 1.0
    data = step_folder(tmp_path, 1) / "rank-0-of-2.safetensors"
    data.write_bytes(data.read_bytes()[:-1] + b"\0")
    with pytest.raises(BaseException, match="no whole checkpoint"):
        load_by_torch(tmp_path)


class Runs:
    """What a pickle may do."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("it ran",)


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointException, match="a Runs: a checkpoint holds"):
        dcp.save({"object": Runs()}, storage_writer=Writer(tmp_path, 1))
    assert not [*tmp_path.iterdir()]
