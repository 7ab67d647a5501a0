"""A process that does tasks, one at a time.

It is a fresh one, with one thread for arithmetic. What goes wrong in a task is its error, and so is the death of the
process under it. The process ends when its line is closed, so it does not outlive its parent by more than a task.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from time import perf_counter
from typing import Protocol

import msgspec

from hcsim.pool import Finished, TaskFunction
from hcsim.registry import load_plugin, loaded_plugins
from hcsim.workers import ONE_THREAD


class _Order(msgspec.Struct):
    module: str
    function: str
    task: bytes


class _Answer(msgspec.Struct):
    answer: bytes | None
    error: str = ""


class _Process(Protocol):
    def kill(self) -> None: ...

    def reap(self) -> int | None:
        """Wait for the end; return the exit code."""


class TaskProcess:
    """A process, and what it is doing."""

    def __init__(self, line: Connection, process: _Process) -> None:
        self.line = line
        self.task: bytes | None = None
        self.is_alive = True
        self._process = process
        self._began_s = 0.0

    def give(self, function: TaskFunction, task: bytes) -> None:
        self.task, self._began_s = task, perf_counter()
        order = _Order(function.__module__, function.__qualname__, task)
        with suppress(OSError):  # it has died already; `take` finds out
            self.line.send_bytes(msgspec.msgpack.encode(order))

    def take(self) -> Finished:
        """Return what its task came to, now that the line has something to say or has gone dead."""
        assert self.task is not None
        task, self.task = self.task, None
        try:
            answer = msgspec.msgpack.decode(self.line.recv_bytes(), type=_Answer)
        except (EOFError, OSError):
            self.is_alive = False
            answer = _Answer(None, f"the process that ran this cell ended with code {self._process.reap()}")
        return Finished(task, answer.answer, answer.error, perf_counter() - self._began_s)

    def end(self) -> None:
        self.line.close()
        self._process.kill()
        self._process.reap()


class _Spawned:
    def __init__(self, process: BaseProcess) -> None:
        self.kill = process.kill
        self._process = process

    def reap(self) -> int | None:
        self._process.join()
        return self._process.exitcode


def spawned_process() -> TaskProcess:
    """Start a process by multiprocessing; its caller is `workers.starting`."""
    context = get_context("spawn")
    line, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, loaded_plugins()), daemon=True)
    process.start()
    theirs.close()
    return TaskProcess(line, _Spawned(process))


class _Executed:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.kill = process.kill
        self.reap = process.wait


def executed_process(plugins: Sequence[str]) -> TaskProcess:
    """Start a process from any thread of any process, also from one that multiprocessing forbids to have children."""
    line, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "hcsim.pool.process", str(theirs.fileno()), *plugins],
            pass_fds=[theirs.fileno()], env={**os.environ, **ONE_THREAD}, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    return TaskProcess(line, _Executed(process))


def _serve(line: Connection, plugins: Sequence[str]) -> None:
    """In the process: tasks in, answers out, until the line closes."""
    for plugin in plugins:
        load_plugin(plugin)
    while True:
        try:
            order = msgspec.msgpack.decode(line.recv_bytes(), type=_Order)
        except (EOFError, OSError):  # the parent is gone
            return
        try:
            function: TaskFunction = getattr(import_module(order.module), order.function)
            answer = _Answer(function(order.task))
        except Exception as error:
            answer = _Answer(None, f"{type(error).__name__}: {error}")
        try:
            line.send_bytes(msgspec.msgpack.encode(answer))
        except OSError:
            return


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve(Connection(int(sys.argv[1])), sys.argv[2:])
