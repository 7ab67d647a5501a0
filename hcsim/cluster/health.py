"""Failure detection: suspicion from the rhythm of heartbeats.

The φ-accrual detector (Hayashibara et al., "The φ Accrual Failure Detector", SRDS 2004) computes from the
intervals between a peer's heartbeats how likely its present silence is; φ is the negative logarithm of that
probability. A peer with a steady rhythm is suspected early, one on an unstable radio link later. There are four
deviations:

- The spread is at least a quarter of the interval, since a busy machine sometimes answers late.
- Two hard limits hold whatever the rhythm was: a timeout and a number of missed heartbeats.
- A refused connection is evidence that the process is gone, not silence.
- Silence while this process itself was suspended is not counted against peers, because their messages are
  waiting to be read (Dadgar et al., "Lifeguard: Local Health Awareness for More Accurate Failure Detection",
  DSN-W 2018).

The time is passed in, so that the same events give the same results.
"""

from __future__ import annotations

import math
from collections import deque

from hcsim.config.cluster import Heartbeat

_MEMORY = 100
_RHYTHM = 5
_SMOOTHING = 0.2
"""The weight of the newest round trip in the average. Higher values follow faster."""

_SHORT_SLEEP_S = 2.0
"""No peer suspects a machine for less."""


class PauseDetector:
    """Detects that this process was suspended or starved: it did not look when it meant to."""

    def __init__(self, due_s: float, tolerated_s: float) -> None:
        self.due_s = due_s
        self._tolerated_s = tolerated_s

    def away_s(self, now: float) -> float:
        """Return for how long this process was suspended; 0 if that is tolerable, or was reported before."""
        away_s = now - self.due_s
        if away_s < self._tolerated_s:
            return 0.0
        self.due_s = now
        return away_s


class SleepDetector:
    """Detects that this machine slept, its lid closed perhaps: its peers have gone on without it."""

    def __init__(self, asleep_s: float) -> None:
        self._asleep_s = asleep_s

    def report(self, asleep_s: float) -> str:
        """Return what a person should know of the time slept since the last report; empty where it is short."""
        slept_s = asleep_s - self._asleep_s
        if slept_s < _SHORT_SLEEP_S:
            return ""
        self._asleep_s = asleep_s
        return f"this machine slept for {slept_s:.0f} s"


class FailureDetector:
    """The heartbeat history of one peer."""

    def __init__(self, now: float, policy: Heartbeat) -> None:
        self._policy = policy
        self._last_s = now
        self._beat_s = now
        self._intervals_s: deque[float] = deque(maxlen=_MEMORY)
        self._rhythm: tuple[float, float] | None = None
        """Mean and spread of the intervals, cached until there is another interval."""
        self._refused = ""
        self.latency_s: float | None = None
        """The round-trip time, as an exponential moving average."""

    def beat(self, now: float) -> None:
        self._intervals_s.append(max(0.0, now - self._beat_s))
        self._rhythm = None
        self._beat_s = now
        self.sign(now)

    def sign(self, now: float) -> None:
        """Record any other message, which is a sign of life outside the rhythm."""
        self._last_s = max(self._last_s, now)
        self._refused = ""

    def excuse(self, away_s: float, now: float) -> None:
        """Do not count a time in which this process could not receive."""
        self._last_s = min(self._last_s + away_s, now)
        self._beat_s = min(self._beat_s + away_s, now)

    def echoed(self, round_trip_s: float) -> None:
        before = round_trip_s if self.latency_s is None else self.latency_s
        self.latency_s = before + _SMOOTHING * (round_trip_s - before)

    def refused(self, why: str = "its machine answers that nobody is there") -> None:
        self._refused = why

    def silence_s(self, now: float) -> float:
        return max(0.0, now - self._last_s)

    def overdue(self, now: float) -> int:
        return int(self.silence_s(now) / self._policy.interval_s)

    def phi(self, now: float) -> float:
        """Return how surprising the silence is: its probability is 10^-φ. Zero while there is no rhythm."""
        if len(self._intervals_s) < _RHYTHM:
            return 0.0
        if self._rhythm is None:  # it is asked for more often than a heart beats
            mean_s = math.fsum(self._intervals_s) / len(self._intervals_s)
            variance = math.fsum([(each - mean_s) ** 2 for each in self._intervals_s]) / len(self._intervals_s)
            self._rhythm = mean_s, max(math.sqrt(variance), self._policy.interval_s / 4)
        mean_s, spread_s = self._rhythm
        return _surprise((self.silence_s(now) - mean_s) / spread_s)

    def suspected(self, now: float) -> str:
        """Return why this peer is suspected; empty if it is not."""
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
    """Return -log10 of the probability that a normal variable is at least this many deviations above its mean."""
    if deviations < 30:
        return -math.log10(0.5 * math.erfc(deviations / math.sqrt(2)))
    return (deviations**2 / 2 + math.log(deviations * math.sqrt(2 * math.pi))) / math.log(10)
