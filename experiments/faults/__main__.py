"""Clusters under random faults: does what must always hold, hold?

    python -m experiments.faults --seeds 1000
    python -m experiments.faults --seed 17            one of them, with all that its nodes say
    python -m experiments.faults --figure             how long until a loss is noticed, and until training goes on

Each seed is a home of two to eight Macs on Ethernet, Wi-Fi or both, a strategy, a compressor, and a schedule of faults
that heal. The Macs find each other, prove who they are, agree on views and train; `laws` is then held against
the trace and the results. A seed that breaks a law is printed with the command that replays it, which also looks for a
shorter list of faults that still breaks one.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from experiments import asked
from experiments.faults.trial import Trial, run_trial, scenario_of, shortened, trial_of
from experiments.workers import starting
from hcsim.config import write_faults
from hcsim.config.schedule import DEFAULT_KINDS

console = Console(soft_wrap=True)


def main(
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds, from --first on; left out, 100.")] = None,
    first: Annotated[int | None, typer.Option(min=0, help="The first seed; left out, 1.")] = None,
    seed: Annotated[int | None, typer.Option(help="Only this one; tells all that its nodes say.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; left out, one for each core.")] = None,
    figure: Annotated[bool, typer.Option("--figure", help="Draw detection and recovery against heartbeats.")] = False,
    out: Annotated[Path | None, typer.Option(help="Where the figure goes; left out, results/.")] = None,
    json: Annotated[str | None, typer.Option(help="Write one row for each seed to this file.")] = None,
) -> None:
    """Hold random clusters to what must always hold."""
    many = {"--seeds": seeds, "--first": first, "--json": json}
    processes = workers or os.cpu_count() or 1
    if figure:
        asked.refuse("beside --figure", {"--seed": seed, **many})
        from experiments.faults.figure import draw

        folder = out or Path("results")
        asked.make_folder(folder)
        draw(folder, processes)
        return
    asked.refuse("without --figure", {"--out": out})
    if seed is not None:
        asked.refuse("beside --seed", {**many, "--workers": workers})
        raise typer.Exit(_replay(seed))
    asked.check_json(json)
    start = 1 if first is None else first
    chosen = range(start, start + (seeds or 100))
    started_s = perf_counter()
    trials: list[Trial] = []
    interrupted = False
    try:
        with Progress(*Progress.get_default_columns()[:-1], MofNCompleteColumn(), TimeRemainingColumn()) as progress:
            bar = progress.add_task("seeds", total=len(chosen))
            for trial in _trials(chosen, processes):
                trials.append(trial)
                progress.advance(bar)
                if trial.wrong:
                    progress.console.print(_told(trial), markup=False)
    except KeyboardInterrupt:
        interrupted = True
    wall_s = perf_counter() - started_s
    rows = [msgspec.to_builtins(trial) for trial in sorted(trials, key=lambda each: each.seed)]
    asked.hand_over(json, rows, lambda: _report(trials, wall_s))
    if interrupted:
        done = {trial.seed for trial in trials}
        left = next((number for number in chosen if number not in done), chosen.stop)
        console.print(
            f"interrupted; the rest: python -m experiments.faults --first {left} --seeds {chosen.stop - left}"
        )
        raise typer.Exit(130)
    if any(trial.wrong for trial in trials):
        raise typer.Exit(1)


def _trials(seeds: range, workers: int) -> Iterator[Trial]:
    if workers == 1:
        yield from map(trial_of, seeds)
        return
    with starting():
        pool = multiprocessing.get_context("spawn").Pool(workers)
    with pool:
        yield from pool.imap_unordered(trial_of, seeds)


def _told(trial: Trial) -> str:
    lines = "\n".join(f"  {law}" for law in trial.wrong)
    return f"seed {trial.seed} ({trial.nodes} nodes, {trial.method}):\n{lines}\n  {_command(trial.seed)}"


def _command(seed: int) -> str:
    return f"python -m experiments.faults --seed {seed}"


def _replay(seed: int) -> int:
    scenario = scenario_of(seed)
    console.print(f"# {len(scenario.nodes)} nodes, {scenario.training}", markup=False, highlight=False)
    console.print(write_faults(scenario.faults), markup=False, highlight=False)
    trial = run_trial(scenario, tell=lambda host, what: console.print(f"{host}: {what}", markup=False, highlight=False))
    console.print(f"virtual time {trial.virtual_s:.1f} s, {trial.views} views, trace sha256 {trial.trace_sha256}")
    if not trial.wrong:
        console.print("every law held")
        return 0
    console.print(_told(trial), markup=False, highlight=False)
    console.print("fewer faults that still break a law:")
    console.print(write_faults(shortened(scenario).faults), markup=False, highlight=False)
    return 1


def _report(trials: list[Trial], wall_s: float) -> None:
    fired: Counter[str] = Counter()
    for trial in trials:
        fired.update(trial.fired)
    table = Table("fault", "struck", box=None, pad_edge=False)
    for kind in DEFAULT_KINDS:
        table.add_row(kind, str(fired[kind]))
    console.print(table)
    wrong = sum(bool(trial.wrong) for trial in trials)
    hours = sum(trial.virtual_s for trial in trials) / 3600
    console.print(
        f"{len(trials)} seeds, {60 * len(trials) / wall_s:.0f} a minute, {hours:.1f} h of virtual time, "
        f"{sum(trial.views for trial in trials)} views, {sum(fired.values())} faults"
    )
    console.print(f"laws broken by {wrong} seeds" if wrong else "every law held in every seed")
    if never := [kind for kind in DEFAULT_KINDS if not fired[kind]]:
        console.print(f"never struck: {', '.join(never)}")


if __name__ == "__main__":
    asked.run(main)
