"""What a process that works in a cluster needs of its system: a machine that stays awake, and enough open files.

macOS puts a machine to sleep that nobody types on, also while it computes. A power assertion prevents that, and
`caffeinate` holds one: `-i` against sleep for want of input, `-s` against any sleep on mains power. It ends with the
work, and `-w` ends it with the process if that is killed. A closed lid still means sleep. Linux is left alone: servers
do not sleep, and a desktop's settings are its owner's.

macOS begins each process with 256 open files. The hard limit is much higher, or none, but the system refuses a soft one
above OPEN_MAX, which is 10240.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

MOST_DESCRIPTORS = 10240
_END_S = 2.0


def reachable_descriptors(soft: int, hard: int) -> int:
    """Return how many files may be open at once after `raise_descriptors`, by the limits before; negative: no limit."""
    if soft < 0:
        return soft
    return max(soft, MOST_DESCRIPTORS if hard < 0 else min(hard, MOST_DESCRIPTORS))


def raise_descriptors() -> None:
    """Raise the soft limit of open files as far as needed and allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if (enough := reachable_descriptors(soft, hard)) != soft:
        with suppress(OSError, ValueError):  # less than a system of its own rules allows: what there is has to do
            resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))


class PowerAssertion:
    """Keeps the machine awake for the work of this process, however many parts it has. A forked child holds one of its
    own, so the machine stays awake until the last process has ended its work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._caffeinate: subprocess.Popen[bytes] | None = None
        os.register_at_fork(after_in_child=self._leave_to_the_parent)

    @contextmanager
    def held(self, tell: Callable[[str], None], system: str | None = None) -> Iterator[None]:
        """Keep the machine awake inside this context, where the system would put it to sleep. `tell` is called, for the
        first holder, with what was done or why it could not be. `system` is `sys.platform`, left out: this one."""
        if (system or sys.platform) != "darwin":
            yield
            return
        holder = os.getpid()
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                self._begin(tell)
        try:
            yield
        finally:
            if os.getpid() == holder:  # a child that was forked inside leaves it to its parent
                with self._lock:
                    self._holders -= 1
                    if not self._holders:
                        self._end()

    def _leave_to_the_parent(self) -> None:
        self._lock, self._holders = threading.Lock(), 0
        parents, self._caffeinate = self._caffeinate, None
        if parents is not None:
            parents.returncode = 0  # only its parent can wait for it

    def _begin(self, tell: Callable[[str], None]) -> None:
        command = ("caffeinate", "-is", "-w", str(os.getpid()))
        try:
            self._caffeinate = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt is for us, and we may go on for a while
            )  # fmt: skip
        except OSError as error:
            tell(f"this machine may fall asleep while it works: caffeinate cannot be started: {error.strerror}")
            return
        tell("this machine stays awake while it works, unless its lid is closed (caffeinate -is)")

    def _end(self) -> None:
        process, self._caffeinate = self._caffeinate, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


_awake = PowerAssertion()


@contextmanager
def at_work(tell: Callable[[str], None] = lambda what: None) -> Iterator[None]:
    """Have enough open files, and a machine that stays awake, inside this context."""
    raise_descriptors()
    with _awake.held(tell):
        yield
