"""Training by stages: equal to one process, as fast as the formula, and refused where it cannot be."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import combinations, pairwise, permutations
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from experiments.peers.crew import free_ports
from hcsim import real_group
from hcsim.compressors.base import Array
from hcsim.config import CATALOGUE, Crash, Scenario, Training, parse_scenario
from hcsim.config.machine import GIB, usable_bytes
from hcsim.errors import CollectiveError, ConfigError
from hcsim.launch.virtual import simulate_training
from hcsim.runtime.work_time import seconds
from hcsim.training import tasks
from hcsim.training.data import Batches
from hcsim.training.fitting import Room, fits_of
from hcsim.training.optimizer import AdamW, Optimizer, Sgd, clip
from hcsim.training.pipeline.partition import StageMachine, cut
from hcsim.training.pipeline.schedule import bubble
from hcsim.training.run import Report, Run
from hcsim.training.strategies import check_training
from hcsim.training.task import Task, backward_work, forward_work, sequential
from hcsim.training.tasks.shapes import shapes_of
from hcsim.training.trainer import train
from hcsim.units import Seconds
from tests.training.clusters import quiet_cluster

STEPS = 3
DIGITS = Training(task="digits", steps=STEPS, batch=6, evaluate_every=2)


class Models:
    """Keeps the whole model that the evaluating rank ends with."""

    def __init__(self) -> None:
        self.learned: list[Array] = []

    def point(self, rank: int, point: object) -> None:
        pass

    def finished(self, run: Run) -> None:
        if isinstance(run.parameters, np.ndarray):
            self.learned.append(run.parameters.copy())


def by_stages(settings: Training, ranks: int, what: Task | None = None) -> Array:
    seen = Models()
    simulate_training(quiet_cluster(ranks), settings, observer=seen, what=what).values()
    (model,) = seen.learned
    return model


def by_one_process(settings: Training, ranks: int, microbatches: int) -> Array:
    """Train with the joined batch, whose gradients one process adds up over the microbatches."""
    task = tasks.task(settings.task)
    lr = settings.lr or task.defaults.lr
    rule: Optimizer = AdamW(lr=lr) if settings.optimizer == "adamw" else Sgd(lr=lr, momentum=task.defaults.momentum)
    replica, batches = task.replica(1), Batches.of(task, (settings.batch,) * ranks, 1)
    stepper = rule.open(replica.parameters)
    for step in range(settings.steps):
        batch = np.concatenate([batches.batch(step, rank) for rank in range(ranks)])
        total = np.zeros_like(replica.parameters)
        for part in np.array_split(batch, microbatches):
            replica.gradients.fill(0)
            replica.forward(part)
            for block in reversed(range(len(task.blocks))):
                replica.backward(block)
            total += np.float32(len(part) / len(batch)) * np.asarray(replica.gradients)
        replica.gradients[:] = total
        if settings.clip is not None:
            clip(replica.gradients, settings.clip)
        stepper.step(replica.gradients, lr)
    return np.array(replica.parameters)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("ranks", "optimizer"), [(2, "sgd"), (4, "adamw"), (3, "sgd"), (3, "adamw")])
def test_stages_learn_to_the_bit_what_one_process_learns_from_an_undivided_batch(ranks: int, optimizer: str) -> None:
    settings = replace(DIGITS, strategy="pipeline:microbatches=1", optimizer=optimizer, lr=0.01)
    alone = by_one_process(settings, ranks, 1)
    assert by_stages(settings, ranks).tobytes() == alone.tobytes()


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_microbatches_add_up_to_the_gradient_of_the_batch(schedule: str) -> None:
    settings = replace(DIGITS, strategy=f"pipeline:schedule={schedule},microbatches=4", clip=0.5)
    np.testing.assert_allclose(by_stages(settings, 3), by_one_process(settings, 3, 4), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "settings",
    [
        replace(DIGITS, clip=0.5),
        replace(DIGITS, recompute=True),
        pytest.param(replace(DIGITS, task="text:lora=4,matrices=all", steps=1), marks=pytest.mark.slow),
    ],
)
def test_both_schedules_and_any_number_of_stages_learn_the_same_bits(settings: Training) -> None:
    """Also where blocks are computed again, and where the first blocks are frozen and pass no gradients on."""
    specs = (("1f1b", 2), ("gpipe", 3), ("1f1b", 4), ("gpipe", 4))
    models = [
        by_stages(replace(settings, strategy=f"pipeline:{schedule},microbatches=3", batch=12 // ranks), ranks).tobytes()
        for schedule, ranks in specs
    ]
    assert len(set(models)) == 1


@pytest.mark.parametrize("compressor", ["none", "int8+ef"])
def test_replicas_of_a_stage_average_their_gradients(compressor: str) -> None:
    """Two pipelines of two stages learn what two ranks learn by data parallelism, each with the batch of two."""
    piped = replace(DIGITS, strategy="pipeline:microbatches=1,stages=2", compressor=compressor)
    seen = Models()
    simulate_training(quiet_cluster(2), replace(DIGITS, batch=12, compressor=compressor), observer=seen).values()
    tolerance = 1e-6 if compressor == "none" else 2e-3
    np.testing.assert_allclose(by_stages(piped, 4), seen.learned[0], rtol=tolerance, atol=tolerance)


# Parameters that two blocks share.


def with_shared_matrix() -> Task:
    """Return a small decoder whose head computes with the embedding's matrix."""
    import torch

    from experiments.memory import decoder
    from hcsim.training.task import Defaults, Tie
    from hcsim.training.tasks.torch_task import Dataset, NetworkSpec, TorchTask
    from hcsim.training.tasks.transformer import Architecture

    of = Architecture(2, 32, 50, 2, positions=8)
    codes = torch.from_numpy(np.random.default_rng(1).integers(0, 50, (64, 9)))
    data = Dataset(codes[:, :-1].contiguous(), codes[:, 1:].contiguous())
    model = NetworkSpec(lambda: decoder(of), 1.0, (Tie("0.tokens.weight", 0, 3),))
    return TorchTask("shared", model, data, Dataset(data.inputs[:4], data.targets[:4]), Defaults(0.05, 0.9, 4))


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_embedding_that_the_head_shares_is_learned_as_in_one_process(ranks: int) -> None:
    settings = Training(strategy="pipeline:microbatches=2", steps=3, batch=8 // ranks, clip=0.5)
    seen = Models()
    alone = replace(settings, strategy="ddp", batch=8)
    simulate_training(quiet_cluster(1), alone, observer=seen, what=with_shared_matrix()).values()
    np.testing.assert_allclose(by_stages(settings, ranks, with_shared_matrix()), seen.learned[0], rtol=1e-4, atol=2e-6)


def test_a_task_that_does_not_name_what_its_blocks_share_is_refused_by_name() -> None:
    task = with_shared_matrix()
    task.model = replace(task.model, ties=())  # type: ignore[attr-defined]
    last = simulate_training(quiet_cluster(4), replace(DIGITS, strategy="pipeline"), what=task).results[3]
    assert isinstance(last, ConfigError)
    assert "computes with parameters of another stage" in str(last)


# Time.

LAYERS = "transformer:layers=8,width=256,tokens=64"


def network(ranks: int, rate: str, latency: str) -> Scenario:
    """So many equal Macs on one switch."""
    text = f"""
    name = "layers"
    [[medium]]
    kind = "ethernet"
    name = "switch"
    rate = "{rate}"
    latency = "{latency}"
    [[node]]
    name = "mac"
    machine = "M4"
    links = ["switch"]
    """
    one = parse_scenario(text, "layers")
    return replace(one, nodes=tuple(replace(one.nodes[0], name=f"mac-{rank}") for rank in range(ranks)))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 3), (4, 8), (4, 2), (8, 8)])
def test_a_step_of_equal_stages_takes_what_the_formula_says(schedule: str, stages: int, microbatches: int) -> None:
    """(m + p - 1)(f + b) on a network that takes no time, of which a stage computes m (f + b); and an update."""
    spec = f"pipeline:{schedule},microbatches={microbatches}"
    settings = Training(task=LAYERS, strategy=spec, steps=1, batch=microbatches)
    report = simulate_training(network(stages, "100000 Gb/s", "1 ns"), settings).values()[0]
    machine, task = CATALOGUE["M4"], sequential(tasks.task(LAYERS)).stage(0, 8 // stages)
    forward_s = seconds(machine, forward_work(task, stages))
    backward_s = sum(seconds(machine, backward_work(block, stages)) for block in task.blocks)
    update_s = seconds(machine, Sgd(lr=0.1, momentum=0.9).work(sum(block.length for block in task.blocks)))
    turns_s = (microbatches + stages - 1) * (forward_s + backward_s)
    assert report.duration_s == pytest.approx(turns_s + update_s, rel=0.01)
    computing_s = report.spent_s["compute"] - update_s
    assert 1 - computing_s / turns_s == pytest.approx(bubble(stages, microbatches), rel=0.01)


def test_activations_travel_while_machines_compute() -> None:
    """On a network that needs as long for all activations as a stage computes, a step takes far less than both one
    after the other, where many microbatches are under way."""

    def step_s(schedule: str, rate: str) -> float:
        settings = Training(task=LAYERS, strategy=f"pipeline:{schedule},microbatches=16", steps=1, batch=16)
        return simulate_training(network(4, rate, "0.1 ms"), settings).values()[0].duration_s

    sending_s = 2 * 16 * 4 * 64 * 256 * 4 * 8 / 0.8e9
    assert 0 < step_s("gpipe", "0.8 Gb/s") - step_s("gpipe", "100 Gb/s") < 0.5 * sending_s
    assert step_s("gpipe", "0.8 Gb/s") < step_s("1f1b", "0.8 Gb/s")


@pytest.mark.parametrize("strategy", ["pipeline", "pipeline:gpipe,stages=2,microbatches=3"])
def test_phantoms_take_the_time_and_the_bytes_of_stages_with_data(strategy: str) -> None:
    settings = replace(DIGITS, strategy=strategy, clip=1.0, batch=(5, 6, 7, 8), compressor="int8+ef", evaluate_every=9)
    digits = tasks.task("digits")
    real, phantom = (
        simulate_training(quiet_cluster(4), settings, what=what).values() for what in (digits, shapes_of(digits))
    )
    assert [report.sent_bytes for report in phantom] == [report.sent_bytes for report in real]
    assert [report.duration_s for report in phantom] == pytest.approx(
        [report.duration_s for report in real],
        rel=1e-3,  # evaluations end together, and take no time but that
    )


# Where a model is cut.


@given(st.data(), st.booleans())
def test_the_cut_is_the_best_of_all(data: st.DataObject, overlaps: bool) -> None:
    """Compare with every order of the machines and every cut."""
    stages, blocks = data.draw(st.integers(1, 4)), data.draw(st.integers(4, 7))
    times, limits = st.integers(1, 20), st.integers(2, 12)
    costs = [tuple(float(data.draw(times)) for _ in range(blocks)) for _ in range(stages)]
    machines = [
        StageMachine(block_s, float(data.draw(limits)), float(data.draw(st.sampled_from([1, 3]))))
        for block_s in data.draw(st.permutations(costs))
    ]
    sizes, needs = [data.draw(times) for _ in range(blocks)], [data.draw(st.integers(1, 4)) for _ in range(blocks)]

    def fits(stage: int, first: int, end: int, usable: float) -> bool:
        return sum(needs[first:end]) + stage <= usable

    def slowest(bounds: Sequence[int], order: Sequence[StageMachine]) -> float:
        worst = 0.0
        for stage, (machine, (first, end)) in enumerate(zip(order, pairwise(bounds), strict=True)):
            if not fits(stage, first, end, machine.usable_bytes):
                return inf
            moved = [sizes[bound] / machine.rate_Bps for bound in (first, end) if 0 < bound < blocks]
            computing = sum(machine.block_s[first:end])
            worst = max(worst, max(computing, *moved, 0.0) if overlaps else computing + sum(moved))
        return worst

    cuts = [(0, *inner, blocks) for inner in combinations(range(1, blocks), stages - 1)]
    best = min(slowest(bounds, order) for bounds in cuts for order in permutations(machines))
    found = cut(machines, stages, sizes, fits, overlaps=overlaps)
    if found is None:
        assert best == inf
    else:
        assert sorted(rank for seat in found.seats for rank in seat) == list(range(stages))
        order = [machines[rank] for (rank,) in found.seats]
        assert found.slowest_s == pytest.approx(best) == pytest.approx(slowest(found.bounds, order))


def test_a_machine_with_little_memory_gets_few_blocks_and_a_fast_one_many() -> None:
    plenty = StageMachine((1.0,) * 12, 1e9)
    little, fast = StageMachine((1.0,) * 12, 2.0), StageMachine((0.25,) * 12, 1e9)

    def fits(stage: int, first: int, end: int, usable: float) -> bool:
        return end - first <= usable

    made = cut([plenty, little, fast], 3, [1] * 12, fits, overlaps=True)
    assert made is not None
    blocks = {rank: end - first for (rank,), (first, end) in zip(made.seats, pairwise(made.bounds), strict=True)}
    assert blocks == {0: 2, 1: 2, 2: 8}


# Memory.


def rooms(count: int, usable_bytes: int | None = None) -> list[Room]:
    return [Room(f"mac-{rank}", "M4", usable_bytes, usable_bytes) for rank in range(count)]


def test_each_stage_holds_its_share_of_the_states() -> None:
    settings = Training(task="llama-7b", precision="bf16")
    (whole,) = fits_of(settings, rooms(1))
    stages = [fit.need for fit in fits_of(replace(settings, strategy="pipeline"), rooms(4))]
    for part in ("weights", "gradients", "optimizer"):
        assert sum(getattr(stage, part) for stage in stages) == pytest.approx(getattr(whole.need, part), abs=4)
        assert max(getattr(stage, part) for stage in stages) < 0.3 * getattr(whole.need, part)


def test_stages_that_share_a_matrix_both_hold_it() -> None:
    (whole,) = fits_of(Training(task="gpt2"), rooms(1))
    stages = [fit.need for fit in fits_of(Training(task="gpt2", strategy="pipeline"), rooms(4))]
    assert sum(stage.weights for stage in stages) == whole.need.weights + 4 * 50257 * 768


def test_1f1b_keeps_the_activations_of_as_many_microbatches_as_there_are_stages_from_there_on() -> None:
    """And gpipe those of all eight, of four samples each."""

    def activations(schedule: str) -> list[int]:
        settings = Training(task=LAYERS, strategy=f"pipeline:{schedule},microbatches=8", batch=8)
        return [fit.need.activations for fit in fits_of(settings, rooms(4))]

    of_two_layers = [block.activations.kept_bytes for block in tasks.task(LAYERS).blocks[:2] if block.activations]
    fewer = [most - least for most, least in zip(activations("gpipe"), activations("1f1b"), strict=True)]
    assert fewer == [(8 - kept) * 4 * sum(of_two_layers) for kept in (4, 3, 2, 1)]


def test_a_model_too_large_for_one_machine_fits_into_four() -> None:
    settings = Training(task="llama-7b", precision="bf16", recompute=True, momentum=0.0)
    machines = rooms(4, usable_bytes(("M4"), 32 * GIB))
    assert not any(fit.fits for fit in fits_of(settings, machines))
    assert all(fit.fits for fit in fits_of(replace(settings, strategy="pipeline"), machines))


# What cannot be.


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"task": "convex"}, "convex cannot be cut into stages: its blocks are not a chain"),
        ({"strategy": "pipeline:stages=3"}, "4 ranks are no multiple of 3 stages"),
        ({"strategy": "pipeline:1b1f"}, "schedule"),
        ({"strategy": "pipeline:stages=0"}, "stages"),
        ({"batch": "auto"}, "a pipeline shares out the blocks of the model by speed"),
        ({"algorithm": "hierarchical"}, "hierarchical"),
    ],
)
def test_what_cannot_be_trained_by_stages_is_refused_in_a_line(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as refusal:
        check_training(replace(DIGITS, **{"strategy": "pipeline", **settings}), 4, 2)
    assert "\n" not in str(refusal.value)


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="digits has 4 blocks, too few for 5 stages"):
        check_training(replace(DIGITS, strategy="pipeline"), 5, 1)


@pytest.mark.parametrize("lost", [0, 2, 3])
def test_a_lost_stage_ends_the_others_with_an_error_that_names_it(lost: int) -> None:
    scenario = quiet_cluster(4)
    settings = Training(task="resnet50", strategy="pipeline", steps=40, batch=8, timeout_s=20)
    crash = Crash(Seconds(3.0), scenario.nodes[lost].name)
    outcome = simulate_training(replace(scenario, faults=(crash,)), settings)
    others = [result for rank, result in enumerate(outcome.results) if rank != lost]
    assert all(isinstance(result, CollectiveError) for result in others)
    assert any(f"rank {lost}" in str(result) for result in others)
    assert outcome.seconds < 3.0 + 2 * 20


def test_real_ranks_learn_the_bits_and_send_the_bytes_of_simulated_ones() -> None:
    settings = replace(DIGITS, strategy="pipeline:microbatches=3", steps=2)
    simulated = simulate_training(quiet_cluster(3), settings).values()
    addresses = [f"127.0.0.1:{port}" for port in free_ports(3)]

    async def rank(number: int) -> Report:
        async with real_group(number, addresses, device="sleep:M4") as group:
            return await train(group, settings, 1)

    async def main() -> list[Report]:
        return await asyncio.gather(*map(rank, range(3)))

    real = asyncio.run(main())
    assert [report.sha256 for report in real] == [report.sha256 for report in simulated]
    assert [report.sent_bytes for report in real] == [report.sent_bytes for report in simulated]
