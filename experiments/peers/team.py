"""All ranks of one library: started once, then told turn by turn what to do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import BufferedRWPair
from pathlib import Path
from time import monotonic
from typing import TypeVar

import msgspec

from experiments.peers.peer import Job, Peer
from experiments.peers.rank import CONTROL, Ready, Report, Turn
from hcsim.errors import HcsimError

_ROOT = Path(__file__).parents[2]
_START_TIMEOUT_S = 120.0
_TURN_TIMEOUT_S = 180.0
_END_TIMEOUT_S = 10.0
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

Message = TypeVar("Message")
Process = subprocess.Popen[bytes]


class TeamFailed(HcsimError):
    """A library's ranks did not start, ended early, or took too long."""


class Team:
    """Running ranks of one library."""

    def __init__(self, peer: Peer, lines: list[BufferedRWPair], processes: list[Process], log: Path) -> None:
        self.peer = peer
        self._lines = lines
        self._processes = processes
        self._log = log
        self.idle_bytes = [self._read(stream, Ready).idle_bytes for stream in lines]
        """Of each rank, in the order of its reports."""

    def take(self, turn: Turn) -> list[Report]:
        """Let every rank take this turn. If one fails, all are ended: none may go on and disturb others."""
        command = msgspec.json.encode(turn) + b"\n"
        try:
            for stream in self._lines:
                stream.write(command)
                stream.flush()
            return [self._read(stream, Report) for stream in self._lines]
        except (TeamFailed, OSError) as failure:
            for process in self._processes:
                process.terminate()
            raise TeamFailed(str(failure)) from None

    def _read(self, stream: BufferedRWPair, kind: type[Message]) -> Message:
        try:
            line = stream.readline()
        except TimeoutError:
            raise TeamFailed(f"a rank has not answered for {_TURN_TIMEOUT_S:.0f} s") from None
        if not line:
            raise TeamFailed(f"a rank ended: {_last_words(self._log)}")
        return msgspec.json.decode(line, type=kind)


@contextmanager
def running(peer: Peer, ranks: int, algorithm: str) -> Iterator[Team]:
    """Start one process per rank, connected to each other; end them all on leaving."""
    with ExitStack() as stack:
        # Unix sockets have short names, so not below a long working directory.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hcsim-")))
        door = stack.enter_context(socket.socket(socket.AF_UNIX))
        door.bind(str(folder / CONTROL))
        door.listen(ranks)
        job = Job(peer.name, tuple(f"127.0.0.1:{port}" for port in _free_ports(ranks)), str(folder), algorithm)
        log = folder / "log"
        processes = _start(peer, job, log)
        stack.callback(_end, processes)
        lines = [stack.enter_context(stream) for stream in _accept(door, ranks, processes, log)]
        yield Team(peer, lines, processes, log)


def _start(peer: Peer, job: Job, log: Path) -> list[Process]:
    described = msgspec.json.encode(job).decode()
    module = [sys.executable, "-m", "experiments.peers.rank", described]
    commands = peer.launch([[*module, str(rank)] for rank in range(job.ranks)])
    with log.open("ab") as output:
        return [
            subprocess.Popen(
                command, cwd=_ROOT, env=os.environ | _ONE_THREAD, stdin=subprocess.DEVNULL, stdout=output, stderr=output
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


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it left no message"
