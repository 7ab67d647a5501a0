"""The fork server, whose children are the ranks: `python -m hcsim.scripts.fork_server DESCRIPTOR METHOD`.

By the method `fork` it imports torch, and the other modules that a script begins with, once and forks each rank from
there. That saves each rank seconds and a hundred megabytes. Where it is not safe to fork a process that has loaded
the system's frameworks (macOS), every rank is started afresh, by `spawn`.

It serves requests of the simulator. When the simulator is gone, it ends all ranks and itself. Each rank is a
session of its own, so that processes started by its script end with it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from typing import Literal, Protocol

import msgspec

from hcsim.scripts.environment import RankSpec, import_early
from hcsim.scripts.ipc import IpcClosed, IpcConnection
from hcsim.transport.messages import Schema

StartMethod = Literal["fork", "spawn"]
START_METHOD: StartMethod = "fork" if sys.platform.startswith("linux") else "spawn"
"""The method that is safe on this system."""
_MOST_DESCRIPTORS = 2
_GRACE_S = 5.0
"""Wall time that a process has to exit after its last message."""


class ForkRequest(msgspec.Struct, frozen=True, tag=True):
    """Start a rank; the descriptors of its socket and its shared memory are passed along. The answer is its
    process id."""

    spec: RankSpec


class EndRequest(msgspec.Struct, frozen=True, tag=True):
    """End a rank. The answer is its exit status, or the negated number of the signal that ended it."""

    pid: int
    at_once: bool
    """Kill it at once; otherwise it first has a grace period to exit by itself."""


REQUESTS: Schema[ForkRequest | EndRequest] = Schema(ForkRequest | EndRequest)
REPLIES: Schema[int] = Schema(int)


class RankChild(Protocol):
    """A rank's process. Its holder keeps it: a `Popen` that was dropped is reaped by the next one, and its status is
    lost."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Return the exit status, or the negated number of the signal, once it has ended."""

    def wait(self) -> int:
        """Return the same when it has ended."""


class ForkedRank:
    """A child that was forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        code = self._reap(0)
        assert code is not None
        return code

    def _reap(self, options: int) -> int | None:
        if self._code is None:
            ended, status = os.waitpid(self.pid, options)
            self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code


def main(line: socket.socket, method: StartMethod) -> None:
    """Serve until the simulator closes the connection."""
    if method == "fork":
        import hcsim.scripts.rank.script  # noqa: F401 (so that no rank has to)
    simulator = IpcConnection(line, REQUESTS, descriptors=_MOST_DESCRIPTORS)
    living: dict[int, RankChild] = {}
    try:
        while True:
            request = simulator.receive()
            if isinstance(request, ForkRequest):
                child = _begin(simulator, method, request.spec, *simulator.take_descriptors())
                living[child.pid] = child
                simulator.send(child.pid)
            else:
                simulator.send(_end(living[request.pid], at_once=request.at_once))
                del living[request.pid]
    except IpcClosed:
        pass
    finally:
        for pid in living:
            _kill(pid)


def _begin(
    simulator: IpcConnection[ForkRequest | EndRequest],
    method: StartMethod,
    spec: RankSpec,
    connection: int,
    arena: int,
) -> RankChild:
    fork = method == "fork"
    child = _fork(simulator, spec, connection, arena) if fork else _spawn(spec, connection, arena)
    os.close(connection)
    os.close(arena)
    return child


def _fork(simulator: IpcConnection[ForkRequest | EndRequest], spec: RankSpec, connection: int, arena: int) -> RankChild:
    import_early(spec.script)  # for the first rank; the others find the modules loaded
    pid = os.fork()
    if pid:
        return ForkedRank(pid)
    from hcsim.scripts.rank.script import run_script

    try:
        simulator.close()
        os.setsid()
        run_script(spec, connection, arena)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # whatever happens, this is no fork server


def _spawn(spec: RankSpec, connection: int, arena: int) -> RankChild:
    encoded = msgspec.json.encode(spec).decode()
    command = [sys.executable, "-m", "hcsim.scripts.rank.script", encoded, str(connection), str(arena)]
    return subprocess.Popen(command, pass_fds=[connection, arena], start_new_session=True)


def _end(child: RankChild, *, at_once: bool) -> int:
    until_s = time.monotonic() + (0.0 if at_once else _GRACE_S)
    while (code := child.poll()) is None and time.monotonic() < until_s:
        time.sleep(0.002)
    _kill(child.pid)
    if code is None:
        with suppress(OSError):
            os.kill(child.pid, signal.SIGKILL)  # it may not lead its session yet
        code = child.wait()
    return code


def _kill(pid: int) -> None:
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), "fork" if sys.argv[2] == "fork" else "spawn")
    os._exit(0)  # to unload torch takes long, and changes nothing
