"""DDP on hcsim beside gloo, interleaved in one run.

    python -m experiments.ddp --ranks 2,4 --json ddp.json
    sudo python -m experiments.ddp --shaped

Over loopback: the time of a step of a model with 25 million parameters, the median and the least, and the CPU time of
all ranks in it. All have one thread for arithmetic and no binding to cores; a step is timed after a barrier, and takes
as long as its slowest rank. Over links of 100 Mbit/s (network namespaces; Linux, root): the time to a loss on digits,
hcsim's with compressed gradients, gloo's with dense ones. Ratios are hcsim's over gloo's: below one, hcsim is faster.
"""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer
from rich.console import Console

from experiments import asked
from experiments.allreduce import parse_ranks
from experiments.ddp import loopback, shaped
from tests.real.namespaces import obstacle

MBIT = 100


def main(
    ranks: Annotated[str, typer.Option(help="Numbers of processes.")] = "2,4",
    repeat: Annotated[int, typer.Option(min=1, max=1000, help="Rounds in which both take a turn.")] = 8,
    slow: Annotated[bool, typer.Option("--shaped", help="Over links of 100 Mbit/s instead, to a loss.")] = False,
    compression: Annotated[str, typer.Option(help="hcsim's, over slow links.")] = "topk:0.02+ef",
    json_file: Annotated[str | None, typer.Option("--json", help="Write one row per cell to this file.")] = None,
) -> None:
    """torch's DistributedDataParallel on hcsim beside gloo, interleaved in one run."""
    asked.check_json(json_file)
    if slow and (why_not := obstacle()):
        raise typer.BadParameter(f"left out: {why_not}", param_hint="--shaped")
    # Namespaces and ranks are removed on the way out, also when somebody ends us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    rows = []
    try:
        for count in parse_ranks(ranks):
            rows.append(shaped.measure(count, MBIT, repeat, compression) if slow else loopback.measure(count, repeat))
            asked.write_json(json_file, rows)
    finally:  # a full disk, or Ctrl-C, costs only what has not been measured yet
        if rows:
            Console().print(shaped.table(rows) if slow else loopback.table(rows))


if __name__ == "__main__":
    asked.run(main)
