"""Predicted against measured training steps of models that no curve was measured for.

    python -m experiments.compute --threads 1,2 --json compute.json

The machine's kernel curves are measured for each number of threads by `hcsim.twin.kernels`, in turns with the steps of
the models and with the kernels of these steps. A step is predicted twice: from the kinds and sizes of its kernels by
the machine's curves, and, with `--own-kernels`, by the times of its own. Nothing is fitted to the steps. The machine
should have nothing else to do.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated

import msgspec
import pandas as pd
import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from experiments import asked
from experiments.compute.figure import draw
from experiments.compute.models import MODELS, seeded
from hcsim.config import KernelCurve, Machine
from hcsim.runtime.host import KernelGroup, Work
from hcsim.runtime.work_time import seconds
from hcsim.torch_kernels import KernelTally
from hcsim.twin.kernels import (
    Rest,
    TimedStep,
    kernels_of,
    own_curves,
    step_durations,
    time_blocks,
    time_kernels,
)
from hcsim.twin.machine import measured_now
from hcsim.units import ByteRate, FlopRate, Seconds

TURNS = 2
STEPS_OF_A_TURN = 2


class Measured(msgspec.Struct, frozen=True):
    """One model's steps, and its kernels."""

    model: str
    steps_s: tuple[float, ...]
    groups: tuple[KernelGroup, ...]
    """Of one step."""
    own_s: float
    """By the times of its own kernels."""
    kinds_s: dict[str, float]
    """How long its own kernels of each kind took."""

    @property
    def step_s(self) -> float:
        return statistics.median(self.steps_s)

    @property
    def spread(self) -> float:
        """Half of the distance between the tenth and the ninetieth percentile, relative to the median."""
        tenths = statistics.quantiles(self.steps_s, n=10)
        return (tenths[-1] - tenths[0]) / 2 / self.step_s


class Record(msgspec.Struct, frozen=True):
    """What was measured with one number of threads."""

    threads: int
    step_s: float
    """What a step costs beside its kernels."""
    curves: tuple[KernelCurve, ...]
    models: tuple[Measured, ...]

    def predicted_s(self, model: Measured) -> float:
        """Return the duration of the model's step by the machine's curves."""
        return seconds(machine_with(self.curves), Work(groups=model.groups)) + self.step_s

    def rows(self) -> list[dict[str, object]]:
        """Return the table's rows, of predictions by kind and by the model's own kernels."""
        return [
            {
                "threads": self.threads,
                "model": model.model,
                "method": method,
                "measured_s": model.step_s,
                "spread": model.spread,
                "predicted_s": predicted_s,
                "error": predicted_s / model.step_s - 1,
                "farthest": farthest,
            }
            for model in self.models
            for method, predicted_s, farthest in (
                ("curves", self.predicted_s(model), self.farthest(model)),
                ("own kernels", model.own_s, ""),
            )
        ]

    def farthest(self, model: Measured) -> str:
        """Return the kind whose kernels' time is farthest from what the model's own took, with the difference."""
        machine, missed_s = machine_with(self.curves), dict.fromkeys(model.kinds_s, 0.0)
        for kind, own_s in model.kinds_s.items():
            groups = tuple(group for group in model.groups if group.kind == kind)
            missed_s[kind] = seconds(machine, Work(groups=groups)) - own_s
        kind = max(missed_s, key=lambda kind: abs(missed_s[kind]))
        return f"{kind} {1e3 * missed_s[kind]:+.1f} ms"


def machine_with(curves: tuple[KernelCurve, ...]) -> Machine:
    """Return a machine of which only the kernels matter."""
    return Machine("measured", FlopRate(1e11), ByteRate(1e10), overhead_s=Seconds(0), kernels=curves)


def measured(name: str, timed: TimedStep, rest: Rest) -> Measured:
    """Return what was measured of a model."""
    curves = own_curves(timed.samples, rest, measured_now("cpu"))
    tally, signed = KernelTally(), KernelTally()
    kinds_s: dict[str, float] = {}
    for sample in timed.samples:
        lasts_s = statistics.median(sample.seconds) + rest.of(sample.kernel)
        kinds_s[sample.kernel.kind] = kinds_s.get(sample.kernel.kind, 0.0) + lasts_s
        tally.add(sample.kernel)
        signed.add(sample.kernel, sample.signature)
    own_s = seconds(machine_with(curves), Work(groups=signed.take())) + rest.step_s
    return Measured(name, tuple(timed.durations), tally.take(), own_s, kinds_s)


def record(threads: int, models: list[str], progress: Progress) -> Record:
    """Measure the machine's kernels and all models with this number of threads, in turns: a machine that becomes
    slower does so for all."""
    torch.set_num_threads(threads)
    task = progress.add_task(f"{threads} threads", total=TURNS * (len(models) + 1))
    timed: dict[str, TimedStep] = {}
    blocks: dict[int, TimedStep] = {}
    for _ in range(TURNS):
        time_blocks("cpu", blocks)
        progress.advance(task)
        for name in models:
            step = seeded(name)
            step_durations(step, repeats=1)
            found = TimedStep([], step_durations(step, repeats=STEPS_OF_A_TURN, warm_up=0))
            found.samples.extend(time_kernels(step, repeats=2, warm_up=0))
            found.durations.extend(step_durations(step, repeats=STEPS_OF_A_TURN, warm_up=0))
            if name in timed:
                timed[name].add(found)
            else:
                timed[name] = found
            progress.advance(task)
    kernels = kernels_of(list(blocks.values()), measured_now("cpu"))
    found_models = (measured(name, each, kernels.rest) for name, each in timed.items())
    return Record(threads, kernels.rest.step_s, kernels.curves, tuple(found_models))


def main(
    threads: Annotated[str, typer.Option(help="Numbers of threads.")] = f"1,{torch.get_num_threads()}",
    only: Annotated[str | None, typer.Option(help="Only these models.")] = None,
    own_kernels: Annotated[
        bool, typer.Option("--own-kernels", help="Predict from each model's own kernels, too.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the table and the figure.")] = None,
    json_file: Annotated[str | None, typer.Option("--json", help="A file for all that was measured.")] = None,
) -> None:
    """Predict training steps from measured kernels, and measure them."""
    asked.check_json(json_file)
    if out is not None:
        asked.make_folder(out)
    models = list(MODELS) if only is None else asked.chosen(only, MODELS)
    records = []
    with Progress(console=Console(stderr=True)) as progress:
        for count in dict.fromkeys(threads.split(",")):
            records.append(record(int(count), models, progress))
            if json_file is not None:
                Path(json_file).write_bytes(msgspec.json.encode(records))
    table = pd.DataFrame([row for each in records for row in each.rows()])
    if not own_kernels:
        table = table[table["method"] == "curves"]
    show(table)
    if out is not None:
        draw(table, out)


def show(table: pd.DataFrame) -> None:
    """Print a line for each model, and the median and the 90th percentile of the errors."""
    shown = Table(box=box.SIMPLE)
    for title in ("threads", "model", "method", "measured", "spread", "predicted", "error", "farthest kind"):
        shown.add_column(title, justify="left" if title in ("model", "method", "farthest kind") else "right")
    for row in table.itertuples():
        shown.add_row(f"{row.threads}", row.model, row.method, f"{1e3 * row.measured_s:.1f} ms", f"{row.spread:.1%}",
                      f"{1e3 * row.predicted_s:.1f} ms", f"{row.error:+.1%}", row.farthest)  # fmt: skip
    console = Console()
    console.print(shown)
    for (count, method), rows in table.groupby(["threads", "method"], sort=False):
        errors = rows["error"].abs()
        console.print(f"{count} threads, {method}: median {errors.median():.1%}, p90 {errors.quantile(0.9):.1%}")


if __name__ == "__main__":
    asked.run(main)
