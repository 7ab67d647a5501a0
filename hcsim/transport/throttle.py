"""Makes guessing slow: after a few failures a source has to wait, twice as long after each further one."""

from __future__ import annotations

FREE_FAILURES = 5
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 60.0
FORGIVEN_AFTER_S = 300.0
MAX_SOURCES = 4096
"""A stranger with many addresses must not fill our memory: beyond this the source that failed longest ago goes."""


class Throttle:
    """Counts failures by source. It has no clock: `now_s` comes with every call."""

    def __init__(self) -> None:
        self._failures: dict[str, tuple[int, float]] = {}
        """How many, and when the last one was; the order is that of the last failures."""

    def wait_s(self, source: str, now_s: float) -> float:
        """How long the source still has to wait; nothing, for most."""
        count, last_s = self._failures.get(source, (0, now_s))
        if count <= FREE_FAILURES or now_s - last_s > FORGIVEN_AFTER_S:
            return 0.0
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(count - FREE_FAILURES - 1, 30))
        return max(0.0, last_s + wait_s - now_s)

    def failed(self, source: str, now_s: float) -> None:
        """An attempt from there has failed."""
        count, last_s = self._failures.pop(source, (0, now_s))
        if now_s - last_s > FORGIVEN_AFTER_S:
            count = 0
        self._failures[source] = (count + 1, now_s)
        if len(self._failures) > MAX_SOURCES:
            del self._failures[next(iter(self._failures))]

    def succeeded(self, source: str) -> None:
        """Somebody from there is a member after all."""
        self._failures.pop(source, None)
