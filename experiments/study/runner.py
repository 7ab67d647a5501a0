"""Runs cells in a pool of processes: here, or on the workers of a Dask cluster.

A worker is a fresh process with one thread for arithmetic; it is given one cell at a time. A cell that raises
has failed, and so has one whose worker died under it; neither stops the others. An
interrupt ends local workers at once: what was finished is kept, what was under way is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

import msgspec

from experiments.study.bands import banded
from experiments.study.cell import AnyCell, Result
from hcsim.pool import Pool

ReportCell = Callable[[AnyCell, Result, float], None]
"""Called with the cell, its result, and how many seconds that took."""
_DECODER = msgspec.json.Decoder(AnyCell)


def run_cells(cells: Sequence[AnyCell], pool: Pool, finished: ReportCell) -> None:
    """Run each; `finished` is called for each when it is over, in any order."""
    by_task = {msgspec.json.encode(cell): cell for cell in cells}
    with closing(pool.run(answer_cell, iter(by_task))) as over:
        for each in over:
            result = Result(error=each.error) if each.answer is None else msgspec.json.decode(each.answer, type=Result)
            finished(by_task[each.task], result, each.seconds)


def answer_cell(task: bytes) -> bytes:
    """In a worker: run a cell."""
    return msgspec.json.encode(banded(_DECODER.decode(task)))
