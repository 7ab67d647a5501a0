"""Time that passes by itself."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

from hcsim.runtime.clock import Limit


class RealClock:
    """The machine's monotonic clock."""

    def __init__(self) -> None:
        self._limits: _Limits | None = None

    def now(self) -> float:
        """Seconds since an unspecified moment, never going back."""
        return time.monotonic()

    def elapsed(self) -> float:
        """The same: it never jumps."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait; zero or less lets every other ready task run once."""
        await asyncio.sleep(max(seconds, 0.0))

    def timeout(self, seconds: float | None) -> Limit:
        """As `asyncio.timeout`."""
        if seconds is None or not seconds > 0:
            return asyncio.timeout(seconds)
        loop = asyncio.get_running_loop()
        if self._limits is None or self._limits.loop is not loop:
            self._limits = _Limits(loop)
        return _Limit(self._limits, seconds)


class _Limits:
    """The time limits of one event loop, behind one timer: nearly all of them are over long before they are due, and to
    set and to cancel a timer costs more than all else that they need. There are tens of them, so they need no order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._due_s: dict[_Limit, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        """For the earliest of them, or for an earlier one that is over."""

    def add(self, limit: _Limit, due_s: float) -> None:
        """Call `expire` then, unless it is removed before."""
        self._due_s[limit] = due_s
        if self._timer is None or due_s < self._timer.when():
            self._set(due_s)

    def remove(self, limit: _Limit) -> None:
        """It is over."""
        self._due_s.pop(limit, None)

    def _set(self, due_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_at(due_s, self._look)

    def _look(self) -> None:
        assert self._timer is not None
        now_s = max(self.loop.time(), self._timer.when())  # the loop may call a clock's tick too early
        self._timer = None
        try:
            late = [limit for limit, due_s in self._due_s.items() if due_s <= now_s]
            for limit in sorted(late, key=self._due_s.__getitem__):  # a machine that stood still finds several
                del self._due_s[limit]
                limit.expire()
        finally:  # whatever one of them waits for may refuse to be cancelled
            if self._due_s:
                self._set(min(self._due_s.values()))


class _Limit:
    """One time limit, around one task's work."""

    __slots__ = ("_cancelled_before", "_expired", "_limits", "_seconds", "_task")

    def __init__(self, limits: _Limits, seconds: float) -> None:
        self._limits = limits
        self._seconds = seconds
        self._expired = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelled_before = task.cancelling()
        self._limits.add(self, self._limits.loop.time() + self._seconds)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._expired:
            self._limits.remove(self)
        elif self._task.uncancel() <= self._cancelled_before and kind is asyncio.CancelledError:
            raise TimeoutError from error  # nobody else has cancelled it as well

    def expired(self) -> bool:
        """See `runtime.clock.Limit.expired`."""
        return self._expired

    def expire(self) -> None:
        """It has taken too long."""
        self._expired = True
        self._task.cancel()
