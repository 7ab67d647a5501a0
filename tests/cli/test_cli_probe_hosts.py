"""`hcsim probe --hosts` puts what other machines measured of themselves into the twin here. ssh is a script."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from hcsim.cli.app import app
from hcsim.cli.errors import BAD_INPUT
from hcsim.cli.probe_hosts import ProbedMachine
from hcsim.config import load_scenario
from hcsim.twin.file import TwinFile
from tests.twin.test_twin_file import AIR, MINI, STUDIO, WIRED

SSH = """#!/bin/sh
for word in "$@"; do
  case "$word" in
    mini.local | studio.local) cat "{folder}/$word.json"; exit 0 ;;
    away.local) echo "ssh: connect to host away.local port 22: Connection refused" >&2; exit 255 ;;
    bare.local) echo "sh: hcsim: not found" >&2; exit 127 ;;
  esac
done
"""


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    programs = tmp_path / "bin"
    programs.mkdir()
    for machine, interface in ((MINI, WIRED), (STUDIO, AIR)):
        twin = TwinFile(programs / f"{machine.name}.toml")
        twin.put_machine(machine, [interface])
        data = msgspec.json.encode(ProbedMachine(twin.path.read_text(), (interface,)))
        (programs / f"{machine.name}.local.json").write_bytes(data)
    (programs / "ssh").write_text(SSH.format(folder=programs))
    (programs / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return tmp_path


def test_machines_that_answer_are_kept_and_the_others_are_named(others: Path) -> None:
    twin = others / "home.toml"
    hosts = "mini.local,away.local,studio.local,bare.local"
    result = CliRunner().invoke(app, ["probe", "-o", str(twin), "--hosts", hosts, "--device", "cpu"])
    assert result.exit_code not in (0, BAD_INPUT)
    assert "Traceback" not in result.output
    assert "2 of 4 machines are not measured" in result.stderr
    assert "away.local: ssh failed" in result.stderr
    assert "bare.local: hcsim was not found there" in result.stderr
    scenario = load_scenario(twin)
    assert {machine.name: machine for machine in scenario.machines} == {"mini": MINI, "studio": STUDIO}
    media = {node.name: [link.medium for link in node.links] for node in scenario.nodes}
    assert media == {"mini": ["switch"], "studio": ["air"]}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--hosts", "a", "--cluster"], "--hosts: only without --cluster"),
        (["--hosts", "-oProxyCommand=x"], "not the name of a host"),
        (["--hosts", "localhost"], "no machine but this one"),
    ],
)
def test_hosts_that_cannot_be_meant_are_refused(words: list[str], told: str, others: Path) -> None:
    result = CliRunner().invoke(app, ["probe", "-o", str(others / "home.toml"), "--device", "cpu", *words])
    assert result.exit_code == BAD_INPUT
    assert told in result.stderr
