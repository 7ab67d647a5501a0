"""A clock of the virtual world."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from hcsim.runtime.clock import Limit

if TYPE_CHECKING:
    from hcsim.virtual.loop import VirtualLoop


class VirtualClock:
    """The world's time, seen through a clock that may drift and jump."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._rate = 1.0
        self.offset_s = 0.0
        self._elapsed_offset_s = 0.0
        self._stood_at_s: float | None = None

    def now(self) -> float:
        """See `runtime.clock.Clock.now`."""
        return self._loop.time() * self._rate + self.offset_s

    def elapsed(self) -> float:
        """See `runtime.clock.Clock.elapsed`."""
        return self._loop.time() * self._rate + self._elapsed_offset_s

    async def sleep(self, seconds: float) -> None:
        """See `runtime.clock.Clock.sleep`."""
        await asyncio.sleep(seconds / self._rate)

    def timeout(self, seconds: float | None) -> Limit:
        """See `runtime.clock.Clock.timeout`."""
        return asyncio.timeout(None if seconds is None else seconds / self._rate)

    # The world's side of a clock.

    def multiply_rate(self, factor: float) -> None:
        """Run faster or slower from now on; what it shows does not leap."""
        faster = self._rate * factor
        gained_s = self._loop.time() * (faster - self._rate)
        self.offset_s -= gained_s
        self._elapsed_offset_s -= gained_s
        self._rate = faster

    def stand_still(self) -> None:
        """The machine sleeps: time passes, but not for what measures how long something takes."""
        if self._stood_at_s is None:
            self._stood_at_s = self.elapsed()

    def go_on(self) -> None:
        """The machine is awake again."""
        if self._stood_at_s is not None:
            self._elapsed_offset_s += self._stood_at_s - self.elapsed()
            self._stood_at_s = None

    def go_on_from(self, before: VirtualClock) -> None:
        """Show what that clock shows: it is the same one, in the machine's next life."""
        before.go_on()
        self._rate, self.offset_s, self._elapsed_offset_s = before._rate, before.offset_s, before._elapsed_offset_s
