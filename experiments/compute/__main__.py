"""Predicted against measured training steps of models that no curve was measured for.

    python -m experiments.compute --threads 1,2 --json compute.json
    python -m experiments.compute --device cuda --json compute.json
    python -m experiments.compute --from compute.json --own-kernels --out results/fidelity

The machine's kernel curves are measured by `hcsim.twin.kernels`, in turns with the steps of the models and with the
kernels of these steps: on a processor once for each number of threads, on a GPU for small batches and for large ones.
A step is predicted twice: from the kinds and sizes of its kernels by the machine's curves, and, with `--own-kernels`,
by the times of its own. No prediction can be nearer than the same steps are to themselves: how far those of two turns
are apart is told, too. Nothing is fitted to the steps, and of some models nobody looked at the errors before the kinds
of kernels were chosen. The machine should have nothing else to do.

The file of `--json` is written anew after each model, and has all that was measured: `--from` computes the table of it
once more.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated

import torch
import typer
from msgspec import ValidationError
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from experiments import asked
from experiments.compute.predicted import Row, record_of
from experiments.compute.recorded import KNOWN, Plan, Recorded, measure, read, write

_BATCHES = {"cpu": "1", "cuda": "1,64", "mps": "1,8"}
_DEVICES = {"cpu": lambda: True, "cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}


def main(
    device: Annotated[str, typer.Option(help="cpu, cuda or mps.")] = "cpu",
    threads: Annotated[str, typer.Option(help="Numbers of threads, on the CPU.")] = f"1,{torch.get_num_threads()}",
    batches: Annotated[
        str | None, typer.Option(help="Multiples of the models' batches. 1; on GPUs larger ones, too.")
    ] = None,
    only: Annotated[str | None, typer.Option(help="Only these models.")] = None,
    own_kernels: Annotated[
        bool, typer.Option("--own-kernels", help="Predict from each model's own kernels, too.")
    ] = False,
    recorded: Annotated[
        Path | None, typer.Option("--from", help="Measure nothing: a file that --json wrote.", exists=True)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the table and the figure.")] = None,
    json_file: Annotated[str | None, typer.Option("--json", help="A file for all that was measured.")] = None,
) -> None:
    """Predict training steps from measured kernels, and measure them."""
    asked.check_json(json_file)
    if out is not None:
        asked.make_folder(out)
    if recorded is not None:
        found = _read(recorded)
    else:
        if device not in _DEVICES or not _DEVICES[device]():
            raise typer.BadParameter(f"torch computes on no {device!r} here", param_hint="--device")
        models = list(KNOWN) if only is None else asked.chosen(only, KNOWN)
        plan = Plan(device, models, _numbers(batches or _BATCHES[device], "--batches"))
        counts = _numbers(threads, "--threads") if device == "cpu" else [torch.get_num_threads()]
        found = _measured(plan, counts, None if json_file is None else Path(json_file))
    rows = [row for each in found for row in record_of(each).rows() if own_kernels or row.method == "curves"]
    show(rows)
    for each in found:
        for name, reason in each.failed.items():
            Console(stderr=True).print(f"{name} was not measured on {each.device}: {reason}", markup=False)
    if out is not None:
        from experiments.compute.figure import draw  # needs what plots

        draw(rows, out)


def _numbers(text: str, option: str) -> list[int]:
    try:
        found = list(dict.fromkeys(int(word) for word in text.split(",")))
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise typer.BadParameter(f"{text!r} is no list of whole numbers from 1", param_hint=option)
    return found


def _read(path: Path) -> list[Recorded]:
    try:
        return read(path)
    except ValidationError as error:
        raise typer.BadParameter(f"{path} has no measurements: {error}", param_hint="--from") from None


def _measured(plan: Plan, threads: list[int], path: Path | None) -> list[Recorded]:
    """Measure with each number of threads; write the file after each model."""
    done: list[Recorded] = []
    found: Recorded | None = None
    with Progress(console=Console(stderr=True)) as progress:
        for count in threads:
            task = progress.add_task(f"{plan.device}, {count} threads", total=plan.turns * (len(plan.cases) + 1))
            for found in measure(plan, count):
                progress.advance(task)
                if path is not None:
                    write(path, [*done, found])
            assert found is not None
            done.append(found)
    return done


def show(rows: list[Row]) -> None:
    """Print a line for each model, and the median and the 90th percentile of the errors."""
    shown = Table(box=box.SIMPLE)
    for title in ("on", "model", "method", "measured", "spread", "predicted", "launches", "error", "farthest kind"):
        shown.add_column(title, justify="left" if title in ("on", "model", "method", "farthest kind") else "right")
    for row in rows:
        launches = f"{1e3 * row.launches_s:.1f} ms" if row.launches_s else ""
        shown.add_row(row.on, row.model, row.method, f"{1e3 * row.measured_s:.1f} ms", f"{row.spread:.1%}",
                      f"{1e3 * row.predicted_s:.1f} ms", launches, f"{row.error:+.1%}", row.farthest)  # fmt: skip
    console = Console()
    console.print(shown)
    groups: dict[str, list[float]] = {}
    for row in rows:
        models = "models that nobody looked at" if row.unseen else "models"
        groups.setdefault(f"{row.on}, {row.method}, {{}} {models}", []).append(abs(row.error))
    for on in dict.fromkeys(row.on for row in rows):
        apart = {row.model: row.apart for row in rows if row.on == on}
        groups[f"{on}, steps of {{}} models in another turn"] = list(apart.values())
    for title, found in groups.items():
        p90 = statistics.quantiles(found, n=10, method="inclusive")[-1] if len(found) > 1 else found[0]
        console.print(f"{title.format(len(found))}: median {statistics.median(found):.1%}, p90 {p90:.1%}")


if __name__ == "__main__":
    asked.run(main)
