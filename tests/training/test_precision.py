"""bf16 by shapes, and activations that are computed again."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from hcsim.config import Machine, Training
from hcsim.errors import ConfigError
from hcsim.launch.virtual import simulate_training
from hcsim.runtime.work_time import seconds
from hcsim.training.precision import prepared
from hcsim.training.task import Work, backward_work, forward_work
from hcsim.training.tasks import task
from hcsim.training.trainer import difference, encoded

GPT2 = Training(task="gpt2:tokens=64", batch=1, steps=2, algorithm="ring")
NARROW = replace(GPT2, precision="bf16")


def work(settings: Training) -> tuple[Work, Work]:
    """Return the work of both passes over one sample."""
    what = prepared(task(settings.task), settings)
    backward = [backward_work(block, 1) for block in what.blocks]
    moved_bytes = sum(each.moved_bytes for each in backward)
    return forward_work(what, 1), Work(sum(each.flops for each in backward), moved_bytes)


def step_bytes(settings: Training) -> int:
    points = simulate_training("four-macs-1gbe", settings).values()[0].points
    [sent] = [later.sent_bytes - earlier.sent_bytes for earlier, later in pairwise(points)]
    return sent


def test_bf16_halves_the_bytes_on_the_wire_and_in_memory() -> None:
    what = prepared(task(GPT2.task), NARROW)
    assert what.replica(0).layout.size_bytes == 2 * 124_439_808
    for whole, narrow in zip(work(GPT2), work(NARROW), strict=True):
        assert narrow.flops == whole.flops
        assert narrow.moved_bytes == whole.moved_bytes / 2
    # A ring of four sends 2 · 3/4 of it, and headers.
    assert step_bytes(NARROW) == pytest.approx(1.5 * 2 * 124_439_808, rel=1e-4)


@pytest.mark.parametrize("strategy", ["diloco:1", "parameter_server", "single"])
def test_every_strategy_exchanges_half_of_the_bytes_in_bf16(strategy: str) -> None:
    whole, narrow = (
        simulate_training("four-macs-1gbe", replace(each, strategy=strategy, steps=1)).values()[1].sent_bytes
        for each in (GPT2, NARROW)
    )
    assert narrow == pytest.approx(whole / 2, rel=0.01)


def test_kernels_of_bf16_take_the_time_that_a_machine_has_measured_of_them() -> None:
    products = [
        {"kind": "matmul", "dtype": dtype, "points": [[1e6, each_s], [1e9, 1000 * each_s]]}
        for dtype, each_s in (("float32", 1e-3), ("bfloat16", 1e-4))
    ]
    table = {"name": "M9", "peak": 1.0, "memory": 1e15, "kernel": products, "efficiency": []}
    machine = msgspec.convert(table, Machine, dec_hook=lambda kind, value: kind(value))
    mlp = "transformer:layers=2,width=256,tokens=64"
    whole, narrow = (work(replace(each, task=mlp))[0] for each in (GPT2, NARROW))
    assert seconds(machine, narrow) < 0.2 * seconds(machine, whole)


def test_data_are_trained_in_float32() -> None:
    with pytest.raises(ConfigError, match='precision = "bf16": digits has data, and is trained in float32'):
        simulate_training("two-macs-wifi", Training(precision="bf16")).values()


def test_unlike_precisions_are_told_apart_and_the_usual_one_says_nothing() -> None:
    """A run with the defaults sends what it sent before there was the choice."""
    usual, narrow = encoded(Settings(Training())), encoded(Settings(Training(precision="bf16")))
    assert b"precision" not in usual
    for one, other in ((usual, narrow), (narrow, usual)):
        assert difference(one, other, "a", "b") in ("precision is fp32 on a and bf16 on b",
                                                    "precision is bf16 on a and fp32 on b")  # fmt: skip


class Settings(msgspec.Struct):
    settings: Training


# Computing activations again.


def test_another_forward_pass_is_the_price_of_computing_activations_again() -> None:
    (forward, backward), (_, again) = work(GPT2), work(replace(GPT2, recompute=True))
    head = task(GPT2.task).blocks[-1]
    assert again.flops == backward.flops + forward.flops - head.flops
    assert step_bytes(replace(GPT2, recompute=True)) == step_bytes(GPT2)


@pytest.mark.parametrize("name", ["digits", pytest.param("text", marks=pytest.mark.slow),
                                  pytest.param("text:lora=4", marks=pytest.mark.slow)])  # fmt: skip
def test_what_is_computed_again_is_the_same_to_the_last_bit(name: str) -> None:
    plain = task(name)
    again = prepared(plain, Training(task=name, recompute=True))
    replicas = [each.replica(seed=3) for each in (plain, again)]
    for replica in replicas:
        replica.forward(np.arange(12))
        for block in reversed(range(len(plain.blocks))):
            replica.backward(block)
    assert np.array_equal(*(replica.gradients for replica in replicas))
    assert np.any(replicas[0].gradients)
    assert again.fingerprint == plain.fingerprint


def test_a_task_without_activations_has_nothing_to_compute_again() -> None:
    with pytest.raises(ConfigError, match="recompute = true: convex keeps no activations"):
        simulate_training("two-macs-wifi", Training(task="convex", recompute=True)).values()
