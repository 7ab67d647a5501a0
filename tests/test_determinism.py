"""One scenario, one trace: in fresh processes, whatever the order in which Python hashes strings, and on any processor.

And the check can fail: where hcsim itself lets a set of strings decide whom it tells first, it is caught.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import hcsim
from hcsim.config import load_scenario, shipped_scenarios

GUARD_S = 120
PACKAGE = Path(hcsim.__file__).parent

_EVERY_SCENARIO = """
import json
from msgspec.structs import replace
from hcsim import Options, Phantom, simulate
from hcsim.config import load_scenario, shipped_scenarios

async def program(group):
    for algorithm in ("ring", "tree", "centralized", "halving_doubling"):
        await group.all_reduce(Phantom(32_000_000), algorithm=algorithm)
    pending = [group.all_gather(Phantom(10_000), bucket=bucket) for bucket in range(3)]
    for each in pending:
        await each
    await group.all_to_all([Phantom(5_000)] * group.size)
    await group.barrier()

def run(scenario):
    outcome = simulate(scenario, program, options=Options(timeout_s=300.0))
    outcome.values()
    return outcome.trace_sha256, outcome.events, outcome.seconds

scenarios = {name: load_scenario(name) for name in shipped_scenarios()}
found = {name: run(scenario) for name, scenario in scenarios.items()}
found["another seed"] = run(replace(scenarios["two-macs-wifi"], seed=2))
print(json.dumps(found))
"""

_AS_HCSIM_RUN = """
import contextlib, io, json
from hcsim.cli.app import app
from hcsim.config import shipped_scenarios

def run(name):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert not app(["run", name], standalone_mode=False), said.getvalue()
    return said.getvalue()

print(json.dumps({name: run(name) for name in shipped_scenarios()}))
"""
"""In one process: to start takes longer than most of them."""

_ORDER_OF_NAMES = "print(' '.join({f'mini-{number}' for number in range(1, 5)}))"


@cache
def output(code: str, hash_seed: int, folder: Path = PACKAGE.parent) -> str:
    """What the code prints in a fresh process, with the package that is in that folder."""
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=GUARD_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@cache
def hash_seeds() -> tuple[int, int]:
    """Two that bring the names of four hosts into unlike orders."""
    first = output(_ORDER_OF_NAMES, 1)
    return 1, next(seed for seed in range(2, 50) if output(_ORDER_OF_NAMES, seed) != first)


def run_twice(folder: Path = PACKAGE.parent) -> tuple[dict[str, str], dict[str, str]]:
    """What `hcsim run` says of each shipped scenario, its trace's hash too, with each of two hash seeds."""
    first, other = (json.loads(output(_AS_HCSIM_RUN, hash_seed, folder)) for hash_seed in hash_seeds())
    return first, other


@pytest.mark.slow
def test_a_shipped_scenario_has_one_trace_when_it_is_run():
    """With its own job or training, its cluster and its faults, all of which strike."""
    once, again = run_twice()
    assert once == again
    assert list(once) == list(shipped_scenarios())
    for name, said in once.items():
        ended = re.search(r"simulated time ([\d.]+) (m?s), ([\d,]+) events\ntrace sha256 [0-9a-f]{64}\n$", said)
        assert ended, said
        lasted_s = float(ended[1]) * {"s": 1.0, "ms": 1e-3}[ended[2]]
        assert lasted_s >= max((fault.over_s for fault in load_scenario(name).faults), default=0.0)
        assert int(ended[3].replace(",", "")) > 50


@pytest.mark.slow
def test_a_set_that_decides_whom_hcsim_tells_first_is_caught(tmp_path):
    """In a copy, in which the cluster ends after a step, and that ships nothing else."""
    copy = Path(shutil.copytree(PACKAGE, tmp_path / "hcsim"))
    for scenario in sorted((copy / "scenarios").iterdir()):
        if scenario.stem != "four-macs-churn":
            scenario.unlink()
        else:
            _change(scenario, "steps = 35", "steps = 1")
    told, everybody = "for neighbour in {}:", "(self._host, *self._host.neighbours())"
    by_name = f"by_name = {{host.name: host for host in {everybody}}}\n        "
    planted = by_name + told.format("map(by_name.get, set(by_name))")
    _change(copy / "virtual" / "lan.py", told.format(everybody), planted)
    once, again = run_twice(tmp_path)
    assert list(once) == list(again) == ["four-macs-churn"]
    assert once != again


def _change(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.slow
def test_a_shipped_scenario_has_one_trace_with_every_algorithm():
    once, again = (json.loads(output(_EVERY_SCENARIO, hash_seed)) for hash_seed in hash_seeds())
    assert once == again
    assert all(events > 100 for _, events, _ in once.values())


def test_every_machine_has_the_same_traces():
    """Whether x86 or ARM. They are others when the model, a plan, a frame or a greeting changes: then on both."""
    found = json.loads(output(_EVERY_SCENARIO, 1))
    assert {name: sha256[:16] for name, (sha256, _, _) in found.items()} == {
        "eight-macs-2.5gbe": "c0590b8e944f14c0",
        "four-macs-1gbe": "50015b8c87de332f",
        "four-macs-churn": "2957cf68bbecb43d",
        "four-macs-faulty": "851f3f0770318294",
        "mixed-home": "984f80909b938b5f",
        "two-homes-wan": "3e55ae2e6bd746e7",
        "two-macs-wifi": "0c6320b4ad6e8733",
        "another seed": "2985b2596acf54d9",
    }


def test_other_scenarios_and_other_seeds_have_other_traces():
    found = json.loads(output(_EVERY_SCENARIO, 1))
    assert len({sha256 for sha256, _, _ in found.values()}) == len(found) == len(shipped_scenarios()) + 1
