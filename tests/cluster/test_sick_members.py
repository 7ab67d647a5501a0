"""One member that is alive and of no use, for good: the others go on at full speed after three timeouts at most."""

from __future__ import annotations

from functools import cache

import pytest

from hcsim.config import parse_scenario
from hcsim.launch import simulate_cluster
from hcsim.telemetry.trace import Event
from hcsim.training.run import Report
from hcsim.training.tasks.slopes import Slopes
from tests.cluster.sick_members import SICK_MEMBERS

TIMEOUT_S = 10
STEPS = 60
HOME = """
name = "sick"
seed = 3
medium = [{{ kind = "ethernet", name = "switch", rate = "1 Gb/s" }}]

[[node]]
name = "mac"
count = 4
machine = {{ name = "slow", peak = "1 TFLOPS", memory = "100 GB/s", overhead = "30 ms" }}
links = ["switch"]

[cluster]
nodes = 4
preset = "low_latency"
peer_timeout = "5 s"

[training]
task = "slopes"
compressor = "{compressor}"
steps = {steps}
batch = 4
evaluate_every = {steps}
timeout = "{timeout} s"
"""
QUICK = (
    "stuck device",
    "gradient port closed",
    "gradient port silent",
    "clogged with one peer",
    "misbehaves: duplicate",
    "misbehaves: huge_step",
    "misbehaves: raw_bytes",
    "misbehaves to one peer: wrong_signature",
)
WITHOUT_FAILURE = ("slow cable", "throttled device")
"""Every step is slow with these, and none fails within the timeout."""


@cache
def calm_s() -> float:
    """How long all of them take when nothing is wrong."""
    return max(run("", "none", limit_s=None)[1].values())


def run(
    faults: str, compressor: str, limit_s: float | None
) -> tuple[dict[str, Report | BaseException], dict[str, float]]:
    """What each machine came to, and when it did its last step."""
    events: list[Event] = []
    text = HOME.format(compressor=compressor, steps=STEPS, timeout=TIMEOUT_S) + faults
    outcome = simulate_cluster(parse_scenario(text, "sick"), what=Slopes(), limit_s=limit_s, sink=events.extend)
    last_s = {str(event[2]): int(event[0]) / 1e9 for event in events if event[1] == "applied"}
    return {f"mac-{number}": result for number, result in enumerate(outcome.results, 1)}, last_s


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.soak)
        for name in SICK_MEMBERS
        if name not in WITHOUT_FAILURE and not name.endswith(": lie")
    ],
)
@pytest.mark.parametrize("compressor", ["none", pytest.param("int8+ef", marks=pytest.mark.soak)])
def test_the_others_go_on_at_full_speed(name: str, compressor: str) -> None:
    limit_s = calm_s() + 3 * TIMEOUT_S
    results, last_s = run(SICK_MEMBERS[name], compressor, limit_s)
    done = [machine for machine, result in results.items() if isinstance(result, Report) and result.steps == STEPS]
    assert len(done) >= 3
    assert len({result.sha256 for result in results.values() if isinstance(result, Report)}) == 1
    assert max(last_s[machine] for machine in done) < limit_s
