"""Rank processes that stay: each runs one function after the other, in a process group that is made for it.

Importing torch takes seconds, so it is done once, in a server from which the ranks are forked.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import msgspec

LIMIT_S = 150.0
"""For one function on all ranks; what hangs is killed then, and the test fails."""
CALL_LIMIT_S = 90.0
"""The timeout of the groups."""

_PRELOADED = [
    "hcsim.engine.local",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
]
_context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")


class Meeting(msgspec.Struct, frozen=True):
    """Where and as whom a rank meets the others."""

    rank: int
    size: int
    backend: str
    file: str
    """Of a FileStore. With an empty backend, the function makes its groups itself."""

    def init(self, **options: Any) -> None:
        """Make the process group of all ranks."""
        import torch.distributed as dist

        limit = options.pop("timeout", timedelta(seconds=CALL_LIMIT_S))
        dist.init_process_group(
            self.backend, init_method=f"file://{self.file}", rank=self.rank, world_size=self.size, timeout=limit
        )
        if self.backend == "gloo":  # whoever leaves before the others are connected makes them fail, or wait for long
            dist.barrier()


class Failed(msgspec.Struct, frozen=True):
    """What a rank answers if its function raised."""

    text: str


class Killed(msgspec.Struct, frozen=True):
    """What stands for the answer of a rank that died."""


class Ranks:
    """The processes."""

    def __init__(self) -> None:
        _context.set_forkserver_preload(_PRELOADED)
        self._seats: list[tuple[Any, Connection] | None] = []

    def run(self, function: Callable[..., Any], *args: object, size: int, backend: str = "hcsim") -> list[Any]:
        """What the function returned, by rank; fails with the traceback of the first rank that raised."""
        answers = self.answers(function, *args, size=size, backend=backend)
        for rank, answer in enumerate(answers):
            if isinstance(answer, Failed):
                raise AssertionError(f"rank {rank} of {size}, {backend or 'own groups'}:\n{answer.text}")
        return answers

    def answers(self, function: Callable[..., Any], *args: object, size: int, backend: str = "hcsim") -> list[Any]:
        """The same, where ranks may fail or die: then `Failed` or `Killed` stands in their place."""
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            file = str(Path(folder) / "store")
            for rank in range(size):
                self._tidy(rank)
                self._pipe(rank).send((function, args, Meeting(rank, size, backend, file)))
            return self._collect(size)

    def close(self) -> None:
        """End the processes."""
        for rank in range(len(self._seats)):
            self._vacate(rank)

    def _collect(self, size: int) -> list[Any]:
        answers: list[Any] = [None] * size
        missing = {self._pipe(rank): rank for rank in range(size)}
        deadline_s = time.monotonic() + LIMIT_S
        while missing:
            ready = wait(list(missing), max(0.0, deadline_s - time.monotonic()))
            if not ready:
                late = sorted(missing.values())
                for rank in range(size):
                    self._vacate(rank)
                raise AssertionError(f"ranks {late} were not done after {LIMIT_S:g} s; the answers are {answers}")
            for pipe in ready:
                rank = missing.pop(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    self._vacate(rank)
                    answers[rank] = Killed()
        return answers

    def _pipe(self, rank: int) -> Connection:
        self._seats += [None] * (rank + 1 - len(self._seats))
        seat = self._seats[rank]
        if seat is None:
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(theirs,), name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()
            seat = self._seats[rank] = process, ours
        return seat[1]

    def _tidy(self, rank: int) -> None:
        """A process that has ended since its last task, by what that left behind, has its successor."""
        seat = self._seats[rank] if rank < len(self._seats) else None
        if seat is not None and (not seat[0].is_alive() or seat[1].poll()):
            self._vacate(rank)

    def _vacate(self, rank: int) -> None:
        if (seat := self._seats[rank]) is not None:
            self._seats[rank] = None
            seat[0].kill()
            seat[0].join()
            seat[1].close()


def _serve(pipe: Connection) -> None:
    import torch

    import hcsim.torch_backend  # noqa: F401

    warnings.simplefilter("ignore", FutureWarning)  # of names that torch wants to be rid of, and programs use
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    while True:
        try:
            function, args, meeting = pipe.recv()
        except EOFError:
            return
        pipe.send(_answer(function, args, meeting))


def _answer(function: Callable[..., Any], args: tuple[Any, ...], meeting: Meeting) -> Any:
    import torch.distributed as dist

    try:
        if not meeting.backend:
            return function(meeting, *args)
        meeting.init()
        return function(*args)
    except BaseException:
        return Failed(traceback.format_exc())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        # By this count torch names groups, alike on all ranks; a group that could not be made has been counted.
        dist.distributed_c10d._world.group_count = 0
