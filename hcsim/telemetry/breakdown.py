"""Where the time of each step goes on each machine, to the nanosecond:

    step = compute + encode + exposed communication + idle

The device of a machine computes or encodes, or is quiet. What it waits for then is what leads to its next piece of
work (see `critical_path.py`): communication is exposed while that is on its way through the network, and the machine
is idle while it is still to be computed by another machine, or held up by anything else. Communication is hidden
while the device works. The words are those of Holistic Trace Analysis, which has no causes: for it all time in a
collective is communication, be it only a wait for the slowest.

Where frames are not recorded, as on a real machine, which sees only itself, communication is any collective
operation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from hcsim.telemetry.activity import MachineActivity, SpanNs, difference, intersection, length_ns, union
from hcsim.telemetry.critical_path import NETWORK, OTHER, Causes

Cause: TypeAlias = tuple[str, str]
"""What a machine waited for (a kind of `critical_path`), and of which machine or line."""


class StepBreakdown(NamedTuple):
    """The time of one step on one machine."""

    machine: str
    number: int
    begin_ns: int
    end_ns: int
    compute_ns: int
    encode_ns: int
    exposed_ns: int
    """The device is quiet, and what it waits for is on its way."""
    idle_ns: int
    """The device is quiet, and waits for anything else."""
    hidden_ns: int
    """Communication while the device works, which costs nothing."""
    causes: tuple[tuple[Cause, int], ...]
    """What the device waited for; the times add up to `exposed_ns` and `idle_ns`."""

    @property
    def whole_ns(self) -> int:
        return self.end_ns - self.begin_ns


def breakdown(machines: Mapping[str, MachineActivity]) -> Iterator[StepBreakdown]:
    """Yield the steps of each machine."""
    causes = Causes(machines) if any(activity.arrivals for activity in machines.values()) else None
    for name, activity in machines.items():
        compute, encode = _Spans(activity.worked("compute")), _Spans(activity.worked("encode"))
        network = _Spans(activity.communication())
        for step in activity.steps:
            window = (step.begin_ns, step.end_ns)
            computing, encoding, moving = (each.within(window) for each in (compute, encode, network))
            working = union([*computing, *encoding])
            quiet = difference([window], working)
            why = _by_operations(name, quiet, moving) if causes is None else _by_causes(causes, name, quiet)
            exposed_ns = sum(spent_ns for (kind, _), spent_ns in why.items() if kind == NETWORK)
            yield StepBreakdown(
                machine=name,
                number=step.number,
                begin_ns=step.begin_ns,
                end_ns=step.end_ns,
                compute_ns=length_ns(computing),
                encode_ns=length_ns(encoding),
                exposed_ns=exposed_ns,
                idle_ns=why.total() - exposed_ns,
                hidden_ns=length_ns(intersection(moving, working)),
                causes=tuple(why.most_common()),
            )


def _by_causes(causes: Causes, machine: str, quiet: Sequence[SpanNs]) -> Counter[Cause]:
    found: Counter[Cause] = Counter()
    for gap in quiet:
        for segment in causes.back(machine, gap):
            where = f"{segment.machine} → {segment.target}" if segment.target else segment.machine
            found[segment.kind, where] += segment.length_ns
    return found


def _by_operations(machine: str, quiet: Sequence[SpanNs], moving: Sequence[SpanNs]) -> Counter[Cause]:
    exposed_ns = length_ns(intersection(quiet, moving))
    return +Counter({(NETWORK, "operations"): exposed_ns, (OTHER, machine): length_ns(quiet) - exposed_ns})


class _Spans:
    """Spans in order without overlap, of which those within a window are found quickly if windows come in order."""

    def __init__(self, spans: Sequence[SpanNs]) -> None:
        self._spans = spans
        self._first = 0

    def within(self, window: SpanNs) -> list[SpanNs]:
        spans = self._spans
        while self._first and spans[self._first - 1][1] > window[0]:
            self._first -= 1
        while self._first < len(spans) and spans[self._first][1] <= window[0]:
            self._first += 1
        last = self._first
        while last < len(spans) and spans[last][0] < window[1]:
            last += 1
        return intersection(spans[self._first : last], [window])
