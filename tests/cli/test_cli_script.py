"""`hcsim run SCRIPT.py`: what it prints, how it ends, and that nothing is left of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hcsim.cli.app import app

START = "from hcsim.cli import main; main()"


def hcsim(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(
        """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
data = torch.full((1000,), float(dist.get_rank()))
dist.all_reduce(data)
print("got", data[0].item(), *sys.argv[1:])
print("names", *sorted({"a", "b", "c"}, key=hash), file=sys.stderr)
if "fail" in sys.argv and dist.get_rank() == 2:
    raise ValueError("on purpose")
"""
    )
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_at_hand")
def test_every_line_says_whose_it_is_and_the_end_says_how_it_went(script: Path, tmp_path: Path) -> None:
    trace, metrics = tmp_path / "trace.jsonl", tmp_path / "metrics.txt"
    files = ("--trace", str(trace), "--set", f"metrics={metrics}")
    result = hcsim("run", str(script), "--scenario", "four-macs-1gbe", *files, "--", "--lr", "0.1")
    assert result.exit_code == 0, result.output
    got = sorted(line for line in result.stdout.splitlines() if "got" in line)
    assert got == [f"[{rank} mini-{rank + 1}] got 6.0 --lr 0.1" for rank in range(4)]
    assert re.search(r"^simulated time .* µs, [\d,]+ events$", result.stdout, re.MULTILINE)
    assert re.search(r"mini-1\.switch\.out", result.stdout)
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [event[2] for event in events if event[1] == "script ended"]
    assert "hcsim_collectives_total" in metrics.read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_at_hand")
def test_a_script_of_which_nothing_is_simulated_is_no_success(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text("print('done')")
    result = hcsim("run", str(script), "--scenario", "two-macs-wifi")
    assert result.exit_code == 1
    assert "error: alone.py has computed nothing with torch or MLX and called no other rank" in result.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_at_hand")
def test_a_script_that_fails_shows_its_own_traceback_and_a_status(script: Path) -> None:
    result = hcsim("run", str(script), "--scenario", "four-macs-1gbe", "--", "fail")
    assert result.exit_code == 1
    shown = [line for line in result.stderr.splitlines() if line.startswith("[2 mini-3]")]
    assert shown[-1] == "[2 mini-3] ValueError: on purpose"
    assert f'[2 mini-3]   File "{script}", line 9, in <module>' in shown
    assert not any("runpy" in line for line in shown)
    assert "rank 2 (mini-3) failed: ValueError: on purpose" in result.stdout


@pytest.mark.slow
def test_ranks_that_cannot_be_started_are_no_crash_of_their_machines(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise ImportError('this is not the queue that others import')")
    monkeypatch.chdir(tmp_path)
    result = hcsim("run", str(script), "--scenario", "two-macs-wifi")
    assert result.exit_code == 1
    assert result.output == "error: the process that starts the ranks has ended: look above for its reason\n"


@pytest.mark.slow
def test_two_runs_under_unlike_hash_seeds_print_the_same(script: Path) -> None:
    command = [sys.executable, "-c", START, "run", str(script), "--scenario", "two-macs-wifi"]
    printed = [
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True, timeout=120
        ).stdout
        for seed in ("1", "2")
    ]
    assert "trace sha256" in printed[0]
    assert printed[0] == printed[1]


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("nowhere.py", "--scenario", "two-macs-wifi"), "nowhere.py: there is no such script"),
        (("train.py",), "on which cluster? Give --scenario"),
        (("train.py", "--scenario", "four-macs"), "four-macs: there is no such file"),
        (("train.py", "--scenario", "two-macs-wifi", "--nodes", "3"), "--nodes 3: two-macs-wifi has 2"),
        (
            ("train.py", "--scenario", "two-macs-wifi", "--task", "digits"),
            "--task: only without a script (what a script is given stands after --)",
        ),
        (
            ("train.py", "--scenario", "two-macs-wifi", "--state", "s", "--hosts", "a"),
            "--hosts, --state: only with --real",
        ),
        (
            ("train.py", "--scenario", "two-macs-wifi", "--set", "metrics=9400"),
            "--set metrics=9400: a port is for real runs",
        ),
        (
            ("train.py", "--scenario", "two-macs-wifi", "--set", "remote_hcsim=h"),
            "--set remote_hcsim: only with --real",
        ),
        (
            ("train.py", "--scenario", "two-macs-wifi", "--set", "lr=0.1"),
            "--set lr: only without a script (what a script is given stands after --)",
        ),
        (("train.py", "--scenario", "two-macs-wifi", "--set", "quorum=any"), "--set quorum: only with --real"),
        (("train.py", "--real", "--seed", "3"), "--seed: only in a virtual run, or without a script"),
        (("train.py", "--real", "--trace", "t"), "--trace: only in a virtual run"),
        (("train.py", "--real", "--set", "stripes=2"), "--set stripes: only in a virtual run, or without a script"),
        (("train.py", "--real", "--set", "segment=1 MiB"), "--set segment: only in a virtual run, or without"),
        (("train.py", "--real", "--set", "tcp.window=1 MiB"), "--set tcp.window: only in a virtual run"),
        (
            ("train.py", "--real", "--hosts", "a", "--state", "s"),
            "--hosts, --state: only without a script; start it on every machine",
        ),
        (
            ("train.py", "--real", "--set", "remote_hcsim=h"),
            "--set remote_hcsim: only without a script; start it on every machine",
        ),
        (
            ("train.py", "--real", "--set", "device=cpu"),
            "--set device: only without a script; start it on every machine",
        ),
        (("two-macs-wifi", "--nodes", "2"), "--nodes: only with a script, or where something is learned (--task)"),
        (("two-macs-wifi", "--scenario", "two-macs-wifi"), "--scenario: only with a script"),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_line(arguments: tuple[str, ...], complaint: str) -> None:
    result = hcsim("run", *arguments)
    assert result.exit_code == 2
    assert complaint in " ".join(result.stderr.split())


@pytest.mark.slow
def test_what_the_terminal_cannot_show_is_spelled_and_ends_nothing(tmp_path: Path) -> None:
    script = tmp_path / "tells.py"
    text = "import sys, time\ntime.sleep(1)\nprint('loss \u2248 0.5')\nprint('\u2713', file=sys.stderr)\n"
    script.write_text(text, encoding="utf-8")
    command = [sys.executable, "-c", START, "run", str(script), "--scenario", "two-macs-wifi", "--nodes", "1"]
    in_ascii = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(command, env=in_ascii, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert r"loss \u2248 0.5" in ended.stdout
    assert r"\u2713" in ended.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_at_hand")
@pytest.mark.parametrize(("scenario", "nodes"), [("four-macs-faulty", 2), ("four-macs-churn", 1)])
def test_on_fewer_machines_only_their_own_faults_happen(tmp_path: Path, scenario: str, nodes: int) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(3600)\n")
    result = hcsim("run", str(script), "--scenario", scenario, "--nodes", str(nodes))
    assert result.exit_code == 0, result.output
    assert f"train.py on {scenario}, {nodes} rank" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_process_is_left_when_the_simulator_ends(tmp_path: Path, how: signal.Signals) -> None:
    """Not even one that computes without end, and never says a word."""
    script = tmp_path / "endless.py"
    script.write_text("import os, sys\nos.write(2, f'{os.getpid()}\\n'.encode())\nwhile True: pass\n")
    command = [sys.executable, "-c", START, "run", str(script), "--scenario", "two-macs-wifi"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as simulator:
        assert simulator.stderr is not None
        pid = int(simulator.stderr.readline())
        simulator.send_signal(how)
        try:
            simulator.wait(timeout=240)
        finally:
            simulator.kill()
        for _ in range(1000):
            if not _lives(pid):
                break
            time.sleep(0.02)
        assert not _lives(pid)


def _lives(pid: int) -> bool:
    if sys.platform != "linux":
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
        return bool(state.stdout.strip()) and "Z" not in state.stdout
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
