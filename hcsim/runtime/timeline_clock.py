"""The clock of a timeline: one for all machines of a run, so that their files can be laid on top of each other.

A machine's own clock counts from a moment of its own, and runs some parts per million faster or slower than others. So
a machine that records frames keeps an estimate of how far the clock of a machine of reference is ahead of its own. A
machine that finds nobody to follow is the reference of those that come later; of two references the older one stays.

The estimate is Cristian's (Distributed Computing 3, 1989) in the form of NTP (RFC 5905, section 8). Of a question at
t1 and its answer at t4 by our clock, which the other received at t2 and answered at t3 by its clock, the offset is
((t2 − t1) + (t3 − t4)) / 2. It is wrong by at most half of the round trip (t4 − t1) − (t3 − t2), which it is if one
direction took no time. So the sample of the shortest round trip counts. To that the error of the other's clock is
added, and what the clocks may have drifted apart since.
"""

from __future__ import annotations

from typing import NamedTuple

DRIFT = 50e-6
"""How much faster or slower than the other a clock may run: the quartz of a computer is good to some 20 ppm."""


class ClockSample(NamedTuple):
    """A question and its answer, in nanoseconds; `error_ns` is that of the other's clock."""

    asked_ns: int
    received_ns: int
    answered_ns: int
    heard_ns: int
    error_ns: int

    @property
    def offset_ns(self) -> int:
        """How far the other's clock is ahead."""
        return ((self.received_ns - self.asked_ns) + (self.answered_ns - self.heard_ns)) // 2

    @property
    def bound_ns(self) -> int:
        """The largest error of the offset."""
        trip_ns = (self.heard_ns - self.asked_ns) - (self.answered_ns - self.received_ns)
        return max(trip_ns, 0) // 2 + self.error_ns + 1  # the division leaves half a nanosecond out


class TimelineClock:
    """The estimate of one machine."""

    def __init__(self, own_reference: int) -> None:
        """`own_reference` is the name that this machine has as a reference; older ones have smaller names."""
        self._own = own_reference
        self.reference = 0
        """Whose clock this is; 0 as long as nobody's."""
        self.offset_ns = 0
        self._error_ns = 0
        self._since_ns = 0

    def error_ns(self, now_ns: int) -> int:
        """Return how wrong the clock is at most; `now_ns` is the time by our own."""
        return 0 if self.reference == self._own else self._error_ns + round(DRIFT * (now_ns - self._since_ns))

    def be_reference(self) -> bool:
        """Be the reference unless there is one; return whether there was none."""
        if self.reference:
            return False
        self.reference = self._own
        return True

    def learn(self, reference: int, sample: ClockSample) -> bool:
        """Take in a sample of a clock of that reference; return whether it is better than what was known."""
        if not reference or reference == self._own or (self.reference and reference > self.reference):
            return False
        if reference == self.reference and sample.bound_ns >= self.error_ns(sample.heard_ns):
            return False
        self.reference, self.offset_ns = reference, sample.offset_ns
        self._error_ns, self._since_ns = sample.bound_ns, sample.heard_ns
        return True
