"""Whole clusters in the virtual world: found, admitted, in views, and training through what happens to them."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from hcsim.config import (
    AnyFault,
    Cluster,
    Crash,
    Leave,
    Machine,
    Misbehave,
    Partition,
    Pause,
    Restart,
    Scenario,
    Stranger,
    Training,
    load_scenario,
    parse_scenario,
)
from hcsim.errors import TrainingError
from hcsim.launch.virtual import Outcome
from hcsim.launch.virtual_cluster import simulate_cluster
from hcsim.training.run import Report
from hcsim.training.tasks import task
from hcsim.units import ByteRate, FlopRate, PositiveSeconds, Seconds
from tests.switches import on_switch

ABC = ("a", "b", "c")
SLOW = "2 Mb/s"
"""So that a few hundred steps take a while."""


def home(*faults: AnyFault, steps: int = 150, **changes: object) -> Scenario:
    training = Training(task="convex", steps=steps, timeout_s=PositiveSeconds(20), **changes)  # type: ignore[arg-type]
    cluster = Cluster(nodes=3, preset="low_latency", checkpoint_every=20)
    return replace(on_switch(ABC, faults, rate=SLOW), training=training, cluster=cluster)


def digests(outcome: Outcome[Report]) -> set[str | None]:
    return {report.sha256 for report in outcome.results if isinstance(report, Report)}


def views(scenario: Scenario) -> tuple[Outcome[Report], list[str]]:
    told: list[str] = []
    outcome = simulate_cluster(scenario, tell=lambda host, what: told.append(what), limit_s=600)
    return outcome, [what for what in dict.fromkeys(told) if what.startswith("view")]


@pytest.mark.slow
def test_all_members_end_with_the_same_model():
    outcome, said = views(home(steps=20))
    assert [report.steps for report in outcome.values()] == [20, 20, 20]
    assert len(digests(outcome)) == 1
    assert any("training begins" in what for what in said)


@pytest.mark.slow
def test_two_runs_are_the_same_event_for_event():
    first, second = (simulate_cluster(home(Crash(Seconds(2), "a"), steps=60)) for _ in range(2))
    assert first.trace_sha256 == second.trace_sha256


@pytest.mark.slow
def test_the_others_go_on_without_a_leader_that_crashed():
    outcome, said = views(home(Crash(Seconds(3), "a")))
    assert isinstance(outcome.results[0], BaseException)
    assert [r.steps for r in outcome.results if isinstance(r, Report)] == [150, 150]
    assert len(digests(outcome)) == 1
    assert any("training goes on after step" in what for what in said)


@pytest.mark.slow
def test_a_run_ends_when_those_that_are_left_wait_for_one_that_is_gone_for_good():
    scenario = home(Crash(Seconds(3), "a"), Crash(Seconds(6), "b"), steps=300)
    outcome = simulate_cluster(scenario)
    assert outcome.seconds > 3600
    error = outcome.results[2]
    assert isinstance(error, TrainingError)
    assert "nothing has moved for 3600 s" in str(error)
    assert "waiting for b: c cannot decide alone" in str(error)


@pytest.mark.slow
def test_a_run_goes_on_after_hours_in_which_nothing_could_move():
    outcome = simulate_cluster(home(*(Pause(Seconds(3), name, PositiveSeconds(3 * 3600)) for name in ABC)))
    assert [report.steps for report in outcome.values()] == [150, 150, 150]
    assert outcome.seconds > 3 * 3600


@pytest.mark.slow
@pytest.mark.parametrize("state", ["kept", "lost"])
def test_one_that_was_started_anew_takes_the_model_from_the_others(state):
    outcome, _ = views(home(Restart(Seconds(3), "b", state)))
    assert len(outcome.values()) == 3
    assert len(digests(outcome)) == 1


@pytest.mark.slow
def test_after_a_power_cut_training_goes_on_from_the_checkpoint():
    cut = [Restart(Seconds(4), name, "kept", Seconds(1)) for name in ABC]
    outcome, said = views(home(*cut))
    assert len(outcome.values()) == 3
    assert len(digests(outcome)) == 1
    resumed = [what for what in said if "goes on after step" in what]
    assert resumed
    assert int(resumed[0].split()[-1]) % 20 == 0  # where it was last saved
    without = simulate_cluster(home())
    assert digests(outcome) == digests(without)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["", ":async"])
def test_after_a_power_cut_a_parameter_server_goes_on_from_the_checkpoint(mode):
    cut = [Restart(Seconds(4), name, "kept", Seconds(1)) for name in ABC]
    outcome, said = views(home(*cut, strategy=f"parameter_server{mode}"))
    assert [report.steps for report in outcome.values()] == [150] * 3
    assert len(digests(outcome)) == 1
    resumed = [what for what in said if "goes on after step" in what]
    assert resumed
    assert int(resumed[0].split()[-1]) % 20 == 0


@pytest.mark.slow
def test_a_final_model_that_arrives_as_noise_is_pulled_once_more():
    last = Seconds(1.55)  # of three steps of half a second
    noise = Misbehave(last, "a", "noise", to="c", duration_s=PositiveSeconds(0.3))
    outcome, said = views(home(noise, steps=3, strategy="parameter_server"))
    assert [report.steps for report in outcome.values()] == [3] * 3
    assert len(digests(outcome)) == 1
    assert any("the final model is not the same on c as on the others" in what for what in said)


@pytest.mark.slow
def test_the_others_go_on_when_one_leaves_and_it_takes_part_again_when_it_is_started():
    outcome, said = views(home(Leave(Seconds(3), "a"), Restart(Seconds(4), "a"), steps=400))
    assert [report.steps for report in outcome.values()] == [400] * 3
    assert len(digests(outcome)) == 1
    assert any("(a left)" in what for what in said)
    assert any("(a joined)" in what for what in said)


@pytest.mark.slow
def test_after_all_have_left_training_goes_on_when_they_are_started_again():
    left = [Leave(Seconds(3), name) for name in ABC]
    again = [Restart(Seconds(20), name) for name in ABC]
    outcome, said = views(home(*left, *again))
    assert [report.steps for report in outcome.values()] == [150] * 3
    assert len(digests(outcome)) == 1
    assert any("goes on after step" in what for what in said)


@pytest.mark.slow
def test_a_sole_member_goes_on_from_its_checkpoint_when_it_is_started_anew():
    told: list[str] = []
    mac = load_scenario("four-macs-1gbe").nodes[0].machine
    scenario = home(Restart(Seconds(0.12), "a"), steps=200)
    scenario = replace(
        scenario,
        nodes=(replace(scenario.nodes[0], machine=mac),),
        cluster=Cluster(nodes=1, preset="low_latency", checkpoint_every=20),
    )
    outcome = simulate_cluster(scenario, what=task("digits"), tell=lambda host, what: told.append(what), limit_s=60)
    assert [report.steps for report in outcome.values()] == [200]
    assert told[-1] == "view 2: training goes on after step 80"
    without = simulate_cluster(replace(scenario, faults=()), what=task("digits"))
    assert digests(outcome) == digests(without)


@pytest.mark.slow
def test_one_that_is_started_anew_without_the_others_says_for_whom_it_waits():
    told: list[str] = []
    faults = Crash(Seconds(3), "c"), Crash(Seconds(6), "b"), Crash(Seconds(6), "a"), Restart(Seconds(8), "a")
    simulate_cluster(home(*faults, steps=400), tell=lambda host, what: told.append(what), limit_s=60)
    waiting = "waiting for b, which may still have the model; for one that is gone for good, and only then: "
    assert told[-1] == f"{waiting}hcsim cluster forget NAME"


def told_of(count: int, fault: AnyFault, *further: AnyFault, **changes: object) -> tuple[list[str], Outcome[Report]]:
    """What the machines of a cluster say, whose first steps take a second or more, and what they come to."""
    names = [chr(ord("a") + number) for number in range(count)]
    slow = Machine("slow", FlopRate(1e12), ByteRate(1e11), overhead_s=Seconds(0.12))
    scenario = on_switch(tuple(names), (fault, *further), rate="1 Gb/s")
    training = {"task": "slopes", "steps": 6, "batch": 4, "timeout_s": PositiveSeconds(10), **changes}
    scenario = replace(
        scenario,
        nodes=tuple(replace(node, machine=slow) for node in scenario.nodes),
        training=Training(**training),  # type: ignore[arg-type]
        cluster=Cluster(nodes=count, preset="low_latency"),
    )
    told: list[str] = []
    outcome = simulate_cluster(scenario, tell=lambda host, what: told.append(f"{host}: {what}"), limit_s=120)
    return told, outcome


@pytest.mark.slow
def test_of_several_that_are_lost_at_once_each_is_named():
    told, _ = told_of(5, Partition(Seconds(2), (("a", "b", "c"), ("d", "e")), PositiveSeconds(4)), steps=3)
    view = next(what for what in told if what.startswith("a: view") and ": a, b, c (" in what)
    reason = view.partition("(")[2]
    assert re.search(r"\bd\b", reason)
    assert re.search(r"\be\b", reason)


def test_a_server_that_waits_for_a_worker_names_its_machine():
    told, _ = told_of(1, Pause(Seconds(0.6), "a", PositiveSeconds(13)), steps=1, strategy="parameter_server")
    assert any("gave up" in what and what.endswith("waiting for a (a:52416))") for what in told)


def test_a_stranger_that_takes_a_machines_name_does_not_keep_it_from_starting():
    _, outcome = told_of(2, Stranger(Seconds(0), "home", spoofs="b"), Restart(Seconds(0), "b"), steps=2)
    assert [report.steps for report in outcome.values()] == [2, 2]


@pytest.mark.slow
def test_one_that_comes_when_all_steps_are_done_has_done_them_too():
    away = Partition(Seconds(1), (("a", "c"), ("b", "d")), PositiveSeconds(1))
    _, outcome = told_of(4, away, steps=1)
    assert [report.steps for report in outcome.values()] == [1, 1, 1, 1]
    assert len(digests(outcome)) == 1


CROWDED = """
name = "crowded"
seed = 976
[[medium]]
kind = "wifi"
name = "air"
standard = "wifi5"
fairness = "airtime"
[cluster]
nodes = 5
quorum = "majority"
heartbeat = { interval = "0.25 s", timeout = "1.5 s" }
settle = "0.1 s"
checkpoint_every = 2
measure = "order"
[training]
task = "slopes"
strategy = "parameter_server:async"
compressor = "powersgd:2+ef"
steps = 27
batch = 1
timeout = "5 s"
[[fault]]
kind = "few_descriptors"
at = "2.368 s"
node = "mac-4"
connections = 4
[[fault]]
kind = "router_reboot"
at = "2.616 s"
home = "home"
duration = "0.304 s"
[[fault]]
kind = "pause"
at = "15 s"
node = "mac-5"
duration = "2 s"
[[fault]]
kind = "pause"
at = "20 s"
node = "mac-1"
duration = "2 s"
""" + "".join(
    f"""
[[node]]
name = "mac-{number}"
machine = {{ name = "slow", peak = "1e12 FLOPS", memory = "1e11 B/s", overhead = "{overhead} s" }}
links = [{{ medium = "air" }}]
"""
    for number, overhead in enumerate((0.12, 0.12, 0.12, 0.12, 0.18), 1)
)


@pytest.mark.slow
def test_a_machine_that_is_not_taken_in_says_so_once_of_each_member_that_it_asks():
    asked: dict[str, list[str]] = {}

    def hear(host: str, what: str) -> None:
        if what.startswith("view"):
            asked[host] = []
        elif what.startswith("waiting to be taken in"):
            asked.setdefault(host, []).append(what)

    simulate_cluster(parse_scenario(CROWDED, "crowded"), tell=hear, limit_s=25)
    assert any(len(each) > 1 for each in asked.values())
    for each in asked.values():
        assert len(each) == len(dict.fromkeys(each))
