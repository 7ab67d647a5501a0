"""That compressed training still learns, on digits that nobody trained on."""

from __future__ import annotations

import functools

import pytest

from hcsim.config import Training
from hcsim.launch import simulate_training
from tests.training.clusters import quiet_cluster


@functools.cache
def accuracy(compressor: str) -> float:
    """Of two workers after 250 steps of plain SGD."""
    settings = Training(
        task="digits", compressor=compressor, steps=250, batch=32, lr=0.3, momentum=0.0, evaluate_every=250
    )
    score = simulate_training(quiet_cluster(2), settings).values()[0].points[-1].score
    assert score is not None
    assert score.accuracy is not None
    return score.accuracy


@pytest.mark.parametrize("compressor", ["topk:0.01+ef", "int8+ef", "powersgd:4+ef"])
def test_with_error_feedback_a_fraction_of_the_bytes_teaches_as_much(compressor: str) -> None:
    assert accuracy("none") > 0.95
    assert accuracy(compressor) > accuracy("none") - 0.01


def test_without_error_feedback_one_percent_of_the_elements_does_not() -> None:
    assert accuracy("topk:0.01") < accuracy("none") - 0.015
