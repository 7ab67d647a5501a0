"""`hcsim selftest` names what fails, whatever becomes of a check's process, and its report names nobody."""

from __future__ import annotations

import asyncio
import fcntl
import getpass
import json
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from hcsim.doctor import CheckResult, CheckState
from hcsim.real.interfaces import host_name
from hcsim.selftest.between import check_host
from hcsim.selftest.checks import CHECKS
from hcsim.selftest.machine import check_compressors, check_disk
from hcsim.selftest.runner import (
    Planned,
    SelftestReport,
    SelftestResult,
    anonymous,
    run_checks,
)

STATES: tuple[CheckState, ...] = ("good", "bad", "skipped")
REMEDY = "turn it off and on again"


def results_of(*programs: str, limit_s: float = 60.0, all_s: float = 300.0) -> list[SelftestResult]:
    """Run these programs in place of checks."""
    planned = [Planned("it", (sys.executable, "-c", program), limit_s, REMEDY) for program in programs]

    async def main() -> list[SelftestResult]:
        return [result async for result in run_checks(planned, all_s)]

    return asyncio.run(main())


def prints(state: CheckState, found: str) -> str:
    result = msgspec.json.encode(CheckResult("it", state, found)).decode()
    return f"print('some noise'); print({result!r})"


def test_a_result_is_shown_and_a_remedy_where_it_is_bad() -> None:
    good, bad, skipped = results_of(*(prints(state, state) for state in STATES))
    assert (good.state, good.found, good.remedy) == ("good", "good", "")
    assert (bad.state, bad.found, bad.remedy) == ("bad", "bad", REMEDY)
    assert (skipped.state, skipped.remedy) == ("skipped", "")


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("import os; os.kill(os.getpid(), 6)", "was ended by SIGABRT"),
        ("import sys; sys.exit('boom')", "ended with status 1: boom"),
        ("print('no result')", "ended with status 0"),
        ("", "it said nothing"),
    ],
)
def test_a_process_that_gives_no_result_has_failed(program: str, found: str) -> None:
    (result,) = results_of(program)
    assert (result.state, result.remedy) == ("bad", REMEDY)
    assert found in result.found


def test_a_check_that_hangs_ends_with_all_that_it_started_and_the_next_one_runs(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    hold = f"import fcntl, time; f = open({str(lock)!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True)"
    hangs = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', "
        f"{hold + '; time.sleep(600)'!r}], stdout=subprocess.PIPE); child.stdout.readline(); child.wait()"
    )
    planned = [
        Planned("hangs", (sys.executable, "-c", hangs), 5.0, REMEDY),
        Planned("next", (sys.executable, "-c", prints("good", "fine")), 60.0, REMEDY),
    ]

    async def main() -> list[SelftestResult]:
        return [result async for result in run_checks(planned)]

    hung, after = asyncio.run(main())
    assert hung.state == "bad"
    assert hung.found.startswith("did not end within 5 s")
    assert after.state == "good"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # returns, as nobody holds it any more


def test_what_there_was_no_time_for_is_no_success() -> None:
    (result,) = results_of(prints("good", "fine"), all_s=0.0)
    assert result.state == "bad"
    assert result.found.startswith("not begun: 0 s were over")
    assert "hcsim selftest" in result.remedy


def test_the_report_names_neither_the_machine_nor_its_user() -> None:
    text = anonymous(f"{Path.home()}/x of {getpass.getuser()} at {host_name()}: no such file")
    assert str(Path.home()) not in text
    assert "no such file" in text
    for name in (getpass.getuser(), host_name()):
        assert len(name) <= 2 or name in ("root", "localhost") or name not in text.split()


def test_compressors_and_disk_are_well_here() -> None:
    assert "round trips" in check_compressors()
    found = check_disk()
    assert "8 MiB" in found
    assert "the damaged one is passed over" in found


def hcsim(*words: str) -> list[str]:
    return [sys.executable, "-m", "hcsim", "selftest", *words]


@pytest.mark.slow
def test_the_command_prints_a_report_that_programs_read(tmp_path: Path) -> None:
    ended = subprocess.run(hcsim("--json", "clocks", "disk"), cwd=tmp_path, capture_output=True, text=True, check=False)
    report = msgspec.json.decode(ended.stdout, type=SelftestReport)
    assert [result.check for result in report.results] == ["clocks", "disk"]
    assert ended.returncode == (0 if report.passed else 1), ended.stderr
    assert report.facts.versions["hcsim"]
    assert set(json.loads(ended.stdout)) == {"facts", "results"}


@pytest.mark.slow
def test_a_check_that_fails_is_marked_and_the_status_tells(tmp_path: Path) -> None:
    script = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); import hcsim.cli as c; c.main()"
    command = [sys.executable, "-c", script, "selftest", "disk"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended.stderr
    assert "✗ disk" in ended.stdout
    assert "cannot be written" in ended.stdout
    assert "→ free some disk space" in ended.stdout


@pytest.mark.slow
def test_an_interrupt_ends_it_cleanly(tmp_path: Path) -> None:
    with subprocess.Popen(
        hcsim("clocks", "collectives"), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "clocks" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr.read().strip() == "interrupted"


def test_a_check_that_is_unknown_is_told_in_a_line(tmp_path: Path) -> None:
    ended = subprocess.run(hcsim("colectives"), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: there is no check 'colectives'")


def test_without_ssh_another_machine_has_a_result_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = asyncio.run(check_host("mini.local", "hcsim", [], print, limit_s=60.0))
    assert isinstance(result, SelftestResult)
    assert (result.check, result.state, result.remedy) == ("mini.local", "bad", "install OpenSSH")
    assert result.found == "ssh cannot be started: No such file or directory"


def test_every_check_has_a_limit_and_a_remedy() -> None:
    assert all(0 < check.limit_s <= 150 and check.remedy for check in CHECKS.values())


@pytest.mark.slow
def test_a_member_that_is_killed_and_comes_back_changes_nothing_of_what_is_learned() -> None:
    assert "end with the simulated parameters" in CHECKS["elastic"].run()


@pytest.mark.slow
def test_processes_end_with_their_rank() -> None:
    assert "no process left over" in CHECKS["processes"].run()
