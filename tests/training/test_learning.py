"""That compressed training still learns, on digits that nobody trained on."""

from __future__ import annotations

import pytest

from hcsim import Group, simulate
from hcsim.config import Training
from hcsim.launch.virtual import simulate_training
from hcsim.training.learner import seconds_per_step
from hcsim.training.optimizer import Sgd
from hcsim.training.task import backward_work, forward_work
from hcsim.training.tasks import task
from tests.training.clusters import quiet_cluster


def accuracy(compressor: str) -> float:
    """Of two workers after 150 steps of plain SGD."""
    settings = Training(
        task="digits", compressor=compressor, steps=150, batch=32, lr=0.5, momentum=0.0, evaluate_every=150
    )
    score = simulate_training(quiet_cluster(2), settings).values()[0].points[-1].score
    assert score is not None
    assert score.accuracy is not None
    return score.accuracy


def test_a_timed_step_takes_what_the_machine_needs_for_its_work() -> None:
    found, samples, how = task("convex"), 16, Sgd(lr=0.1, momentum=0.9)
    works = [forward_work(found, samples), *(backward_work(block, samples) for block in reversed(found.blocks))]

    async def program(group: Group) -> tuple[float, float]:
        host = group.host
        timed_s = await seconds_per_step(host, found, how, samples)
        began_s = host.clock.elapsed()
        for work in [*works, how.work(sum(block.length for block in found.blocks))]:
            await host.device.run(work, lambda: None)
        return timed_s, host.clock.elapsed() - began_s

    for timed_s, needed_s in simulate(quiet_cluster(2), program).values():
        assert timed_s == pytest.approx(needed_s)
        assert timed_s > 0


@pytest.mark.slow
def test_with_error_feedback_a_fraction_of_the_bytes_teaches_as_much_and_without_it_one_percent_does_not() -> None:
    dense = accuracy("none")
    assert dense > 0.95
    for compressor in ("topk:0.01+ef", "int8+ef", "powersgd:4+ef"):
        assert accuracy(compressor) > dense - 0.01
    assert accuracy("topk:0.01") < dense - 0.015
