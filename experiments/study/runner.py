"""Runs cells in parallel processes.

A worker is a fresh process with one thread for arithmetic; it is given one cell at a time. A cell that raises
has failed, and so has one whose worker died under it; neither stops the others. An
interrupt ends the workers at once: what was finished is kept, what was under way is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import perf_counter

import msgspec

from experiments.study.bands import banded
from experiments.study.cell import AnyCell, Result
from hcsim.registry import load_plugin, loaded_plugins
from hcsim.workers import starting

Finished = Callable[[AnyCell, Result, float], None]
"""Told the cell, what it came to, and how many seconds that took."""


class _Worker:
    """A process, and what it is doing."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self.line, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_work, args=(theirs, loaded_plugins()), daemon=True)
        self.process.start()
        theirs.close()
        self.cell: AnyCell | None = None
        self._started_s = 0.0

    def give(self, cell: AnyCell) -> None:
        self.cell, self._started_s = cell, perf_counter()
        with suppress(OSError):  # it has died already; `take` finds out
            self.line.send_bytes(msgspec.json.encode(cell))

    def take(self) -> tuple[Result, float]:
        """What its cell came to, now that the line has something to say or has gone dead."""
        try:
            result = msgspec.json.decode(self.line.recv_bytes(), type=Result)
        except (EOFError, OSError):
            self.process.join()
            result = Result(error=f"the process that ran this cell ended with code {self.process.exitcode}")
        self.cell = None
        return result, perf_counter() - self._started_s

    def end(self) -> None:
        self.line.close()
        self.process.kill()
        self.process.join()


def run_cells(cells: Sequence[AnyCell], jobs: int, finished: Finished) -> None:
    """Run each, `jobs` at a time; `finished` hears of each when it is over, in any order."""
    todo = list(reversed(cells))
    workers: list[_Worker] = []
    try:
        with starting():  # an interrupt meanwhile is raised at its end, when they are in the list
            workers += [_Worker() for _ in range(min(jobs, len(todo)))]
        for worker in workers:
            worker.give(todo.pop())
        while busy := [worker for worker in workers if worker.cell is not None]:
            ready = wait([worker.line for worker in busy])
            for worker in [worker for worker in busy if worker.line in ready]:
                cell = worker.cell
                assert cell is not None
                finished(cell, *worker.take())
                if not worker.process.is_alive():
                    workers.remove(worker)
                    worker.end()
                    if todo:
                        with starting():
                            worker = _Worker()
                            workers.append(worker)
                if todo:
                    worker.give(todo.pop())
    finally:
        for worker in workers:
            worker.end()


def _work(line: Connection, plugins: Sequence[str]) -> None:
    """In the worker: cells in, results out, until the line closes."""
    for plugin in plugins:
        load_plugin(plugin)
    decoder = msgspec.json.Decoder(AnyCell)
    while True:
        try:
            cell = decoder.decode(line.recv_bytes())
        except (EOFError, OSError):  # the parent is gone
            return
        try:
            result = banded(cell)
        except Exception as error:
            result = Result(error=f"{type(error).__name__}: {error}")
        try:
            line.send_bytes(msgspec.json.encode(result))
        except OSError:
            return
