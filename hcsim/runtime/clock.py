"""Time, as a host sees it; waiting for what may never come, and no longer being waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Protocol

from hcsim.errors import DeadlineExceeded, HcsimError


class Limit(Protocol):
    """A time limit around a task's work, as `asyncio.timeout` gives."""

    async def __aenter__(self) -> object:
        """It begins."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """It is over: raises `TimeoutError` if the work was cancelled for it."""

    def expired(self) -> bool:
        """Whether the work took too long. Another `TimeoutError` may come from within."""


class Clock(Protocol):
    """A host's clock. Hosts' clocks need not agree: a virtual one can drift and jump."""

    def now(self) -> float:
        """Seconds since some fixed moment of this host's own."""

    def elapsed(self) -> float:
        """The same without jumps, for measuring how long something takes."""

    async def sleep(self, seconds: float) -> None:
        """Wait; zero or less lets every other ready task run once."""

    def timeout(self, seconds: float | None) -> Limit:
        """As `asyncio.timeout`: cancels the body after that time and raises `TimeoutError`."""


@asynccontextmanager
async def within(clock: Clock, seconds: float | None, late: str) -> AsyncIterator[None]:
    """What takes longer is cancelled, and raises `DeadlineExceeded` in these words.

    Something in it that has a deadline of its own knows better what was late."""
    limit = clock.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if isinstance(error, HcsimError) or not limit.expired():
            raise
        raise DeadlineExceeded(late) from None


def disappoint(waiting: asyncio.Future[Any], error: HcsimError) -> None:
    """Tell who waits for something, unless it has come, that it will not. If nobody does, nobody has to know."""
    if not waiting.done():
        waiting.set_exception(error)
        waiting.exception()  # or asyncio would complain that it was never retrieved


class News:
    """Something that happens again and again, and that several wait for."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    async def next(self) -> None:
        """Returns when it has happened once more."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    def tell(self) -> None:
        """It has happened."""
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)


class TokenBucket:
    """Allows `rate` actions a second, and `burst` of them at once after a quiet time.

    It has no clock: `now_s` comes with every call."""

    def __init__(self, rate: float, burst: int) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = float(burst)
        self._at_s = 0.0

    def take(self, now_s: float) -> bool:
        """Whether one more is allowed now; if so, it counts."""
        self._tokens = min(self._burst, self._tokens + max(0.0, now_s - self._at_s) * self._rate)
        self._at_s = now_s
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def wait_s(self, now_s: float) -> float:
        """How long until one more is allowed."""
        tokens = self._tokens + max(0.0, now_s - self._at_s) * self._rate
        return max(0.0, (1.0 - tokens) / self._rate)
