"""The fork server, whose children are the ranks: `python -m hcsim.scripts.fork_server DESCRIPTOR`.

It imports torch, and the other modules that a script begins with, once and forks each rank from there. That
saves each rank seconds and a hundred megabytes. Where it is not safe to fork a process that has loaded the
system's frameworks (macOS), every rank is started afresh instead.

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

import msgspec

from hcsim.scripts.environment import RankSpec, import_early
from hcsim.scripts.ipc import IpcClosed, IpcConnection
from hcsim.transport.messages import Schema

FORKS = sys.platform.startswith("linux")
_MOST_DESCRIPTORS = 2
_GRACE_S = 5.0
"""Wall time that a process has to exit after its last message."""


class ForkRequest(msgspec.Struct, frozen=True, tag=True):
    """Start a rank; the descriptors of its socket and its shared memory are passed along. The answer is its
    process id."""

    seat: RankSpec


class EndRequest(msgspec.Struct, frozen=True, tag=True):
    """End a rank. The answer is its exit status, or the negated number of the signal that ended it."""

    pid: int
    at_once: bool
    """Kill it at once; otherwise it first has a grace period to exit by itself."""


REQUESTS: Schema[ForkRequest | EndRequest] = Schema(ForkRequest | EndRequest)
REPLIES: Schema[int] = Schema(int)


def main(line: socket.socket) -> None:
    """Serve until the simulator closes the connection."""
    if FORKS:
        import hcsim.scripts.rank.script  # noqa: F401 (so that no rank has to)
    simulator = IpcConnection(line, REQUESTS, descriptors=_MOST_DESCRIPTORS)
    living: dict[int, None] = {}
    try:
        while True:
            request = simulator.hear()
            if isinstance(request, ForkRequest):
                pid = _begin(simulator, request.seat, *simulator.take_descriptors())
                living[pid] = None
                simulator.say(pid)
            else:
                code = _end(request)
                del living[request.pid]
                simulator.say(code)
    except IpcClosed:
        pass
    finally:
        for pid in living:
            _kill(pid)


def _begin(simulator: IpcConnection[ForkRequest | EndRequest], seat: RankSpec, conversation: int, arena: int) -> int:
    pid = _fork(simulator, seat, conversation, arena) if FORKS else _spawn(seat, conversation, arena)
    os.close(conversation)
    os.close(arena)
    return pid


def _fork(simulator: IpcConnection[ForkRequest | EndRequest], seat: RankSpec, conversation: int, arena: int) -> int:
    import_early(seat.script)  # for the first rank; the others find the modules loaded
    pid = os.fork()
    if pid:
        return pid
    from hcsim.scripts.rank.script import run_script

    try:
        simulator.close()
        os.setsid()
        run_script(seat, conversation, arena)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # whatever happens, this is no fork server


def _spawn(seat: RankSpec, conversation: int, arena: int) -> int:
    encoded = msgspec.json.encode(seat).decode()
    command = [sys.executable, "-m", "hcsim.scripts.rank.script", encoded, str(conversation), str(arena)]
    return subprocess.Popen(command, pass_fds=[conversation, arena], start_new_session=True).pid


def _end(request: EndRequest) -> int:
    pid = request.pid
    until_s = time.monotonic() + (0.0 if request.at_once else _GRACE_S)
    ended, status = os.waitpid(pid, os.WNOHANG)
    while not ended and time.monotonic() < until_s:
        time.sleep(0.002)
        ended, status = os.waitpid(pid, os.WNOHANG)
    _kill(pid)
    if not ended:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)  # it may not lead its session yet
        _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _kill(pid: int) -> None:
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # to unload torch takes long, and changes nothing
