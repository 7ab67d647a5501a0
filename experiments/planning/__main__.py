"""How good are plans?

    python -m experiments.planning                  twenty random homes, three models: regret, table and figure
    python -m experiments.planning --part learning  samples to a target loss, by method: a table

Regret is how much longer the plan's choice takes than the best of all candidates that may be chosen, each simulated for
as long as the plan simulates its finalists. Homes have two to five Macs on a random network. A run that was interrupted
goes on where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import pandas as pd
import typer
from rich.console import Console
from rich.progress import Progress

from experiments import asked
from experiments.figures.style import LOOKS, figure
from experiments.planning.cells import AnyCell, Entry, Exhaustive, Learned, Planned, run_all
from experiments.study.store import Store
from experiments.study.tables import write_csv
from hcsim import rng

HOMES = 20
MODELS = ("resnet50", "gpt2:tokens=256", "llama-1b:tokens=256,lora=16")
_CHIPS = ("M1", "M1 Air", "M1 Pro", "M2", "M2 Air", "M2 Max", "M2 Ultra", "M3", "M3 Pro", "M4", "M4 Pro", "M4 Max")
_NETWORKS = ("wifi5", "wifi6", "wifi7", "1gbe", "2.5gbe", "10gbe", "thunderbolt")
_LEARNING_HOME = "2 x M4, M1, M3 Pro on 1gbe"
_LEARNING_TASKS = {"text": (384, 16), "digits": (192, 8)}
"""Steps, and steps between looks."""
_SEEDS = (1, 2, 3)
REFERENCE = ("ddp", "none")
LEARNING = (
    REFERENCE, ("ddp", "bf16"), ("ddp", "int8+ef"), ("ddp", "powersgd:2+ef"), ("ddp", "powersgd:4+ef"),
    ("ddp", "topk:0.01+ef"), ("local_sgd:8", "none"), ("local_sgd:8", "int8"), ("local_sgd:8,pace=speed", "none"),
    ("local_sgd:32", "none"), ("local_sgd:32", "int8"), ("local_sgd:32,pace=speed", "int8"), ("local_sgd:64", "int8"),
    ("diloco:8,momentum=0.5", "none"), ("diloco:8,momentum=0.5", "int8"),
    ("diloco:8,momentum=0.5,pace=speed", "int8"), ("diloco:32,momentum=0.5", "none"),
    ("diloco:32,momentum=0.5", "int8"), ("diloco:64,momentum=0.5", "int8"),
    ("parameter_server:bounded,staleness=4", "none"), ("parameter_server:async", "none"),
)  # fmt: skip


def random_home(number: int) -> str:
    """Return a home in words: a few Macs, on one network or on two."""
    draw = rng.stream(1, "home", number)
    macs = [draw.choice(_CHIPS) for _ in range(draw.randint(2, 5))]
    network = draw.choice(_NETWORKS)
    if network == "thunderbolt" or len(macs) == 2 or draw.random() < 0.5:
        return f"{', '.join(macs)} on {network}"
    cut = draw.randint(1, len(macs) - 1)
    other = draw.choice([each for each in _NETWORKS if each not in (network, "thunderbolt")])
    return f"{', '.join(macs[:cut])} on {network}; {', '.join(macs[cut:])} on {other}"


def main(
    part: Annotated[str, typer.Option(help="regret or learning.")] = "regret",
    homes: Annotated[int, typer.Option(min=1, help="How many random homes.")] = HOMES,
    jobs: Annotated[int, typer.Option(min=0, help="Processes; 0: one for each core.")] = 0,
    out: Annotated[Path, typer.Option(help="The folder for the results.")] = Path("results/planning"),
    store: Annotated[Path, typer.Option(help="The folder for finished cells.")] = Path(".planning"),
) -> None:
    """Measure how good plans are, or how fast methods learn."""
    if part not in ("regret", "learning"):
        raise typer.BadParameter(f"{part!r} is not one of regret, learning", param_hint="--part")
    asked.make_folder(out)
    cells = regret_cells(homes) if part == "regret" else learning_cells()
    kept = Store(store, Entry)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        line = progress.add_task(part, total=len(cells))
        run_all(cells, kept, jobs, lambda done, total: progress.update(line, completed=done, total=max(1, total)))
    entries = [entry for cell in cells if (entry := kept.get(cell)) is not None]
    if len(entries) < len(cells):
        typer.echo(f"{len(cells) - len(entries)} of {len(cells)} cells failed", err=True)
    rows = regret_rows(entries) if part == "regret" else learning_rows(entries)
    write_csv(pd.DataFrame(rows), out / f"{part}.csv")
    if part == "regret":
        draw_regret(rows, out / part)
    for line_of in summary(part, rows):
        typer.echo(line_of)


def regret_cells(homes: int) -> list[AnyCell]:
    """The longest first."""
    words = sorted((random_home(number) for number in range(homes)), key=lambda each: -each.count(","))
    kinds: tuple[type[Planned] | type[Exhaustive], ...] = (Exhaustive, Planned)
    return [kind(home, task) for kind in kinds for home in words for task in MODELS]


def learning_cells() -> list[AnyCell]:
    """Those of text, which take longest, first."""
    return [
        Learned(_LEARNING_HOME, task, strategy, compressor, seed, *_LEARNING_TASKS[task])
        for task in _LEARNING_TASKS for strategy, compressor in LEARNING for seed in _SEEDS
    ]  # fmt: skip


def regret_rows(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """One row for each home and model."""
    by = {(type(entry.cell), entry.cell.home, entry.cell.task): entry for entry in entries}
    rows = []
    for (kind, home, task), entry in by.items():
        best = by.get((Exhaustive, home, task))
        plan = entry.result
        if kind is not Planned or best is None or not (plan.nodes and best.result.nodes):
            continue  # where nothing fits, neither finds anything
        rows.append({
            "home": home, "task": task, "plan": f"{plan.strategy} {plan.compressor}", "machines": len(plan.nodes),
            "by_speed": plan.by_speed, "best": f"{best.result.strategy} {best.result.compressor}",
            "regret": round(plan.quality_s / best.result.quality_s - 1, 6),
            "speedup": None if plan.alone_s is None else round(plan.alone_s / plan.quality_s, 4),
            "candidates": plan.candidates, "simulated": plan.simulated, "least_over_bound": round(min(plan.ratios), 4),
            "plan_core_s": round(entry.cost_s, 1), "exhaustive_core_s": round(best.cost_s, 1),
        })  # fmt: skip
    return rows


def learning_rows(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Samples to the target, relative to data parallelism without compression, which reaches it two thirds through."""
    curves: dict[tuple[str, str, str], list[tuple[tuple[int, float], ...]]] = {}
    for entry in entries:
        assert isinstance(entry.cell, Learned)
        key = entry.cell.task, entry.cell.strategy, entry.cell.compressor
        curves.setdefault(key, []).append(entry.result.curve)
    rows = []
    for task in _LEARNING_TASKS:
        reference = curves[(task, *REFERENCE)]
        target = fmean(curve[2 * len(curve) // 3][1] for curve in reference)
        usual = fmean(filter(None, (_samples_to(curve, target) for curve in reference)))
        for (of, strategy, compressor), found in curves.items():
            if of != task:
                continue
            reached = [samples for curve in found if (samples := _samples_to(curve, target)) is not None]
            whole = len(reached) == len(found)
            rows.append({
                "task": task, "strategy": strategy, "compressor": compressor, "seeds": len(found),
                "reached": len(reached), "target_loss": round(target, 4),
                "samples": round(fmean(reached), 1) if whole else None,
                "relative": round(fmean(reached) / usual, 4) if whole else None,
                "least": round(min(reached) / usual, 4) if whole else None,
                "most": round(max(reached) / usual, 4) if whole else None,
            })  # fmt: skip
    return rows


def _samples_to(curve: Sequence[tuple[int, float]], target: float) -> float | None:
    """Return after how many samples the loss is at the target and stays there on average: between two looks, of which
    each counts as the mean with its neighbours, it is taken to fall in a line."""
    smooth = [
        (samples, fmean(loss for _, loss in curve[max(0, i - 1) : i + 2])) for i, (samples, _) in enumerate(curve)
    ]
    before: tuple[int, float] | None = None
    for samples, loss in smooth:
        if loss <= target:
            if before is None or before[1] <= loss:
                return float(samples)
            return before[0] + (samples - before[0]) * (before[1] - target) / (before[1] - loss)
        before = samples, loss
    return None


def draw_regret(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Regret against the speed-up, by model."""
    with figure(5.0, 3.2, file) as sheet:
        axes = sheet.subplots()
        for look, task in zip(LOOKS, MODELS, strict=False):
            own = [row for row in rows if row["task"] == task and row["speedup"] is not None]
            axes.plot(
                [row["speedup"] for row in own], [100 * row["regret"] for row in own], linestyle="none",
                color=look["color"], marker=look["marker"], label=task,
            )  # fmt: skip
        axes.axhline(5, color="0.5", linewidth=0.8, linestyle="--")
        axes.set_xlabel("speed-up of the plan over the fastest machine alone")
        axes.set_ylabel("regret (%)")
        axes.set_title("The plan's choice against the best of all candidates")
        axes.legend()


def summary(part: Literal["regret", "learning"] | str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return what to read first."""
    if part == "learning":
        return [f"{row['task']}: {row['strategy']} {row['compressor']}: {row['relative']}" for row in rows]
    worst = max((row["regret"] for row in rows), default=0.0)
    within = sum(row["regret"] <= 0.05 for row in rows)
    longest_s = max((row["plan_core_s"] for row in rows), default=0.0)
    return [
        f"{within} of {len(rows)} plans are within 5 % of the best; the worst is {worst:.1%} slower",
        f"the longest plan took {longest_s:.0f} s on one core",
    ]


if __name__ == "__main__":
    asked.run(main)
