"""A small program to save: a model with everything that is awkward to save, its optimizer, and its training."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hcsim.checkpoints.parts import write_part
from hcsim.checkpoints.saver import RankState
from hcsim.checkpoints.storage import Writer, packed_plan, unpacked_plan
from hcsim.training.modules.batch_norm import SyncBatchNorm
from hcsim.training.modules.sharded import Sharded


class Odd(nn.Module):
    """A tied weight, a scalar, an empty tensor, one that is not contiguous, bfloat16, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.turned = nn.Parameter(torch.randn(3, 6).t())
        self.register_buffer("seen", torch.tensor(0, dtype=torch.int64))
        self.register_buffer("narrow", torch.randn(5).bfloat16())
        self.register_buffer("mask", torch.randn(2, 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.seen, Tensor)
        self.seen += 1
        return (self.second(torch.tanh(self.first(x))) * self.scale) @ self.turned + self.nothing.sum()


def model(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)), Odd(), nn.Linear(3, 2))


def sharded(seed: int = 1) -> nn.Sequential:
    """A block within a block, and a layer that every rank holds, with averaged gradients."""
    plain = model(seed)
    SyncBatchNorm.convert(plain)
    for parameter in plain[2].parameters():
        parameter.register_post_accumulate_grad_hook(_average)
    plain[0][0] = Sharded(plain[0][0])  # type: ignore[index, operator]
    return nn.Sequential(Sharded(plain[0]), Sharded(plain[1]), plain[2])


def _average(parameter: Tensor) -> None:
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)
    parameter.grad.div_(dist.get_world_size())


def adam(of: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(of.parameters(), lr=0.01, amsgrad=True)


def train(of: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """On data drawn from torch's generator."""
    for _ in range(steps):
        optimizer.zero_grad()
        of(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()


def tensors(of: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything there is, copied."""
    found = {name: tensor.detach().clone() for name, tensor in of.state_dict().items()}
    for name, parameter in of.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{key} of {name}"] = value.detach().clone()
    return found


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Equal in names, dtypes, shapes and bits."""
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert tensor.shape == theirs[name].shape, name
        assert torch.equal(tensor, theirs[name]), name


def write(folder: Path, step: int, states: list[RankState]) -> None:
    """What ranks save that are not there at once: each has told its marks, and then its plan."""
    marks = [state.marks() for state in states]
    writers = [Writer(folder, step, state.aliases) for state in states]
    planners = [state.planner(marks) for state in states]
    local = [
        writer.prepare_local_plan(planner.create_local_plan())
        for writer, planner in zip(writers, planners, strict=True)
    ]
    plans = [unpacked_plan(packed_plan(plan)) for plan in local]
    for rank, (writer, planner) in enumerate(zip(writers, planners, strict=True)):
        dealt, _ = planner.create_global_plan(plans)
        plan = planner.finish_plan(writer.prepare_global_plan(dealt)[rank])
        write_part(folder, *writer.take(plan, planner, copy=False).packed())
