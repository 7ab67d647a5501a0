"""Calls on tensors that lie on a device: started when the device has copied them, without holding up the program.

The copies into host memory are queued on the device's stream like any other work. A thread waits for them in the order
in which the calls were made, and starts each. From the first such call on, all calls of the group go through it: they
have to stay in order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from hcsim.errors import DeadlineExceeded
from hcsim.torch_backend.engine import Pending
from hcsim.torch_backend.tensors import Flat


class StagedPending:
    """A call that will be started."""

    def __init__(self, started: Future[Pending]) -> None:
        self._started = started

    def done(self) -> bool:
        """Whether it is over."""
        if not self._started.done():
            return False
        return self._started.exception() is not None or self._started.result().done()

    def wait(self, timeout_s: float | None) -> int:
        """See `Pending.wait`."""
        try:
            pending = self._started.result(timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(f"the device had not copied the tensors after {timeout_s:g} s; it goes on") from None
        return pending.wait(timeout_s)

    def on_done(self, act: Callable[[], None]) -> None:
        """See `Pending.on_done`."""

        def follow(started: Future[Pending]) -> None:
            if started.exception() is None:
                started.result().on_done(act)
            else:
                act()

        self._started.add_done_callback(follow)


class Staging:
    """The calls of one group, in order."""

    def __init__(self) -> None:
        self._worker: ThreadPoolExecutor | None = None
        self._guard = threading.Lock()

    def start(self, flats: Sequence[Flat], begin: Callable[[], Pending]) -> Pending:
        """Begin at once where nothing lies on a device and nobody waits for one."""
        with self._guard:
            if self._worker is None:
                if not any(flat.staged for flat in flats):
                    return begin()
                self._worker = ThreadPoolExecutor(1, "hcsim staging")
            return StagedPending(self._worker.submit(_begin_when_copied, flats, begin))

    def close(self) -> None:
        """Start what is still to be started, and no more."""
        with self._guard:
            if self._worker is not None:
                self._worker.shutdown()
                self._worker = None


def _begin_when_copied(flats: Sequence[Flat], begin: Callable[[], Pending]) -> Pending:
    for flat in flats:
        flat.copied()
    return begin()
