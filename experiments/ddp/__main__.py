"""DDP on hcsim beside gloo, interleaved in one run.

    python -m experiments.ddp --ranks 2,4 --json ddp.json

Over loopback: the time of a step of a model with 25 million parameters, and the CPU time of all ranks in it. All have
one thread for arithmetic and no binding to cores; a step is timed after a barrier, and takes as long as its slowest
rank. Ratios are hcsim's over gloo's: below one, hcsim is faster.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from experiments import asked
from experiments.allreduce import parse_ranks
from experiments.ddp import loopback


def main(
    ranks: Annotated[str, typer.Option(help="Numbers of processes.")] = "2,4",
    repeat: Annotated[int, typer.Option(min=1, max=1000, help="Rounds in which both take a turn of three steps.")] = 8,
    json_file: Annotated[str | None, typer.Option("--json", help="Write one row per cell to this file.")] = None,
) -> None:
    """torch's DistributedDataParallel on hcsim beside gloo, interleaved in one run."""
    asked.check_json(json_file)
    rows = []
    for count in parse_ranks(ranks):
        rows.append(loopback.measure(count, repeat))
        asked.write_json(json_file, rows)
    Console().print(loopback.table(rows))


if __name__ == "__main__":
    typer.run(main)
