"""MLX scripts that do not know hcsim, started by `hcsim run`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("mlx.core")

from hcsim.config import parse_scenario
from hcsim.scripts.processes import RankProcesses
from hcsim.scripts.run import ScriptRun, simulate_script
from tests.mlx_programs.conftest import OnRanks
from tests.real.namespaces import Process
from tests.real.together import together

UNMODIFIED = """
import hashlib
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.optimizers import SGD
from mlx.utils import tree_flatten

group = mx.distributed.init(strict=True, backend="ring")
rank = group.rank()
assert mx.distributed.all_sum(mx.array(1.0)).item() == group.size()
mx.random.seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
loss_and_gradients = nn.value_and_grad(model, lambda x: model(x).square().mean())
optimizer = SGD(0.1, momentum=0.9)
inputs = np.random.default_rng(rank).standard_normal((4, 8, 8)).astype(np.float32)
for x in map(mx.array, inputs):
    loss, gradients = loss_and_gradients(x)
    optimizer.update(model, nn.average_gradients(gradients))
    mx.eval(model.parameters(), optimizer.state)
try:
    mx.compile(lambda x: mx.distributed.all_sum(x))(mx.ones(2))
except ValueError as error:
    assert "inside mx.compile" in str(error), error
else:
    raise AssertionError("a collective was compiled")
data = b"".join(np.array(each).tobytes() for _, each in tree_flatten(model.parameters()))
print("learned", hashlib.sha256(data).hexdigest(), flush=True)
"""
"""Tanh and SGD are not compiled by mlx.nn, so that both worlds compute the same."""


EXAMPLE = Path(__file__).parents[2] / "examples" / "train_mlx.py"
MINIS = """
name = "minis"
effects = "all"
medium = [{{ kind = "ethernet", name = "switch", rate = "1 Gb/s" }}]
node = [{{ name = "mini", count = {size}, machine = "M4", links = ["switch"] }}]
"""


def learned(text: str) -> list[str]:
    return re.findall(r"learned (\w+)", text)


def counted(folder: Path, processes: RankProcesses, text: str, size: int = 2) -> tuple[ScriptRun, str]:
    script = folder / "simulated.py"
    script.write_text(text)
    said: list[str] = []
    run = simulate_script(
        parse_scenario(MINIS.format(size=size), "minis"),
        script,
        say=lambda rank, stream, text: said.append(text),
        processes=processes,
    )
    assert run.succeeded, "".join(said)
    return run, "".join(said)


def test_an_unmodified_script_trains_on_a_virtual_cluster(tmp_path: Path, processes: RankProcesses) -> None:
    run, said = counted(tmp_path, processes, UNMODIFIED)
    assert len({*learned(said)}) == 1
    for rank in run.ranks:
        assert len(rank.steps_s) == 4
        assert rank.calls == 1 + 4
        assert rank.compute_s > 0
    again, said_again = counted(tmp_path, processes, UNMODIFIED)
    assert said_again == said
    assert again.trace_sha256 == run.trace_sha256


@pytest.mark.slow
def test_an_unmodified_script_learns_the_same_on_real_machines(tmp_path: Path, processes: RankProcesses) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNMODIFIED)
    with together(tmp_path, "ab") as cluster:
        machines: list[Process] = [
            cluster.lan[name].hcsim("run", "--real", str(script), "--nodes", "2", "--set", f"name={name}")
            for name in "ab"
        ]
        for process in machines:
            assert process.ends() == 0, process.text
        real = [digest for process in machines for digest in learned(process.text)]
    _, said = counted(tmp_path, processes, UNMODIFIED)
    assert len(real) == 2
    assert {*real} == {*learned(said)}


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--compressor", "int8+ef"], ["--every", "4"]], ids=["int8", "diloco"])
def test_the_example_learns_the_same_in_both_worlds(
    on_ranks: OnRanks, simulated: OnRanks, arguments: list[str]
) -> None:
    losses = [
        re.findall(r"loss ([0-9.]+)", run(2, EXAMPLE, "--steps", "10", "--batch", "4", *arguments)[0].output)
        for run in (on_ranks, simulated)
    ]
    assert losses[0] == losses[1]
    assert float(losses[0][0]) < 3.5


WORK = """
import time
import mlx.core as mx

def took(make):
    began = time.perf_counter()
    made = make()
    lazy_s = time.perf_counter() - began
    mx.eval(made)
    return lazy_s, time.perf_counter() - began

x = mx.zeros((512, 512))
mx.eval(x)
lazy_s, product_s = took(lambda: x @ x)
_, two_s = took(lambda: (x @ x) @ x)
_, view_s = took(lambda: x.T.reshape(-1)[:7])
_, again_s = took(lambda: x)
_, compiled_s = took(lambda: mx.compile(lambda a: a @ a)(x))
_, gradient_s = took(lambda: mx.grad(lambda a: (a @ x).sum())(x))
print("seconds", lazy_s, product_s, two_s, view_s, again_s, compiled_s, gradient_s)
"""


def test_what_a_script_evaluates_takes_time_once(tmp_path: Path, processes: RankProcesses) -> None:
    run, said = counted(tmp_path, processes, WORK, size=1)
    seconds = map(float, said.split()[1:])
    lazy_s, product_s, two_s, view_s, again_s, compiled_s, gradient_s = seconds
    assert lazy_s == pytest.approx(view_s, abs=1e-5) == pytest.approx(again_s, abs=1e-5)
    assert two_s == pytest.approx(2 * product_s, rel=0.05)
    assert compiled_s == pytest.approx(product_s, rel=0.05)
    assert gradient_s == pytest.approx(product_s, rel=0.05)  # of the sum alone, the product is not needed
    assert run.ranks[0].flops == 5 * 2 * 512**3


CUSTOM = """
import mlx.core as mx

@mx.custom_function
def double(x):
    return 2 * x

@double.vjp
def double_back(x, cotangent, output):
    return 3 * cotangent

print(double(mx.ones(2)).tolist())
try:
    mx.eval(mx.grad(lambda x: double(x).square().sum())(mx.ones(2)))
except ValueError as error:
    print(error)
"""


def test_what_cannot_be_counted_is_refused(tmp_path: Path, processes: RankProcesses) -> None:
    _, said = counted(tmp_path, processes, CUSTOM, size=1)
    assert said.startswith("[2.0, 2.0]\n")
    assert "cannot be counted on a virtual cluster" in said
