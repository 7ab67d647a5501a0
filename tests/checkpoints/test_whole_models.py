"""All that `nn.Module.state_dict` has of a model is saved, and put back only where it fits."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from hcsim.checkpoints.loader import load
from hcsim.checkpoints.parts import step_folder
from hcsim.checkpoints.saver import Saver
from hcsim.errors import CheckpointError, NoCheckpoint
from hcsim.training.modules.sharded import Sharded
from tests.torch_backend.ranks import Ranks


def saved(folder: Path | str, model: nn.Module) -> Any:
    saver = Saver(folder, model)
    saver.save(1)
    saver.wait()
    return load(folder)


class Counting(nn.Module):
    """Counts in a state that is no tensor."""

    def __init__(self, updates: Any = 0) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.updates = updates

    def get_extra_state(self) -> dict[str, Any]:
        return {"updates": self.updates, "seen": torch.ones(3)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["seen"], torch.ones(3))
        self.updates = state["updates"]


class Tied(nn.Module):
    """A weight, a buffer and two modules that have two names each."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3)
        self.bias = nn.Parameter(torch.randn(7))
        self.out = nn.Linear(3, 7, bias=False)
        self.out.weight = self.table.weight
        scale = torch.randn(2)
        self.register_buffer("fleeting", scale, persistent=False)
        self.register_buffer("scale", scale)
        self.register_buffer("same", scale)
        self.norm = nn.BatchNorm1d(2)
        self.again = self.norm
        self.counting = Counting(5)
        self.counted = self.counting


def compiled(of: nn.Module) -> Any:
    return torch.compile(of, backend="eager")


@pytest.mark.parametrize("wrapped", [nn.Identity, nn.DataParallel, compiled])
def test_what_has_several_names_is_there_under_each(tmp_path: Path, wrapped: Any) -> None:
    ours = Tied()
    found = saved(tmp_path, ours if wrapped is nn.Identity else wrapped(ours)).model()
    assert found.keys() == ours.state_dict().keys()
    for one, other in (("table", "out"), ("norm", "again")):
        assert found[f"{one}.weight"] is found[f"{other}.weight"]
    again = Tied()
    again.counting.updates = 0
    again.load_state_dict(found)
    assert again.counting.updates == 5
    assert torch.equal(again.out.weight, ours.table.weight)
    assert torch.equal(again.get_buffer("scale"), ours.get_buffer("fleeting"))


def shared_blocks(folder: str) -> None:
    """Tied within a block, and a block that has two names itself."""
    torch.manual_seed(1)
    plain = nn.Sequential(Tied(), nn.Linear(2, 2))
    want = {name: value.clone() for name, value in plain.state_dict().items() if isinstance(value, Tensor)}
    block = Sharded(plain[1])
    ours = nn.Sequential(Sharded(plain[0]), block, block)
    found = saved(folder, ours).model()
    for name, value in want.items():
        assert torch.equal(found[name], value), name
    assert found["2.weight"] is found["1.weight"]
    whole = nn.Sequential(Tied(), layer := nn.Linear(2, 2), layer)
    whole.load_state_dict(found)


def test_sharded_blocks_have_every_name_too(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(shared_blocks, str(tmp_path), size=2)


def test_what_a_module_keeps_beside_its_tensors_comes_back(tmp_path: Path) -> None:
    found = saved(tmp_path, nn.Sequential(Counting(5), nn.ReLU()))
    again = nn.Sequential(Counting(), nn.ReLU())
    found.restore(again)
    assert again[0].updates == 5
    assert found.model()["0._extra_state"]["updates"] == 5
    with pytest.raises(CheckpointError, match=r"is of another model: this one has no 0\._extra_state"):
        found.restore(_without_count())
    with pytest.raises(CheckpointError, match=r"has no 0\._extra_state"):
        saved(tmp_path / "without", _without_count()).restore(again)
    with pytest.raises(CheckpointError, match=r"0\._extra_state\.updates is a object"):
        saved(tmp_path, nn.Sequential(Counting(object())))


EXTRA = {
    "bytes": b"a\0b",
    "no bytes": b"",
    "bytearray": bytearray(b"ab"),
    "array": np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::-1],
    "array of no dimension": np.array(1.5, np.float16),
    "empty array": np.empty((0, 3), np.uint8),
    "number": np.float32(0.1),
    "large number": np.uint64(2**64 - 1),
    "truth": np.True_,
    "complex number": np.complex64(1 + 2j),
}


@pytest.mark.parametrize("kind", EXTRA)
def test_extra_states_may_be_bytes_and_of_numpy(tmp_path: Path, kind: str) -> None:
    saved(tmp_path, Counting(EXTRA[kind])).restore(again := Counting())
    assert type(again.updates) is type(EXTRA[kind])
    if isinstance(EXTRA[kind], np.ndarray | np.generic):
        assert again.updates.dtype == EXTRA[kind].dtype
        assert again.updates.shape == EXTRA[kind].shape
    assert np.array_equal(again.updates, EXTRA[kind])


def test_extra_states_may_be_files_in_memory(tmp_path: Path) -> None:
    torch.save([1, "two"], file := io.BytesIO())
    saved(tmp_path, Counting(file)).restore(again := Counting())
    assert torch.load(again.updates) == [1, "two"]


@pytest.mark.parametrize("other", [{1, 2}, np.array(["word"]), np.array([None]), torch.float32, {1.5: 2}])
def test_other_extra_states_are_refused_by_the_name_of_their_module(tmp_path: Path, other: Any) -> None:
    with pytest.raises(CheckpointError, match=r"0\._extra_state[./]updates (is|has) a "):
        saved(tmp_path, nn.Sequential(Counting(other)))


def _without_count() -> nn.Module:
    made = nn.Sequential(nn.Module())
    made[0].layer = nn.Linear(2, 2)
    return made


def numbers(values: Tensor) -> nn.Module:
    made = nn.Module()
    made.register_buffer("numbers", values)
    return made


@pytest.mark.parametrize("here", [torch.uint8, torch.int64, torch.bool])
def test_whole_numbers_do_not_hold_others(tmp_path: Path, here: torch.dtype) -> None:
    found = saved(tmp_path, numbers(torch.tensor([1.7, -300.0])))
    kept = numbers(torch.ones(2, dtype=here))
    name = str(here).removeprefix("torch.")
    with pytest.raises(CheckpointError, match=f"numbers is {name} in the model, which cannot hold the float32"):
        found.restore(kept)
    assert torch.equal(kept.get_buffer("numbers"), torch.ones(2, dtype=here))
    found.restore(narrow := numbers(torch.zeros(2, dtype=torch.bfloat16)))
    assert narrow.get_buffer("numbers")[1] == -300


@pytest.mark.parametrize(("number", "here"), [(300, torch.uint8), (-1, torch.uint8), (2**31, torch.int32)])
def test_whole_numbers_that_do_not_fit_are_refused(tmp_path: Path, number: int, here: torch.dtype) -> None:
    kept = numbers(torch.ones(2, dtype=here))
    name = str(here).removeprefix("torch.")
    with pytest.raises(CheckpointError, match=f"numbers is {name} in the model, which cannot hold the {number} of"):
        saved(tmp_path / "beyond", numbers(torch.tensor([1, number]))).restore(kept)
    assert torch.equal(kept.get_buffer("numbers"), torch.ones(2, dtype=here))
    saved(tmp_path / "within", numbers(torch.tensor([1, 100]))).restore(kept)
    assert kept.get_buffer("numbers").tolist() == [1, 100]


def other_format(folder: Path) -> None:
    saved(folder, nn.Linear(2, 2))
    path = step_folder(folder, 1) / "rank-0-of-1.json"
    part = msgspec.json.decode(path.read_bytes().rsplit(b"\n", 2)[0])
    body = msgspec.json.encode({"format": "hcsim checkpoint part 1", "step": part["step"]})
    path.write_bytes(body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n")


def by_torch(folder: Path) -> None:
    dcp.save({"model": nn.Linear(2, 2).state_dict()}, checkpoint_id=folder)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("others", "error"), [(other_format, "'hcsim checkpoint part 1', and 'hcsim"), (by_torch, "its FileSystemReader")]
)
def test_what_is_no_checkpoint_of_ours_is_refused_by_its_name(tmp_path: Path, others: Any, error: str) -> None:
    others(tmp_path)
    with pytest.raises(CheckpointError, match=error) as caught:
        load(tmp_path)
    assert not isinstance(caught.value, NoCheckpoint)
