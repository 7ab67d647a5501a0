"""What is known of how methods learn."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from hcsim.errors import ConfigError
from hcsim.plan.methods import MEASURED_STEPS, Method, learning_cost, methods

TABLE = Path(__file__).parents[2] / "results" / "time_to_target.csv"
NAMES = {
    "data parallel, int8": Method("ddp", "int8+ef"),
    "data parallel, PowerSGD 2": Method("ddp", "powersgd:2+ef"),
    "data parallel, top-k 1 %": Method("ddp", "topk:0.01+ef"),
    "local SGD 8": Method("local_sgd:8"),
    "DiLoCo 8": Method("diloco:8"),
    "DiLoCo 8, momentum 0.5": Method("diloco:8,momentum=0.5"),
    "DiLoCo 8, momentum 0.5, int8": Method("diloco:8,momentum=0.5", "int8"),
    "server, bounded": Method("parameter_server:bounded,staleness=4"),
    "server, async": Method("parameter_server:async"),
}


def test_steps_to_a_target_are_those_of_the_study() -> None:
    found: dict[Method, list[str]] = {}
    with TABLE.open() as file:
        for row in csv.DictReader(file):
            if row["task"] == "digits" and row["method"] in NAMES:
                found.setdefault(NAMES[row["method"]], []).append(row["steps_to_target"])
    steps = {
        method: None if "" in each else (min(map(float, each)), max(map(float, each))) for method, each in found.items()
    }
    assert steps == MEASURED_STEPS


def test_a_step_of_data_parallelism_is_worth_what_one_machine_alone_learns() -> None:
    assert learning_cost(Method("ddp")) == learning_cost(Method("single")) == ("exact", 1.0, 1.0)


def test_a_method_never_counts_as_learning_faster_than_one_machine_alone() -> None:
    assert all(1 <= learning_cost(each).least <= learning_cost(each).most for each in MEASURED_STEPS)


def test_what_was_not_measured_is_unknown_and_what_came_to_nothing_has_failed() -> None:
    assert learning_cost(Method("local_sgd:32")).evidence == "unknown"
    assert learning_cost(Method("local_sgd:8", "int8")).evidence == "unknown"
    assert learning_cost(Method("ddp", "topk:0.01+ef")).evidence == "failed"


def test_between_homes_there_is_one_method_more() -> None:
    assert "hierarchical" in {each.family for each in methods(2)} - {each.family for each in methods(1)}


def test_a_strategy_that_is_asked_for_is_the_only_one_and_has_to_be_known() -> None:
    assert list(methods(1, ["diloco:64"], ["bf16"])) == [Method("diloco:64", "bf16")]
    with pytest.raises(ConfigError, match="did you mean diloco"):
        list(methods(1, ["dilocoo"]))
