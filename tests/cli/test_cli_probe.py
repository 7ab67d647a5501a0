"""`hcsim probe` as a person uses it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hcsim.cli.app import app
from hcsim.cli.errors import BAD_INPUT, FAILED, INTERRUPTED
from hcsim.config import Machine, load_scenario

COMMAND = (sys.executable, "-c", "import hcsim.cli; hcsim.cli.main()")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--device", "gpu"], 'device "gpu"'),
        (["-o", "no/such/folder/twin.toml"], "there is no folder"),
        (["-o", "."], "it is a folder"),
        (["--minutes", "0.1"], "--minutes"),
        (["train.py"], "train.py: there is no such script"),
        (["train.txt"], "ends with .py"),
        (["train.py", "--cluster"], "--cluster: only without a script"),
        (["train.py", "--minutes", "0"], "--minutes 0"),
    ],
)
def test_bad_input_is_told_in_a_line(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["probe", *arguments])
    assert result.exit_code == BAD_INPUT
    assert told in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_interrupted_probe_leaves_what_it_has_measured_and_a_run_takes_it(tmp_path: Path) -> None:
    twin = tmp_path / "twin.toml"
    process = subprocess.Popen(
        [*COMMAND, "probe", "-o", str(twin), "--device", "cpu"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        while not twin.exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=120)[0].decode()
    finally:
        process.kill()
        process.wait()
    assert process.returncode == INTERRUPTED, said
    assert f"what was measured so far is in {twin}" in said
    assert list(tmp_path.iterdir()) == [twin]
    [machine] = load_scenario(twin).machines
    assert isinstance(machine, Machine)
    assert machine.basis.kind == "measured"
    assert {curve.kind for curve in machine.kernels} >= {"matmul"}
    result = CliRunner().invoke(app, ["run", str(twin), "--task", "convex", "--steps", "2"])
    assert result.exit_code == 0, result.output
    assert "simulated time" in result.output


TRAINING = """
import sys
import torch
model = torch.nn.Linear(256, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(int(sys.argv[1])):
    loss = model(torch.ones(64, 256)).square().mean()
    loss.backward()
    optimizer.step()
print("the last line")
"""


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_at_hand")
def test_a_probed_script_is_simulated_with_its_own_kernels(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script, twin = tmp_path / "train.py", tmp_path / "twin.toml"
    script.write_text(TRAINING)
    result = CliRunner().invoke(app, ["probe", str(script), "-o", str(twin), "--", "10"])
    assert result.exit_code == 0, result.output
    assert "train.py on cpu: " in result.stdout
    assert "100% of their time is in known kernels" in result.stdout
    assert "ended before enough steps were timed" in result.stderr
    assert "the last line" in capfd.readouterr().err
    [machine] = load_scenario(twin).machines
    [known] = machine.scripts
    assert known.name == "train.py"
    assert known.basis.source.endswith("on cpu, given 10")
    result = CliRunner().invoke(app, ["run", str(script), "--scenario", str(twin), "--", "2"])
    assert result.exit_code == 0, result.output
    took = re.search(r"0 \S+ +([0-9.]+) (.?s) ", result.stdout)
    assert took is not None
    expected_s = 2 * sum(curve.points[0][1] for curve in known.kernels)
    assert float(took[1]) * {"ms": 1e-3, "µs": 1e-6}[took[2]] == pytest.approx(expected_s, rel=0.3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import torch\ntorch.ones(3) @ torch.ones(4)", "train.py failed: RuntimeError"),
        ("print('done')", "ended without a backward pass"),
        ("import torch\na = torch.ones(1, requires_grad=True)\na.sum().backward()", "too few steps"),
    ],
)
def test_a_script_that_cannot_be_measured_is_told_in_a_line(
    text: str, told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script, twin = tmp_path / "train.py", tmp_path / "twin.toml"
    script.write_text(text)
    result = CliRunner().invoke(app, ["probe", str(script), "-o", str(twin)])
    assert result.exit_code == FAILED
    assert result.stderr.splitlines()[-1].startswith("error: train.py")
    assert told in result.stderr.splitlines()[-1]
    own_traceback = capfd.readouterr().err
    assert ("Traceback" in own_traceback) == ("ones(4)" in text)
    assert "runpy" not in own_traceback
    assert not twin.exists()
