"""Clusters under faults: a search through random ones, and how soon training goes on after a loss.

    python -m experiments.faults --seeds 1000         what `hcsim fuzz` does, and its table of coverage
    python -m experiments.faults --seed 17            one of them, with all that its nodes say
    python -m experiments.faults --figure             how long until a loss is noticed, and until training goes on

What a seed is, what must hold, and how a finding is made small: hcsim/fuzz/ and docs/howto/fuzz.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from experiments import asked
from hcsim.cli.errors import errors_told
from hcsim.cli.fuzz import FuzzOptions, replay_seed, search
from hcsim.fuzz.search import cores

FINDINGS = Path("findings")


def main(
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds, from --first on; left out, 100.")] = None,
    first: Annotated[int | None, typer.Option(min=0, help="The first seed; left out, 1.")] = None,
    seed: Annotated[int | None, typer.Option(help="Only this one; tells all that its nodes say.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; left out, one for each core.")] = None,
    figure: Annotated[bool, typer.Option("--figure", help="Draw detection and recovery against heartbeats.")] = False,
    out: Annotated[Path | None, typer.Option(help="Where the figure goes; left out, results/.")] = None,
    json: Annotated[str | None, typer.Option(help="Write all that was found to this file.")] = None,
    dask: Annotated[
        str | None, typer.Option(help="Run on a Dask cluster: tcp://host:8786, or ssh:host,host to start one.")
    ] = None,
) -> None:
    """Hold random clusters to what must always hold."""
    many = {"--seeds": seeds, "--first": first, "--json": json, "--dask": dask}
    if figure:
        asked.refuse("beside --figure", {"--seed": seed, **many})
        from experiments.faults.figure import draw

        folder = out or Path("results")
        asked.make_folder(folder)
        draw(folder, workers or cores())
        return
    asked.refuse("without --figure", {"--out": out})
    if seed is not None:
        asked.refuse("beside --seed", {**many, "--workers": workers})
        held = replay_seed(seed, shrink=True, out=FINDINGS)
    else:
        asked.check_json(json)
        file = None if json is None else Path(json)
        start = 1 if first is None else first
        with errors_told():
            held = search(FuzzOptions(seeds, start, None, workers, True, None, FINDINGS, file, dask))
    if not held:
        raise typer.Exit(1)


if __name__ == "__main__":
    asked.run(main)
