"""`hcsim bench SCENARIO`, and `hcsim run` of one with a job: what it prints, what it writes, how it ends."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hcsim.cli.app import app
from hcsim.collectives.algorithms import PLANNERS

SMALL = ("--size", "1000 B", "--repeat", "2")


def hcsim(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def digest(kind: str, output: str) -> str:
    found = re.search(rf"^{kind} sha256 ([0-9a-f]{{64}})$", output, re.MULTILINE)
    assert found, output
    return found[1]


def test_a_run_shows_each_repeat_and_ends_with_the_digest_of_its_trace() -> None:
    result = hcsim("bench", "four-macs-1gbe", *SMALL)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "all_reduce of 1000 B float32, 4 ranks, four-macs-1gbe, simulated"
    shown = [line.split()[:2] for line in lines if "exact" in line]
    assert shown == [["1", "recursive_doubling"], ["2", "recursive_doubling"]]
    assert re.fullmatch(r"trace sha256 [0-9a-f]{64}", lines[-1])


def test_a_scenario_that_is_run_does_its_job_as_a_bench_does() -> None:
    settings = ("--set", "size=1000 B", "--set", "job.repeat=2")
    assert hcsim("run", "four-macs-1gbe", *settings).stdout == hcsim("bench", "four-macs-1gbe", *SMALL).stdout


def test_a_bench_of_a_scenario_that_trains_does_one_operation() -> None:
    result = hcsim("bench", "four-macs-churn", *SMALL)
    assert result.stdout.startswith("all_reduce of 1000 B float32, 4 ranks, four-macs-churn")


def test_the_same_run_gives_the_same_output_and_another_seed_another_trace() -> None:
    first, again = (hcsim("bench", "two-macs-wifi", *SMALL) for _ in range(2))
    other = hcsim("bench", "two-macs-wifi", *SMALL, "--seed", "77")
    assert first.stdout == again.stdout
    assert digest("trace", other.stdout) != digest("trace", first.stdout)
    assert digest("result", other.stdout) == digest("result", first.stdout)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("operation", PLANNERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float64"])
def test_every_operation_is_checked_against_its_exact_result(operation: str, dtype: str) -> None:
    result = hcsim("bench", "four-macs-1gbe", "--operation", operation, "--dtype", dtype, *SMALL)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("exact") == 2


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("algorithm", PLANNERS["all_reduce"])
def test_every_algorithm_comes_to_the_same_result(algorithm: str) -> None:
    ours = hcsim("bench", "two-homes-wan", "--algorithm", algorithm, *SMALL)
    assert ours.exit_code == 0, ours.output
    assert algorithm in ours.stdout
    assert digest("result", ours.stdout) == digest("result", hcsim("bench", "two-homes-wan", *SMALL).stdout)


def test_phantoms_are_not_checked_and_computing_is_timed() -> None:
    result = hcsim("bench", "eight-macs-2.5gbe", *SMALL)
    assert result.exit_code == 0, result.output
    assert "compute" in result.stdout
    assert result.stdout.count("  no data") == 2
    assert "result sha256" not in result.stdout


def test_what_does_not_fit_into_the_memory_here_is_refused_before_it_runs() -> None:
    result = hcsim("bench", "four-macs-1gbe", "--size", "100 TB")
    assert result.exit_code == 2
    assert "all_reduce of 9.313e+04 GiB among 4 ranks needs 7.451e+05 GiB here, where" in result.stderr
    assert "--set payload=phantom simulates it without data" in result.stderr


def test_the_trace_is_written_as_lines_of_json(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    result = hcsim("bench", "two-macs-wifi", *SMALL, "--trace", str(file))
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    events = [line for line in lines if line[1] != "metric"]
    assert lines[: len(events)] == events
    assert f"{len(events):,} events" in result.stdout
    assert [event[0] for event in events] == sorted(event[0] for event in events)
    assert "deliver" in [event[1] for event in events]


def test_ranks_that_fail_are_named_and_the_run_fails() -> None:
    result = hcsim("run", "two-macs-wifi", "--set", "timeout=100 ms", "--set", "size=64 MiB")
    assert result.exit_code == 1
    assert re.search(r"^rank 0 \(air-m2\) failed: .*0\.1 s.*rank 1", result.stdout, re.MULTILINE)
    assert "rank 1 (pro-m3) failed" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("trace sha256 ")


def test_a_crash_is_named_and_the_repeats_before_it_are_shown(tmp_path: Path) -> None:
    scenario = tmp_path / "crash.toml"
    scenario.write_text(
        'name = "crash"\n'
        '[[medium]]\nkind = "ethernet"\nname = "switch"\nrate = "1 Gb/s"\n'
        '[[node]]\nname = "mini"\ncount = 3\nmachine = "M4"\nlinks = ["switch"]\n'
        '[[fault]]\nkind = "crash"\nat = "60 ms"\nnode = "mini-2"\nclean = true\n'
        '[job]\nsize = "1 MiB"\nrepeat = 100\n'
    )
    result = hcsim("run", str(scenario))
    assert result.exit_code == 1
    assert "exact" in result.stdout
    assert "rank 1 (mini-2) failed: mini-2 crashed" in result.stdout
    assert result.stdout.count("failed") >= 3


def test_scenarios_are_listed_with_their_descriptions() -> None:
    result = hcsim("list", "scenarios")
    assert result.exit_code == 0
    assert re.search(r"two-macs-wifi +Two MacBooks on one Wi-Fi 6 access point", result.stdout)


def test_version() -> None:
    assert hcsim("--version").stdout == "hcsim 0.1.0\n"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom hcsim.cli import main\nsys.argv = ['hcsim', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = ('numpy', 'torch', 'matplotlib', 'simpy', 'asyncio', 'rich.console', 'hcsim.config')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert "bench" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
