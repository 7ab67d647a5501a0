"""The end of a run in which nothing moves any more, though its hosts go on to send heartbeats.

Members that have finished leave, or are gone for good, and the others wait for a word that never comes. Real ones tell
their people, and wait; simulated ones would do so for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from hcsim.errors import TrainingError
from hcsim.virtual.loop import VirtualLoop


class Standstill:
    """Looks now and then whether something has moved; `moved` gives another value if it has."""

    def __init__(
        self,
        loop: VirtualLoop,
        moved: Callable[[], object],
        *,
        every_s: float,
        from_s: float = 0.0,
        limit_s: float | None = None,
    ) -> None:
        """Before `from_s` something may still happen by itself: a fault heals."""
        self._loop = loop
        self._every_s = every_s
        self._moved = moved
        self._limit_s = limit_s
        self._seen: object = None
        self._running: dict[asyncio.Timeout, None] = {}
        self._look_at(from_s)

    @asynccontextmanager
    async def noticed(self, last_words: Callable[[], str]) -> AsyncIterator[None]:
        """End what runs here when all stands still, with what it said last; and in any case at the limit."""
        timeout = asyncio.timeout_at(self._limit_s)
        self._running[timeout] = None
        try:
            async with timeout:
                yield
        except TimeoutError:
            if not timeout.expired() or (self._limit_s is not None and self._loop.time() >= self._limit_s):
                raise
            raise TrainingError(
                f"nothing has moved for {self._every_s:g} s, and it said last: {last_words()}"
            ) from None
        finally:
            del self._running[timeout]

    def _look_at(self, time_s: float) -> None:
        # The world's own timer: a frozen or crashed host does not stop it.
        self._loop.call_at_ns(round(time_s * 1e9), self._look)

    def _look(self) -> None:
        now = self._moved()
        if now != self._seen:
            self._seen = now
            self._look_at(self._loop.time() + self._every_s)
            return
        for timeout in self._running:
            timeout.reschedule(self._loop.time())
