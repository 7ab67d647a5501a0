"""The critical path of a run: the chain of work and transfers that leads to its end without a gap.

It is found backwards, as in Lumos (arXiv 2504.09307) and Holistic Trace Analysis. Whatever a machine begins at a
moment was made possible by what ended there last: a piece of its own work, or a frame that arrived. In the simulator
nothing lies between the two, to the nanosecond, unless messages cost processor time. Work leads back to its own
begin, on the same machine. A frame leads back to the moment at which its sender handed it over, on the sender's
machine, or, if it had to wait for room, to the moment at which its receiver made some. What no event explains is a
segment, too: the sender's data were held up by those ahead of them (the network), or the machine waited for a timer
or for its processor to handle messages. A machine that stood still (a fault) did nothing with what arrived meanwhile.

The segments follow one another without gap or overlap, so their lengths add up to the time from begin to end exactly.

What a faster machine would save follows from its share of the path, if transfers take as long as before: another
chain may become the longest (then it saves less), and who sends earlier finds other transfers on the same line (then
it may save less or more). A machine that is not on the path at all changes nothing in the first case. The simulator
knows better: simulate the faster machine.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from hcsim.telemetry.activity import DeviceWork, FrameTransfer, MachineActivity, SpanNs, union

COMPUTE, ENCODE, NETWORK, FAULT, OTHER = "compute", "encode", "network", "fault", "other"


class PathSegment(NamedTuple):
    """A part of the path."""

    begin_ns: int
    end_ns: int
    kind: str
    machine: str
    """Where the time passes; of a transfer, the sender."""
    target: str = ""
    """Of a transfer."""
    name: str = ""
    """Of work."""

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.begin_ns

    def __str__(self) -> str:
        if self.kind == NETWORK:
            return f"{self.machine} → {self.target}"
        return f"{self.machine}: {' '.join(filter(None, (self.kind, self.name)))}"


class Causes:
    """What led to what, on all machines."""

    def __init__(self, machines: Mapping[str, MachineActivity]) -> None:
        self._ended: dict[str, list[DeviceWork | FrameTransfer]] = {}
        self._ends_ns: dict[str, list[int]] = {}
        self._signals: dict[str, dict[int, FrameTransfer]] = {}
        """By their arrival. They count only where they are the whole explanation, to the nanosecond."""
        self._stopped = {name: union(activity.stopped) for name, activity in machines.items()}
        self._departures = {name: _Departures(activity.departures) for name, activity in machines.items()}
        for name, activity in machines.items():
            # Work comes last of what ends at one moment: its own work is what a machine goes on from.
            events: list[DeviceWork | FrameTransfer] = [*activity.arrivals, *activity.work]
            events.sort(key=lambda event: event.end_ns)
            self._ended[name] = events
            self._ends_ns[name] = [event.end_ns for event in events]
            self._signals[name] = {each.end_ns: each for each in activity.signals}

    def back(self, machine: str, span: SpanNs) -> Iterator[PathSegment]:
        """Yield the segments that lead to the end of the span on this machine, from the last to the first."""
        begin_ns, now_ns = span
        limits: dict[str, int] = {}
        while now_ns > begin_ns:
            stop_ns, thaw_ns = self._last_stop(machine, now_ns)
            if thaw_ns >= now_ns:
                yield PathSegment(max(stop_ns, begin_ns), now_ns, FAULT, machine)
                now_ns = stop_ns
                continue
            events = self._ended[machine]
            last = min(bisect_right(self._ends_ns[machine], now_ns), limits.get(machine, len(events))) - 1
            event = events[last] if last >= 0 and events[last].end_ns >= max(thaw_ns, begin_ns) else None
            if event is None or event.end_ns < now_ns:
                signal = self._signals[machine].get(now_ns)
                if signal is not None and signal.begin_ns < now_ns:
                    yield PathSegment(max(signal.begin_ns, begin_ns), now_ns, NETWORK, signal.source, machine)
                    machine, now_ns = signal.source, signal.begin_ns
                    continue
            ended_ns = max(thaw_ns, begin_ns) if event is None else event.end_ns
            yield from self._unexplained(machine, (ended_ns, now_ns))
            now_ns = ended_ns
            if event is None:
                continue
            limits[machine] = last  # each event at most once: transfers may take no time
            is_held = isinstance(event, FrameTransfer) and self._is_held(event)
            now_ns = event.held_until_ns if isinstance(event, FrameTransfer) and is_held else event.begin_ns
            cut_ns = max(now_ns, begin_ns)
            if isinstance(event, FrameTransfer):
                if cut_ns < ended_ns:
                    yield PathSegment(cut_ns, ended_ns, NETWORK, event.source, event.target)
                machine = event.target if is_held else event.source
            else:
                yield from self._work(machine, event, (cut_ns, ended_ns))

    def _is_held(self, frame: FrameTransfer) -> bool:
        """Whether a frame waited for its receiver. One that had only to wait until what came before it, or its own
        first part, was out of the way of a receiver that did nothing else meanwhile, waited for the network."""
        if not frame.begin_ns < frame.held_until_ns < frame.end_ns:
            return False
        last = bisect_right(self._ends_ns[frame.target], frame.held_until_ns) - 1
        _, thaw_ns = self._last_stop(frame.target, frame.held_until_ns)
        ended_ns = self._ends_ns[frame.target][last] if last >= 0 else -1
        return max(ended_ns, thaw_ns) > frame.begin_ns

    def _last_stop(self, machine: str, now_ns: int) -> SpanNs:
        """Return when the machine last stood still before this moment, or an empty span before all times."""
        stopped = self._stopped[machine]
        number = bisect_left(stopped, now_ns, key=lambda each: each[0]) - 1
        return stopped[number] if number >= 0 else (-1, -1)

    def path(self, machine: str, span: SpanNs) -> list[PathSegment]:
        """Return the segments in order; parts of one kind that follow each other on one machine are joined."""
        joined: list[PathSegment] = []
        for segment in reversed(list(self.back(machine, span))):
            if joined and segment[2:] == joined[-1][2:]:
                joined[-1] = joined[-1]._replace(end_ns=segment.end_ns)
            else:
                joined.append(segment)
        return joined

    def _work(self, machine: str, work: DeviceWork, span: SpanNs) -> Iterator[PathSegment]:
        for begin_ns, end_ns, is_fault in _parts(span, self._stopped[machine]):
            if is_fault:
                yield PathSegment(begin_ns, end_ns, FAULT, machine)
            else:
                yield PathSegment(begin_ns, end_ns, work.purpose, machine, name=work.name)

    def _unexplained(self, machine: str, span: SpanNs) -> Iterator[PathSegment]:
        departures = self._departures[machine]
        for since_ns, until_ns, is_sending in _parts(span, departures.spans):
            target = departures.target(until_ns) if is_sending else ""
            yield PathSegment(since_ns, until_ns, NETWORK if is_sending else OTHER, machine, target)


class _Departures:
    """The frames that one machine sent."""

    def __init__(self, departures: Sequence[FrameTransfer]) -> None:
        self.spans = union(each[:2] for each in departures)
        self._departures = departures
        self._ends_ns = [each.end_ns for each in departures]

    def target(self, until_ns: int) -> str:
        """Return to whom the frame was that arrived next, then or later."""
        return self._departures[bisect_left(self._ends_ns, until_ns)].target


def _parts(span: SpanNs, marked: Sequence[SpanNs]) -> Iterator[tuple[int, int, bool]]:
    """Yield the parts of a span from the last to the first, each with whether it is within the marked time, which is in
    order."""
    begin_ns, at_ns = span
    number = bisect_left(marked, at_ns, key=lambda each: each[0]) - 1
    while at_ns > begin_ns:
        since_ns, until_ns = marked[number] if number >= 0 else (begin_ns, begin_ns)
        if until_ns < at_ns:
            yield max(until_ns, begin_ns), at_ns, False
        if since_ns < until_ns and until_ns > begin_ns:
            yield max(since_ns, begin_ns), min(until_ns, at_ns), True
        at_ns, number = since_ns, number - 1


def shares(path: Iterable[PathSegment]) -> Counter[tuple[str, str, str]]:
    """Return the time on the path by kind, machine and target."""
    spent: Counter[tuple[str, str, str]] = Counter()
    for segment in path:
        spent[segment.kind, segment.machine, segment.target] += segment.length_ns
    return spent


def path_gain(path: Sequence[PathSegment], kind: str, machine: str | None, speed: float) -> float:
    """Return by which share of the whole time the path would be shorter if this took 1/speed of its time, on one
    machine or on all."""
    whole_ns = path[-1].end_ns - path[0].begin_ns
    spent_ns = sum(each.length_ns for each in path if each.kind == kind and machine in (None, each.machine))
    return spent_ns * (1.0 - 1.0 / speed) / whole_ns
