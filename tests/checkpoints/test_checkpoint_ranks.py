"""Several processes: they go on to the same bits, help each other out with parts, and hear of each other's trouble."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hcsim.checkpoints.loader import load
from hcsim.checkpoints.parts import step_folder, steps_in
from hcsim.checkpoints.saver import Saver
from hcsim.errors import CheckpointError
from hcsim.torch_backend.hooks import CompressionState, compression_hook
from hcsim.training.modules.periodic import DiLoCo
from tests.checkpoints.programs import adam, model, same, sharded, tensors, train
from tests.torch_backend.ranks import Ranks


def replicated(seed: int = 1) -> nn.Module:
    small = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    torch.manual_seed(seed)
    for parameter in small.parameters():
        nn.init.normal_(parameter)
    return DistributedDataParallel(small)


MODELS: dict[str, Callable[[int], nn.Module]] = {"sharded": sharded, "replicated": replicated}


def interrupted(kind: str, folder: str, mine: bool) -> None:
    """Train, save, train on; then begin anew from what was saved, and come to the same."""
    where = Path(folder) / str(dist.get_rank() if mine else "")
    ours = MODELS[kind](1)
    optimizer = adam(ours)
    torch.manual_seed(10 + dist.get_rank())
    train(ours, optimizer, 2)
    saver = Saver(where, ours, optimizer)
    saver.save(2, epoch=1)
    train(ours, optimizer, 3)
    saver.save(5)
    saver.wait()
    dist.barrier()
    again = MODELS[kind](2)
    fresh = adam(again)
    found = load(where, 2)
    found.restore(again, fresh)
    assert (found.step, found.world, found.plain) == (2, dist.get_world_size(), {"epoch": 1})
    train(again, fresh, 3)
    same(tensors(again, fresh), tensors(ours, optimizer))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size", "mine"), [("sharded", 3, False), ("replicated", 2, True)])
def test_training_goes_on_to_the_same_bits(ranks: Ranks, tmp_path: Path, kind: str, size: int, mine: bool) -> None:
    ranks.run(interrupted, kind, str(tmp_path), mine, size=size)


@pytest.mark.slow
def test_it_runs_on_gloo_too(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(interrupted, "sharded", str(tmp_path), True, size=2, backend="gloo")


def save_alone_and_copied(folder: str) -> list[Tensor]:
    ours = sharded()
    optimizer = adam(ours)
    torch.manual_seed(dist.get_rank())
    train(ours, optimizer, 1)
    saver = Saver(Path(folder) / str(dist.get_rank()), ours, optimizer, copies=2)
    saver.save(4)
    train(ours, optimizer, 1)
    saver.save(8)
    saver.wait()
    return [value for block in (ours[0], ours[1]) for value in block.full_parameters().values()]  # type: ignore[operator]


def load_mine(folder: str, step: int) -> list[Tensor]:
    where = Path(folder) / str(dist.get_rank())
    again = sharded(seed=3)
    found = load(where)
    assert found.step == step
    found.restore(again, adam(again))
    assert len(list(step_folder(where, step).glob("*.json"))) == 3  # we keep what the others gave us
    return [value for block in (again[0], again[1]) for value in block.full_parameters().values()]  # type: ignore[operator]


@pytest.mark.slow
def test_a_machine_that_lost_its_disk_has_its_part_from_another(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks.run(save_alone_and_copied, str(tmp_path), size=3)[0]
    assert [len(list(step_folder(tmp_path / str(rank), 8).glob("*.json"))) for rank in range(3)] == [2, 2, 2]
    shutil.rmtree(tmp_path / "1")
    for found in ranks.run(load_mine, str(tmp_path), 8, size=3):
        assert all(map(torch.equal, found, saved))
    # Both copies of a part are damaged: the step before it is used, by all.
    for rank in range(3):
        for path in step_folder(tmp_path / str(rank), 8).glob("rank-2-*.safetensors"):
            path.write_bytes(path.read_bytes()[:-1])
    ranks.run(load_mine, str(tmp_path), 4, size=3)


def one_disk_is_full(folder: str) -> None:
    rank = dist.get_rank()
    where = Path(folder) / str(rank)
    saver = Saver(where, model())
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        saver.save(1)
        with pytest.raises(CheckpointError, match=r"^rank 1: .*cannot be written: File too large$"):
            saver.save(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert steps_in(where) == [1]
    with pytest.raises(CheckpointError, match="of step 1 the part of rank 1 is missing"):
        load(where)
    saver.save(3)
    saver.wait()
    dist.barrier()
    assert load(where).step == 3

    state = {"state": object()} if rank == 0 else {}
    with pytest.raises(CheckpointError, match=r"^rank 0: .* is a object"):
        saver.save(4, **state)
    wide = nn.Linear(2, 2, dtype=torch.complex128 if rank == 1 else None)  # is found out when the copy is taken
    with pytest.raises(CheckpointError, match=r"^rank 1: .* is complex128"):
        Saver(where, wide).save(5)
    narrow = nn.Module()
    narrow.register_buffer("narrow", torch.ones(2).to(torch.complex32 if rank == 1 else torch.float32))
    with pytest.raises(CheckpointError, match=r"^rank 1: .*model.narrow is complex32"):
        Saver(where, narrow, copies=2).save(5)
    assert steps_in(where) == [3, 1]
    saver.save(6)
    saver.wait()


@pytest.mark.slow
def test_all_ranks_hear_that_one_cannot_save_and_go_on(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(one_disk_is_full, str(tmp_path), size=2)


def diloco(folder: str) -> None:
    """Between two exchanges the ranks' parameters differ; their inner moments always do."""

    def begun(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, DiLoCo]:
        torch.manual_seed(seed)
        small = nn.Linear(5, 2)
        return small, adam(small), DiLoCo(small, every=3)

    def go(small: nn.Module, inner: torch.optim.Optimizer, outer: DiLoCo, steps: int) -> None:
        for _ in range(steps):
            train(small, inner, 1)
            outer.step()

    ours = begun(1)
    torch.manual_seed(20 + dist.get_rank())
    go(*ours, 4)
    saver = Saver(folder, *ours[:2], also={"outer": ours[2]})
    saver.save(4)
    go(*ours, 2)
    saver.save(6)
    there = tensors(*ours[:2])
    go(*ours, 3)
    saver.wait()
    dist.barrier()
    again = begun(2)
    for step, left in ((4, 5), (6, 3)):
        load(folder, step).restore(*again[:2], also={"outer": again[2]})
        go(*again, left)
        same(tensors(*again[:2]), tensors(*ours[:2]))
    found = load(folder, 6)  # after an exchange there is one model
    assert all(torch.equal(tensor, there[name]) for name, tensor in found.model().items())
    with pytest.raises(CheckpointError, match="bias differs among the 2 ranks that saved it"):
        load(folder, 4).model()


def compressed(folder: str, step: int) -> dict[str, float]:
    """Load what others saved, if they did, and save it as ours; what this rank owes, summed up by parameter."""
    torch.manual_seed(1)
    small = nn.Linear(64, 8)
    ddp = DistributedDataParallel(small)
    state = CompressionState(small, "topk:0.02+ef")
    ddp.register_comm_hook(state, compression_hook)
    if step:
        load(folder).restore(ddp, also={"compression": state})
    else:
        torch.manual_seed(dist.get_rank())
        for _ in range(2):
            ddp(torch.randn(4, 64)).square().sum().backward()
    saver = Saver(folder, ddp, also={"compression": state})
    saver.save(step + 1)
    saver.wait()
    memory = state.state_dict()["memory"].numpy().tobytes()
    _, arrays = msgspec.msgpack.decode(memory, type=tuple[str, dict[str, tuple[str, tuple[int, ...], bytes]]])
    ddp(torch.randn(4, 64)).square().sum().backward()  # they agree on the step, and go on
    return {name: float(np.frombuffer(raw, kind).astype(float).sum()) for name, (kind, _, raw) in arrays.items()}


@pytest.mark.slow
def test_what_compression_owes_is_owed_once_by_however_many_ranks(ranks: Ranks, tmp_path: Path) -> None:
    totals = []
    for step, size in enumerate((3, 2, 4, 1)):
        owed = ranks.run(compressed, str(tmp_path), step, size=size)
        names = sorted({name for each in owed for name in each})
        totals.append({name: sum(each.get(name, 0.0) for each in owed) for name in names})
    assert list(totals[0]) == ["own/residual/bias", "own/residual/weight"]
    assert all(abs(total) > 0.1 for total in totals[0].values())
    for later in totals[1:]:
        assert later == pytest.approx(totals[0], rel=1e-4)


def diloco_alone(folder: str) -> None:
    """One rank goes on from what two saved after an exchange, with an inner optimizer that begins anew."""
    small = nn.Linear(5, 2)
    outer = DiLoCo(small, every=3)
    found = load(folder, 6)
    with pytest.raises(CheckpointError, match=r"state.bias.exp_avg differs .*: only 2 ranks can go on"):
        found.restore(small, adam(small), also={"outer": outer})
    found.restore(small, also={"outer": outer})
    assert torch.equal(small.weight, found.model()["weight"])


@pytest.mark.slow
def test_an_outer_optimizer_goes_on_too(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(diloco, str(tmp_path), size=2)
    ranks.run(diloco_alone, str(tmp_path), size=1)
