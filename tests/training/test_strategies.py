"""What strategies come to: many ranks against one process, phantoms against data, time against overlap."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

import hcsim
from hcsim.collectives.group import Group
from hcsim.compressors.base import Array
from hcsim.config import ClockJump, Crash, Training, load_scenario
from hcsim.errors import ConfigError
from hcsim.launch.virtual import simulate_training
from hcsim.training import tasks
from hcsim.training.strategies import strategy
from hcsim.training.tasks.shapes import PhantomTask
from hcsim.training.trainer import train
from hcsim.units import Seconds
from tests.training.clusters import Parameters, quiet_cluster

STEPS = 8
CONVEX = Training(task="convex", steps=STEPS, evaluate_every=4)


def learned(settings: Training, ranks: int) -> dict[int, Array]:
    seen = Parameters()
    simulate_training(quiet_cluster(ranks), settings, observer=seen).values()
    return seen.by_rank


def alone(settings: Training, ranks: int) -> Array:
    return learned(replace(settings, strategy="single", compressor="none"), ranks)[0]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("algorithm", ["ring", "tree", "centralized", "direct", "halving_doubling", "auto"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_many_ranks_learn_what_one_process_learns_from_the_joined_batch(algorithm: str, ranks: int) -> None:
    settings = replace(CONVEX, algorithm=algorithm)
    ours = learned(settings, ranks)
    assert len({parameters.tobytes() for parameters in ours.values()}) == 1
    np.testing.assert_allclose(ours[0], alone(settings, ranks), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("strategy", ["ddp", "parameter_server"])
@pytest.mark.parametrize("task", ["digits", pytest.param("text:lora=4,matrices=all", marks=pytest.mark.slow)])
def test_a_network_of_torch_modules_learns_the_same_on_many_ranks(strategy: str, task: str) -> None:
    settings = Training(task=task, strategy=strategy, steps=4, batch=6, bucket_bytes=4096)
    np.testing.assert_allclose(learned(settings, 3)[2], alone(settings, 3), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "parameter_server"])
def test_ranks_count_by_their_samples_also_where_the_last_batch_is_short(strategy: str) -> None:
    """1,024 samples in batches of 300 + 70 + 5: the third batch of an epoch has fewer."""
    settings = replace(CONVEX, strategy=strategy, batch=(300, 70, 5), lr=0.05)
    np.testing.assert_allclose(learned(settings, 3)[0], alone(settings, 3), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("strategy", ["ddp", "parameter_server"])
def test_clipping_is_of_the_average(strategy: str) -> None:
    settings = replace(CONVEX, strategy=strategy, clip=0.3, batch=(40, 3))
    clipped = learned(settings, 2)[0]
    np.testing.assert_allclose(clipped, alone(settings, 2), rtol=2e-5, atol=2e-6)
    assert not np.allclose(clipped, learned(replace(settings, clip=None), 2)[0], atol=1e-3)


def test_local_sgd_that_talks_in_every_step_is_data_parallel() -> None:
    plain = replace(CONVEX, momentum=0.0)
    every = learned(replace(plain, strategy="local_sgd:1"), 3)[0]
    np.testing.assert_allclose(every, learned(plain, 3)[0], rtol=2e-5, atol=2e-6)


def test_local_sgd_averages_what_ranks_learned_alone() -> None:
    """Without talking until the end, each rank is a run of its own, on its own batches."""
    settings = replace(CONVEX, strategy=f"local_sgd:{STEPS}", batch=(16, 48), momentum=0.0)
    ours = learned(settings, 2)[0].astype(np.float64)
    task = tasks.task("convex")

    def by_itself(rank: int) -> np.ndarray:
        from hcsim.training.data import Batches

        replica = task.replica(1)
        batches = Batches.of(task, (16, 48), 1)
        for step in range(STEPS):
            replica.gradients.fill(0)
            replica.forward(batches.batch(step, rank))
            for block in reversed(range(len(task.blocks))):
                replica.backward(block)
            replica.parameters[:] -= np.float32(task.defaults.lr) * replica.gradients
        return replica.parameters.astype(np.float64)

    np.testing.assert_allclose(ours, (16 * by_itself(0) + 48 * by_itself(1)) / 64, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_diloco_steps_with_nesterov_momentum_over_the_average_way() -> None:
    """One inner step of plain SGD makes the way lr times the mean gradient: torch's SGD does the rest."""
    import torch

    settings = replace(CONVEX, strategy="diloco:1,lr=0.7,momentum=0.9", momentum=0.0, steps=3)
    ours = learned(settings, 2)[0]
    task = tasks.task("convex")
    from hcsim.training.data import Batches

    replica, batches = task.replica(1), Batches.of(task, (16, 16), 1)
    parameters = torch.from_numpy(replica.parameters)
    parameters.requires_grad_()
    outer = torch.optim.SGD([parameters], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(3):
        replica.gradients.fill(0)
        replica.forward(np.concatenate([batches.batch(step, rank) for rank in range(2)]))
        for block in reversed(range(len(task.blocks))):
            replica.backward(block)
        parameters.grad = torch.from_numpy(task.defaults.lr * replica.gradients).float()
        outer.step()
    np.testing.assert_allclose(ours, parameters.detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "compressor", ["none", "topk:0.05+ef", "randomk:0.1", "int8+ef", "onebit", "fp16", "powersgd:2+ef"]
)
@pytest.mark.parametrize(
    "strategy", ["ddp", "local_sgd:2", "hierarchical", "parameter_server", "parameter_server:async"]
)
def test_phantoms_take_the_time_and_the_bytes_of_what_they_stand_for(
    monkeypatch: pytest.MonkeyPatch, compressor: str, strategy: str
) -> None:
    settings = replace(CONVEX, strategy=strategy, compressor=compressor, bucket_bytes=1024, clip=1.0)
    scenario = load_scenario("two-homes-wan") if strategy == "hierarchical" else quiet_cluster(3)
    real = simulate_training(scenario, settings).values()
    convex = tasks.task("convex")
    shapes = PhantomTask("convex", tuple(convex.blocks), convex.samples, convex.defaults)
    monkeypatch.setattr("hcsim.training.strategies.task", lambda name: shapes)
    phantom = simulate_training(scenario, settings).values()
    assert [report.sent_bytes for report in phantom] == [report.sent_bytes for report in real]
    assert [report.duration_s for report in phantom] == pytest.approx([report.duration_s for report in real])


@pytest.mark.slow
def test_buckets_travel_while_the_backward_pass_goes_on() -> None:
    """With buckets of its blocks the exchange of one hides behind the computing of the next."""
    scenario = load_scenario("eight-macs-2.5gbe")
    whole, cut = (
        simulate_training(scenario, Training(task="resnet50", steps=1, batch=32, bucket_bytes=size)).values()[0]
        for size in (1 << 30, 4 << 20)
    )
    assert cut.spent_s["compute"] == pytest.approx(whole.spent_s["compute"], rel=0.03)
    hidden_s = whole.duration_s - cut.duration_s
    assert hidden_s > 0.3 * min(cut.spent_s["compute"], whole.spent_s["exchange"])


def test_a_hierarchy_sends_over_the_line_between_homes_once_for_each_home() -> None:
    scenario = load_scenario("two-homes-wan")
    settings = Training(task="gpt2", steps=1, batch=1, timeout_s=3600)
    flat, hierarchical = (
        simulate_training(scenario, replace(settings, strategy=name)).values() for name in ("ddp", "hierarchical")
    )
    assert hierarchical[0].duration_s < 0.8 * flat[0].duration_s


def test_a_hierarchy_learns_what_one_process_learns() -> None:
    seen = Parameters()
    settings = replace(CONVEX, strategy="hierarchical", bucket_bytes=1024)
    simulate_training(load_scenario("two-homes-wan"), settings, observer=seen).values()
    assert len({parameters.tobytes() for parameters in seen.by_rank.values()}) == 1
    np.testing.assert_allclose(seen.by_rank[3], alone(settings, 4), rtol=2e-5, atol=2e-6)


def test_the_learning_rate_warms_up() -> None:
    """Plain SGD with a warm-up over 4 steps: the first step is a quarter of a full one."""
    one = replace(CONVEX, steps=1, momentum=0.0)
    start = tasks.task("convex").replica(seed=1).parameters
    full, warming = (learned(replace(one, warmup=steps), 2)[0] - start for steps in (0, 4))
    np.testing.assert_allclose(warming, full / 4, atol=1e-6)
    scaled = learned(replace(one, scale_lr=True), 2)[0] - start
    np.testing.assert_allclose(scaled, 2 * full, atol=1e-6)


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_clock_that_jumps_does_not_change_what_took_how_long(jump_s: float) -> None:
    calm = quiet_cluster(2)
    settings = replace(CONVEX, task="resnet50", steps=3)
    jumpy = replace(calm, faults=(ClockJump(Seconds(0.5), "mac-0", jump_s),))
    plain, jumped = (simulate_training(scenario, settings).values()[0] for scenario in (calm, jumpy))
    assert jumped.duration_s == pytest.approx(plain.duration_s)
    assert jumped.spent_s == pytest.approx(plain.spent_s)


@pytest.mark.parametrize(
    ("unlike", "complaint"),
    [
        ({"lr": 0.01}, "unlike settings: lr is 0.05 on rank 0 and 0.01 on rank 2"),
        ({"steps": 3}, "steps is 8 on rank 0 and 3 on rank 2"),
        ({"batch": 7}, "batch is 16 on rank 0 and 7 on rank 2"),
        ({"task": "digits"}, "task is convex on rank 0 and digits on rank 2"),
        ({"strategy": "parameter_server"}, "strategy is ddp on rank 0 and parameter_server on rank 2"),
    ],
)
def test_ranks_that_mean_to_do_unlike_things_find_out_before_they_start(
    unlike: dict[str, object], complaint: str
) -> None:
    async def program(group: Group) -> None:
        await train(group, replace(CONVEX, **unlike) if group.rank == 2 else CONVEX, 1)

    for result in hcsim.simulate(quiet_cluster(3), program).results:
        assert isinstance(result, ConfigError)
        assert complaint in str(result)


def test_ranks_with_unlike_seeds_find_out() -> None:
    async def program(group: Group) -> None:
        await train(group, CONVEX, group.rank)

    results = hcsim.simulate(quiet_cluster(2), program).results
    assert all("seed is 0 on rank 0 and 1 on rank 1" in str(result) for result in results)


@pytest.mark.parametrize("strategy", ["ddp", "local_sgd:2", "parameter_server"])
def test_a_machine_that_dies_ends_the_run_of_all_or_leaves_the_others_to_go_on(strategy: str) -> None:
    scenario = quiet_cluster(4)
    dead = scenario.nodes[3].name
    settings = replace(CONVEX, task="resnet50", strategy=strategy, steps=6, timeout_s=20.0)
    outcome = simulate_training(replace(scenario, faults=(Crash(Seconds(2.5), dead),)), settings)
    assert isinstance(outcome.results[3], hcsim.HcsimError)
    survivors = outcome.results[:3]
    if strategy == "parameter_server":
        assert all(isinstance(result, hcsim.Report) for result in survivors)
    else:
        assert all(isinstance(result, hcsim.HcsimError) for result in survivors)
    assert outcome.seconds < 600


def test_what_is_reported_adds_up() -> None:
    report = simulate_training(quiet_cluster(2), CONVEX).values()[0]
    assert [point.step for point in report.points] == list(range(1, STEPS + 1))
    assert [point.step for point in report.points if point.score] == [4, 8]
    assert all(a.time_s < b.time_s for a, b in zip(report.points, report.points[1:], strict=False))
    assert report.points[-1].time_s == report.duration_s
    assert report.points[-1].sent_bytes == report.sent_bytes > STEPS * 4 * 64 * 16 // 2


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("dpp", 'there is no strategy "dpp" (did you mean ddp?); known: single, ddp, hierarchical'),
        ("diloco:often", "diloco"),
        ("diloco:16,speed=3", '"speed=3" cannot be used; "diloco" knows every=16, lr=0.7, momentum=0.9'),
        ("local_sgd:0", "every"),
        ("ddp:3", '"ddp" has nothing to set'),
        ("parameter_server:bounded,staleness=-1", "staleness"),
    ],
)
def test_a_strategy_that_makes_no_sense_is_refused_with_what_would(spec: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        strategy(spec)
    assert complaint in str(refusal.value)


def test_batch_sizes_are_for_all_ranks() -> None:
    async def program(group: Group) -> None:
        await train(group, replace(CONVEX, batch=(1, 2, 3)), 1)

    outcome = hcsim.simulate(quiet_cluster(2), program)
    with pytest.raises(ConfigError, match="3 batch sizes for 2 ranks"):
        outcome.values()
