"""What members of a running cluster measure of the links between them, held against what the scenario says they are."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import pytest
from msgspec.structs import replace

from hcsim.cluster.membership_source import NodeInfo
from hcsim.cluster.messages import LinkStatus
from hcsim.cluster.status_client import StatusClient
from hcsim.config import AnyFault, Cluster, Crash, Pause, Reset, Restart, Scenario, Training, parse_scenario
from hcsim.errors import ConfigError
from hcsim.launch.virtual import Outcome
from hcsim.launch.virtual_cluster import simulate_cluster
from hcsim.node import ClusterJob, train_as_member
from hcsim.runtime.address import address_at
from hcsim.selftest.script import SEED, train
from hcsim.telemetry.trace import Event
from hcsim.training.run import Report
from hcsim.units import PositiveSeconds, Seconds
from hcsim.virtual.host import VirtualHost
from hcsim.virtual.links import ResourceGraph
from hcsim.virtual.world import World
from tests.switches import on_switch

ABC = ("a", "b", "c")
PORTS = (52415, 52416)


def home(cable: str = "16.4 Gb/s", **cluster: object) -> Scenario:
    """Two Studios with a Thunderbolt cable between them, a mini, and a laptop on Wi-Fi. A step takes a while."""
    slow = '{ name = "slow", peak = "1 TFLOPS", memory = "100 GB/s", overhead = "30 ms" }'
    cable = f'{{ between = ["studio-1", "studio-2"], forward = "{cable}", backward = "{cable}" }}'
    scenario = parse_scenario(
        f"""
        name = "home"
        seed = {SEED}
        medium = [
            {{ kind = "ethernet", name = "switch", rate = "1 Gb/s" }},
            {{ kind = "wifi", name = "air", standard = "wifi6e" }},
            {{ kind = "thunderbolt", name = "desk", cable = [{cable}] }},
        ]
        node = [
            {{ name = "studio-1", machine = {slow}, links = ["switch"] }},
            {{ name = "mini", machine = {slow}, links = ["switch"] }},
            {{ name = "studio-2", machine = {slow}, links = ["switch"] }},
            {{ name = "laptop", machine = {slow}, links = ["air"] }},
        ]
        """,
        "home",
    )
    training = Training(task="convex", steps=12, algorithm="ring", timeout_s=PositiveSeconds(20))
    return replace(
        scenario,
        training=training,
        cluster=Cluster(nodes=4, preset="low_latency", **cluster),  # type: ignore[arg-type]
    )


def traced(scenario: Scenario) -> tuple[Outcome[Report], list[Event]]:
    events: list[Event] = []
    return simulate_cluster(scenario, sink=events.extend, limit_s=600), events


def digest(outcome: Outcome[Report]) -> str | None:
    """Of all who came to the end, if it is one."""
    (only,) = {result.sha256 for result in outcome.results if isinstance(result, Report)}
    return only


def asked_while_training(scenario: Scenario, at_s: float) -> tuple[dict[str, dict[str, LinkStatus]], list[float]]:
    """Every node's links by the other's name, as told to somebody who asks at that time; and gauges of bandwidth."""
    world = World(scenario)
    assert scenario.cluster is not None
    assert scenario.training is not None
    plan = ClusterJob(scenario.cluster, scenario.training, scenario.seed)
    surveys: list[StatusClient] = []

    async def look(host: VirtualHost) -> None:
        await host.clock.sleep(at_s)
        surveys.append(StatusClient(host, "", 1.0))
        await surveys[0].run((), 0.5)

    async def on_host(host: VirtualHost) -> Report:
        hosts = [address for interface in host.interfaces() for address in interface.addresses]
        control, data = (address_at(hosts, port) for port in PORTS)
        if host.name == "mini":
            host.spawn(look(host), name="look")
        return await train_as_member(host, NodeInfo(host.name, 1, host.name, control, data), plan, durable=False)

    results = world.run_on_all(on_host)
    assert all(isinstance(result, Report) for result in results), results
    links = {node: {link.name: link for link in told.links} for node, told in surveys[0].told.items()}
    name = "hcsim_link_bandwidth_bytes_per_second"
    gauges = [
        series.value
        for metrics in world.tell_metrics().values()
        for series in (
            metrics.gauge(name, node=f"{other}-{other[:8]}", direction=way) for other in links for way in ("out", "in")
        )
        if series.value
    ]
    return links, gauges


def wires_Bps(scenario: Scenario, ends: tuple[str, str]) -> float:
    """What the scenario has between two interfaces."""
    (source, _), (target, interface) = (end.split("%") for end in ends)
    path = ResourceGraph(scenario).route(source, target, ("", interface))
    assert path is not None
    return path.rate_bytes_ps


@pytest.mark.slow
def test_status_tells_which_way_each_link_takes_and_how_fast_the_scenario_has_it() -> None:
    scenario = home()
    links, gauges = asked_while_training(scenario, 4.0)
    assert sorted(links) == ["laptop", "mini", "studio-1", "studio-2"]
    for name, theirs in links.items():
        for other, link in theirs.items():
            if link.ends == ("", ""):
                continue  # a ring has no use for this one
            assert [end.split("%")[0] for end in link.ends] == [name, other]
            assert link.there_Bps == pytest.approx(wires_Bps(scenario, link.ends), rel=0.2)
            assert link.back_Bps == pytest.approx(wires_Bps(scenario, link.ends[::-1]), rel=0.2)
    assert sum(link.ends != ("", "") for theirs in links.values() for link in theirs.values()) >= 8
    assert links["laptop"]["mini"].there_Bps == links["mini"]["laptop"].back_Bps, "both hear what one has measured"
    assert len(gauges) == 4 * 3 * 2


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("cable", "interface"), [("16.4 Gb/s", "bridge0"), ("50 Mb/s", "switch")])
def test_of_several_ways_the_one_that_was_measured_to_be_fast_is_dialled(cable: str, interface: str) -> None:
    links, _ = asked_while_training(home(cable, measure="order"), 4.0)
    assert links["studio-2"]["studio-1"].ends == (f"studio-2%{interface}", f"studio-1%{interface}")
    assert links["studio-1"]["studio-2"].ends == (f"studio-1%{interface}", f"studio-2%{interface}")


def test_without_measuring_the_first_address_that_answers_is_dialled_and_nothing_is_said_of_its_speed() -> None:
    links, gauges = asked_while_training(home("50 Mb/s", measure="nothing"), 4.0)
    assert not gauges
    assert all(link.there_Bps is None for theirs in links.values() for link in theirs.values())


@pytest.mark.slow
def test_where_choices_follow_the_links_the_ring_goes_over_the_cable() -> None:
    outcome, events = traced(home(measure="order"))
    assert len(outcome.values()) == 4
    orders = {str(event[4]) for event in events if event[1] == "follows links"}
    (order,) = orders  # all members have the same
    names = order.split(",")
    assert ("studio-1", "studio-2") in [tuple(sorted(pair)) for pair in pairwise([*names, names[0]])]


@pytest.mark.slow
def test_measuring_links_changes_no_sum_and_following_them_is_the_same_in_every_run() -> None:
    without, links = (digest(traced(home(measure=measure))[0]) for measure in ("nothing", "links"))
    assert without == links
    first, second = (traced(home(measure="order"))[0] for _ in range(2))
    assert first.trace_sha256 == second.trace_sha256


# What happens while it is measured.


def slow_abc(*faults: AnyFault, steps: int = 10, **cluster: object) -> Scenario:
    """Over a line so slow that measuring takes most of a second."""
    training = Training(task="convex", steps=steps, algorithm="ring", timeout_s=PositiveSeconds(20))
    scenario = replace(on_switch(ABC, faults, rate="0.5 Mb/s"), seed=SEED)
    return replace(
        scenario,
        training=training,
        cluster=Cluster(nodes=3, preset="low_latency", **cluster),  # type: ignore[arg-type]
    )


def measuring_s(events: list[Event]) -> tuple[float, float]:
    """From when to when the first view's members measured."""
    began = min(int(event[0]) for event in events if event[1] == "follows")
    return began / 1e9, min(int(event[0]) for event in events if event[1] == "synchronised") / 1e9


def reference(scenario: Scenario, events: list[Event]) -> str:
    """What those who are left would have learned without faults, had they begun alone."""
    assert scenario.training is not None
    begun = [event for event in events if event[1] == "synchronised"]
    epoch = begun[0][3]
    ranks = {int(event[4]): str(event[2]) for event in events if event[1] == "follows" and event[3] == epoch}
    order = [name for _, name in sorted(ranks.items())]
    return train(on_switch(ABC), scenario.training, first=order).sha256()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("measure", ["links", "order"])
@pytest.mark.parametrize("share", [0.05, 0.4, 0.8])
def test_a_member_that_dies_while_links_are_measured_costs_the_others_a_view_and_nothing_else(
    share: float, measure: str
) -> None:
    began_s, ended_s = measuring_s(traced(slow_abc())[1])
    assert ended_s - began_s > 0.3
    crash = Crash(Seconds(began_s + share * (ended_s - began_s)), "b")
    scenario = slow_abc(crash, measure=measure)
    outcome, events = traced(scenario)
    assert [r.steps for r in outcome.results if isinstance(r, Report)] == [10, 10]
    assert min(int(event[0]) for event in events if event[1] == "synchronised") / 1e9 > crash.at_s
    assert digest(outcome) == reference(scenario, events)  # a ring of two has one order


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "fault", [Pause(Seconds(0.4), "c", PositiveSeconds(3)), Restart(Seconds(0.4), "a"), Reset(Seconds(0.4), ("a", "c"))]
)
def test_whatever_happens_while_links_are_measured_all_come_to_the_end(fault: AnyFault) -> None:
    outcome, events = traced(slow_abc(fault, steps=60))
    began_s, ended_s = measuring_s(events)
    assert began_s < fault.at_s < ended_s
    assert [report.steps for report in outcome.values()] == [60, 60, 60]
    assert digest(outcome) is not None


def measured_pairs(events: list[Event]) -> list[tuple[str, str]]:
    """Which pairs were measured, the one that measured first."""
    return [(str(event[2]), str(event[3])) for event in events if event[1] == "measured"]


def around_restart(events: list[Event]) -> tuple[list[Event], list[Event], list[Event]]:
    """What happened before b crashed; from then until it was in a view again; and afterwards."""
    crash = next(number for number, event in enumerate(events) if event[1] == "fault")
    views = [number for number, event in enumerate(events) if event[1:3] == ("follows", "b") and number > crash]
    return events[:crash], events[crash : views[0]], events[views[0] :]


@pytest.mark.slow
def test_after_a_loss_nothing_is_measured_again_and_a_machine_that_returns_measures_while_the_others_train() -> None:
    _, events = traced(slow_abc(Restart(Seconds(5), "b", "kept", Seconds(4)), steps=120))
    before, away, after = around_restart(events)
    assert sorted(tuple(sorted(pair)) for pair in measured_pairs(before)) == [("a", "b"), ("a", "c"), ("b", "c")]
    assert sorted(measured_pairs(away)) == [("b", "a"), ("b", "c")]
    assert measured_pairs(after) == []
    first = next(number for number, event in enumerate(away) if event[1] == "measured")
    assert any(event[1:3] == ("applied", "a") for event in away[first:])


@pytest.mark.slow
def test_a_measurement_that_never_ended_does_not_keep_the_next_one_waiting() -> None:
    # It dies while it measures, and comes back.
    _, events = traced(slow_abc(Restart(Seconds(3), "b", "kept", Seconds(4)), steps=100))
    before, away, _ = around_restart(events)
    assert ("b", "c") not in measured_pairs(before)
    assert sorted(measured_pairs(away)[-2:]) == [("b", "a"), ("b", "c")]


def test_members_that_do_not_agree_on_whether_choices_follow_the_links_say_so() -> None:
    scenario = slow_abc()
    world = World(scenario)
    assert scenario.training is not None

    async def on_host(host: VirtualHost) -> Report:
        assert scenario.training is not None
        cluster = Cluster(nodes=3, preset="low_latency", measure="order" if host.name == "c" else "links")
        control, data = (f"{host.name}:{port}" for port in PORTS)
        plan = ClusterJob(cluster, scenario.training, SEED)
        return await train_as_member(host, NodeInfo(host.name, 1, host.name, control, data), plan, durable=False)

    results: Mapping[str, object] = dict(zip(ABC, world.run_on_all(on_host), strict=True))
    wrong = [result for result in results.values() if isinstance(result, ConfigError)]
    assert wrong
    assert "measure is" in str(wrong[0])
