"""One scenario, one trace: in fresh processes, whatever the order in which Python hashes strings, and on any processor.

And the check can fail: a program that lets a set of strings decide what it does first is caught.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache

import pytest

from hcsim.config import shipped_scenarios

GUARD_S = 120

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

_ORDER_OF_A_SET = "print(' '.join({'north', 'south', 'east', 'west', 'up', 'down', 'left', 'right'}))"

_LED_BY_A_SET = """
from hcsim import Phantom, simulate

async def program(group):
    directions = ["north", "south", "east", "west", "up", "down", "left", "right"]
    for direction in {*directions}:  # the planted mistake
        await group.all_reduce(Phantom(1000 * (1 + directions.index(direction))), algorithm="ring")

print(simulate("four-macs-1gbe", program).trace_sha256)
"""

_LED_BY_A_LIST = _LED_BY_A_SET.replace("{*directions}", "directions")


@cache
def output(code: str, hash_seed: int) -> str:
    """What the code prints in a fresh process."""
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=GUARD_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("scenario", shipped_scenarios())
def test_a_shipped_scenario_has_one_trace(scenario):
    once, again = (json.loads(output(_EVERY_SCENARIO, hash_seed))[scenario] for hash_seed in (1, 2))
    assert once == again
    assert once[1] > 100


def test_every_machine_has_the_same_traces():
    """Whether x86 or ARM. They are others when the model, a plan, a frame or a greeting changes: then on both."""
    found = json.loads(output(_EVERY_SCENARIO, 1))
    assert {name: sha256[:16] for name, (sha256, _, _) in found.items()} == {
        "eight-macs-2.5gbe": "f1311cff74cfcaaf",
        "four-macs-1gbe": "a14f064131813a76",
        "four-macs-churn": "53bfd28b97b78ad6",
        "four-macs-faulty": "3f68e38d056b597b",
        "mixed-home": "45a2caeb67455ab8",
        "two-homes-wan": "e1b97ae8cd4600c9",
        "two-macs-wifi": "36ba4e61957995bd",
        "another seed": "65484458f66cf915",
    }


def test_other_scenarios_and_other_seeds_have_other_traces():
    found = json.loads(output(_EVERY_SCENARIO, 1))
    assert len({sha256 for sha256, _, _ in found.values()}) == len(found) == len(shipped_scenarios()) + 1


def test_iteration_over_a_set_is_caught():
    first = 1
    other = next(seed for seed in range(2, 50) if output(_ORDER_OF_A_SET, seed) != output(_ORDER_OF_A_SET, first))
    assert output(_LED_BY_A_SET, first) != output(_LED_BY_A_SET, other)
    assert output(_LED_BY_A_LIST, first) == output(_LED_BY_A_LIST, other)
