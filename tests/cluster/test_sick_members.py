"""One member that is alive and of no use, for good: the others go on at full speed after three timeouts at most."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest

from hcsim.cluster.membership_source import LAST_CALL_S
from hcsim.config import parse_scenario
from hcsim.launch.virtual_cluster import simulate_cluster
from hcsim.telemetry.trace import Event
from hcsim.training.run import Report
from hcsim.training.tasks.convex import LinearTask
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
machine = {machine}
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
BY_KERNELS = '{ name = "slow", peak = "1 TFLOPS", memory = "100 GB/s", overhead = "30 ms" }'
"""Whose steps take the same time at any clock rate."""
BY_ARITHMETIC = '{ name = "slow", peak = "1 MFLOPS", memory = "100 GB/s", overhead = "1 ms", efficiency_compute = 0.8 }'
QUICK = (
    "slow cable",
    "stuck device",
    "gradient port closed",
    "gradient port silent",
    "clogged with one peer",
    "misbehaves: duplicate",
    "misbehaves: huge_step",
    "misbehaves: raw_bytes",
    "misbehaves to one peer: wrong_signature",
)


@cache
def calm_s(machine: str = BY_KERNELS) -> float:
    """How long all of them take when nothing is wrong."""
    return max(run("", "none", limit_s=None, machine=machine)[1].values())


def run(
    faults: str, compressor: str, limit_s: float | None, machine: str = BY_KERNELS
) -> tuple[dict[str, Report | BaseException], dict[str, float]]:
    """What each machine came to, and when it did its last step."""
    events: list[Event] = []
    text = HOME.format(compressor=compressor, steps=STEPS, timeout=TIMEOUT_S, machine=machine) + faults
    outcome = simulate_cluster(parse_scenario(text, "sick"), what=LinearTask(), limit_s=limit_s, sink=events.extend)
    last_s = {str(event[2]): int(event[0]) / 1e9 for event in events if event[1] == "applied"}
    return {f"mac-{number}": result for number, result in enumerate(outcome.results, 1)}, last_s


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.soak)
        for name in SICK_MEMBERS
        if not name.endswith(": lie")
    ],
)
@pytest.mark.parametrize("compressor", ["none", pytest.param("int8+ef", marks=pytest.mark.soak)])
def test_the_others_go_on_at_full_speed(name: str, compressor: str) -> None:
    limit_s = calm_s() + 3 * TIMEOUT_S
    results, last_s = run(SICK_MEMBERS[name], compressor, limit_s + LAST_CALL_S)
    done = [machine for machine, result in results.items() if isinstance(result, Report) and result.steps == STEPS]
    assert len(done) >= 3
    assert len({result.sha256 for result in results.values() if isinstance(result, Report)}) == 1
    assert max(last_s[machine] for machine in done) < limit_s


@pytest.mark.slow
@pytest.mark.parametrize("name", ["slow cable", "gradient port silent"])
def test_the_others_do_not_wait_for_the_time_limit_of_an_exchange(name: str) -> None:
    events: list[Event] = []
    text = HOME.format(compressor="none", steps=40, timeout=600, machine=BY_KERNELS) + SICK_MEMBERS[name]
    simulate_cluster(parse_scenario(text, "sick"), what=LinearTask(), limit_s=60, sink=events.extend)
    done_s = [int(event[0]) / 1e9 for event in events if event[1:3] == ("applied", "mac-1")]
    assert len(done_s) == 40
    assert max(after - before for before, after in pairwise(done_s)) < 20


@pytest.mark.slow
def test_a_machine_that_becomes_ten_times_slower_is_left_out() -> None:
    limit_s = calm_s(BY_ARITHMETIC) + 3 * TIMEOUT_S
    throttled = '[[fault]]\nkind = "throttle"\nat = "3 s"\nnode = "mac-2"\nfactor = 0.1\n'
    results, last_s = run(throttled, "none", limit_s + LAST_CALL_S, BY_ARITHMETIC)
    for machine in ("mac-1", "mac-3", "mac-4"):
        result = results[machine]
        assert isinstance(result, Report)
        assert result.steps == STEPS
        assert last_s[machine] < limit_s


@pytest.mark.slow
def test_machines_that_become_slow_together_go_on_together() -> None:
    """There is nobody without whom they would be faster."""
    throttled = "".join(
        f'[[fault]]\nkind = "throttle"\nat = "3 s"\nnode = "mac-{number}"\nfactor = 0.1\n' for number in range(1, 5)
    )
    results, _ = run(throttled, "none", None, BY_ARITHMETIC)
    for result in results.values():
        assert isinstance(result, Report)
        assert result.steps == STEPS
        assert result.points[-1].ranks == 4


@pytest.mark.slow
def test_a_machine_that_becomes_slow_alone_goes_on_in_its_view() -> None:
    throttled = '[[fault]]\nkind = "throttle"\nat = "3 s"\nnode = "mac"\nfactor = 0.02\n'
    text = HOME.format(compressor="none", steps=STEPS, timeout=TIMEOUT_S, machine=BY_ARITHMETIC) + throttled
    alone = text.replace("count = 4\n", "").replace("nodes = 4", "nodes = 1")
    events: list[Event] = []
    simulate_cluster(parse_scenario(alone, "alone"), what=LinearTask(), sink=events.extend)
    steps_s = [int(event[0]) / 1e9 for event in events if event[1] == "applied"]
    assert max(after - before for before, after in pairwise(steps_s)) > TIMEOUT_S / 4
    assert not [event for event in events if event[1] == "view failed"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "parameter_server"])
def test_members_come_to_the_end_together_though_only_some_see_one_that_wants_to_join(strategy: str) -> None:
    """They wait for it, longer than an exchange may take."""
    events: list[Event] = []
    text = HOME.format(compressor="none", steps=2 * STEPS, timeout=2, machine=BY_KERNELS)
    text += SICK_MEMBERS["clogged with one peer"]
    scenario = parse_scenario(text.replace("[training]", f'[training]\nstrategy = "{strategy}"'), "sick")
    outcome = simulate_cluster(scenario, what=LinearTask(), limit_s=120, sink=events.extend)
    assert sum(isinstance(result, Report) and result.steps == 2 * STEPS for result in outcome.results) >= 3
    assert len({event[3] for event in events if event[1] == "view failed"}) == 1, "none fails because of the waiting"


@pytest.mark.slow
@pytest.mark.parametrize("sick", ["mac-1", "mac-2", "mac-3", "mac-4"])
def test_a_parameter_server_and_its_workers_leave_out_nobody_but_who_breaks_the_protocol(sick: str) -> None:
    """The server is on one of the four."""
    left_out: list[str] = []

    def tell(host: str, text: str) -> None:
        left_out.extend([host] if text.startswith("left out by the others") else [])

    text = HOME.format(compressor="none", steps=STEPS, timeout=TIMEOUT_S, machine=BY_KERNELS)
    text = text.replace("[training]", '[training]\nstrategy = "parameter_server"')
    text += SICK_MEMBERS["misbehaves: unasked"].replace("mac-2", sick)
    outcome = simulate_cluster(parse_scenario(text, "sick"), what=LinearTask(), limit_s=120, tell=tell)
    assert set(left_out) == {sick}
    assert sum(isinstance(result, Report) and result.steps == STEPS for result in outcome.results) >= 3


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("seed", [27, 28, 40, 46])
def test_no_view_is_waited_for_because_a_machine_sends_noise_when_asked_whether_there_is_one(seed: int) -> None:
    text = HOME.format(compressor="none", steps=5, timeout=TIMEOUT_S, machine=BY_KERNELS).replace("4\n", "3\n")
    text = text.replace("[training]", '[training]\nstrategy = "parameter_server"').replace("seed = 3", f"seed = {seed}")
    noise = '[[fault]]\nkind = "misbehave"\nat = "1.2 s"\nnode = "mac-2"\nhow = "noise"\nshare = 0.2\n'
    outcome = simulate_cluster(parse_scenario(text + noise, "sick"), what=LinearTask(), limit_s=100)
    assert sum(isinstance(result, Report) and result.steps == 5 for result in outcome.results) >= 2
