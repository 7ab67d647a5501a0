"""Whether a rank's device makes progress: what the rank tells the others while they wait for it.

A device that hangs, or that has become a thousand times as slow, cannot be told from a slow one but by its own past.
So two durations are compared with the longest so far: that of a piece of work (a forward pass, the backward pass of a
block, an update, an evaluation), and that of a phase, from one exchange to the next. What takes `STUCK` times as long
is stuck. Both may always take a quarter of the others' time limit, before which nothing is told: they then give this
rank up after one time limit, as if it had never spoken. The first piece has no past: it is compared with the whole step
that the machine's profile predicts, or may take `FIRST` time limits if no profile is known. The first phase may take as
long as its pieces go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

from hcsim.collectives.keep_alive import NOTICES
from hcsim.runtime.clock import Clock

STUCK = 10.0
FIRST = 20.0
_SHORT = 1 / NOTICES
"""How long any piece or phase may take, as a share of the time limit."""


class DevicePace:
    """The pieces of work of one rank's device, in phases between exchanges."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._running = 0
        self._waiting = 0
        self._longest_s: float | None = None
        self._longest_phase_s: float | None = None
        self._expected_s: float | None = None
        self._moved_s = self._began_s = clock.elapsed()
        """When a piece last began on an idle device, or ended; and when the phase began."""

    def begin(self, step_s: float | None) -> None:
        """Begin a phase that no exchange precedes; a step takes so long by the machine's profile, if it is known."""
        self._began_s = self._clock.elapsed()
        self._expected_s = step_s

    @contextmanager
    def work(self) -> Iterator[None]:
        """The device does a piece of work, after those that it does already."""
        if not self._running:
            self._moved_s = self._clock.elapsed()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            now_s = self._clock.elapsed()
            self._longest_s = max(self._longest_s or 0.0, now_s - self._moved_s)
            self._moved_s = now_s

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The rank waits for others."""
        if not self._waiting:
            self._longest_phase_s = max(self._longest_phase_s or 0.0, self._clock.elapsed() - self._began_s)
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            self._began_s = self._clock.elapsed()

    def computes(self, timeout_s: float) -> bool:
        """Return whether this rank has computed for a while, and its device is not stuck; `timeout_s` is the time limit
        of those that wait for it."""
        now_s = self._clock.elapsed()
        since_s = self._moved_s if self._waiting else self._began_s  # encoding is part of an exchange
        if (self._waiting and not self._running) or now_s - since_s < timeout_s / NOTICES:
            return False
        known_s = self._expected_s if self._longest_s is None else self._longest_s
        piece_s = FIRST * timeout_s if known_s is None else STUCK * known_s
        phase_s = inf if self._longest_phase_s is None else STUCK * self._longest_phase_s
        short_s = _SHORT * timeout_s
        return now_s - self._moved_s <= max(short_s, piece_s) and now_s - since_s <= max(short_s, phase_s)

    def is_busy_as_usual(self) -> bool:
        """Return whether the device does a piece of work that is not longer than some before: then it need not be
        checked, and a check would wait for that piece."""
        usual_s = STUCK * (self._longest_s or 0.0)
        return self._running > 0 and self._clock.elapsed() - self._moved_s <= usual_s
