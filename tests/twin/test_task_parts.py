from __future__ import annotations

import pytest
from msgspec.structs import replace

from hcsim.config import Basis, Scenario, Training, parse_scenario
from hcsim.errors import ConfigError
from hcsim.training.tasks import task
from hcsim.twin.prediction import PredictedRun, predict
from hcsim.twin.tasks import BATCHES, measure_task
from hcsim.virtual.hardware import machine_of

ALONE = """
name = "alone"
[[machine]]
name = "mini"
peak = "1 GFLOPS"
memory = "1 GB/s"
[[medium]]
kind = "ethernet"
name = "switch"
rate = "1 Gb/s"
[[node]]
name = "a"
machine = "mini"
links = ["switch"]
"""


def provenance(spread: float) -> Basis:
    return Basis("measured", "a test", "2026-11-19", spread)


def test_each_part_of_a_step_is_timed_for_several_batches_and_a_step_is_their_sum() -> None:
    found = measure_task("convex", "cpu", provenance)
    blocks = [f"convex backward {block}" for block in range(len(task("convex").blocks))]
    assert {curve.signature for curve in found.kernels} == {"convex forward", "convex update by Sgd", *blocks}
    batch = task("convex").defaults.batch
    forward = next(curve for curve in found.kernels if curve.signature == "convex forward")
    assert [samples for samples, _ in forward.points] == [share * batch for share in BATCHES]
    scenario: Scenario = parse_scenario(ALONE, "a test")
    node = scenario.nodes[0]
    # Each part takes a millisecond, whatever the machine is said to do in a second.
    points = ((float(batch), 1e-3),)
    known = replace(found, kernels=tuple(replace(curve, points=points) for curve in found.kernels))
    nodes = (replace(node, machine=replace(machine_of(node), tasks=(known,))),)
    phases = predict(replace(scenario, nodes=nodes), PredictedRun(Training(task="convex", strategy="ddp"))).phases
    assert phases["compute"] == pytest.approx(1e-3 * len(found.kernels))


def test_a_task_of_shapes_cannot_be_measured() -> None:
    with pytest.raises(ConfigError, match="has only shapes"):
        measure_task("gpt2", "cpu", provenance)
