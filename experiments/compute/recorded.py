"""What is measured for the experiment: the steps of blocks and models with all their kernels, kept in a file.

Everything else follows from it, on any machine and at any time: time on a GPU is scarce.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from experiments.compute.models import MODELS, Step
from experiments.compute.unseen import UNSEEN
from hcsim.twin.kernels import ASYNCHRONOUS, TimedStep, time_blocks, time_kernels, time_queued, time_steps
from hcsim.twin.stopwatch import streamed_s

KNOWN: dict[str, Callable[[int], Step]] = {**MODELS, **UNSEEN}


class Recorded(msgspec.Struct):
    """What was measured on one device, with one number of threads."""

    device: str
    threads: int
    settings: dict[str, str]
    blocks: dict[int, TimedStep] = {}
    models: dict[str, TimedStep] = {}
    failed: dict[str, str] = {}
    """Why a model or a block was not measured."""


class Plan(msgspec.Struct, frozen=True):
    """What to measure."""

    device: str
    models: Sequence[str]
    batches: Sequence[int]
    """Multiples of the models' batches."""
    turns: int = 2

    @property
    def cases(self) -> list[tuple[str, int]]:
        return [(model, batch) for batch in self.batches for model in self.models]


def settings_of(device: str) -> dict[str, str]:
    """Return what the speed of this device depends on, beside its kind."""
    found = {"torch": str(torch.__version__), "python": platform.python_version(), "system": platform.platform()}
    if device == "cuda":
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            "cudnn.benchmark": str(torch.backends.cudnn.benchmark),
            "tf32 in matrix products": str(torch.backends.cuda.matmul.allow_tf32),
            "tf32 in convolutions": str(torch.backends.cudnn.allow_tf32),
        }
    return found | {"dtype": str(torch.get_default_dtype()), "matmul precision": torch.get_float32_matmul_precision()}


def measure(plan: Plan, threads: int) -> Iterator[Recorded]:
    """Measure the blocks and all models, in turns: a machine that becomes slower does so for all. Yield what is known
    after each of them."""
    alone = _alone if plan.device == "cpu" else _here
    if plan.device == "cpu":
        torch.set_num_threads(threads)
    found = Recorded(plan.device, threads, settings_of(plan.device))
    for _ in range(plan.turns):
        failed = time_blocks(plan.device, found.blocks)
        found.failed |= {f"block {number}": reason for number, reason in failed.items()}
        yield found
        for model, batch in plan.cases:
            name = model if batch == 1 else f"{model} ×{batch}"
            try:
                timed = alone(time_model, model, batch, plan.device, threads)
            except (RuntimeError, TypeError, AssertionError) as error:  # it lacks an operation or memory
                found.failed[name] = f"{type(error).__name__}: {error}"
            else:
                if name in found.models:
                    found.models[name].add(timed)
                else:
                    found.models[name] = timed
            yield found


T = TypeVar("T")


def _here(call: Callable[..., T], *given: object) -> T:
    return call(*given)


def _alone(call: Callable[..., T], *given: object) -> T:
    """Call it in a process of its own. How long a step takes on a processor depends on how much memory the process
    has had before and keeps: the same model's steps may be 40 % longer after others."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, context) as executor:
        return executor.submit(call, *given).result()


def seeded(model: str, batch: int = 1, seed: int = 0) -> Step:
    """Return a model's step, with the same parameters and data each time, and a batch that is so many times as
    large."""
    torch.manual_seed(seed)
    return KNOWN[model](batch)


def time_model(model: str, batch: int, device: str, threads: int) -> TimedStep:
    """Time the steps of a model before and after its kernels."""
    torch.set_num_threads(threads)
    repeats = 5 if device in ASYNCHRONOUS else 3
    with torch.device(device):
        step = seeded(model, batch)
    steps = time_steps(step, device, repeats=repeats, warm_up=2)
    samples, views = time_kernels(step, device, repeats=repeats, warm_up=0)
    steps.add(time_steps(step, device, repeats=repeats, warm_up=0))
    time_queued(step, device, steps, len(samples))
    if device in ASYNCHRONOUS:
        steps.streamed.extend(streamed_s(step, device) for _ in range(3))
    return TimedStep(samples, steps, views)


def write(path: Path, found: Sequence[Recorded]) -> None:
    """Write the file anew; it is whole at any time."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_bytes(msgspec.json.encode(found))
    os.replace(beside, path)


def read(path: Path) -> list[Recorded]:
    return msgspec.json.decode(path.read_bytes(), type=list[Recorded])
