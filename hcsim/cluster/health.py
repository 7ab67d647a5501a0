"""Who is well: suspicion from the rhythm of heartbeats.

The φ-accrual detector (Hayashibara et al., "The φ Accrual Failure Detector", SRDS 2004): from the intervals between
a peer's heartbeats follows how likely its present silence is; φ is the negative logarithm of that. A peer with a
steady rhythm is suspected soon, one on a shaky radio later. Where we deviate: the spread is never taken
for less than a quarter of the interval, since a machine that computes answers late now and then; and two
hard limits hold whatever the rhythm was. A refused connection is no silence but an answer: nobody is there. And a
silence in which we stood still ourselves is nobody's: what was said meanwhile waits to be read (the idea is that of
Dadgar et al., "Lifeguard: Local Health Awareness for More Accurate Failure Detection", DSN-W 2018).

Time comes from outside, so that the same events give the same answers.
"""

from __future__ import annotations

import math
from collections import deque

from hcsim.config.cluster import Heartbeat

_MEMORY = 100
_RHYTHM = 5
"""Intervals that make a rhythm."""
_SMOOTHING = 0.2
"""Weight of the newest round trip in the average. Higher follows faster."""


class Watch:
    """Whether we looked when we meant to. If not, we slept or had no processor, and others' silence was ours."""

    def __init__(self, due_s: float, tolerated_s: float) -> None:
        self.due_s = due_s
        """When we mean to look next."""
        self._tolerated_s = tolerated_s

    def away_s(self, now: float) -> float:
        """For how long we have not looked; nothing if that is tolerable, or was told before."""
        away_s = now - self.due_s
        if away_s < self._tolerated_s:
            return 0.0
        self.due_s = now
        return away_s


class Pulse:
    """What is known of one peer's heartbeats."""

    def __init__(self, now: float, policy: Heartbeat) -> None:
        self._policy = policy
        self._last_s = now
        self._beat_s = now
        self._intervals_s: deque[float] = deque(maxlen=_MEMORY)
        self._rhythm: tuple[float, float] | None = None
        """Mean and spread of the intervals, until there is another one."""
        self._refused = ""
        self.latency_s: float | None = None
        """Round trip, as an exponential moving average."""

    def beat(self, now: float) -> None:
        """A sign of life."""
        self._intervals_s.append(max(0.0, now - self._beat_s))
        self._rhythm = None
        self._beat_s = now
        self.sign(now)

    def sign(self, now: float) -> None:
        """A sign of life outside the rhythm: any other message."""
        self._last_s = max(self._last_s, now)
        self._refused = ""

    def excuse(self, away_s: float, now: float) -> None:
        """For so long we could not hear it."""
        self._last_s = min(self._last_s + away_s, now)
        self._beat_s = min(self._beat_s + away_s, now)

    def echoed(self, round_trip_s: float) -> None:
        """An answer came after that time."""
        before = round_trip_s if self.latency_s is None else self.latency_s
        self.latency_s = before + _SMOOTHING * (round_trip_s - before)

    def refused(self, why: str = "its machine answers that nobody is there") -> None:
        """It does not take our call."""
        self._refused = why

    def silence_s(self, now: float) -> float:
        """Since the last sign of life."""
        return max(0.0, now - self._last_s)

    def overdue(self, now: float) -> int:
        """Heartbeats that should have come since."""
        return int(self.silence_s(now) / self._policy.interval_s)

    def phi(self, now: float) -> float:
        """How surprising the silence is: its odds are 10^-φ. Zero while there is no rhythm."""
        if len(self._intervals_s) < _RHYTHM:
            return 0.0
        if self._rhythm is None:  # it is asked for more often than a heart beats
            mean_s = math.fsum(self._intervals_s) / len(self._intervals_s)
            variance = math.fsum([(each - mean_s) ** 2 for each in self._intervals_s]) / len(self._intervals_s)
            self._rhythm = mean_s, max(math.sqrt(variance), self._policy.interval_s / 4)
        mean_s, spread_s = self._rhythm
        return _surprise((self.silence_s(now) - mean_s) / spread_s)

    def suspected(self, now: float) -> str:
        """Why this peer is taken for lost; empty while it is not."""
        policy, silence_s = self._policy, self.silence_s(now)
        if self._refused:
            return self._refused
        if silence_s >= policy.timeout_s:
            return f"silent for {silence_s:.1f} s"
        if self.overdue(now) >= policy.failures:
            return f"{policy.failures} heartbeats overdue"
        if (phi := self.phi(now)) >= policy.phi:
            return f"silent for {silence_s:.1f} s, which is not its rhythm (φ = {phi:.1f})"
        return ""


def _surprise(deviations: float) -> float:
    """-log10 of the odds that a normal variable is so many deviations above its mean, or more."""
    if deviations < 30:
        return -math.log10(0.5 * math.erfc(deviations / math.sqrt(2)))
    return (deviations**2 / 2 + math.log(deviations * math.sqrt(2 * math.pi))) / math.log(10)
