"""Sharded strategies: the bits of data parallelism, the bytes of the formulas, the memory of a share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

import hcsim
from hcsim.collectives.group import Group
from hcsim.compressors.base import Array
from hcsim.config import Crash, Training, parse_scenario
from hcsim.config.machine import GIB
from hcsim.errors import ConfigError
from hcsim.launch.virtual import simulate_training
from hcsim.runtime.frame import HEADER_BYTES
from hcsim.telemetry.timeline import Timeline
from hcsim.training import tasks
from hcsim.training.fitting import Room, alternatives, fits_of
from hcsim.training.run import Report, Run
from hcsim.training.strategies import check_training
from hcsim.training.tasks.shapes import PhantomTask
from hcsim.training.trainer import train
from hcsim.units import Seconds
from tests.training.clusters import quiet_cluster

STAGES = ("zero1", "zero2", "zero3")
BY_BLOCK = Training(task="digits", steps=3, batch=6, evaluate_every=3, algorithm="ring", bucket_bytes=1)
"""Buckets of single blocks, which all stages have, are summed in one order."""
CONVEX = Training(task="convex", steps=6, evaluate_every=3)


class FirstRank:
    """Keeps what the first rank ends with."""

    parameters: Array

    def point(self, rank: int, point: object) -> None:
        pass

    def finished(self, run: Run) -> None:
        if run.group.rank == run.lead:
            found = run.parameters
            assert isinstance(found, np.ndarray)
            self.parameters = found.copy()


def learned(settings: Training, ranks: int) -> tuple[Array, Sequence[Report]]:
    """Return the parameters, of which all ranks have the same digest, and what was reported."""
    seen = FirstRank()
    reports = simulate_training(quiet_cluster(ranks), settings, observer=seen).values()
    assert len({report.sha256 for report in reports}) == 1
    return seen.parameters, reports


@pytest.mark.parametrize(
    "changed",
    [
        {}, {"optimizer": "adamw"}, {"momentum": 0.0, "batch": (1, 9, 4)}, {"clip": 0.2}, {"recompute": True},
        pytest.param({"task": "text:lora=4", "steps": 1}, marks=pytest.mark.slow), {"task": "convex", "batch": "auto"},
    ],
    ids=str,
)  # fmt: skip
def test_ranks_that_share_out_the_model_learn_the_bits_of_data_parallelism(changed: dict[str, object]) -> None:
    settings = replace(BY_BLOCK, **changed)
    whole, reports = learned(settings, 3)
    for stage in STAGES:
        ours, told = learned(replace(settings, strategy=stage), 3)
        assert np.array_equal(ours, whole), stage
        assert told[0].sha256 == reports[0].sha256
        assert [point.score for point in told[0].points] == [point.score for point in reports[0].points]


@pytest.mark.parametrize("algorithm", ["auto", "direct", "ring"])
@pytest.mark.parametrize("strategy", [*STAGES, "zero1:shards=2", "zero2:2,copies=2", "zero3:shards=2"])
def test_many_ranks_learn_what_one_process_learns_from_the_joined_batch(algorithm: str, strategy: str) -> None:
    settings = replace(CONVEX, algorithm=algorithm, batch=(300, 70, 5, 9), clip=1.0)
    alone = FirstRank()
    alone_settings = replace(settings, strategy="single", algorithm="auto")
    simulate_training(quiet_cluster(4), alone_settings, observer=alone).values()
    ours, _ = learned(replace(settings, strategy=strategy), 4)
    np.testing.assert_allclose(ours, alone.parameters, rtol=2e-5, atol=2e-6)


# What is sent.


def sent_bytes(strategy: str, ranks: int, changed: dict[str, object] | None = None) -> list[int]:
    """Return the payload bytes of one step by rank, of a model whose buckets can be cut evenly."""
    blocks = tuple(replace(block, shapes=(("w", (240, 4)),)) for block in tasks.task("convex").blocks)
    task = PhantomTask("even", blocks, 1000, tasks.task("convex").defaults)
    settings = Training(task="even", steps=2, batch=4, algorithm="ring", strategy=strategy, **(changed or {}))  # type: ignore[arg-type]
    frames: dict[int, tuple[int, int]] = {}

    async def program(group: Group) -> None:
        report = await train(group, settings, 1, what=task)
        total = [report.points[1].sent_bytes - report.points[0].sent_bytes]
        frames[group.rank] = total[0], group.wire_bytes - group.bytes_sent

    hcsim.simulate(quiet_cluster(ranks), program).values()
    return [frames[rank][0] for rank in range(ranks)]


MODEL_BYTES = len(tasks.task("convex").blocks) * 240 * 4 * 4


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("stage", "times"), [("zero1", 2), ("zero2", 2), ("zero3", 3)])
def test_a_step_sends_the_bytes_of_the_formula(stage: str, times: int, ranks: int) -> None:
    blocks = len(tasks.task("convex").blocks)
    frames = times * (ranks - 1) * (blocks if stage == "zero3" else 1)
    expected = times * MODEL_BYTES * (ranks - 1) // ranks + HEADER_BYTES * frames
    assert sent_bytes(stage, ranks) == [expected] * ranks


def test_a_step_of_shards_within_groups_sends_sums_of_shards_between_them() -> None:
    within, between = 2 * MODEL_BYTES // 2, 2 * (MODEL_BYTES // 2) // 2
    assert sent_bytes("zero1:shards=2", 4) == [within + between + 3 * HEADER_BYTES] * 4


def test_copies_cost_a_share_of_the_gradients_each() -> None:
    plain, safe = sent_bytes("zero2", 4), sent_bytes("zero2:copies=3", 4)
    assert [b - a for a, b in zip(plain, safe, strict=True)] == [2 * (MODEL_BYTES // 4 + HEADER_BYTES)] * 4


def test_bf16_halves_what_is_sent() -> None:
    narrow = sent_bytes("zero3", 4, {"precision": "bf16"})
    blocks = len(tasks.task("convex").blocks)
    assert narrow == [3 * MODEL_BYTES // 2 * 3 // 4 + 3 * 3 * blocks * HEADER_BYTES] * 4


@pytest.mark.parametrize("strategy", [*STAGES, "zero3:shards=2,copies=2"])
def test_phantoms_take_the_time_and_the_bytes_of_what_they_stand_for(
    monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    settings = replace(CONVEX, strategy=strategy, bucket_bytes=1024, clip=1.0)
    real = simulate_training(quiet_cluster(4), settings).values()
    convex = tasks.task("convex")
    shapes = PhantomTask("convex", tuple(convex.blocks), convex.samples, convex.defaults)
    monkeypatch.setattr("hcsim.training.strategies.task", lambda name: shapes)
    phantom = simulate_training(quiet_cluster(4), settings).values()
    assert [report.sent_bytes for report in phantom] == [report.sent_bytes for report in real]
    assert [report.duration_s for report in phantom] == pytest.approx([report.duration_s for report in real])


def test_the_timeline_shows_where_a_machine_waits_for_a_block(tmp_path: Path) -> None:
    with (tmp_path / "run.pftrace").open("wb") as file:
        timeline = Timeline(file.write)
        simulate_training(quiet_cluster(2), replace(CONVEX, strategy="zero3", steps=1), sink=timeline).values()
        analysis = timeline.end()
    assert b"gather" in (tmp_path / "run.pftrace").read_bytes()
    assert all(step.exposed_ns > 0 for step in analysis.steps)


# What is refused, and what ends.


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"strategy": "zero1", "compressor": "int8+ef"}, 'compressor = "int8+ef": zero1 sends each sum'),
        ({"strategy": "zero3", "algorithm": "tree"}, 'algorithm = "tree": zero3 reduce-scatters and gathers'),
        ({"strategy": "zero3:shards=3"}, "shards=3: 4 ranks cannot be cut into groups of 3"),
        ({"strategy": "zero2:copies=0"}, "copies"),
    ],
)
def test_settings_that_cannot_be_sharded_are_refused(changed: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_training(replace(CONVEX, **changed), 4, 1)
    assert complaint in str(refusal.value)


@pytest.mark.parametrize("strategy", [*STAGES, "zero3:copies=2"])
def test_fixed_ranks_end_together_when_one_is_lost(strategy: str) -> None:
    scenario = quiet_cluster(4)
    settings = replace(CONVEX, task="resnet50", strategy=strategy, steps=4, timeout_s=20.0)
    crash = Crash(Seconds(2.5), scenario.nodes[3].name)
    outcome = simulate_training(replace(scenario, faults=(crash,)), settings)
    assert all(isinstance(result, hcsim.HcsimError) for result in outcome.results)
    assert outcome.seconds < 60


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_gradients_that_are_not_finite_end_the_run_with_their_tensor() -> None:
    settings = replace(CONVEX, lr=1e9, steps=60, strategy="zero3")
    outcome = simulate_training(quiet_cluster(2), settings)
    assert any("has the training diverged" in str(result) for result in outcome.results)
    assert all(isinstance(result, hcsim.HcsimError) for result in outcome.results)


# Memory.

LLAMA = Training(
    task="llama-7b:tokens=512", strategy="zero3", precision="bf16", recompute=True, batch=1, momentum=0.9, steps=1
)
FOUR = [Room(name, "M4", 32 * GIB, usable) for name, usable in zip("abcd", [32 * GIB * 2 // 3] * 4, strict=True)]


def test_a_share_of_a_model_fits_where_the_model_does_not() -> None:
    whole = replace(LLAMA, strategy="ddp")
    assert not any(fit.fits for fit in fits_of(whole, FOUR))
    assert all(fit.fits for fit in fits_of(LLAMA, FOUR))
    assert "--strategy zero3" in [each.words for each in alternatives(whole, FOUR)]


def test_each_stage_shares_out_one_more_part() -> None:
    needs = [fits_of(replace(LLAMA, strategy=name), FOUR)[1].need for name in ("ddp", *STAGES)]
    parameters_bytes = 2 * 6_738_415_616
    # In the backward pass of the lowest layer those of it, of the one before and of the embedding are no averages yet.
    layer_bytes = 2 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096)
    averages_bytes = (parameters_bytes - 2 * layer_bytes - 2 * 32000 * 4096) // 4
    assert [need.optimizer for need in needs] == [4 * parameters_bytes] + [parameters_bytes] * 3
    assert [need.gradients for need in needs[:2]] == [parameters_bytes] * 2
    assert needs[3].gradients == averages_bytes + 2 * layer_bytes == pytest.approx(needs[2].gradients, rel=0.02)
    assert [need.weights for need in needs] == [parameters_bytes] * 3 + [parameters_bytes // 4 + 2 * layer_bytes]


def test_copies_take_their_share() -> None:
    one, two = (fits_of(replace(LLAMA, strategy=f"zero3:copies={k}"), FOUR)[0].need for k in (1, 2))
    assert two.optimizer == 2 * one.optimizer


def test_a_task_that_cannot_be_computed_block_by_block_is_whole_on_every_rank() -> None:
    settings = Training(task="convex", strategy="zero3")
    assert fits_of(settings, FOUR)[0].need.weights > fits_of(replace(settings, strategy="ddp"), FOUR)[0].need.weights


@pytest.mark.slow
def test_a_model_of_seven_billion_parameters_trains_on_four_macs() -> None:
    macs = parse_scenario(
        """
        name = "four"
        [[medium]]
        kind = "ethernet"
        name = "switch"
        rate = "10 Gb/s"
        [[node]]
        name = "mac"
        count = 4
        machine = "M4"
        memory = "32 GiB"
        links = ["switch"]
        """,
        "four",
    )
    reports = simulate_training(macs, LLAMA).values()
    assert reports[0].sent_bytes == pytest.approx(3 * 2 * 6_738_415_616 * 3 / 4, rel=1e-3)
