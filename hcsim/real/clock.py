"""Time that passes by itself."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager


class RealClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds since an unspecified moment, never going back."""
        return time.monotonic()

    def elapsed(self) -> float:
        """The same: it never jumps."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait; zero or less lets every other ready task run once."""
        await asyncio.sleep(max(seconds, 0.0))

    def timeout(self, seconds: float | None) -> AbstractAsyncContextManager[object]:
        """As `asyncio.timeout`."""
        return asyncio.timeout(seconds)
