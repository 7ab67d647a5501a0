"""The ranks' processes, as the simulator sees them: started, ended, never left behind.

All are children of one nursery (see there), which ends them when we are gone, however that came about.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from types import TracebackType

from hcsim.errors import HcsimError
from hcsim.scripts.arena import Mapped, shared_file
from hcsim.scripts.conversation import Conversation, HungUp, Message
from hcsim.scripts.nursery import Birth, End, Seat, receive, transmit

_ALONE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""One thread for each rank: the order in which several add up is not always the same."""


class Process:
    """One rank's process, and our ways to it."""

    def __init__(self, pid: int, conversation: Conversation, arena: Mapped) -> None:
        self.pid = pid
        self.conversation = conversation
        self.arena = arena


class Processes:
    """All of them."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._nursery = subprocess.Popen(
                [sys.executable, "-m", "hcsim.scripts.nursery", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={"PYTHONHASHSEED": "0", **os.environ, **_ALONE},
                start_new_session=True,  # an interrupt is for us, and we end them
            )
        self._line = ours
        self._living: dict[int, Process] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for process in tuple(self._living.values()):
            self.end(process, at_once=True)
        self._line.close()
        self._nursery.wait()

    def start(self, seat: Seat) -> Process:
        """A process for this seat."""
        ours, theirs = socket.socketpair()
        arena = shared_file()
        try:
            with theirs:
                pid = self._ask(Birth(seat), (theirs.fileno(), arena))
        except BaseException:
            ours.close()
            os.close(arena)
            raise
        process = self._living[pid] = Process(pid, Conversation(ours, Message), Mapped(arena))
        return process

    def end(self, process: Process, *, at_once: bool) -> int:
        """End it, if it has not ended by itself, and all that it started; its exit status, or minus the signal."""
        if self._living.pop(process.pid, None) is None:
            return 0
        process.conversation.close()
        process.arena.close()
        try:
            return self._ask(End(process.pid, at_once))
        except HcsimError:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            return -signal.SIGKILL

    def _ask(self, what: Birth | End, descriptors: tuple[int, ...] = ()) -> int:
        try:
            transmit(self._line, what, descriptors)
            answer, _ = receive(self._line, int)
        except (HungUp, OSError):
            raise HcsimError("the process that starts the ranks has ended: look above for its reason") from None
        return int(answer)
