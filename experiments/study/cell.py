"""A cell: everything that one run depends on, and what the run came to.

A cell says nothing of the study that asked for it, so two studies that ask for the same run share it. Its key is
a digest over the cell, the code that would run it, the plugins that are loaded and the libraries that would calculate
for it: what was measured by others is measured again.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TypeAlias

import msgspec

from experiments.clusters import ALONE
from hcsim.registry import loaded_plugins, plugins_sha256
from hcsim.twin.effects import Effect

ROOT = Path(__file__).parents[2]
_MEASURING = ("bands", "cell", "failures", "measure", "measure_cluster", "measure_training")
_CODE = (
    "hcsim/**/*.py", "hcsim/**/*.[ch]", "hcsim/scenarios/*.toml", "experiments/clusters.py",
    *(f"experiments/study/{name}.py" for name in _MEASURING),
)  # fmt: skip
"""What a result depends on,"""
_LIBRARIES = ("numpy", "torch", "simpy", "zstandard")
"""and who calculates for it."""


class _Cell(msgspec.Struct, frozen=True, tag_field="kind"):
    link: str
    world: int

    @property
    def key(self) -> str:
        """Under which its result is kept."""
        means = f"{measured_with()}\n{plugins_sha256()}" if loaded_plugins() else measured_with()
        return hashlib.sha256(means.encode() + msgspec.json.encode(self, order="deterministic")).hexdigest()


class AllReduce(_Cell, frozen=True, tag="all_reduce"):
    """All-reduces of a phantom, one after the other."""

    algorithm: str
    size_bytes: int
    repeats: int


class Train(_Cell, frozen=True, tag="training"):
    """A training run. None: as the task says."""

    task: str
    strategy: str
    seed: int
    steps: int
    compressor: str = "none"
    algorithm: str = "auto"
    variant: str = "equal"
    batch: int | None = None
    lr: float | None = None
    momentum: float | None = None
    warmup: int = 0
    scale_lr: bool = False
    evaluate_every: int = 20
    bucket_bytes: int | None = None
    target_loss: float | None = None
    failure: str = "pause"
    failures_per_hour: float = 0.0
    """Of each node, per hour that it runs."""
    failure_s: float = 0.0

    @property
    def alone(self) -> bool:
        """Whether one machine does the work of all."""
        return self.link == ALONE


AnyCell: TypeAlias = AllReduce | Train


class Point(msgspec.Struct, frozen=True):
    """How far a training run had come, where it was evaluated."""

    step: int
    time_s: float
    sent_bytes: int
    train_loss: float | None
    loss: float | None
    accuracy: float | None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a cell came to. Times are virtual; they are those of the slowest rank, bytes those of the busiest."""

    steps: int = 0
    step_s: float | None = None
    """Of an all-reduce the median; of training the mean in the second half, over whole periods of its strategy."""
    p10_s: float | None = None
    """Of that, by the spread of the figures of machines and links."""
    p90_s: float | None = None
    effects: tuple[Effect, ...] = ()
    """What the band rests on."""
    fastest_s: float | None = None
    slowest_s: float | None = None
    total_s: float | None = None
    step_sent_bytes: float | None = None
    """With the headers."""
    payload_share: float | None = None
    """The encoded size of all gradients over their size in float32."""
    closed_form_s: float | None = None
    diverged: bool = False
    final_loss: float | None = None
    final_accuracy: float | None = None
    time_to_target_s: float | None = None
    samples_per_s: float | None = None
    compute_s: float | None = None
    encode_s: float | None = None
    exchange_s: float | None = None
    batch: int | None = None
    """Samples per step, of all ranks together."""
    lost_ranks: int | None = None
    """That had not come to an end of their own when the run was over: nodes failed."""
    points: tuple[Point, ...] = ()
    scenario: str | None = None
    scenario_sha256: str | None = None
    trace_sha256: str | None = None
    parameters_sha256: str | None = None
    error: str | None = None


@cache
def code_sha256() -> str:
    """Over the sources that a result depends on."""
    digest = hashlib.sha256()
    for file in sorted({file for pattern in _CODE for file in ROOT.glob(pattern)}):
        source = file.read_bytes()
        digest.update(f"{file.relative_to(ROOT).as_posix()}\n{len(source)}\n".encode() + source)
    return digest.hexdigest()


@cache
def measured_with() -> str:
    """What a cell is measured with."""
    return "\n".join([code_sha256(), *(f"{name} {version(name)}" for name in _LIBRARIES)])
