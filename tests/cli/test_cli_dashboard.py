"""`hcsim dashboard` and `hcsim cluster status --watch`, as they are typed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path
from urllib.request import urlopen

import pytest
from typer.testing import CliRunner

from hcsim.cli.app import app
from hcsim.cli.dashboard import guard_for, tell_url
from hcsim.errors import ConfigError
from hcsim.real.keys import new_secret, save_secret
from tests.conftest import free_addresses

LIMIT_S = 240
"""Nothing here takes so long unless it hangs, however busy the machine."""


def test_a_token_and_tls_protect_the_page_beyond_the_loopback_and_only_there() -> None:
    for listen in ("127.0.0.1:0", "[::1]:52419", "localhost:1"):
        assert guard_for(listen) == (None, "")
    first, second = guard_for("0.0.0.0:52419")[0], guard_for("[2001:db8::1]:52419")[0]
    assert first is not None
    assert second is not None
    assert first.token != second.token
    assert len(first.token) >= 32
    with pytest.raises(ConfigError, match="give an IP address"):
        guard_for("mini.local:52419")


@pytest.mark.parametrize(
    ("listen", "example"),
    [
        ("0.0.0.0", "0.0.0.0:52419"),
        ("127.0.0.1:", "127.0.0.1:52419"),
        ("::1", "[::1]:52419"),
        ("[::]", "[::]:52419"),
        ("52419", "127.0.0.1:52419"),
        (":8080", "127.0.0.1:8080"),
        ("127.0.0.1:99999", "127.0.0.1:52419"),
        ("", "127.0.0.1:52419"),
    ],
)
def test_a_page_without_a_port_or_an_address_is_refused_with_an_example_that_is_taken(
    listen: str, example: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"as in {example}") + "$"):
        guard_for(listen)
    guard_for(example)


def test_the_address_that_is_told_is_one_that_another_machine_can_call(capsys: pytest.CaptureFixture[str]) -> None:
    tell_url("https://0.0.0.0:52419/?token=t", "AB:CD")
    captured = capsys.readouterr()
    assert "0.0.0.0" not in captured.out
    assert captured.out.strip().endswith(":52419/?token=t")
    assert "AB:CD" in captured.err


def test_a_machine_that_has_joined_no_cluster_is_told_so(tmp_path: Path) -> None:
    for words in (("dashboard",), ("cluster", "status", "--watch")):
        result = CliRunner().invoke(app, [*words], env={"HCSIM_HOME": str(tmp_path)})
        assert result.exit_code == 2
        assert "hcsim cluster" in result.stderr


@pytest.mark.slow
def test_a_virtual_run_shows_itself_when_it_has_ended_until_it_is_interrupted() -> None:
    command = [sys.executable, "-m", "hcsim", "run", "two-macs-wifi", "--task", "slopes", "--steps", "3", "--dashboard"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ) as run:
        try:
            url = told_url(run)
            with urlopen(f"{url}at?t=1e9", timeout=LIMIT_S) as page:
                assert b'"headline":"Finished: 3 steps"' in page.read()
            run.send_signal(signal.SIGINT)
            assert run.wait(LIMIT_S) == 0
        finally:
            run.kill()


@pytest.mark.slow
def test_a_real_run_shows_its_cluster_while_it_trains(tmp_path: Path) -> None:
    save_secret(tmp_path, "home", new_secret())
    control, data = (address.rpartition(":")[2] for address in free_addresses(2))
    job = tmp_path / "job.toml"
    job.write_text(
        f"""
        name = "alone"
        cluster = {{ nodes = 1, discover = false, discovery_port = {control}, gradient_port = {data} }}
        training = {{ task = "convex", steps = 1000000 }}
        """
    )
    this = ("--set", "device=cpu", "--set", "at=127.0.0.1", "--set", "name=mini", "--dashboard")
    command = ["nice", sys.executable, "-m", "hcsim", "run", "--real", str(job), *this]
    environment = {**os.environ, "HCSIM_HOME": str(tmp_path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as run:
        try:
            url = told_url(run)
            with urlopen(f"{url}events", timeout=LIMIT_S) as stream:
                headlines = (json.loads(line[6:])["headline"] for line in stream if line.startswith(b"data: "))
                first = next(line for line in islice(headlines, LIMIT_S) if "step" in line)
            assert first.startswith("Working on 1 machine, step ")
            run.send_signal(signal.SIGINT)
            assert run.wait(LIMIT_S) == 0
        finally:
            run.kill()


def told_url(run: subprocess.Popen[str]) -> str:
    assert run.stdout is not None
    return next(line.split()[-1] for line in run.stdout if line.startswith("dashboard at "))
