"""What a rank does, in either world."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable
from itertools import pairwise
from statistics import fmean
from typing import Any, TypeAlias

import msgspec
import numpy as np

from hcsim.collectives.buffers import Data
from hcsim.collectives.group import Group
from hcsim.collectives.plan import Shape, split
from hcsim.collectives.select import Options, choose
from hcsim.config import Machine, Training
from hcsim.runtime.channel import Phantom
from hcsim.training.trainer import train
from hcsim.twin.prediction import exchanges_every
from hcsim.units import ByteRate, FlopRate, PositiveShare, Seconds

FLOAT_BYTES = 4
MAC, OLD = (
    Machine(
        name, FlopRate(flops), ByteRate(120e9), efficiency_compute=PositiveShare(0.36),
        efficiency_memory=PositiveShare(0.82), overhead_s=Seconds(40e-6),
    )
    for name, flops in (("lab mac", 3.9e12), ("lab old", 5e8))
)  # fmt: skip
"""About an M4, whose figures in the catalogue may change; and one so slow that the processor of a real machine can
compute for several of them."""
_PERIOD = 251


class Collectives(msgspec.Struct, frozen=True, tag=True):
    """A collective operation, repeated."""

    operation: str
    algorithm: str
    size_bytes: int
    repeats: int
    together: int = 1
    """So many of them at once."""
    phantom: bool = False


class Trainings(msgspec.Struct, frozen=True, tag=True):
    """A short training, repeated."""

    task: str
    strategy: str
    compressor: str
    steps: int
    repeats: int

    @property
    def training(self) -> Training:
        return Training(
            task=self.task, strategy=self.strategy, compressor=self.compressor, steps=self.steps,
            evaluate_every=self.steps,
        )  # fmt: skip


class Steps(msgspec.Struct, frozen=True, tag=True):
    """The steps of a training, repeated, without what comes before them."""

    task: str
    strategy: str
    compressor: str
    rounds: int
    """Of as many steps as the strategy takes to exchange something; the first one is left out."""
    repeats: int

    @property
    def every(self) -> int:
        return max(4, exchanges_every(Training(strategy=self.strategy)))

    @property
    def training(self) -> Training:
        steps = (1 + self.rounds) * self.every
        return Training(
            task=self.task, strategy=self.strategy, compressor=self.compressor, steps=steps, evaluate_every=steps
        )


Turn: TypeAlias = Collectives | Trainings | Steps


class Laps(msgspec.Struct, frozen=True, tag=True):
    """How it went on one rank."""

    seconds: list[float]
    """Of each repeat: of an operation, from this rank's exit from a barrier to the end; of a step of a training."""
    algorithm: str
    """What `auto` stood for."""
    sha256: str = ""
    """Of this rank's last results, or of the parameters at the end."""


def options(hosts: int, algorithm: str) -> Options:
    """The options of the group. Two halves are the homes of a hierarchical operation."""
    half = hosts // 2
    groups = (tuple(range(half)), tuple(range(half, hosts))) if algorithm == "hierarchical" else ()
    return Options(timeout_s=60.0, groups=groups)


async def run(group: Group, turn: Turn) -> Laps:
    """Take a turn."""
    match turn:
        case Collectives():
            return await run_collectives(group, turn)
        case Trainings():
            return await run_trainings(group, turn)
        case _:
            return await run_steps(group, turn)


async def run_steps(group: Group, turn: Steps) -> Laps:
    """Train anew each time; the seconds are the mean of the steps, and none on a rank that takes no steps of its
    own."""
    reports = [await train(group, turn.training, seed=1) for _ in range(turn.repeats)]
    laps = [[point.spent_s["whole"] for point in report.points[turn.every :]] for report in reports]
    return Laps([fmean(lap) if lap else 0.0 for lap in laps], turn.training.algorithm, reports[-1].sha256 or "")


async def run_trainings(group: Group, turn: Trainings) -> Laps:
    """Train anew each time; the seconds are those of a step."""
    reports = [await train(group, turn.training, seed=1) for _ in range(turn.repeats)]
    seconds = [report.duration_s / report.steps for report in reports]
    return Laps(seconds, turn.training.algorithm, reports[-1].sha256 or "")


async def run_collectives(group: Group, turn: Collectives) -> Laps:
    """Repeat the operation."""
    clock, seconds = group.host.clock, []
    fresh = [_input(turn, group.rank + number) for number in range(turn.together)]
    results: list[Any] = []
    for _ in range(turn.repeats):
        data = [each if isinstance(each, Phantom) else each.copy() for each in fresh]
        await group.barrier()
        began_s = clock.elapsed()
        results = await asyncio.gather(*(_start(group, turn, each, number) for number, each in enumerate(data)))
        seconds.append(clock.elapsed() - began_s)
    return Laps(seconds, _chosen(group, turn), "" if turn.phantom else _digest(results))


def _input(turn: Collectives, number: int) -> Data:
    """Small whole numbers, whose sums are exact."""
    if turn.phantom:
        return Phantom(turn.size_bytes, FLOAT_BYTES)
    return ((np.arange(turn.size_bytes // FLOAT_BYTES) + number) % _PERIOD).astype(np.float32)


def _start(group: Group, turn: Collectives, data: Data, bucket: int) -> Awaitable[Any]:
    match turn.operation:
        case "all_reduce":
            return group.all_reduce(data, algorithm=turn.algorithm, bucket=bucket)
        case "broadcast":
            return group.broadcast(data, algorithm=turn.algorithm, bucket=bucket)
        case "all_gather":
            return group.all_gather(data, algorithm=turn.algorithm, bucket=bucket)
        case _:
            return group.reduce_scatter(data, algorithm=turn.algorithm, bucket=bucket)


def _chosen(group: Group, turn: Collectives) -> str:
    if turn.algorithm != "auto":
        return turn.algorithm
    length = turn.size_bytes // FLOAT_BYTES
    parts = tuple(hi - lo for lo, hi in pairwise(split(length, group.size)))
    counts = (length,) * group.size if turn.operation == "all_gather" else parts
    shape = Shape(world=group.size, length=length, counts=counts)
    return choose(turn.operation, shape, FLOAT_BYTES, group.options.links)


def _digest(results: list[Any]) -> str:
    digest = hashlib.sha256()
    for result in results:
        for part in result if isinstance(result, list) else [result]:
            digest.update(np.ascontiguousarray(part).view(np.uint8).data)
    return digest.hexdigest()
