"""Inputs that are nearly right, for everything that reads bytes from outside: `python -m experiments.hostile`.

    python -m experiments.hostile --inputs 10000000 --workers 8     all parsers
    python -m experiments.hostile --only "trust list,scenario"      some of them
    python -m experiments.hostile --only checkpoint --input 4711    one input again, and what it does

An input is refused by an `HcsimError`, or taken. Findings are everything else: other errors, numbers that are not
finite, more than 10 s of a processor's time, more than 64 MiB of memory, a process that dies. The exit status is then
1. Each input follows from the seed, the parser's name and the input's number alone, whatever the number of workers.
"""

from __future__ import annotations

import os
import traceback
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from experiments import asked
from experiments.hostile.campaign import Shard, Tally, by_name, one_input, run_all, shards

console = Console(soft_wrap=True)
MOST_SHOWN = 20
"""Findings of one kind that are alike are one line; so many lines are shown."""


def main(
    inputs: Annotated[int, typer.Option(min=1, help="How many, of all parsers together.")] = 100_000,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; left out, one for each core.")] = None,
    seed: Annotated[int, typer.Option(help="Another one gives other inputs.")] = 1,
    only: Annotated[str | None, typer.Option(help="Only these parsers, with commas.")] = None,
    input: Annotated[int | None, typer.Option(min=0, help="Only that input of one parser.")] = None,
) -> None:
    """Look for inputs that are neither refused nor taken."""
    names = asked.chosen(only, by_name()) if only else list(by_name())
    if input is not None:
        raise typer.Exit(_show(names, seed, input))
    tallies = dict.fromkeys(names, Tally())
    for shard, tally in run_all(shards(names, seed, inputs), workers or os.cpu_count() or 1):
        tallies[shard.name] = tallies[shard.name].plus(tally)
    _print(tallies)
    raise typer.Exit(any(tally.findings for tally in tallies.values()))


def _show(names: list[str], seed: int, number: int) -> int:
    if len(names) != 1:
        raise typer.BadParameter("of which parser? Name it with --only", param_hint="--input")
    data, error = one_input(Shard(names[0], seed, number, number + 1))
    console.print(f"{len(data)} bytes: {data!r}", markup=False, highlight=False)
    told = "it is taken" if error is None else "".join(traceback.format_exception(error))
    console.print(told, markup=False, highlight=False)
    return 0


def _print(tallies: dict[str, Tally]) -> None:
    table = Table("parser")
    for heading in ("inputs", "refused", "accepted", "findings"):
        table.add_column(heading, justify="right")
    total = Tally()
    for name, tally in [*tallies.items()]:
        total = total.plus(tally)
        table.add_row(name, *_figures(tally))
    table.add_section()
    table.add_row("all", *_figures(total))
    console.print(table)
    for name, tally in tallies.items():
        for what, (number, count) in list(tally.findings.items())[:MOST_SHOWN]:
            often = f" and {count - 1} more" if count > 1 else ""
            console.print(f"{name}: {what}: input {number}{often}", markup=False, highlight=False)


def _figures(tally: Tally) -> list[str]:
    found = sum(count for _, count in tally.findings.values())
    return [f"{number:,}" for number in (tally.inputs, tally.refused, tally.accepted, found)]


if __name__ == "__main__":
    asked.run(main)
