"""What went wrong where other systems divided a torch model among machines, and does not here: one test each."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from hcsim.checkpoints.loader import load
from hcsim.checkpoints.parts import step_folder
from hcsim.checkpoints.saver import Saver
from hcsim.errors import CheckpointError
from hcsim.training.modules.batch_norm import SyncBatchNorm
from hcsim.training.modules.pipeline import Pipeline
from hcsim.training.modules.sharded import Sharded, clip_grad_norm
from tests.torch_backend.ranks import Ranks

ROWS = 4


def net(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def gradients(of: nn.Module) -> list[Tensor]:
    """Of the whole model, put together from all ranks."""
    from torch.distributed.tensor import DTensor  # two seconds, where not all of torch is loaded

    found = []
    for parameter in of.parameters():
        grad = parameter.grad
        assert grad is not None
        found.append(grad.full_tensor() if isinstance(grad, DTensor) else grad)
    return found


def divided() -> None:
    """The same batch by one process, DDP, FSDP2 and our own shards, in each of five steps."""
    from torch.distributed.fsdp import fully_shard

    rank, world = dist.get_rank(), dist.get_world_size()
    one, by_torch, ours = net(), net(), Sharded(net())
    by_ddp = DistributedDataParallel(net())
    for layer in (by_torch[0], by_torch[2], by_torch):
        fully_shard(layer)
    models: list[nn.Module] = [one, by_torch, ours, by_ddp]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for step in range(5):
        torch.manual_seed(step)
        inputs, targets = torch.randn(ROWS * world, 5), torch.randn(ROWS * world, 3)
        for model, optimizer in zip(models, optimizers, strict=True):
            mine = slice(None) if model is one else slice(rank * ROWS, (rank + 1) * ROWS)
            optimizer.zero_grad()
            F.mse_loss(model(inputs[mine]), targets[mine]).backward()
        expected = [grad.clone() for grad in gradients(one)]
        assert all(float(grad.abs().max()) > 1e-4 for grad in expected)
        for model in (by_torch, by_ddp):
            torch.testing.assert_close(gradients(model), expected, rtol=1e-4, atol=1e-6)
        assert ours.shard.grad is not None
        shares = [torch.empty_like(ours.shard.grad) for _ in range(world)]
        dist.all_gather(shares, ours.shard.grad)
        flat = torch.cat(shares)
        for piece, grad in zip(ours.pieces, expected, strict=True):
            torch.testing.assert_close(flat[piece.lo : piece.hi].view(piece.shape), grad, rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
    for name, parameter in ours.full_parameters().items():
        torch.testing.assert_close(parameter, one.get_parameter(name).detach(), rtol=1e-4, atol=1e-5)


def test_fsdp_zero_grads(ranks: Ranks) -> None:
    """Gradients are where the reduction looks for them, in every step."""
    ranks.run(divided, size=3)


def piped(schedule: str) -> tuple[float, int]:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    stages = [nn.Linear(4, 4) for _ in range(world)]
    whole = nn.Sequential(*copy.deepcopy(stages))
    inputs, targets = torch.randn(8, 4), torch.randn(8, 4)
    F.mse_loss(whole(inputs), targets).backward()
    pipeline = Pipeline(stages[rank], entering=(1, 4), microbatches=8, schedule=schedule)  # type: ignore[arg-type]
    pipeline.step(inputs, targets, F.mse_loss)
    torch.testing.assert_close(gradients(stages[rank]), gradients(whole[rank]), rtol=1e-4, atol=1e-6)
    return float(gradients(stages[rank])[0].abs().max()), pipeline.most_kept


def test_pipeline_zero_backward(ranks: Ranks) -> None:
    """The first stage has the gradients of the whole model; the schedules are not the same loop, and end."""
    kept = {}
    for schedule in ("gpipe", "1f1b"):
        found = ranks.run(piped, schedule, size=3)
        assert all(largest > 0 for largest, _ in found)
        kept[schedule] = [most for _, most in found]
    assert kept == {"gpipe": [8, 8, 8], "1f1b": [3, 2, 1]}


def relabelled() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(7 * 5, dtype=torch.float32).view(7, 5)
    by_rows = distribute_tensor(whole.clone(), mesh, [Shard(0)])
    assert torch.equal(by_rows.to_local(), whole.chunk(world, 0)[rank])
    by_columns = by_rows.redistribute(placements=[Shard(1)])
    assert torch.equal(by_columns.to_local(), whole.chunk(world, 1)[rank])
    everywhere = by_columns.redistribute(placements=[Replicate()])
    assert torch.equal(everywhere.to_local(), whole)


def test_dtensor_relabel(ranks: Ranks) -> None:
    """A tensor that is divided otherwise has other numbers on each rank, not only another label."""
    ranks.run(relabelled, size=3)


def normalised(sizes: list[int]) -> None:
    rank = dist.get_rank()
    torch.manual_seed(1)
    joined = torch.randn(sum(sizes), 3) + 1e4
    mine = joined.split(sizes)[rank]
    expected = nn.BatchNorm1d(3).double()(joined.double()).split(sizes)[rank]
    torch.testing.assert_close(SyncBatchNorm(3)(mine).double(), expected, rtol=1e-4, atol=1e-5)


def test_syncbn_unequal_batches(ranks: Ranks) -> None:
    """Every sample counts once, on a rank with many or none, and a large mean takes nothing from the variance."""
    ranks.run(normalised, [7, 0, 2], size=3)


def replaced(folder: str) -> None:
    ours = Sharded(net())
    optimizer = torch.optim.SGD(ours.parameters(), lr=1.0)
    saver = Saver(folder, ours, optimizer)
    saver.save(1)
    saver.wait()
    dist.barrier()
    ours.load_full_parameters({name: torch.zeros_like(value) for name, value in ours.full_parameters().items()})
    load(folder).restore(ours, optimizer)
    expected = net()
    for model in (ours, expected):
        model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    torch.optim.SGD(expected.parameters(), lr=1.0).step()
    for name, parameter in ours.full_parameters().items():
        torch.testing.assert_close(parameter, expected.get_parameter(name).detach())


def test_optimizer_stale_params(ranks: Ranks, tmp_path: Path) -> None:
    """After parameters were put into a model twice, the optimizer still moves those that the model uses."""
    ranks.run(replaced, str(tmp_path), size=2)


def clipped() -> None:
    """Ranks pull in opposite directions but for a little: each gradient is long, their average is not."""
    ours = Sharded(nn.Linear(2, 1, bias=False))
    pull = 100.0 if dist.get_rank() else -99.0
    (ours(torch.tensor([[0.6, 0.8]])) * pull).sum().backward()
    assert clip_grad_norm(ours, 0.25) == pytest.approx(0.5, rel=1e-4)
    shares = [torch.empty(1) for _ in range(2)]
    assert ours.shard.grad is not None
    dist.all_gather(shares, ours.shard.grad)
    torch.testing.assert_close(torch.cat(shares), torch.tensor([0.15, 0.2]), rtol=1e-4, atol=0.0)


def test_clip_before_average(ranks: Ranks) -> None:
    ranks.run(clipped, size=2)


def saved_twice(folder: str) -> None:
    ours = Sharded(net())
    saver = Saver(folder, ours, torch.optim.Adam(ours.parameters()))
    for step in (1, 2):
        saver.save(step)
    saver.wait()


def test_mixed_step_shards(ranks: Ranks, tmp_path: Path) -> None:
    """A shard of one step in the place of another's, or of another run's same step, is no part of a checkpoint."""
    ranks.run(saved_twice, str(tmp_path / "a"), size=2)
    ranks.run(saved_twice, str(tmp_path / "b"), size=2)
    for of_step, into_step, of_run in ((1, 2, "a"), (1, 1, "b")):
        for kind in ("json", "safetensors"):
            name = f"rank-1-of-2.{kind}"
            moved = (step_folder(tmp_path / of_run, of_step) / name).read_bytes()
            (step_folder(tmp_path / "a", into_step) / name).write_bytes(moved)
    with pytest.raises(CheckpointError, match="this describes rank-1-of-2 of step 1"):
        load(tmp_path / "a", 2)
    with pytest.raises(CheckpointError, match="the parts of step 1 are of several savings"):
        load(tmp_path / "a", 1)


class Dropped:
    """What a rank has not sent yet."""

    def __init__(self) -> None:
        self.values = torch.zeros(3)

    def state_dict(self) -> dict[str, Tensor]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.values = state["values"].clone()


def continued(folder: str) -> None:
    """Momentum, dropout's random numbers and a residual: a step after the restart needs all of them."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, residual: Dropped) -> None:
        optimizer.zero_grad()
        F.dropout(model(torch.ones(2, 5)), 0.5).sum().backward()
        residual.values += torch.rand(3) * (1 + dist.get_rank())
        optimizer.step()

    runs = []
    for _ in range(2):
        model = Sharded(net())
        runs.append((model, torch.optim.Adam(model.parameters()), Dropped()))
    (ours, optimizer, residual), again = runs
    for _ in range(3):
        step(ours, optimizer, residual)
    saver = Saver(folder, ours, optimizer, also={"residual": residual})
    saver.save(3)
    step(ours, optimizer, residual)
    saver.wait()
    dist.barrier()
    load(folder).restore(*again[:2], also={"residual": again[2]})
    step(*again)
    assert torch.equal(again[0].shard, ours.shard)
    assert torch.equal(again[2].values, residual.values)


def test_no_optimizer_state(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(continued, str(tmp_path), size=2)


def resharded(folder: str, step: int) -> None:
    """Load what others saved, check it, save it as ours."""
    ours = Sharded(net(seed=7))
    if step:
        load(folder).restore(ours)
    else:
        ours.load_full_parameters({name: parameter.detach() for name, parameter in net().named_parameters()})
    for name, parameter in ours.full_parameters().items():
        assert torch.equal(parameter, net().get_parameter(name))
    saver = Saver(folder, ours)
    saver.save(step + 1)
    saver.wait()


def test_reshard(ranks: Ranks, tmp_path: Path) -> None:
    """From any number of ranks to any other, in processes; all pairs up to eight are in `tests/checkpoints`."""
    for step, size in enumerate((3, 1, 4, 2, 3)):
        ranks.run(resharded, str(tmp_path), step, size=size)
