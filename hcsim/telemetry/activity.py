"""What the machines of a run did, from when to when, as a timeline has collected it. All times are whole nanoseconds.

A machine's device does one piece of work after the other. A transfer is a frame, from the moment at which its sender
has handed it over to the moment at which it has arrived whole, so it includes the wait for the frames before it, and
until the receiver has room for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

SpanNs: TypeAlias = tuple[int, int]


class DeviceWork(NamedTuple):
    """One piece of work of a device."""

    begin_ns: int
    end_ns: int
    purpose: str
    """ "compute" or "encode"."""
    name: str


class FrameTransfer(NamedTuple):
    """A frame under way."""

    begin_ns: int
    end_ns: int
    source: str
    target: str
    held_until_ns: int = -1
    """When the receiver last made room for it or for those before it; -1 if there was room all the time."""


class StepSpan(NamedTuple):
    """A step of a training, or a repetition of a job, on one machine."""

    begin_ns: int
    end_ns: int
    number: int


class MachineActivity:
    """What one machine did."""

    def __init__(self) -> None:
        self.work: list[DeviceWork] = []
        """In order, without overlap."""
        self.arrivals: list[FrameTransfer] = []
        """In the order in which they arrived."""
        self.signals: list[FrameTransfer] = []
        """Arrivals that are no data: what opens connections, and control messages."""
        self.departures: list[FrameTransfer] = []
        """In the order in which they arrived."""
        self.operations: list[SpanNs] = []
        """Collective operations, in the order in which they ended."""
        self.steps: list[StepSpan] = []
        self.stopped: list[SpanNs] = []
        """When it was suspended, asleep or down."""

    def communication(self) -> list[SpanNs]:
        """Return when data were on their way to or from the machine; where that is unknown, when it took part in an
        operation."""
        transfers = [*self.arrivals, *self.departures]
        return union([each[:2] for each in transfers] if transfers else self.operations)

    def worked(self, purpose: str) -> list[SpanNs]:
        """Return when the device was busy with this, without the time in which the machine stood still."""
        spans = union(each[:2] for each in self.work if each.purpose == purpose)
        return difference(spans, union(self.stopped))


def union(spans: Iterable[SpanNs]) -> list[SpanNs]:
    """Return the same time as spans in order that do not touch."""
    joined: list[SpanNs] = []
    for begin_ns, end_ns in sorted(spans):
        if joined and begin_ns <= joined[-1][1]:
            if end_ns > joined[-1][1]:
                joined[-1] = (joined[-1][0], end_ns)
        elif end_ns > begin_ns:
            joined.append((begin_ns, end_ns))
    return joined


def difference(spans: Sequence[SpanNs], others: Sequence[SpanNs]) -> list[SpanNs]:
    """Return what the others leave of the spans; both are in order, without overlap."""
    left: list[SpanNs] = []
    start = 0
    for begin_ns, end_ns in spans:
        while start < len(others) and others[start][1] <= begin_ns:
            start += 1
        at = start
        while at < len(others) and others[at][0] < end_ns:
            if others[at][0] > begin_ns:
                left.append((begin_ns, others[at][0]))
            begin_ns = max(begin_ns, others[at][1])
            at += 1
        if begin_ns < end_ns:
            left.append((begin_ns, end_ns))
    return left


def intersection(spans: Sequence[SpanNs], others: Sequence[SpanNs]) -> list[SpanNs]:
    """Return the time that is in both; both are in order, without overlap."""
    return difference(spans, difference(spans, others))


def length_ns(spans: Iterable[SpanNs]) -> int:
    return sum(end_ns - begin_ns for begin_ns, end_ns in spans)
