"""`hcsim probe` as a person uses it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hcsim.cli.app import app
from hcsim.cli.errors import BAD_INPUT, INTERRUPTED
from hcsim.config import Machine, load_scenario

COMMAND = (sys.executable, "-c", "import hcsim.cli; hcsim.cli.main()")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--device", "gpu"], 'device "gpu"'),
        (["-o", "no/such/folder/twin.toml"], "there is no folder"),
        (["-o", "."], "it is a folder"),
        (["--minutes", "0.1"], "--minutes"),
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
    assert "virtual time" in result.output
