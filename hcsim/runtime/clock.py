"""Time, as a host sees it."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol


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
