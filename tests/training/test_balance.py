"""Unlike machines take unlike shares of a step, or of a period: as much as they finish in the same time."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hcsim.collectives.group import Group
from hcsim.compressors.base import Array
from hcsim.config import Scenario, Throttle, Training, parse_scenario
from hcsim.errors import ConfigError
from hcsim.launch.virtual import Outcome, simulate_training
from hcsim.launch.virtual_cluster import simulate_cluster
from hcsim.telemetry.trace import Event
from hcsim.training import tasks
from hcsim.training.balance import SLACK, UNKNOWN, StepCost, assumed, fastest, paces, shares
from hcsim.training.data import Batches, Turns
from hcsim.training.run import Report, leading
from hcsim.training.trainer import train
from hcsim.units import Seconds
from tests.training.clusters import Parameters

costs_of_some = st.lists(
    st.builds(StepCost, st.floats(0.0, 0.5), st.floats(0.001, 1.0)),
    min_size=1,
    max_size=4,
)


def ends_s(costs: list[StepCost], sizes: tuple[int, ...]) -> float:
    return max(cost.step_s(size) for cost, size in zip(costs, sizes, strict=True))


# Shares and paces.


@given(costs=costs_of_some, samples=st.integers(1, 12))
def test_no_other_shares_of_at_least_one_sample_end_earlier(costs: list[StepCost], samples: int) -> None:
    found = shares(costs, samples)
    assert sum(found) == samples
    assert min(found) >= (1 if samples >= len(costs) else 0)
    if samples >= len(costs):
        others = (each for each in product(range(1, samples + 1), repeat=len(costs)) if sum(each) == samples)
        assert ends_s(costs, found) <= min(ends_s(costs, each) for each in others) + 1e-9


def test_a_fixed_cost_weighs_more_on_a_slow_machine() -> None:
    """Each needs 2 s for a step besides its samples: 102 s are left to both."""
    assert shares([StepCost(2.0, 1.0), StepCost(2.0, 4.0)], 125) == (100, 25)
    assert shares([StepCost(2.0, 1.0), StepCost(52.0, 4.0)], 110) == (98, 12)


def test_the_fastest_get_the_samples_of_which_there_are_fewer_than_ranks() -> None:
    assert shares([StepCost(0.0, 3.0), StepCost(0.0, 1.0), StepCost(0.0, 2.0)], 2) == (0, 1, 1)


def test_a_rank_whose_machine_is_not_known_is_taken_for_an_average_one() -> None:
    one, other = StepCost(0.0, 1.0), StepCost(0.2, 3.0)
    assert assumed([one, UNKNOWN, other]) == (one, StepCost(0.1, 2.0), other)
    assert shares(assumed([UNKNOWN, UNKNOWN]), 10) == (5, 5)


def test_the_fastest_is_the_first_of_several() -> None:
    assert fastest([StepCost(0.0, 2.0), StepCost(0.0, 1.0), StepCost(0.0, 1.0)], 8) == 1


def test_each_rank_takes_as_many_steps_as_it_finishes_meanwhile() -> None:
    assert paces([1.0, 2.0, 16.0, 40.0], [8] * 4, 16) == (16, 8, 1, 1)
    assert paces([1.0, 16 / 3.95], [8, 8], 16) == (16, 4), "all wait a little, rather than one for long"
    assert paces([1.0, 16 / 3.5], [8, 8], 16) == (16, 3)


@given(times_s=st.lists(st.floats(0.5, 5.0), min_size=2, max_size=5), every=st.integers(1, 32))
def test_nobody_waits_for_long_for_a_rank_that_takes_more_than_one_step(times_s: list[float], every: int) -> None:
    found = paces(times_s, [1] * len(times_s), every)
    assert max(found) == every == found[times_s.index(min(times_s))]
    for count, time_s in zip(found, times_s, strict=True):
        assert count == 1 or count * time_s <= SLACK * every * min(times_s) + 1e-6


@pytest.mark.parametrize("turns", [None, Turns(5, (5, 3, 1))])
def test_an_epoch_has_each_sample_once_though_sizes_and_turns_change(turns: Turns | None) -> None:
    batches = Batches(101, (4, 2, 3), seed=1, turns=turns)
    seen: list[int] = []
    for step in range(30):
        if step == 10:
            batches = batches.again(step, (1, 6, 2), Turns(5, (2, 5, 4)))
        parts = [batches.batch(step, rank) for rank in range(3)]
        assert [len(part) for part in parts] == list(batches.counts(step))
        seen += [int(sample) for part in parts for sample in part]
    for epoch in range(len(seen) // 101):
        assert sorted(seen[101 * epoch : 101 * (epoch + 1)]) == list(range(101))
    assert len(seen) > 101


# Unlike machines that train.

HOME = """
name = "home"
medium = [{ kind = "ethernet", name = "switch", rate = "10 Gb/s" }]
node = [
    { name = "mini", count = 3, machine = "M4", links = ["switch"] },
    { name = "old", machine = "M1", links = ["switch"] },
]
"""
SCALES = parse_scenario(
    """
name = "scales"
medium = [{ kind = "ethernet", name = "switch", rate = "1 Gb/s" }]
[[node]]
name = "slow"
machine = { name = "slow", peak = "2 MFLOPS", memory = "100 GB/s", overhead = "1 us" }
links = ["switch"]
[[node]]
name = "quick"
machine = { name = "quick", peak = "10 MFLOPS", memory = "100 GB/s", overhead = "1 us" }
links = ["switch"]
[[node]]
name = "middle"
machine = { name = "middle", peak = "5 MFLOPS", memory = "100 GB/s", overhead = "1 us" }
links = ["switch"]
""",
    "scales",
)
"""Whose steps take the longer the more samples they have."""
CONVEX = Training(task="convex", steps=12, batch="auto:96", evaluate_every=12, lr=0.05)


def home() -> Scenario:
    return parse_scenario(HOME, "home")


def samples_per_s(outcome: Outcome[Report]) -> float:
    lead = leading(outcome.values())
    return sum(point.samples for point in lead.points) / lead.duration_s


@pytest.mark.parametrize(
    ("strategy", "batch"),
    [("ddp", "auto"), ("diloco:16", "auto"), ("diloco:16,pace=speed", None), ("local_sgd:8,pace=speed", "auto")],
)
def test_three_new_machines_and_an_old_one_reach_nine_tenths_of_the_sum_of_their_speeds(
    strategy: str, batch: str | None
) -> None:
    def alone(node: int) -> float:
        one = replace(home(), nodes=(home().nodes[node],))
        return samples_per_s(simulate_training(one, Training(task="resnet50", strategy="single", steps=2)))

    settings = Training(task="resnet50", strategy=strategy, batch=batch, steps=16)  # type: ignore[arg-type]
    assert samples_per_s(simulate_training(home(), settings)) >= 0.9 * sum(alone(node) for node in range(4))


def learned(settings: Training, scenario: Scenario = SCALES) -> dict[int, Array]:
    seen = Parameters()
    simulate_training(scenario, settings, observer=seen).values()
    return seen.by_rank


def alone(settings: Training) -> Array:
    whole = replace(settings, strategy="single")
    return learned(whole)[1]  # the quick one


def shares_taken(events: list[Event], node: str) -> list[tuple[object, ...]]:
    return [event[3:] for event in events if event[1:3] == ("shares", node)]


def test_unlike_shares_learn_what_one_machine_learns_from_the_joined_batch() -> None:
    ours = learned(CONVEX)
    assert len({parameters.tobytes() for parameters in ours.values()}) == 1
    np.testing.assert_allclose(ours[0], alone(CONVEX), rtol=2e-5, atol=2e-6)


def test_a_machine_that_becomes_slow_gets_a_smaller_share_and_nothing_else_changes() -> None:
    settings = replace(CONVEX, steps=40, evaluate_every=40)
    hot = replace(SCALES, faults=(Throttle(Seconds(0.5), "quick", factor=0.3),))
    events: list[Event] = []
    seen = Parameters()
    adapting = simulate_training(hot, settings, observer=seen, sink=events.extend)
    taken = shares_taken(events, "slow")
    assert [*taken] == [*shares_taken(events, "quick")] == [*shares_taken(events, "middle")]
    assert 1 <= len(taken) <= 3, "no shares for every little difference"
    _, *sizes = taken[-1]
    assert sizes[1] < sizes[2], "it is slower than the middle one now"  # type: ignore[operator]
    np.testing.assert_allclose(seen.by_rank[0], alone(settings), rtol=2e-4, atol=2e-5)
    stubborn = simulate_training(hot, replace(settings, batch=(11, 57, 28)))
    assert adapting.values()[0].duration_s < 0.75 * stubborn.values()[0].duration_s


@pytest.mark.parametrize(
    ("strategy", "steps", "lr"),
    [("ddp", 120, 0.05), ("diloco:4,momentum=0.5,pace=speed", 240, 0.02), ("local_sgd:4,pace=speed", 200, 0.05)],
)
def test_unlike_shares_reach_the_optimum(strategy: str, steps: int, lr: float) -> None:
    settings = replace(CONVEX, strategy=strategy, steps=steps, evaluate_every=steps, lr=lr)
    if "pace" in strategy:
        settings = replace(settings, batch=32)
    score = simulate_training(SCALES, settings).values()[0].points[-1].score
    assert score is not None
    assert score.gap is not None
    assert score.gap < 5e-3


def test_ranks_that_take_steps_by_their_speed_count_by_their_samples() -> None:
    """Without talking until the end, each rank is a run of its own."""
    settings = Training(task="convex", strategy="local_sgd:10,pace=speed", steps=10, batch=32, momentum=0.0)
    ours = learned(settings)[0].astype(np.float64)
    task = tasks.task("convex")
    turns = Turns(10, (2, 10, 5))
    batches = Batches.of(task, (32,) * 3, SCALES.seed, turns=turns)

    def by_itself(rank: int) -> np.ndarray:
        replica = task.replica(SCALES.seed)
        for step in range(10):
            if turns.includes(step, rank):
                replica.gradients.fill(0)
                replica.forward(batches.batch(step, rank))
                for block in reversed(range(len(task.blocks))):
                    replica.backward(block)
                replica.parameters[:] -= np.float32(task.defaults.lr) * replica.gradients
        return replica.parameters.astype(np.float64)

    wanted = sum(count * by_itself(rank) for rank, count in enumerate(turns.counts)) / 17
    np.testing.assert_allclose(ours, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("strategy", ["ddp", "diloco:4,pace=speed", "parameter_server"])
def test_a_cluster_shares_out_anew_when_members_come_and_go(strategy: str) -> None:
    text = "[[fault]]\nkind = 'crash'\nat = '1 s'\nnode = 'quick'\n[cluster]\nnodes = 3\npreset = 'low_latency'\n"
    scenario = replace(SCALES, faults=parse_scenario(HOME.replace("old", "quick") + text, "x").faults)
    settings = replace(CONVEX, strategy=strategy, steps=40, evaluate_every=40)
    outcomes = [simulate_cluster(scenario, settings) for _ in range(2)]
    assert outcomes[0].trace_sha256 == outcomes[1].trace_sha256
    slow, _, middle = outcomes[0].results
    assert isinstance(slow, Report)
    assert isinstance(middle, Report)
    assert slow.sha256 == middle.sha256
    assert [slow.steps, middle.steps] == [40, 40]
    assert {slow.points[0].ranks, slow.points[-1].ranks} == {3, 2}
    if strategy in ("ddp", "parameter_server"):
        assert {point.samples for point in slow.points} == {96}, "whoever is there does all of it"
    if strategy == "ddp":
        waited_s = slow.points[-1].spent_s["wait"], middle.points[-1].spent_s["wait"]
        assert max(waited_s) < 0.1 * slow.points[-1].spent_s["whole"]


@pytest.mark.parametrize("strategy", ["ddp", "local_sgd:2,pace=speed"])
def test_ranks_agree_on_their_shares_in_both_worlds(cluster, strategy: str) -> None:
    """On machines whose profile nobody knows, and which are unlike only by chance."""
    settings = replace(CONVEX, strategy=strategy, steps=24)

    async def program(group: Group) -> Report:
        return await train(group, settings, 1)

    reports = cluster.run(3, program)
    assert [report.steps for report in reports] == [24] * 3
    assert len({report.sha256 for report in reports}) == 1
    assert {report.points[-1].samples for report in reports} == {reports[0].points[-1].samples}


def test_single_is_the_fastest_machine() -> None:
    """Of three, it is the second; and it shows what it has learned."""
    reports = simulate_training(SCALES, replace(CONVEX, strategy="single")).values()
    assert [report.steps for report in reports] == [0, 12, 0]
    assert leading(reports).rank == 1
    assert leading(reports).points[-1].score is not None


@pytest.mark.parametrize("batch", ["auto:0", "auto:", "automatic", "96"])
def test_shares_are_of_a_number_of_samples(batch: str) -> None:
    with pytest.raises(ConfigError, match='expected a whole number, a list of them, "auto"'):
        parse_scenario(f'{HOME}[training]\nbatch = "{batch}"\n', "home")
