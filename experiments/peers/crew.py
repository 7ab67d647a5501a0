"""Processes that are started once, connected, and then told turn by turn what to do.

Commands go over a Unix socket, one line of JSON each: launchers such as mpirun keep stdin and stdout for themselves.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import BufferedRWPair
from pathlib import Path
from time import monotonic
from typing import TypeVar

import msgspec

from experiments.peers.peer import Command
from hcsim.errors import HcsimError
from hcsim.workers import ONE_THREAD

CONTROL = "control"
"""The name of the crew's socket in its folder."""
_ROOT = Path(__file__).parents[2]
_START_TIMEOUT_S = 120.0
_TURN_TIMEOUT_S = 180.0
_END_TIMEOUT_S = 10.0

Message = TypeVar("Message")
Process = subprocess.Popen[bytes]


class TeamFailed(HcsimError):
    """A library's ranks did not start, ended early, or took too long."""


class Crew:
    """Running processes."""

    def __init__(self, lines: Sequence[BufferedRWPair], processes: Sequence[Process], log: Path) -> None:
        self._lines = lines
        self._processes = processes
        self._log = log

    def take(self, turn: msgspec.Struct, kind: type[Message]) -> list[Message]:
        """Let every process take this turn. If one fails, all are ended: none may go on and disturb others."""
        command = msgspec.json.encode(turn) + b"\n"
        try:
            for stream in self._lines:
                stream.write(command)
                stream.flush()
            return self.hear(kind)
        except (TeamFailed, OSError) as failure:
            for process in self._processes:
                process.terminate()
            raise TeamFailed(str(failure)) from None

    def hear(self, kind: type[Message]) -> list[Message]:
        """What each of them says next."""
        return [self._read(stream, kind) for stream in self._lines]

    def _read(self, stream: BufferedRWPair, kind: type[Message]) -> Message:
        try:
            line = stream.readline()
        except TimeoutError:
            raise TeamFailed(f"a rank has not answered for {_TURN_TIMEOUT_S:.0f} s") from None
        if not line:
            raise TeamFailed(f"a rank ended: {_last_words(self._log)}")
        return msgspec.json.decode(line, type=kind)


@contextmanager
def working(size: int, commands: Callable[[Path], list[Command]]) -> Iterator[Crew]:
    """Start the processes, of which `size` report at the socket in the folder; end them all on leaving."""
    with ExitStack() as stack:
        # Unix sockets have short names, so not below a long working directory.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hcsim-")))
        door = stack.enter_context(socket.socket(socket.AF_UNIX))
        door.bind(str(folder / CONTROL))
        door.listen(size)
        log = folder / "log"
        processes = _start(commands(folder), log)
        stack.callback(_end, processes)
        lines = [stack.enter_context(stream) for stream in _accept(door, size, processes, log)]
        yield Crew(lines, processes, log)


def module(name: str, *arguments: str) -> Command:
    """The command line of one of our modules."""
    return [sys.executable, "-m", name, *arguments]


def _start(commands: list[Command], log: Path) -> list[Process]:
    with log.open("ab") as output:
        return [
            subprocess.Popen(
                command, cwd=_ROOT, env=os.environ | ONE_THREAD, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            for command in commands
        ]


def _accept(door: socket.socket, ranks: int, processes: list[Process], log: Path) -> Iterator[BufferedRWPair]:
    deadline_s = monotonic() + _START_TIMEOUT_S
    door.settimeout(0.2)
    accepted = 0
    while accepted < ranks:
        try:
            connection, _ = door.accept()
        except TimeoutError:
            if any(process.poll() is not None for process in processes):
                raise TeamFailed(f"a rank ended before it joined: {_last_words(log)}") from None
            if monotonic() > deadline_s:
                raise TeamFailed(f"ranks did not start within {_START_TIMEOUT_S:.0f} s") from None
            continue
        accepted += 1
        with connection:
            connection.settimeout(_TURN_TIMEOUT_S)
            yield connection.makefile("rwb")


def _end(processes: list[Process]) -> None:
    """Ranks end by themselves once their sockets are closed; those that hang are made to."""
    for process in processes:
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
    for process in processes:
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_ports(count: int) -> list[int]:
    """Ports on loopback that nobody has now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it left no message"
