"""That compressed training still learns, on digits that nobody trained on."""

from __future__ import annotations

import pytest

from hcsim.config import Training
from hcsim.launch.virtual import simulate_training
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


@pytest.mark.slow
def test_with_error_feedback_a_fraction_of_the_bytes_teaches_as_much_and_without_it_one_percent_does_not() -> None:
    dense = accuracy("none")
    assert dense > 0.95
    for compressor in ("topk:0.01+ef", "int8+ef", "powersgd:4+ef"):
        assert accuracy(compressor) > dense - 0.01
    assert accuracy("topk:0.01") < dense - 0.015
