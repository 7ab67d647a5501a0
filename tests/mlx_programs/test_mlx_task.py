"""A task with a model of MLX, under hcsim's own strategies."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
import mlx.nn as nn
from typer.testing import CliRunner

from hcsim import Group
from hcsim.cli.app import app
from hcsim.config import Training
from hcsim.errors import UsageError
from hcsim.mlx.task import MlxData, MlxTask
from hcsim.testing import check_task
from hcsim.training.trainer import train
from tests.conftest import Cluster, RealCluster, VirtualCluster
from tests.real.together import SLOW_KBIT, digest, members, plan, together

PLUGIN = Path(__file__).parents[2] / "examples" / "plugins" / "mlx_digits.py"


def lines() -> MlxTask:
    """A small regression."""
    draws = np.random.default_rng(0)
    inputs = draws.standard_normal((96, 6)).astype(np.float32)
    data = MlxData(inputs, np.tanh(inputs.sum(1, keepdims=True)))
    return MlxTask(
        "lines",
        lambda: [nn.Sequential(nn.Linear(6, 16), nn.Tanh()), nn.Linear(16, 1)],
        MlxData(data.inputs[:64], data.targets[:64]),
        MlxData(data.inputs[64:], data.targets[64:]),
        loss=lambda outputs, targets: nn.losses.mse_loss(outputs, targets),
    )


def test_it_is_a_task_as_all_others_are() -> None:
    task = lines()
    check_task(task)
    assert [block.flops for block in task.blocks] == [2 * 6 * 16, 2 * 16]
    assert lines().fingerprint == task.fingerprint


def test_its_gradients_are_those_that_mlx_computes_at_once() -> None:
    replica = lines().replica(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    views = [tensor.view(replica.parameters) for tensors in replica.layout.blocks for tensor in tensors]
    names = ["layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias"]
    model.load_weights(list(zip(names, map(mx.array, views), strict=True)))
    draws = np.random.default_rng(0)
    inputs = draws.standard_normal((96, 6)).astype(np.float32)[:10]
    loss, gradients = nn.value_and_grad(
        model, lambda x: nn.losses.mse_loss(model(x), mx.tanh(x.sum(1, keepdims=True)))
    )(mx.array(inputs))
    assert replica.forward(np.arange(10)) == pytest.approx(loss.item(), rel=1e-6)
    with pytest.raises(UsageError, match="block 1 next"):
        replica.backward(0)
    replica.backward(1)
    replica.backward(0)
    found = [tensor.view(replica.gradients) for tensors in replica.layout.blocks for tensor in tensors]
    first, last = gradients["layers"][0], gradients["layers"][2]
    for ours, theirs in zip(found, [first["weight"], first["bias"], last["weight"], last["bias"]], strict=True):
        np.testing.assert_allclose(ours, np.array(theirs), rtol=1e-5, atol=1e-7)


def test_both_worlds_learn_the_same(virtual: VirtualCluster, real: RealCluster) -> None:
    settings = Training(strategy="diloco:2", compressor="int8+ef", steps=6, batch=8)

    async def program(group: Group) -> Any:
        report = await train(group, settings, 1, what=lines())
        return report.points[-1].score if report.points else None

    def scores(cluster: Cluster) -> list[Any]:
        return cluster.run(3, program)

    found = scores(virtual)
    assert found == scores(real)
    assert found[0] is not None  # rank 0 evaluates the model


@pytest.mark.slow
def test_the_digits_are_learned_while_machines_come_and_go() -> None:
    arguments = ["run", "four-macs-churn", "--plugin", str(PLUGIN), "--task", "mlx_digits", "--steps", "30"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert float(re.findall(r"([0-9.]+) %", result.output)[-1]) > 85


@pytest.mark.slow
def test_members_of_a_real_cluster_go_on_when_one_is_killed(tmp_path: Path) -> None:
    """They end with what the same members learn in the simulator, where one leaves and none is killed."""
    with together(tmp_path, "abc") as cluster:
        job = cluster.write(3, 40)
        job.write_text(
            f"plugins = [{json.dumps(str(PLUGIN))}]\n"
            + job.read_text().replace('task = "convex"', 'task = "mlx_digits"')
        )
        begun = cluster.start("a", "b", "c")
        begun[0].says("training begins")
        cluster.lan.slow(8 * SLOW_KBIT)
        order = members(begun[0])
        first, second, third = sorted(begun, key=lambda process: order.index(process.machine.name))
        first.says("step 5 of")
        third.kill()
        first.says("training goes on")
        cluster.lan.fast()
        for process in (first, second):
            assert process.ends() == 0, process.text
        assert {digest(first), digest(second)} == {cluster.reference(plan(first))}
