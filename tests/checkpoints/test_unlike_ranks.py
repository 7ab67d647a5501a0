"""What is alike on all ranks is saved once; what differs is each rank's own, and goes back to that rank alone."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from hcsim.checkpoints import saver as saving
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


@pytest.mark.slow
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
    return {name: sum(any(each.endswith(f"model.{name}") for each in file) for file in files) for name in VALUES}


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


@pytest.mark.slow
def test_shards_in_each_half_of_the_ranks_are_one_model(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(in_halves, str(tmp_path), False, size=4)
    found = Checkpoint.open(tmp_path)
    plain = nn.Sequential(nn.Linear(5, 3))
    found.restore(plain, adam(plain))
    same(found.model(), dict(plain.state_dict()))


@pytest.mark.slow
def test_halves_that_go_their_own_ways_have_their_own_shards_again(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(in_halves, str(tmp_path), True, size=4)
    with pytest.raises(CheckpointError, match=r"0\.\w+ differs among the 4 ranks that saved it"):
        Checkpoint.open(tmp_path).model()


def sharded_apart(folder: str, members: list[list[int]], inside: list[Callable[[], nn.Module]]) -> None:
    """Each group of ranks has a model of its own, under the names of the others'."""
    rank = dist.get_rank()
    groups = [dist.new_group(each) for each in members]
    mine = next(number for number, each in enumerate(members) if rank in each)

    def begun(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed + mine)
        made = nn.Sequential(Sharded(inside[mine](), group=groups[mine]))
        return made, adam(made)

    def go(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter) * (1 + mine)
        optimizer.step()

    ours = begun(1)
    go(*ours)
    saver = Saver(folder, *ours)
    saver.save(1)
    saver.wait()
    dist.barrier()
    again = begun(5)
    load(folder).restore(*again)
    go(*ours)
    go(*again)
    same(tensors(*again), tensors(*ours))


def small() -> nn.Module:
    return nn.Linear(5, 3)


def large() -> nn.Module:
    return nn.Linear(3, 7)


APART = {
    "sizes": ([[0, 1], [2]], [small, small]),
    "sizes of interleaved groups": ([[0, 3], [1, 2, 4]], [small, small]),
    "shapes": ([[0, 1], [2, 3]], [small, large]),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", APART)
def test_shards_in_groups_of_unlike_sizes_or_shapes_go_back_to_their_ranks(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    members, inside = APART[kind]
    ranks.run(sharded_apart, str(tmp_path), members, inside, size=sum(map(len, members)))
    found = Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match=r"0\.\w+ differs among the \d ranks that saved it"):
        found.model()
    for each in inside:
        with pytest.raises(CheckpointError, match=r"0\.\w+ differs among the \d ranks that saved it"):
            found.restore(nn.Sequential(each()))


def padded(folder: str) -> None:
    """The second rank of each half has no element of the block, and a moment all the same."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = dist.get_rank() // 2

    def begun() -> tuple[nn.Module, torch.optim.Optimizer]:
        made = nn.Sequential(Sharded(nn.Linear(1, 1, bias=False), group=halves[half]))
        return made, adam(made)

    def go(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1 + half)
        optimizer.step()

    ours = begun()
    go(*ours)
    saver = Saver(folder, *ours)
    saver.save(1)
    saver.wait()
    dist.barrier()
    again = begun()
    load(folder).restore(*again)
    go(*again)


@pytest.mark.slow
def test_a_rank_whose_shard_is_all_padding_trains_on(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(padded, str(tmp_path), size=4)


def odd_layouts() -> dict[str, Tensor]:
    numbers = torch.arange(6).to(torch.complex64) * (1 + 1j)
    return {
        "column": torch.arange(12.0).view(4, 3)[:, 0],
        "every second": torch.arange(8.0)[::2],
        "expanded": torch.ones(1).expand(4),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "conjugated": numbers.conj(),
        "negated": numbers.conj().imag,
        "scalar": torch.tensor(1j),
    }


def save_odd_layouts(folder: str) -> None:
    ours, again = nn.Module(), nn.Module()
    for name, value in odd_layouts().items():
        ours.register_parameter(name, nn.Parameter(value))
        again.register_parameter(name, nn.Parameter(torch.zeros(value.shape, dtype=value.dtype)))
    saver = Saver(folder, ours)
    saver.save(1)
    saver.wait()
    dist.barrier()
    load(folder).restore(again)
    same(dict(again.named_parameters()), odd_layouts())


@pytest.mark.slow
def test_tensors_are_compared_however_they_lie_in_memory(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save_odd_layouts, str(tmp_path), size=2)


def replicas(folder: str, kind: str) -> dict[str, Any] | None:
    """Rank 1 rounds differently, and has seen other batches. In a subgroup there is one rank that does not save."""
    rank = dist.get_rank()
    group = dist.new_group([0, 1]) if kind == "subgroup" else None
    if group is not None and rank > 1:
        return None

    def begun(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        made = inner if kind == "by hand" else DistributedDataParallel(inner, process_group=group)
        return made, torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)

    ours, optimizer = begun(1)
    for parameter in ours.parameters():
        parameter.grad = torch.ones_like(parameter) * (1 + rank * 1e-6)
    optimizer.step()
    held = {name.removeprefix("module."): value for name, value in ours.state_dict().items()}
    held["1.running_mean"] += rank
    saver = Saver(folder, ours, optimizer, group=group, alike=kind == "by hand")
    saver.save(1)
    saver.wait()
    dist.barrier(group=group)
    again, moments = begun(2)
    load(folder, group=group).restore(again, moments, group=group)
    mine = tensors(again, moments)
    for name, value in mine.items():
        everyones = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(everyones, value, group=group)
        apart = name == "module.1.running_mean"
        assert torch.equal(*everyones) != apart, name
    return held


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size"), [("ddp", 2), ("subgroup", 3), ("by hand", 2)])
def test_replicas_are_not_compared_and_each_tensor_is_of_one_of_them(
    ranks: Ranks, tmp_path: Path, kind: str, size: int
) -> None:
    first, second, *_ = ranks.run(replicas, str(tmp_path), kind, size=size)
    assert not torch.equal(first["0.weight"], second["0.weight"])
    alone = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    Checkpoint.open(tmp_path).restore(alone, torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9))
    found = Checkpoint.open(tmp_path).model()
    same(found, dict(alone.state_dict()))
    for name, value in found.items():
        assert any(torch.equal(value, each[name]) for each in (first, second)), name
    if kind != "by hand":
        assert torch.equal(found["1.running_mean"], first["1.running_mean"])


def stages_of_replicas(folder: str) -> None:
    """Pipelines of ranks 0 and 2, and of 1 and 3, whose stages DDP averages: a pipeline saves what is no replica."""
    rank = dist.get_rank()
    averaging = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    saving = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]

    def begun(seed: int) -> nn.Module:
        torch.manual_seed(seed + rank // 2)
        return DistributedDataParallel(nn.Linear(2, 2), process_group=averaging)

    ours, again = begun(1), begun(5)
    saver = Saver(f"{folder}/{rank % 2}", ours, group=saving)
    saver.save(1)
    saver.wait()
    dist.barrier()
    load(f"{folder}/{rank % 2}", group=saving).restore(again, group=saving)
    same(dict(again.state_dict()), dict(ours.state_dict()))


@pytest.mark.slow
def test_what_ddp_averages_among_others_than_those_that_save_is_compared(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(stages_of_replicas, str(tmp_path), size=4)


def with_buffers() -> nn.Module:
    """A log that rank 0 alone has, one that it alone lacks, and a window whose length is each rank's."""
    rank = dist.get_rank()
    made = nn.Linear(2, 2)
    made.register_buffer("window", torch.zeros(3 + rank))
    made.register_buffer("log" if rank == 0 else "others", torch.zeros(2))
    return made


def save_buffers(folder: str) -> dict[str, Tensor]:
    rank = dist.get_rank()
    ours, again = with_buffers(), with_buffers()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    for buffer in ours.buffers():
        buffer += 1 + rank
    saver = Saver(folder, ours)
    saver.save(1)
    saver.wait()
    dist.barrier()
    load(folder).restore(again)
    same(dict(again.state_dict()), dict(ours.state_dict()))
    return ours.state_dict()


@pytest.mark.slow
def test_buffers_that_some_ranks_lack_or_of_unlike_shapes_are_the_first_ranks_for_others(
    ranks: Ranks, tmp_path: Path
) -> None:
    first, *_ = ranks.run(save_buffers, str(tmp_path), size=3)
    same(Checkpoint.open(tmp_path).model(), dict(first))
    alone = nn.Linear(2, 2)
    alone.register_buffer("window", torch.zeros(3))
    alone.register_buffer("log", torch.zeros(2))
    Checkpoint.open(tmp_path).restore(alone)
    same(dict(alone.state_dict()), dict(first))


@pytest.mark.parametrize("alike", [True, False])
def test_what_is_on_another_device_is_brought_once_and_kept_only_to_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, alike: bool
) -> None:
    """What a rank compares is brought there by `on_cpu`, and no other way."""
    brought: list[weakref.ref[Tensor]] = []
    most = 0

    def bring(tensor: Tensor, copy: bool = False) -> Tensor:
        nonlocal most
        made = torch.full((5,), float(tensor.numel()))
        brought.append(weakref.ref(made))
        most = max(most, sum(each() is not None for each in brought))
        return made

    monkeypatch.setattr(saving, "on_cpu", bring)
    ours = nn.Module()
    for number in range(80):
        ours.register_parameter(f"n{number}", nn.Parameter(torch.zeros(1 + number, device="meta")))
    state = saving.RankState(ours)
    state.rank, state.world = 0, 2
    marks = state.marks()
    assert most <= 40 + 2 * 4
    others = marks if alike else {name: msgspec.structs.replace(mark, digest=(0, 0)) for name, mark in marks.items()}
    planner = state.planner([marks, others])
    plan = planner.create_local_plan()
    plan = planner.finish_plan(planner.create_global_plan([plan, *([plan] if alike else [])])[0][0])
    written = [item for item in plan.items if item.tensor_data is not None]
    assert len(written) == (40 if alike else 80)
    assert all(float(planner.resolve_data(item)[0]) == item.tensor_data.size[0] for item in written)
    assert len(brought) == (80 if alike else 80 + 40)
