"""How good are bands from the effects of single figures? Beside them those from many variants, for cells of the sweeps.

    python -m experiments.bands                 a few minutes
    python -m experiments.bands --variants 256

The reference draws all figures and seeds together. Compared with it are the effects (two simulations for each figure
that has a spread, which is what sweeps use) and a lognormal through eight variants. The error is that of p10 or
of p90, whichever is farther off, relative to the reference.
"""

from __future__ import annotations

from math import exp, log
from statistics import fmean, median, stdev
from typing import Annotated

import msgspec
import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from experiments import asked
from experiments.clusters import cluster
from experiments.study.bands import representative
from experiments.study.cell import AllReduce, AnyCell, Train
from experiments.study.measure import timed
from hcsim.config import Scenario
from hcsim.twin.effects import band, effects
from hcsim.twin.spread import TENTH_Z, variants

_FEW = 8


class Compared(msgspec.Struct, frozen=True):
    """The bands of a cell, relative to its time."""

    cell: str
    p10: float
    p90: float
    simulations: int
    reference_p10: float
    reference_p90: float
    error: float
    lognormal_error: float


def cells() -> dict[str, AnyCell]:
    """Where compute bounds a step, where the link does, and between them; with one figure and with several."""

    def train(link: str, world: int, task: str, strategy: str, compressor: str, variant: str = "equal") -> Train:
        return Train(link, world, task, strategy, 1, 64, compressor=compressor, algorithm="ring", variant=variant)

    trained = [
        train("ethernet:100 Mb/s", 4, "transformer:3e7", "ddp", "none"),
        train("ethernet:1 Gb/s", 4, "transformer:3e7", "ddp", "powersgd:4+ef"),
        train("ethernet:3.3 Gb/s", 8, "transformer:1e8", "ddp", "none"),
        train("1gbe", 4, "resnet50", "diloco:16", "none"),
        train("thunderbolt", 4, "resnet50", "ddp", "none"),
        train("wifi6", 4, "resnet50", "ddp", "int8+ef"),
        train("wifi6", 4, "resnet50", "diloco:16", "none"),
        train("two-homes", 4, "resnet50", "local_sgd:8", "none"),
        train("10gbe", 4, "resnet50", "ddp", "none", "one-old"),
        train("1gbe", 4, "resnet50", "diloco:16", "none", "one-on-wifi"),
        train("10gbe", 4, "resnet50", "parameter_server:async", "none", "one-old"),
    ]
    reduced = [AllReduce(link, 4, "ring", 1 << 20, 1) for link in ("thunderbolt", "wifi6")]
    return {_name(cell): cell for cell in [*trained, *reduced]}


def _name(cell: AnyCell) -> str:
    if isinstance(cell, AllReduce):
        return f"all-reduce of 1 MiB, {cell.link}"
    how = cell.strategy if cell.compressor == "none" else f"{cell.strategy} {cell.compressor}"
    return ", ".join([cell.task, how, cell.link, *([cell.variant] if cell.variant != "equal" else [])])


def compared(name: str, cell: AnyCell, count: int) -> Compared:
    """Find the band of a cell in all ways."""
    cell = representative(cell)
    scenario = cluster(cell.link, cell.world, cell.variant if isinstance(cell, Train) else "equal").scenario
    simulated = 0

    def counted(variant: Scenario) -> float:
        nonlocal simulated
        simulated += 1
        return timed(cell, variant)

    low, high = band(effects(scenario, counted))
    point_s = timed(cell, scenario)
    drawn = [timed(cell, variant) / point_s for variant in variants(scenario, count)]
    reference = [float(end) for end in np.quantile(drawn, (0.1, 0.9), method="hazen")]
    logs = [log(timed(cell, variant) / point_s) for variant in variants(scenario, _FEW)]
    fit = [exp(fmean(logs) + z * stdev(logs)) for z in (-TENTH_Z, TENTH_Z)]
    return Compared(name, low, high, simulated, *reference, _off((low, high), reference), _off(fit, reference))


def _off(ends: tuple[float, float] | list[float], reference: list[float]) -> float:
    return max(abs(end / there - 1) for end, there in zip(ends, reference, strict=True))


def main(
    count: Annotated[int, typer.Option("--variants", min=8, max=1024, help="Of the reference.")] = 64,
    json_file: Annotated[str | None, typer.Option("--json", help="Write one row per cell to this file.")] = None,
) -> None:
    """Compare bands from single figures with those of many variants."""
    asked.check_json(json_file)
    rows = [compared(name, cell, count) for name, cell in cells().items()]
    asked.hand_over(json_file, [msgspec.structs.asdict(each) for each in rows], lambda: _show(rows))


def _show(rows: list[Compared]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("cell", "p10–p90", "simulations", "of variants", "error", f"of a lognormal ({_FEW})"):
        table.add_column(heading, justify="left" if heading == "cell" else "right")
    for row in rows:
        ends = (f"{low:.3f}–{high:.3f}" for low, high in ((row.p10, row.p90), (row.reference_p10, row.reference_p90)))
        mine, reference = ends
        table.add_row(row.cell, mine, str(row.simulations), reference, f"{row.error:.1%}", f"{row.lognormal_error:.1%}")
    Console(width=120).print(table)
    middle = [median(getattr(row, name) for row in rows) for name in ("error", "lognormal_error")]
    typer.echo(f"median error {middle[0]:.1%}, of lognormals {middle[1]:.1%}")


if __name__ == "__main__":
    asked.run(main)
