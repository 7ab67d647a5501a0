"""Unlike machines wait for each other, however long the slowest computes; one whose device hangs is found."""

from __future__ import annotations

from msgspec.structs import replace

from hcsim.config import Scenario, StuckDevice, parse_scenario
from hcsim.errors import CollectiveError
from hcsim.launch.virtual import simulate_training
from hcsim.launch.virtual_cluster import simulate_cluster
from hcsim.telemetry.trace import Event
from hcsim.units import PositiveSeconds, Seconds

HOME = """
name = "home"
medium = [
    { kind = "ethernet", name = "switch", rate = "1 Gb/s" },
    { kind = "wifi", name = "air", standard = "wifi6" },
]
node = [
    { name = "mini", machine = "M4", links = ["air"] },
    { name = "old", machine = "M1 Air", links = ["air"] },
    { name = "pro", machine = "M3 Pro", links = ["switch"] },
]

[training]
task = "gpt2"
strategy = "diloco:16"
steps = 16
"""
SLOWEST_S = 199.0
"""How long the old one computes for 16 steps; the fastest takes 49 s, and the time limit is 60 s."""


def home(training: str = "", tables: str = "") -> Scenario:
    return parse_scenario(HOME + training + tables, "home")


def test_the_slowest_may_compute_for_several_time_limits() -> None:
    reports = simulate_training(home()).values()
    assert [report.steps for report in reports] == [16, 16, 16]
    assert all(report.duration_s > SLOWEST_S for report in reports)


def test_a_cluster_keeps_its_slowest_member_in_one_view() -> None:
    events: list[Event] = []
    reports = simulate_cluster(home(tables="[cluster]\n"), sink=events.extend).values()
    assert [report.steps for report in reports] == [16, 16, 16]
    assert reports[0].points[-1].ranks == 3
    assert not [event for event in events if event[1] == "view failed"]


def test_a_device_that_hangs_is_named_within_two_time_limits_and_no_link_is_blamed() -> None:
    """It hangs in the third of its sixteen steps, each of which takes 12 s."""
    hung = replace(home(), faults=(StuckDevice(Seconds(30.0), "old", PositiveSeconds(1000.0)),))
    events: list[Event] = []
    outcome = simulate_training(hung, sink=events.extend)
    assert all(isinstance(result, CollectiveError) for result in outcome.results)
    assert {result.peer for result in outcome.results[::2] if isinstance(result, CollectiveError)} == {1}
    failed_s = [int(event[0]) / 1e9 for event in events if event[1] == "group failed"]
    assert 90.0 <= min(failed_s) <= 150.0


def test_a_cluster_goes_on_without_a_member_whose_device_hangs() -> None:
    scenario = home("timeout = '20 s'\n", "[cluster]\n")
    scenario = replace(scenario, training=replace(scenario.training, task="resnet50", steps=64))
    hung = replace(scenario, faults=(StuckDevice(Seconds(60.0), "old"),))
    left_out: dict[str, str] = {}

    def tell(host: str, what: str) -> None:
        if what.startswith("left out by the others"):
            left_out[host] = what

    outcome = simulate_cluster(hung, tell=tell, limit_s=60.0 + 400.0)
    assert list(left_out) == ["old"]
    assert "device" in left_out["old"]
    assert [getattr(outcome.results[rank], "steps", 0) for rank in (0, 2)] == [64, 64]
