"""Time, as a host sees it."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol


class Clock(Protocol):
    """A host's clock. Hosts' clocks need not agree: a virtual one can drift and jump."""

    def now(self) -> float:
        """Seconds since some fixed moment of this host's own."""

    def elapsed(self) -> float:
        """The same without jumps, for measuring how long something takes."""

    async def sleep(self, seconds: float) -> None:
        """Wait; zero or less lets every other ready task run once."""

    def timeout(self, seconds: float | None) -> AbstractAsyncContextManager[object]:
        """As `asyncio.timeout`: cancels the body after that time and raises `TimeoutError`."""
