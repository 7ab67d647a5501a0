"""What the parts of a task's step take on this machine: the forward pass, the backward pass through each block, and the
update of the parameters.

They are timed in real trainings of one rank, with batches of several sizes: handing work to the device's thread, and
Python that runs beside it, take longer there than in a loop. What a step costs beside its parts and a compressor counts
as the update's.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

from hcsim.collectives.group import Group
from hcsim.config import Training
from hcsim.config.machine import Basis, KernelCurve, ScriptKernels
from hcsim.errors import ConfigError
from hcsim.real.hardware import RealDevice
from hcsim.real.host import RealHost, RealOptions
from hcsim.runtime.host import TaskPart, Work
from hcsim.training.tasks import task
from hcsim.training.trainer import train
from hcsim.transport.groups import GroupMembership
from hcsim.twin.ledger import FIRST_STEPS
from hcsim.twin.timing import rounded, summary

T = TypeVar("T")
BATCHES = (0.5, 1.0, 2.0, 4.0)
"""Relative to the task's own."""
STEPS = 30
_ROUNDS = 2
_UPDATE = "update"


class TimedDevice(RealDevice):
    """Notes how long each part of a step takes, until the program hears that it is done."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.parts: dict[str, list[tuple[TaskPart, float]]] = {}

    async def run(self, work: Work, function: Callable[[], T], into: memoryview | None = None) -> T:
        """See `RealDevice.run`."""
        began_s = time.perf_counter()
        result = await super().run(work, function, into)
        if work.part is not None:
            lasted_s = time.perf_counter() - began_s
            self.parts.setdefault(work.part.signature, []).append((work.part, lasted_s))
        return result


def measure_task(name: str, device: str, basis: Callable[[float], Basis]) -> ScriptKernels:
    """Measure a task that has data; `basis` makes the provenance from the spread."""
    chosen = task(name)
    if chosen.phantom:
        raise ConfigError(f'task "{name}" has only shapes: there is nothing to compute')
    batches = [max(1, round(share * chosen.defaults.batch)) for share in BATCHES]
    found: dict[str, dict[float, list[float]]] = {}
    for samples in batches * _ROUNDS:
        for part, lasted_s in asyncio.run(_parts_s(name, device, samples)).items():
            found.setdefault(part.signature, {}).setdefault(part.samples, []).extend(lasted_s)
    curves, spreads = [], []
    for signature, by_samples in found.items():
        # An epoch may end with a smaller batch.
        usual = {samples: each for samples, each in by_samples.items() if len(each) >= STEPS // 2}
        timings = {samples: summary(each) for samples, each in sorted(usual.items())}
        points = tuple((samples, rounded(timing.seconds)) for samples, timing in timings.items())
        curves.append(KernelCurve("matmul", points, signature=signature))
        spreads += [timing.spread for timing in timings.values()]
    return ScriptKernels(name, basis(statistics.median(spreads)), tuple(curves))


async def _parts_s(name: str, device: str, samples: int) -> dict[TaskPart, list[float]]:
    """Train alone; return how long each part took in each step."""
    settings = Training(task=name, strategy="ddp", batch=samples, steps=FIRST_STEPS + STEPS, evaluate_every=10**9)
    timed = TimedDevice(device)
    try:
        async with (
            RealHost(RealOptions("probe", shared_memory=False), device=timed) as host,
            await Group.open(host, GroupMembership(0, ("127.0.0.1:0",))) as group,
        ):
            report = await train(group, settings, seed=0)
    finally:
        timed.close()
    steps = zip(report.points, *timed.parts.values(), strict=True)
    found: dict[TaskPart, list[float]] = {}
    for point, *parts in list(steps)[FIRST_STEPS:]:
        rest_s = point.spent_s["whole"] - point.spent_s["encode"] - sum(lasted_s for _, lasted_s in parts)
        for part, lasted_s in parts:
            more_s = rest_s if _UPDATE in part.signature else 0.0
            found.setdefault(part, []).append(lasted_s + more_s)
    return found
