"""Saved by any number of ranks, loaded by any other: always the tensors of the model that was never divided.

Ranks need no processes here: torch's fake group says who we are, and nothing that saves a part or restores one talks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from hcsim.checkpoints.loader import Checkpoint
from hcsim.checkpoints.saver import RankState
from hcsim.training.modules.sharded import Sharded
from tests.checkpoints.programs import adam, model, same, sharded, tensors, train, write

MOST = 8


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard_of(block: Sharded, rank: int, world: int, whole: Callable[[str], Tensor]) -> Tensor:
    """What a rank has of a block: the parameters end to end, with zeros behind them, in equal shares."""
    names = [piece.name for piece in block.pieces if piece.name != "second.weight"]
    flat = torch.cat([whole(name).detach().reshape(-1) for name in names])
    share = -(-len(flat) // world)
    return nn.functional.pad(flat, (0, share * world - len(flat)))[rank * share : (rank + 1) * share]


def expected(of: nn.Module, plain: dict[str, Tensor], rank: int, world: int) -> dict[str, Tensor]:
    """What a sharded program has on a rank if the whole has these tensors."""
    found = {}
    for name, module in of.named_modules():
        if isinstance(module, Sharded):
            head = f"{name}.".replace("block.", "")
            shard = f"{name}.shard"
            found[shard] = shard_of(module, rank, world, lambda key, head=head: plain[head + key])  # type: ignore[misc]
            for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
                moment = f"{key} of {head}"
                found[f"{key} of {shard}"] = shard_of(
                    module,
                    rank,
                    world,
                    lambda key, moment=moment: plain[moment + key],  # type: ignore[misc]
                )
            found[f"step of {shard}"] = plain["step of 2.weight"]
    for name in plain:
        if name.startswith("2.") or " of 2." in name:
            found[name] = plain[name]
    for name, _ in of.named_buffers():
        if not name.endswith("mask"):
            found[name] = plain[name.replace("block.", "")]
    return found


@pytest.fixture(scope="module")
def plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that was trained a little in one piece."""
    torch.manual_seed(0)
    of = model()
    optimizer = adam(of)
    train(of, optimizer, 3)
    return of, optimizer


@pytest.fixture(scope="module")
def saved(plain: tuple[nn.Module, torch.optim.Optimizer], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as N ranks save it, at step N; at step 0, in one piece."""
    folder = tmp_path_factory.mktemp("saved")
    write(folder, 0, [RankState(*plain)])
    whole = tensors(*plain)
    for world in range(1, MOST + 1):
        states = []
        for rank in range(world):
            with as_rank(rank, world):
                ours = sharded(seed=9)
                optimizer = adam(ours)
                values = expected(ours, whole, rank, world)
                with torch.no_grad():
                    for name, tensor in (*ours.named_parameters(), *ours.named_buffers()):
                        tensor.copy_(values.get(name, tensor))
                for name, parameter in ours.named_parameters():
                    ends = f" of {name}"
                    state = {key.removesuffix(ends): values[key].clone() for key in values if key.endswith(ends)}
                    optimizer.state[parameter] = state
                states.append(RankState(ours, optimizer))
        write(folder, world, states)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("world", range(1, MOST + 1))
def test_whoever_saved_it_each_of_these_ranks_gets_its_share(
    plain: tuple[nn.Module, torch.optim.Optimizer], saved: Path, world: int
) -> None:
    whole = tensors(*plain)
    for rank in range(world):
        with as_rank(rank, world):
            ours = sharded(seed=5)
            optimizer = adam(ours)
            wanted = expected(ours, whole, rank, world)
            for savers in range(MOST + 1):
                with torch.no_grad():
                    for parameter in ours.parameters():
                        parameter.fill_(-1.0)
                Checkpoint.open(saved, savers).restore(ours, optimizer)
                found = tensors(ours, optimizer)
                for name, module in ours.named_modules():
                    if isinstance(module, Sharded):  # behind the parameters are zeros that nobody reads
                        length = max(piece.hi for piece in module.pieces)
                        found[f"{name}.shard"][max(0, length - rank * module.shard.numel()) :] = 0
                same(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("savers", range(MOST + 1))
def test_whoever_saved_it_one_process_gets_the_whole(
    plain: tuple[nn.Module, torch.optim.Optimizer], saved: Path, savers: int
) -> None:
    ours = model(seed=4)
    optimizer = adam(ours)
    Checkpoint.open(saved, savers).restore(ours, optimizer)
    same(tensors(ours, optimizer), tensors(*plain))
    assert Checkpoint.open(saved, savers).world == max(savers, 1)


@pytest.mark.slow
def test_each_rank_writes_its_share_and_no_more(saved: Path) -> None:
    """Of what all ranks hold, one writes each tensor; together the parts are hardly larger than one."""

    def size_bytes(step: int) -> list[int]:
        parts = (saved / f"step-{step:08d}").glob("*.safetensors")
        return [
            sum(tensor.nbytes for name, tensor in read(path).items() if not name.startswith("rank.")) for path in parts
        ]

    from safetensors.torch import load_file as read

    [whole] = size_bytes(0)
    for world in range(1, MOST + 1):
        assert sum(size_bytes(world)) == whole


class Residual:
    """What a rank has not sent yet: those who are left take over what the others had."""

    def __init__(self, value: float) -> None:
        self.values = torch.tensor([value])

    def state_dict(self) -> dict[str, Tensor]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.values = state["values"].clone()

    def forget(self) -> None:
        self.values.zero_()

    def absorb(self, state: dict[str, Tensor]) -> None:
        self.values += state["values"]


class Schedule:
    """The same on all ranks."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 5, 7])
def test_nothing_that_was_not_sent_is_lost_and_new_ranks_know_the_schedule(tmp_path: Path, world: int) -> None:
    savers, linear = 5, nn.Linear(1, 1)
    states = []
    for rank in range(savers):
        with as_rank(rank, savers):
            torch.manual_seed(rank)
            also = {"residual": Residual(2.0**rank), "schedule": Schedule(7)}
            states.append(RankState(linear, also=also))
    write(tmp_path, 1, states)
    total = 0.0
    for rank in range(world):
        with as_rank(rank, world):
            residual, schedule = Residual(0.0), Schedule(0)
            Checkpoint.open(tmp_path).restore(nn.Linear(1, 1), also={"residual": residual, "schedule": schedule})
            assert schedule.epoch == 7
            assert world < savers or float(residual.values) == (2.0**rank if rank < savers else 0.0)
            total += float(residual.values)
            drawn = torch.rand(1)
            if rank < savers:
                torch.manual_seed(rank)
                assert torch.equal(drawn, torch.rand(1))
    assert total == 2.0**savers - 1
