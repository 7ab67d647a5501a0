"""Real runs on machines with a twin, and `hcsim twin`."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from hcsim.cli.app import app
from hcsim.cli.errors import BAD_INPUT
from hcsim.cli.twin import names_of_peers
from hcsim.real.interfaces import host_name
from hcsim.real.keys import new_secret, save_secret
from hcsim.twin.ledger import PHASES, read_ledger
from tests.cli.test_cli_real import LIMIT_S, free_peers, rank
from tests.conftest import free_addresses

HOME = """
name = "home"
twin = 1
[[medium]]
kind = "ethernet"
name = "loopback"
rate = "20 Gb/s"
latency = "20 us"
[[machine]]
name = "this"
peak = "50 GFLOPS"
memory = "10 GB/s"
basis = {{ kind = "measured", source = "hcsim 0.0.1 on cpu", date = "2026-11-01", spread = 0.1 }}
[[node]]
name = "{name}"
count = {count}
machine = "this"
links = ["loopback"]
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "home.toml"
    path.write_text(HOME.format(name=host_name(), count=2))
    return path


def trained(twin: Path) -> tuple[str, str]:
    peers = free_peers(2)
    job = ("--task", "convex", "--set", "training.steps=8", "--set", f"twin={twin}", "--set", "device=cpu")
    with rank(0, peers, *job) as zero, rank(1, peers, *job) as one:
        output, errors = zero.communicate(timeout=LIMIT_S)
        other, other_errors = one.communicate(timeout=LIMIT_S)
    assert (zero.returncode, one.returncode) == (0, 0), errors + other_errors
    assert "predicted" not in other
    return output, errors


@pytest.mark.slow
def test_a_real_run_on_machines_with_a_twin_ends_with_predicted_against_measured(home: Path) -> None:
    output, errors = trained(home)
    ledger = home.with_name("home.ledger.jsonl")
    assert f"a step, predicted by {home} and measured" in output
    assert "p10–p90" in output
    assert f"kept in {ledger}" in errors
    trained(home)
    pairs = read_ledger(ledger.read_bytes()).pairs
    assert len(pairs) == 2
    for pair in pairs:
        assert set(pair.predicted) == set(pair.measured) == set(pair.band) == set(PHASES.values())
        assert pair.nodes == (f"{host_name()}-1", f"{host_name()}-2")
        assert pair.measured["step"] > 0 < pair.predicted["step"]
        assert pair.band["step"][0] <= pair.predicted["step"] <= pair.band["step"][1]
    assert (pairs[0].settings, pairs[0].twin) == (pairs[1].settings, pairs[1].twin)

    shown = CliRunner().invoke(app, ["twin", str(home)])
    assert shown.exit_code == 0, shown.output
    assert f"{home}: 2 runs" in shown.stdout
    report = msgspec.json.decode(CliRunner().invoke(app, ["twin", str(home), "--json"]).stdout)
    assert report["record"]["runs"] == report["record"]["present"] == 2
    assert len(report["pairs"]) == 2


@pytest.mark.slow
def test_a_machine_that_the_twin_lacks_is_named_and_the_run_succeeds(home: Path) -> None:
    home.write_text(HOME.format(name="studio", count=1))
    output, errors = trained(home)
    assert "parameters sha256" in output
    assert f"not compared with {home}: there is no node {host_name()}-1, {host_name()}-2 in it; it has studio" in errors
    assert not home.with_name("home.ledger.jsonl").exists()


@pytest.mark.slow
def test_the_job_of_a_member_may_be_the_twin_itself(home: Path) -> None:
    save_secret(home.parent, "home", new_secret())
    control, data = (address.rpartition(":")[2] for address in free_addresses(2))
    cluster = f"nodes = 1\ndiscover = false\ndiscovery_port = {control}\ngradient_port = {data}"
    home.write_text(
        f"{HOME.format(name='studio', count=1)}\n[cluster]\n{cluster}\n[training]\ntask = 'convex'\nsteps = 6\n"
    )
    command = ["run", "--real", str(home), "--set", "device=cpu", "--set", "at=127.0.0.1", "--set", "name=studio"]
    result = CliRunner().invoke(app, command, env={"HCSIM_HOME": str(home.parent)})
    assert result.exit_code == 0, result.output
    [pair] = read_ledger(home.with_name("home.ledger.jsonl").read_bytes()).pairs
    assert (pair.nodes, pair.steps) == (("studio",), 6)


def test_a_virtual_run_shows_the_band_of_a_step(home: Path) -> None:
    command = ["run", str(home), "--task", "convex", "--steps", "6"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    assert "p10–p90" in shown.stdout
    assert "measured figures make" in shown.stdout
    assert CliRunner().invoke(app, command).stdout == shown.stdout
    without = CliRunner().invoke(app, [*command, "--set", "bands=0"])
    assert "p10–p90" not in without.stdout
    assert set(without.stdout.splitlines()) < set(shown.stdout.splitlines())


def test_a_twin_without_a_run_says_how_to_record_one_and_what_is_out_of_date(home: Path) -> None:
    home.write_text(HOME.format(name=host_name(), count=1))
    shown = CliRunner().invoke(app, ["twin", str(home)])
    assert shown.exit_code == 0, shown.output
    assert "no run is recorded yet" in shown.stdout
    assert "was measured with other software" in shown.stdout
    assert f"on each machine: hcsim probe -o {home}" in shown.stdout


@pytest.mark.parametrize(
    ("text", "arguments", "told"),
    [
        (None, ["twin", "home.toml"], "no such file"),
        ("name = 3", ["twin", "home.toml"], "home.toml"),
        ("\0", ["twin", "home.toml"], "not TOML"),
        (None, ["run", "--real", "--task", "convex", "--set", "twin=home.toml"], "no such file"),
        ('name = "home"', ["run", "--real", "--task", "convex", "--set", "twin=home.toml"], "predicts nothing"),
        (None, ["run", "two-macs-wifi", "--task", "convex", "--set", "twin=home.toml"], "only with --real"),
        (None, ["run", "two-macs-wifi", "--task", "convex", "--set", "bands=-1"], "bands"),
    ],
)
def test_bad_input_is_told_in_a_line(
    text: str | None, arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "home.toml").write_text(text)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == BAD_INPUT
    assert told in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_lines_that_cannot_be_read_are_counted(home: Path) -> None:
    home.with_name("home.ledger.jsonl").write_bytes(b'{"version": 1, "date": "20\n\xff\n{"version": 7}\n')
    shown = CliRunner().invoke(app, ["twin", str(home)])
    assert shown.exit_code == 0, shown.output
    assert "2 lines cannot be read" in shown.stderr
    assert "a newer hcsim wrote 1 line" in shown.stderr


def test_ranks_are_called_as_their_machines() -> None:
    peers = ["studio.local:52416", "wss://mini.example.org/home", "192.168.1.7", "[::1]:1", "127.0.0.1:2"]
    assert names_of_peers(peers, "here") == ("studio", "mini", "192.168.1.7", "here-1", "here-2")
