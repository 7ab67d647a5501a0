"""Cells: what a simulated run comes to, where something else says what it should be."""

from __future__ import annotations

import pytest

from experiments.clusters import LINKS, VARIANTS, cluster
from experiments.study.cell import AllReduce, Train
from experiments.study.estimate import Estimate
from experiments.study.failures import MOST, failing
from experiments.study.measure import measured
from hcsim.config import Pause, Throttle
from hcsim.errors import ConfigError
from hcsim.runtime.frame import HEADER_BYTES
from hcsim.training.tasks import task

FLAT = ("ring", "tree", "centralized", "recursive_doubling", "halving_doubling", "direct")


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("size_bytes", [64 << 10, 1 << 20])
@pytest.mark.parametrize("algorithm", FLAT)
def test_the_simulator_agrees_with_the_textbook(algorithm: str, size_bytes: int) -> None:
    result = measured(AllReduce("ideal", 8, algorithm, size_bytes, 1))
    assert result.step_s == pytest.approx(result.closed_form_s, rel=0.01)


def test_hierarchy_spares_the_line_between_homes() -> None:
    times_s = {
        name: measured(AllReduce("two-homes", 4, name, 4 << 20, 1)).step_s or 0.0 for name in (*FLAT, "hierarchical")
    }
    assert min(times_s, key=lambda name: times_s[name]) == "hierarchical"


def test_all_leave_together_so_slow_lines_bring_the_last_bytes() -> None:
    assert measured(AllReduce("two-homes", 4, "recursive_doubling", 32 << 20, 5)).error is None


def test_a_ring_of_n_macs_sends_twice_the_gradients_less_one_part_in_n() -> None:
    cell = Train("ethernet:1 Gb/s", 4, "transformer:1e7", "ddp", 1, 2, algorithm="ring")
    size_bytes = sum(4 * block.length for block in task(cell.task).blocks)
    result = measured(cell)
    assert result.step_sent_bytes == pytest.approx(2 * 3 / 4 * size_bytes, rel=1e-3)
    assert result.batch == 4
    # Nothing is faster than its bytes at full rate, and the step has to compute besides.
    assert (result.step_s or 0) > 2 * 3 / 4 * size_bytes * 8 / 1e9


def test_the_bytes_of_an_all_reduce_are_those_on_the_wire() -> None:
    """A ring of four sends six messages of a quarter each."""
    result = measured(AllReduce("1gbe", 4, "ring", 64 << 10, 1))
    assert result.step_sent_bytes == 6 * ((16 << 10) + HEADER_BYTES)


@pytest.mark.parametrize("steps", [8, 12, 20, 28])
def test_the_time_of_a_step_does_not_depend_on_where_exchanges_fall(steps: int) -> None:
    """Here an exchange takes as long as two steps: one more or less in the measured part would be seen."""
    even, other = (measured(Train("1gbe", 2, "resnet50", "local_sgd:8", 1, count)) for count in (32, steps))
    assert other.step_s == pytest.approx(even.step_s, rel=0.01)


def test_a_run_that_is_shorter_than_a_period_counts_as_a_whole_with_its_one_exchange() -> None:
    result = measured(Train("1gbe", 2, "resnet50", "diloco:8", 1, 6))
    assert result.step_s == pytest.approx((result.total_s or 0) / 6)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_link_joins_that_many_macs(link: str, world: int) -> None:
    place = cluster(link, world)
    assert len(place.scenario.nodes) == world
    assert sorted(rank for home in place.groups for rank in home) == (list(range(world)) if place.groups else [])


def test_a_variant_differs_in_the_last_mac_alone() -> None:
    equal = cluster("1gbe", 4).scenario
    for variant in VARIANTS:
        other = cluster("1gbe", 4, variant).scenario
        assert other.nodes[:3] == equal.nodes[:3]
        assert (other.nodes[3:] != equal.nodes[3:] or bool(other.faults)) == (variant != "equal")
    with pytest.raises(ConfigError, match="the others have to be on Ethernet"):
        cluster("thunderbolt", 4, "one-on-wifi")


def test_a_higher_failure_rate_has_the_same_failures_closer_together() -> None:
    scenario = cluster("1gbe", 4).scenario
    seldom = failing(scenario, "pause", 30, 10.0, 36_000, seed=1).scenario.faults
    often = failing(scenario, "pause", 60, 10.0, 36_000, seed=1).scenario.faults
    for node in scenario.nodes:
        gaps = []
        for faults in (seldom, often):
            at_s = [fault.at_s for fault in faults if isinstance(fault, Pause) and fault.node == node.name]
            gaps.append([later - earlier - 10.0 for earlier, later in zip([-10.0, *at_s], at_s, strict=False)])
        assert gaps[0] == pytest.approx([2 * gap for gap in gaps[1][: len(gaps[0])]], abs=1e-5)
    # A Poisson process of 30 per hour, over ten hours and four nodes, less the time spent failing.
    assert len(seldom) == pytest.approx(30 * 10 * 4 * 120 / 130, rel=0.1)
    assert [fault.at_s for fault in often] == sorted(fault.at_s for fault in often)


def test_pauses_take_time_and_change_nothing_of_what_is_learned() -> None:
    healthy = Train("1gbe", 2, "convex", "ddp", 1, 40)
    ill = Train("1gbe", 2, "convex", "ddp", 1, 40, failures_per_hour=360_000.0, failure_s=0.01)
    one, other = measured(healthy), measured(ill)
    assert (other.total_s or 0) > (one.total_s or 0) + 0.01
    assert other.parameters_sha256 == one.parameters_sha256


def test_a_run_that_outlasts_its_failures_has_failed() -> None:
    """A microsecond from one to the next: two thousand of them are soon over."""
    with pytest.raises(ConfigError, match=r"failures_per_hour = 3.6e\+09: the run took .* \(2000 of one node are"):
        measured(Train("1gbe", 2, "convex", "ddp", 1, 40, failures_per_hour=3.6e9, failure_s=1e-6))


def test_failures_end_with_the_first_node_that_has_had_its_most() -> None:
    scenario = cluster("1gbe", 2).scenario
    ill, until_s = failing(scenario, "pause", 240, 10.0, 24 * 3600.0, seed=1)
    last_s = [[fault.at_s for fault in ill.faults if fault.node == node.name][-1] for node in scenario.nodes]
    assert len(ill.faults) == 2 * MOST
    assert until_s == pytest.approx(min(last_s) + 10.0)
    assert failing(scenario, "pause", 1, 10.0, 3600.0, seed=1).until_s == 3600.0


def test_the_time_left_follows_what_cells_of_the_same_family_took() -> None:
    cheap, dear = AllReduce("1gbe", 2, "ring", 1024, 1), Train("1gbe", 2, "digits", "ddp", 1, 100)
    longer = Train("1gbe", 2, "digits", "ddp", 1, 300)
    estimate = Estimate([cheap, dear, longer])
    assert estimate.left_s(1) is None
    estimate.finished(cheap, 0.1)
    estimate.finished(dear, 10.0)
    assert estimate.left_s(1) == pytest.approx(30.0)
    assert estimate.left_s(2) == pytest.approx(15.0)
    estimate.finished(longer, 30.0)
    assert estimate.left_s(1) == pytest.approx(0.0)


def test_a_cluster_goes_on_without_macs_that_crash_and_takes_them_back() -> None:
    place = {"task": "convex", "strategy": "ddp", "seed": 1, "steps": 600, "failure": "crash"}
    healthy = measured(Train("1gbe", 3, **place))  # type: ignore[arg-type]
    ill = measured(Train("1gbe", 3, **place, failures_per_hour=1200.0, failure_s=1.0))  # type: ignore[arg-type]
    assert (healthy.steps, ill.steps) == (600, 600)
    assert (ill.total_s or 0) > (healthy.total_s or 0) + 1.0
    assert (ill.samples_per_s or 0) < (healthy.samples_per_s or 0)


def test_no_two_macs_of_the_studies_of_stragglers_are_exactly_alike() -> None:
    """Exactly equal ones use a server's port in lockstep."""
    for variant in set(VARIANTS) - {"equal"}:
        faults = cluster("1gbe", 4, variant).scenario.faults
        factors = [float(fault.factor) for fault in faults if isinstance(fault, Throttle)]
        assert factors[:2] == [0.99, 0.98], variant
        assert len(set(factors)) == len(factors)
