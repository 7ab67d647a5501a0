"""Members of a pipeline that come and go: no stage is lost with its machine, and what was learned is what one process
learns from the same samples."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from hcsim.compressors.base import Array
from hcsim.config import Cluster, Crash, Restart, Scenario, Training
from hcsim.errors import TrainingError
from hcsim.launch.virtual_cluster import simulate_cluster
from hcsim.training import tasks
from hcsim.training.data import Batches
from hcsim.training.optimizer import AdamW
from hcsim.training.run import Point, Report, Run
from hcsim.units import Seconds
from tests.training.clusters import quiet_cluster

BATCH, LR = 4, 0.01
SETTINGS = Training(
    task="digits", strategy="pipeline:microbatches=1,backup=5", steps=24, batch=BATCH, optimizer="adamw", lr=LR,
    evaluate_every=24,
)  # fmt: skip


class Steps:
    """The steps that count: of one that is taken again, the last time."""

    def __init__(self) -> None:
        self.ranks: dict[int, int] = {}
        self.time_s: dict[int, float] = {}
        self.taken: list[int] = []
        self.model: Array | None = None

    def point(self, rank: int, point: Point) -> None:
        if rank == 0:
            self.ranks[point.step] = point.ranks
            self.time_s[point.step] = point.time_s
            self.taken.append(point.step)

    def finished(self, run: Run) -> None:
        if isinstance(run.parameters, np.ndarray):
            self.model = run.parameters.copy()


def cluster(ranks: int, *lost: Crash | Restart) -> Scenario:
    settings = Cluster(preset="low_latency", checkpoint_every=4)
    return replace(quiet_cluster(ranks), cluster=settings, faults=tuple(lost))


def by_one_process(ranks: dict[int, int]) -> Array:
    """Train on the samples of so many ranks in each step."""
    task = tasks.task("digits")
    replica = task.replica(1)
    stepper, order, at = AdamW(lr=LR).open(replica.parameters), Batches.of(task, (task.samples,), 1).batch(0, 0), 0
    for step in sorted(ranks):
        batch = order[at : at + BATCH * ranks[step]]
        at += len(batch)
        replica.gradients.fill(0)
        replica.forward(batch)
        for block in reversed(range(len(task.blocks))):
            replica.backward(block)
        stepper.step(replica.gradients, LR)
    return np.array(replica.parameters)


def restarts(names: list[str], after_step: int, calm: Steps, seconds: float) -> tuple[Restart, ...]:
    at_s = seconds - (calm.time_s[SETTINGS.steps] - calm.time_s[after_step])
    return tuple(Restart(at_s=Seconds(at_s), node=name, down_s=Seconds(0.2)) for name in names)


@pytest.fixture(scope="module")
def calm() -> tuple[Steps, float]:
    seen = Steps()
    outcome = simulate_cluster(cluster(4), SETTINGS, observer=seen)
    assert len({report.sha256 for report in outcome.values()}) == 1
    return seen, outcome.seconds


def test_members_learn_what_one_process_learns(calm: tuple[Steps, float]) -> None:
    seen, _ = calm
    assert seen.ranks == dict.fromkeys(range(1, 25), 4)
    assert seen.model is not None
    assert seen.model.tobytes() == by_one_process(seen.ranks).tobytes()


@pytest.mark.parametrize("returns", [False, True])
def test_a_lost_stage_is_had_from_its_neighbour_and_costs_the_steps_since_the_last_backup(
    calm: tuple[Steps, float], returns: bool
) -> None:
    """The three that are left share out the model, or four do again once the lost one is back."""
    seen, lost = Steps(), cluster(4).nodes[2].name
    (restart,) = restarts([lost], 13, *calm)
    fault = restart if returns else Crash(at_s=restart.at_s, node=lost)
    outcome = simulate_cluster(cluster(4, fault), SETTINGS, observer=seen)
    reports = [result for result in outcome.results if isinstance(result, Report)]
    assert len(reports) == (4 if returns else 3)
    assert len({report.sha256 for report in reports}) == 1
    assert [seen.ranks[step] for step in range(1, 25)] == ([4] * 24 if returns else [4] * 10 + [3] * 14)
    again = [step for step in seen.ranks if seen.taken.count(step) > 1]
    assert again
    assert {*again} <= set(range(11, 15))
    assert seen.model is not None
    assert seen.model.tobytes() == by_one_process(seen.ranks).tobytes()


def test_members_that_all_stop_go_on_from_the_checkpoints_of_their_blocks(calm: tuple[Steps, float]) -> None:
    seen = Steps()
    names = [node.name for node in cluster(4).nodes]
    simulate_cluster(cluster(4, *restarts(names, 14, *calm)), SETTINGS, observer=seen).values()
    again = [step for step in seen.ranks if seen.taken.count(step) > 1]
    assert again
    assert min(again) > 1
    assert seen.model is not None
    assert seen.model.tobytes() == by_one_process(seen.ranks).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "in_a_row"), [((1, 2), True), ((1, 3), False)])
def test_training_ends_with_the_names_of_blocks_whose_only_copies_are_lost(
    lost: tuple[int, int], in_a_row: bool
) -> None:
    """Ranks have the stages in their order, as machines are alike; of five members three are a majority."""
    settings = replace(SETTINGS, task="transformer:layers=8,width=256,tokens=64", steps=40)
    calm = Steps()
    outcome = simulate_cluster(cluster(5), settings, observer=calm)
    at_s = outcome.seconds - (calm.time_s[settings.steps] - calm.time_s[13])
    ranks = {report.rank: node.name for report, node in zip(outcome.values(), cluster(5).nodes, strict=True)}
    faults = [Crash(at_s=Seconds(at_s), node=ranks[rank]) for rank in lost]
    left = [
        result for result in simulate_cluster(cluster(5, *faults), settings).results if "Crashed" not in repr(result)
    ]
    assert len(left) == 3
    if in_a_row:
        assert all(isinstance(result, TrainingError) and "blocks 2 were on machines" in str(result) for result in left)
    else:
        assert all(isinstance(result, Report) and result.steps == settings.steps for result in left)
