"""The interface of a host's clock, and deadlines, failing futures, repeated events and rate limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Protocol

from hcsim.errors import DeadlineExceeded, HcsimError


class Limit(Protocol):
    """A time limit around a task's work, as returned by `asyncio.timeout`."""

    async def __aenter__(self) -> object: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """End the limit; raise `TimeoutError` if the work was cancelled by it."""

    def expired(self) -> bool:
        """Return whether the limit was exceeded. The body may raise another `TimeoutError` itself."""


class Clock(Protocol):
    """A host's clock. Hosts' clocks need not agree: a virtual one can drift and jump."""

    def now(self) -> float:
        """Return the seconds since a fixed origin of this host."""

    def elapsed(self) -> float:
        """Return a monotonic time, for measuring durations. It stands still while the machine sleeps."""

    def asleep(self) -> float:
        """Return for how long the machine has slept, since a fixed moment."""

    async def sleep(self, seconds: float) -> None:
        """Sleep; zero or less lets every other ready task run once."""

    def timeout(self, seconds: float | None) -> Limit:
        """As `asyncio.timeout`: cancel the body after that time and raise `TimeoutError`."""

    def postpone(self, limit: Limit, seconds: float) -> None:
        """Let a limit of this clock end no earlier than this many seconds from now, unless it has expired or its body
        has ended."""


@asynccontextmanager
async def within(clock: Clock, seconds: float | None, late: str) -> AsyncIterator[None]:
    """Cancel the body after this time and raise `DeadlineExceeded` with this message.

    A `DeadlineExceeded` from within the body takes precedence, since it is more specific."""
    limit = clock.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if isinstance(error, HcsimError) or not limit.expired():
            raise
        raise DeadlineExceeded(late) from None


def fail_future(waiting: asyncio.Future[Any], error: HcsimError) -> None:
    """Fail the future, unless it is done. No warning is logged if no task waits for it."""
    if not waiting.done():
        waiting.set_exception(error)
        waiting.exception()  # or asyncio would complain that it was never retrieved


class BroadcastEvent:
    """A repeating event with several waiters."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    async def next(self) -> None:
        """Wait for the next occurrence."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    def tell(self) -> None:
        """Notify all waiters."""
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)


class TokenBucket:
    """Allows `rate` actions a second, and a `burst` of them at once after idle time.

    It has no clock: `now_s` is passed with every call."""

    def __init__(self, rate: float, burst: int) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = float(burst)
        self._at_s = 0.0

    def take(self, now_s: float) -> bool:
        """Return whether one more action is allowed now; if so, count it."""
        self._tokens = min(self._burst, self._tokens + max(0.0, now_s - self._at_s) * self._rate)
        self._at_s = now_s
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def wait_s(self, now_s: float) -> float:
        """Return the time until one more action is allowed."""
        tokens = self._tokens + max(0.0, now_s - self._at_s) * self._rate
        return max(0.0, (1.0 - tokens) / self._rate)
