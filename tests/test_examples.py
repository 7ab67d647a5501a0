"""The examples run on a virtual cluster, and under torchrun with either backend."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hcsim.checkpoints.loader import load
from hcsim.cli.app import app

EXAMPLES = Path(__file__).parent.parent / "examples"
LIMIT_S = 150
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ranks_at_hand")]


def simulated(name: str, scenario: str, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["run", str(EXAMPLES / name), "--scenario", scenario, "--", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def under_torchrun(ranks: int, name: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([0-9.]+)", printed)]


def test_digits_are_learnt_on_four_macs_and_then_on_two_ranks(tmp_path: Path) -> None:
    """The second run goes on where the first one ended, with other ranks and another backend."""
    saved = str(tmp_path / "digits")
    first = simulated("image_classifier.py", "four-macs-1gbe", "--epochs", "2", "--save", saved)
    assert re.findall(r"epoch (\d)", first) == ["0", "1"]
    assert load(saved).world == 4
    second = under_torchrun(2, "image_classifier.py", "--epochs", "4", "--save", saved, "--backend", "hcsim")
    assert re.findall(r"epoch (\d)", second) == ["2", "3"]
    assert float(re.findall(r"([0-9.]+)% right", second)[-1]) > 85
    assert (load(saved).step, load(saved).world) == (4, 2)


def test_the_transformer_learns_alike_in_both_worlds_whole_or_sharded() -> None:
    whole = losses(simulated("language_model.py", "two-macs-wifi", "--steps", "10"))
    sharded = losses(under_torchrun(2, "language_model.py", "--steps", "10", "--sharded"))
    assert len(whole) == 1
    assert whole == pytest.approx(sharded, abs=0.002)
    assert whole[0] < 3.3


def test_diloco_spends_less_time_on_the_air(tmp_path: Path) -> None:
    saved = str(tmp_path / "diloco")
    printed = [
        simulated("diloco_wifi.py", "two-macs-wifi", "--steps", "4", *arguments)
        for arguments in (("--every", "1"), ("--every", "4", "--save", saved))
    ]
    often, seldom = ([float(s) for s in re.findall(r"([0-9.]+) s of them", each)] for each in printed)
    assert max(seldom) < min(often)
    assert load(saved).step == 4
