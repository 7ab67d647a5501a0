"""Checkpoints on a disk that is full, damaged, or another task's."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from hcsim.config import Training
from hcsim.errors import ConfigError
from hcsim.real.hardware import FolderStore
from hcsim.runtime.host import Host
from hcsim.selftest.script import train
from hcsim.training.elastic.checkpoint import CheckpointOrigin, CheckpointWriter, decode, encode, in_store
from hcsim.training.elastic.transfer import StateArrays
from hcsim.training.tasks import task
from hcsim.units import PositiveSeconds
from hcsim.virtual.hardware import VirtualStore
from hcsim.virtual.world import World
from tests.switches import on_switch

SWITCH = on_switch("ab", rate="10 Mb/s", latency="0.5 ms")
CONVEX = Training(task="convex", steps=8, timeout_s=PositiveSeconds(0.5))
DIGITS = CheckpointOrigin("digits", "d1")
PARCEL = StateArrays(b"about", {"parameters": np.arange(6, dtype=np.float32), "steps": np.array([3], np.int64)})
FUZZED = 400


def with_header(data: bytes, header: object) -> bytes:
    end = 8 + int.from_bytes(data[:8], "little")
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[end:]


def header_of(data: bytes) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return found


def mutated(draw: random.Random, data: bytes) -> bytes:
    """Bits flipped, bytes cut out, doubled or replaced, or a field of the header exchanged."""
    kind = draw.randrange(6)
    if kind == 5:
        header = header_of(data)
        part = header[draw.choice(sorted(header))]
        part[draw.choice([*sorted(part), "other"])] = draw.choice([1, -1, "I32", "F64", [], {}, None, [3, 2], 1 << 70])
        return with_header(data, draw.choice([header, [header], part, draw.choice([None, 1, "x", [], {}])]))
    spoiled = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at, length = draw.randrange(len(spoiled)), draw.choice([1, 1, 2, 8, 40])
        if kind == 0:
            spoiled[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del spoiled[at : at + length]
        elif kind == 2:
            spoiled[at:at] = spoiled[at : at + length]
        elif kind == 3:
            spoiled[at : at + length] = draw.randbytes(length)
        else:
            spoiled[at] = draw.choice(b'[]{}",:0\x00\xff')
        if not spoiled:
            break
    return bytes(spoiled)


def check_mutants(seed: int, count: int) -> int:
    """Every damaged file is refused with a `ConfigError` of one line; how many files were not what was saved."""
    data = encode(PARCEL, DIGITS)
    draw, refused = random.Random(seed), []
    for _ in range(count):
        spoiled = mutated(draw, data)
        try:
            loaded = decode(spoiled)
        except ConfigError as error:
            refused.append(str(error))
        else:  # white space in the header, say
            assert (loaded.origin, loaded.number, loaded.snapshot.about) == (DIGITS, 1, PARCEL.about)
            for name, array in PARCEL.arrays.items():
                found = loaded.snapshot.arrays[name]
                assert isinstance(array, np.ndarray)
                assert isinstance(found, np.ndarray)
                assert (found.dtype, found.tobytes()) == (array.dtype, array.tobytes())
    assert not any("\n" in text for text in refused)
    return len(refused)


def test_every_damaged_checkpoint_is_refused_in_one_line():
    assert check_mutants(0, FUZZED) > 0.9 * FUZZED


@pytest.mark.parametrize("change", [{"dtype": "I32"}, {"shape": [2, 3]}])
def test_another_type_or_shape_of_the_same_bytes_is_refused(change):
    data = encode(PARCEL, DIGITS)
    header = header_of(data)
    header["parameters"].update(change)
    with pytest.raises(ConfigError, match="SHA-256 differs"):
        decode(with_header(data, header))


@pytest.mark.parametrize("header", [[], {}, None, 3, {"__metadata__": []}, {"__metadata__": {"format": 1}}])
def test_a_header_of_another_kind_is_refused(header):
    with pytest.raises(ConfigError, match="damaged"):
        decode(with_header(encode(PARCEL), header))


def test_a_checkpoint_of_the_earlier_format_is_refused_and_named():
    header = {"__metadata__": {"format": "hcsim checkpoint 1", "about": "", "sha256": ""}}
    with pytest.raises(ConfigError, match=r"earlier version of hcsim .*hcsim checkpoint 1.*another folder"):
        decode(with_header(encode(PARCEL), header))


def saved(disk: VirtualStore, *steps: int, keep: int = 3) -> None:
    """Save a state that has the step in it, for each of these steps."""
    world = World(SWITCH)

    async def save() -> None:
        checkpoints = CheckpointWriter(1, in_store(disk), keep=keep, origin=DIGITS)
        checkpoints.load()
        for step in steps:
            await checkpoints.save(world.host("a"), StateArrays(str(step).encode(), PARCEL.arrays), step)

    world.run(save())


def newest(disk: VirtualStore, told: list[str] | None = None) -> bytes:
    heard = [] if told is None else told
    found = CheckpointWriter(1, in_store(disk), heard.append, origin=DIGITS).load()
    assert found is not None
    return found.about


def test_the_last_few_are_kept_and_a_damaged_one_costs_only_itself():
    disk = VirtualStore({})
    saved(disk, 1, 2)
    saved(disk, 3, 4, 5)
    assert sorted(disk.records) == ["checkpoint", "checkpoint.1", "checkpoint.2"]
    assert newest(disk) == b"5"
    told: list[str] = []
    disk.records["checkpoint.1"] = disk.records["checkpoint.1"][:-1]
    assert newest(disk, told) == b"4"
    assert len(told) == 1
    assert told[0].startswith("checkpoint.1, on a virtual disk: this checkpoint is damaged")
    assert told[0].endswith("; going on from checkpoint, on a virtual disk")
    saved(disk, 6)  # takes the place of the damaged one
    assert newest(disk, told) == b"6"
    assert [decode(disk.records[name]).snapshot.about for name in sorted(disk.records)] == [b"4", b"6", b"3"]


def test_the_newest_is_found_also_when_fewer_are_kept_than_before():
    disk = VirtualStore({})
    saved(disk, 1, 2, 3)
    assert newest(disk) == b"3"
    saved(disk, 4, keep=1)
    assert newest(disk) == b"4"


def test_where_all_are_damaged_nothing_is_trained_from_the_start_without_a_word():
    disk = VirtualStore({"checkpoint": b"x", "checkpoint.1": b""})
    with pytest.raises(ConfigError, match="checkpoint, on a virtual disk: this checkpoint is damaged"):
        newest(disk)


def test_a_folder_of_another_task_is_named_as_such(tmp_path: Path):
    store = FolderStore(tmp_path / "state")
    store.save("checkpoint", encode(PARCEL, CheckpointOrigin(task("convex").name, "x")))
    for ours, said in (
        (DIGITS, "this is a checkpoint of the task convex, and the task here is digits: give another folder"),
        (CheckpointOrigin("convex", "y"), "the task convex with other data or another model: give another folder"),
    ):
        with pytest.raises(ConfigError, match=f"^{tmp_path}/state/checkpoint: .*{said}"):
            CheckpointWriter(1, in_store(store), origin=ours).load()


def test_a_checkpoint_of_other_settings_is_named_as_such():
    disk = VirtualStore({})

    def checkpoints(member: Host) -> CheckpointWriter:
        return CheckpointWriter(4, in_store(disk if member.name == "a" else member.store))

    assert sorted(train(SWITCH, CONVEX, checkpoints=checkpoints).cluster.done) == ["a", "b"]
    outcome = train(SWITCH, replace(CONVEX, optimizer="adamw"), checkpoints=checkpoints)
    with pytest.raises(ConfigError, match=r"the checkpoint was saved with other settings \(.*another folder"):
        raise outcome.error("a")


class Filling:
    """A vault on a disk that is full for some of the saves."""

    def __init__(self, full: range) -> None:
        self.full = full
        self.saves = 0
        self.data: bytes | None = None

    def __str__(self) -> str:
        return "state/checkpoint"

    def save(self, data: bytes) -> None:
        self.saves += 1
        if self.saves in self.full:
            raise ConfigError("state/checkpoint: cannot be written: No space left on device")
        self.data = data

    def load(self) -> bytes | None:
        return self.data


@pytest.mark.parametrize("strategy", ["ddp", "parameter_server"])
def test_training_goes_on_while_the_disk_is_full_and_saves_when_it_is_not(strategy: str):
    told: list[str] = []
    vault = Filling(range(2, 4))
    outcome = train(
        SWITCH,
        replace(CONVEX, strategy=strategy, steps=12),
        checkpoints=lambda host: CheckpointWriter(2, [vault if host.name == "a" else Filling(range(0))], told.append),
    )
    assert sorted(outcome.cluster.done) == ["a", "b"]
    assert vault.saves == 6
    assert told == [
        "the checkpoint after step 4 could not be saved (state/checkpoint: cannot be written: No space left on device);"
        " training goes on, and the next one is tried when it is due",
        "checkpoints are saved again, as of step 8",
    ]
