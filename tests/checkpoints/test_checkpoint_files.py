"""A checkpoint on disk is whole or it does not count: what dies, is cut, flipped or mixed is named and passed over."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from hcsim.checkpoints.loader import Checkpoint, load
from hcsim.checkpoints.parts import CheckpointShard, data_file, parts_in, step_folder, steps_in, write_part
from hcsim.checkpoints.saver import Saver
from hcsim.errors import CheckpointError, NoCheckpoint
from tests.torch_backend.ranks import Killed, Meeting, Ranks


def layer(value: float) -> nn.Linear:
    made = nn.Linear(2, 1)
    nn.init.constant_(made.weight, value)
    return made


def save(folder: Path, *steps: int) -> None:
    """Each step's weight is its number."""
    made = layer(0)
    saver = Saver(folder, made, keep=100)
    for step in steps:
        nn.init.constant_(made.weight, float(step))
        saver.save(step)
    saver.wait()


def weight(checkpoint: Checkpoint) -> float:
    made = layer(-1)
    checkpoint.restore(made)
    assert torch.equal(made.weight, checkpoint.model()["weight"])
    return float(made.weight.detach()[0, 0])


def die_at(meeting: Meeting, folder: str, suffix: str) -> None:
    """End at the moment when the second step's file of that kind is about to get its name."""
    save(Path(folder), 1)
    sys.addaudithook(
        lambda event, args: os._exit(9) if event == "os.rename" and str(args[1]).endswith(suffix) else None
    )
    save(Path(folder), 2)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
def test_who_dies_while_saving_leaves_the_step_before(ranks: Ranks, tmp_path: Path, suffix: str) -> None:
    assert ranks.answers(die_at, str(tmp_path), suffix, size=1, backend="") == [Killed()]
    assert steps_in(tmp_path) == [2, 1]
    found = load(tmp_path)
    assert (found.step, weight(found)) == (1, 1.0)
    with pytest.raises(CheckpointError, match="no whole checkpoint of step 2"):
        load(tmp_path, 2)
    save(tmp_path, 2)
    assert weight(load(tmp_path)) == 2.0


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [flip, cut, empty, Path.unlink])
@pytest.mark.parametrize("file", ["rank-0-of-1.safetensors", "rank-0-of-1.json"])
def test_a_damaged_file_is_named_and_the_step_before_is_used(tmp_path: Path, damage: object, file: str) -> None:
    save(tmp_path, 1, 2)
    path = step_folder(tmp_path, 2) / file
    assert callable(damage)
    damage(path)
    gone = damage is Path.unlink and file.endswith(".json")  # then the part was never written, for all we know
    if gone:
        assert weight(load(tmp_path)) == 1.0
    else:
        with pytest.warns(UserWarning, match=f"{path}.*: step 1 is loaded"):
            assert weight(load(tmp_path)) == 1.0
    with pytest.raises(CheckpointError, match="no whole checkpoint of step 2" if gone else str(path)):
        load(tmp_path, 2)
    shutil.rmtree(step_folder(tmp_path, 1))
    with pytest.raises(CheckpointError, match="no whole checkpoint" if gone else str(path)):
        load(tmp_path)


def test_every_flipped_byte_of_a_description_is_noticed(tmp_path: Path) -> None:
    save(tmp_path, 3)
    path = step_folder(tmp_path, 3) / "rank-0-of-1.json"
    sound = path.read_bytes()
    for at in range(0, len(sound) - 1, 7):
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 4]) + sound[at + 1 :])
        assert parts_in(tmp_path, 3)[0] == []
    path.write_bytes(sound)
    assert len(parts_in(tmp_path, 3)[0]) == 1


def part_of(rank: int, world: int, step: int, saving: str) -> tuple[CheckpointShard, bytes]:
    """Of ranks of which the first has everything."""
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), step)
        [part], _ = parts_in(Path(folder), step)
        data = data_file(Path(folder), part).read_bytes()
    items = [each for each in part.items if rank == 0 or each.name == "rank.0"]
    items = [msgspec.structs.replace(each, path=(f"rank.{rank}",)) if each.name == "rank.0" else each for each in items]
    return msgspec.structs.replace(part, rank=rank, world=world, saving=saving, items=items), data


def test_parts_of_two_savings_are_never_one_checkpoint(tmp_path: Path) -> None:
    write_part(tmp_path, *part_of(0, 2, 5, "a"))
    write_part(tmp_path, *part_of(1, 2, 5, "b"))
    with pytest.raises(CheckpointError, match="the parts of step 5 are of several savings"):
        load(tmp_path)
    write_part(tmp_path, *part_of(0, 2, 5, "b"))
    assert load(tmp_path).step == 5


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    write_part(tmp_path, *part_of(1, 3, 5, "a"))
    with pytest.raises(CheckpointError, match="of step 5 the part of rank 0, 2 is missing") as caught:
        load(tmp_path)
    assert not isinstance(caught.value, NoCheckpoint)  # who trains on from the start would overwrite it
    with pytest.raises(NoCheckpoint, match=r"there is no whole checkpoint here$"):
        load(tmp_path / "elsewhere")


def test_a_part_of_another_step_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    save(tmp_path, 1)
    shutil.copytree(step_folder(tmp_path, 1), step_folder(tmp_path, 2))
    with pytest.warns(UserWarning, match="this describes rank-0-of-1 of step 1"):
        assert load(tmp_path).step == 1


def test_savings_by_other_numbers_of_ranks_stand_side_by_side(tmp_path: Path) -> None:
    write_part(tmp_path, *part_of(0, 1, 5, "b"))
    write_part(tmp_path, *part_of(0, 2, 5, "c"))  # the newer saving was never finished
    assert load(tmp_path).world == 1


def test_of_two_whole_savings_of_a_step_the_later_one_is_loaded(tmp_path: Path) -> None:
    """Their numbers are drawn: what comes first among those says nothing."""
    for folder in (tmp_path / str(number) for number in range(8)):
        earlier = secrets.token_hex(16)
        for rank in range(2):
            write_part(folder, *part_of(rank, 2, 5, earlier))
        assert load(folder).world == 2
        save(folder, 5)
        assert load(folder).world == 1


def die_saving_again(meeting: Meeting, folder: str, suffix: str) -> None:
    saver = Saver(folder, made := layer(1))
    saver.save(0)
    saver.wait()
    sys.addaudithook(
        lambda event, args: os._exit(9) if event == "os.rename" and str(args[1]).endswith(suffix) else None
    )
    nn.init.constant_(made.weight, 2.0)
    saver.save(0)
    saver.wait()


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
def test_who_dies_while_saving_a_step_again_leaves_what_it_had(ranks: Ranks, tmp_path: Path, suffix: str) -> None:
    assert ranks.answers(die_saving_again, str(tmp_path), suffix, size=1, backend="") == [Killed()]
    assert weight(load(tmp_path)) == 1


def test_of_one_step_that_is_saved_again_and_again_the_last_two_savings_stay(tmp_path: Path) -> None:
    made = layer(0)
    saver = Saver(tmp_path, made)
    for value in range(5):
        nn.init.constant_(made.weight, float(value))
        saver.save(0)
    saver.wait()
    assert weight(load(tmp_path)) == 4
    assert len(list(step_folder(tmp_path, 0).iterdir())) == 4


def test_another_format_is_refused_by_its_name(tmp_path: Path) -> None:
    part, data = part_of(0, 1, 5, "a")
    fields = {name: getattr(part, name) for name in part.__struct_fields__}
    write_part(tmp_path, CheckpointShard(**{**fields, "format": "hcsim checkpoint part 9"}), data)
    with pytest.raises(CheckpointError, match="'hcsim checkpoint part 9', and 'hcsim checkpoint part 2' can be read"):
        load(tmp_path)


def test_a_description_that_is_nested_without_end_is_named(tmp_path: Path) -> None:
    part, data = part_of(0, 1, 1, "one")
    write_part(tmp_path, part, data)
    body = b"[" * 5000
    description = next(step_folder(tmp_path, 1).glob("*.json"))
    description.write_bytes(body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n")
    parts, [trouble] = parts_in(tmp_path, 1)
    assert not parts
    assert trouble.startswith(f"{description}: ")


def test_the_newest_step_and_those_that_stay(tmp_path: Path) -> None:
    made = layer(0)
    saver = Saver(tmp_path, made, keep=2)
    (tmp_path / "step-x").mkdir()
    for step in (10, 20, 30, 40, 100_000_000):
        saver.save(step)
    saver.wait()
    assert steps_in(tmp_path) == [100_000_000, 40, 30]
    assert not list(tmp_path.rglob(".*"))


def test_steps_of_earlier_runs_are_among_those_that_stay(tmp_path: Path) -> None:
    for run in range(4):
        saver = Saver(tmp_path, layer(0), keep=2)
        for step in (2 * run + 1, 2 * run + 2):
            saver.save(step)
        saver.wait()
    assert steps_in(tmp_path) == [8, 7, 6]


def test_a_step_that_was_not_finished_does_not_count_among_those_that_stay(tmp_path: Path) -> None:
    write_part(tmp_path, *part_of(0, 2, 20, "a"))
    save(tmp_path, 10)
    saver = Saver(tmp_path, layer(0), keep=1)
    saver.save(15)
    saver.save(25)
    saver.wait()
    assert steps_in(tmp_path) == [25, 20, 15]
    saver.save(35)
    saver.wait()
    assert steps_in(tmp_path) == [35, 25]


def test_tensors_can_be_read_by_other_programs(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    save(tmp_path, 7)
    read = load_file(step_folder(tmp_path, 7) / "rank-0-of-1.safetensors")
    assert torch.equal(read["model.weight"], torch.tensor([[7.0, 7.0]]))
