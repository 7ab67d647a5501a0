"""One process: what is saved comes back to the bit, and training goes on as if nothing had happened."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hcsim.checkpoints.loader import load
from hcsim.checkpoints.parts import put_together, taken_apart
from hcsim.checkpoints.saver import Saver
from hcsim.errors import CheckpointError
from tests.checkpoints.programs import adam, model, same, tensors, train

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor([each for each in p if each.numel()], lr=0.01),
    "two groups": lambda p: torch.optim.Adam([{"params": (p := list(p))[:3], "lr": 0.1}, {"params": p[3:-1]}]),
}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_goes_on_to_the_same_bits(tmp_path: Path, optimizer: str) -> None:
    ours = model()
    opt = OPTIMIZERS[optimizer](ours.parameters())
    train(ours, opt, 3)
    saver = Saver(tmp_path, ours, opt)
    saver.save(3)
    before = tensors(ours, opt)
    train(ours, opt, 3)  # while it is being written: what was saved is a copy
    saver.wait()

    again = model(seed=2)
    fresh = OPTIMIZERS[optimizer](again.parameters())
    train(again, fresh, 1)
    load(tmp_path).restore(again, fresh)
    same(tensors(again, fresh), before)
    settings, saved = ([{**g, "params": 0} for g in o.param_groups] for o in (fresh, opt))
    assert settings == saved
    assert [[type(value) for value in g.values()] for g in settings] == [[type(v) for v in g.values()] for g in saved]
    train(again, fresh, 3)
    same(tensors(again, fresh), tensors(ours, opt))


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    random.gauss(0, 1)
    np.random.normal()
    saver = Saver(tmp_path, nn.Linear(1, 1))
    saver.save(0)

    def draw() -> list[float]:
        return [random.gauss(0, 1), random.random(), *np.random.normal(size=3), *torch.randn(3).tolist()]

    drawn = draw()
    saver.wait()
    load(tmp_path).restore(nn.Linear(1, 1))
    assert draw() == drawn


@pytest.mark.slow
def test_whatever_has_a_state_and_plain_words_come_back(tmp_path: Path) -> None:
    ours = nn.Linear(2, 2)
    opt = adam(ours)
    schedule = ReduceLROnPlateau(opt, patience=3)
    saver = Saver(tmp_path, ours, opt, also={"schedule": schedule})
    saver.save(1, best=math.inf, name="first", seen=(1, [2, None]), table=torch.arange(6).view(2, 3))
    schedule.step(0.5)
    saver.save(2, best=0.5)
    saver.wait()
    again = ReduceLROnPlateau(adam(nn.Linear(2, 2)))
    first = load(tmp_path, 1)
    first.restore(ours, also={"schedule": again})
    assert (again.best, again.patience) == (math.inf, 3)
    assert torch.equal(first.plain.pop("table"), torch.arange(6).view(2, 3))
    assert first.plain == {"best": math.inf, "name": "first", "seen": (1, [2, None])}
    load(tmp_path).restore(ours, also={"schedule": again})
    assert again.best == 0.5
    with pytest.raises(CheckpointError, match="no state called other"):
        first.restore(ours, also={"other": again})


def test_states_of_every_shape_are_put_together_again() -> None:
    state = {
        "a/b": torch.ones(2), "a": {"b": torch.zeros(2, 2), 3: [], None: ()}, "big": 1 << 100, "negative": -(1 << 63),
        "floats": [math.inf, -math.inf, 0.1, 5e-324], "number": np.float64(0.3), "yes": True,
        "scalars": (torch.tensor(0.1), torch.tensor(math.inf, dtype=torch.bfloat16), torch.tensor(True)),
        "complex": torch.tensor(1j),
    }  # fmt: skip
    beside: dict[str, Tensor] = {}
    again = put_together(taken_apart(state, "own", beside), beside.__getitem__)
    assert len(beside) == 3
    assert list(again) == list(state)
    assert torch.equal(again["a/b"], torch.ones(2))
    assert torch.equal(again["a"]["b"], torch.zeros(2, 2))
    for ours, theirs in zip(again["scalars"], state["scalars"], strict=True):  # type: ignore[call-overload]
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert again["complex"] == torch.tensor(1j)
    for key in ("big", "negative", "floats", "number", "yes"):
        assert again[key] == state[key]
    assert math.isnan(put_together(taken_apart(math.nan, "", {}), beside.__getitem__))
    with pytest.raises(CheckpointError, match="own/what is a object"):
        taken_apart({"what": object()}, "own", {})
    with pytest.raises(CheckpointError, match="a key that is a tuple"):
        taken_apart({(1, 2): 1}, "own", {})


def test_a_whole_model_is_read_under_its_own_names(tmp_path: Path) -> None:
    ours = model()
    saver = Saver(tmp_path, ours)
    saver.save(0)
    saver.wait()
    again = model(seed=3)
    again.load_state_dict(load(tmp_path).model())
    assert torch.equal(again[1].first.weight, ours[1].first.weight)  # type: ignore[union-attr]


def compiled(of: nn.Module) -> Any:
    return torch.compile(of, backend="eager")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("wrapped", [torch.nn.DataParallel, compiled])
def test_wrappers_leave_the_names_alone(tmp_path: Path, wrapped: Any) -> None:
    saver = Saver(tmp_path, wrapped(nn.Linear(2, 2)))
    saver.save(0)
    saver.wait()
    assert list(load(tmp_path).model()) == ["bias", "weight"]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    ours = nn.Linear(2, 2)
    saver = Saver(tmp_path, ours)
    saver.save(0)
    saver.wait()
    found = load(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"weight has shape \[3, 2\] in the model, and in the checkpoint \[2, 2\]"
    ):
        found.restore(nn.Linear(2, 3))
    with pytest.raises(CheckpointError, match=r"0.weight has shape .* it is missing"):
        found.restore(nn.Sequential(ours))
    with pytest.raises(CheckpointError, match="is of another model: this one has no bias"):
        found.restore(nn.Linear(2, 2, bias=False))
    with pytest.raises(CheckpointError, match="no optimizer's state"):
        found.restore(ours, adam(ours))
    with pytest.raises(CheckpointError, match="not the model's"):
        Saver(tmp_path, ours, adam(nn.Linear(2, 2))).save(1)
    wide = nn.Module()
    for dtype in (torch.complex128, torch.complex32):
        wide.register_buffer("wide", torch.zeros(2).to(dtype))
        with pytest.raises(CheckpointError, match=f"wide is {str(dtype).removeprefix('torch.')}, which a safetensors"):
            Saver(tmp_path, wide).save(1)
    for state in ({"note": "cut \ud83d"}, {"note": {"cut \ud83d": 1}}, {"note": {"cut \ud83d": torch.ones(2)}}):
        with pytest.raises(CheckpointError, match=r"given/note has 'cut \\ud83d', which is no text"):
            Saver(tmp_path, ours).save(1, **state)
    saver = Saver(tmp_path, ours, adam(ours))
    saver.save(2)
    saver.wait()
    halves = torch.optim.Adam([{"params": [ours.weight]}, {"params": [ours.bias]}])
    with pytest.raises(CheckpointError, match="has 2 groups, of 1, 1 parameters, which are not those"):
        load(tmp_path).restore(ours, halves)


def test_settings_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    ours = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="1 to 1 copies"):
        Saver(tmp_path, ours, copies=2)
    with pytest.raises(CheckpointError, match="beside the newest"):
        Saver(tmp_path, ours, keep=0)
    with pytest.raises(CheckpointError, match="counted from 0"):
        Saver(tmp_path, ours).save(-1)


def test_a_state_that_cannot_be_had_and_says_nothing_is_named_by_its_error(tmp_path: Path) -> None:
    class Without:
        def state_dict(self) -> dict[str, Any]:
            raise NotImplementedError

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise NotImplementedError

    with pytest.raises(CheckpointError, match=r"rank 0: NotImplementedError\(\)"):
        Saver(tmp_path, nn.Linear(2, 2), also={"loader": Without()}).save(1)


@pytest.mark.slow
def test_what_cannot_be_written_is_told_at_the_end_if_nobody_waits(tmp_path: Path) -> None:
    program = """
        import sys
        from torch import nn
        from hcsim.checkpoints.saver import Saver
        saver = Saver(sys.argv[1], nn.Linear(2, 2))
        saver.save(1)
    """
    folder = tmp_path / "saved"
    folder.write_text("a file where the folder should be")
    command = [sys.executable, "-c", textwrap.dedent(program), str(folder)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert f"the last save failed: {folder}" in told
    assert told.count("cannot be written") == 1


def test_what_cannot_be_written_is_heard_of_at_the_next_saving_and_then_forgotten(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.write_text("a file where the folder should be")
    saver = Saver(folder, nn.Linear(2, 2))
    saver.save(1)
    with pytest.raises(CheckpointError, match=f"{folder}.*cannot be written"):
        saver.save(2)
    saver.save(3)
    with pytest.raises(CheckpointError, match="cannot be written"):
        saver.wait()
    folder.unlink()
    saver.save(4)
    saver.wait()
    assert load(folder).step == 4


def test_another_kind_of_optimizer_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    saver = Saver(tmp_path, model, torch.optim.Adam(model.parameters()))
    saver.save(1)
    saver.wait()
    with pytest.raises(CheckpointError, match="another kind of optimizer: it has betas, and SGD has momentum"):
        load(tmp_path).restore(model, torch.optim.SGD(model.parameters(), momentum=0.9))
    load(tmp_path).restore(model, torch.optim.AdamW(model.parameters()))
