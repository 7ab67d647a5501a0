"""The timeline of a run, for https://ui.perfetto.dev: a trace's sink that writes Perfetto's format.

One process for each machine, with tracks for its steps, for what its device computes and encodes, for the time in which
training waits, for its collective operations, for what goes to and comes from each other machine, and for what happened
to it. Slices of a track never overlap: where several things are under way at once, they are on several tracks of one
name, which the page shows as one. A frame is a slice from its send to its delivery, with an arrow to the delivery. At
the end the steps are written, each with its breakdown, and the critical path.

Slices are written as soon as they are known. What the analysis needs is kept, so a run that is too long for it is cut:
after a number of steps, or of events.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hcsim.telemetry.activity import DeviceWork, FrameTransfer, MachineActivity, StepSpan
from hcsim.telemetry.breakdown import StepBreakdown, breakdown
from hcsim.telemetry.critical_path import Causes, PathSegment
from hcsim.telemetry.perfetto import Notes, PerfettoFile
from hcsim.telemetry.trace import Event, IntervalSink

MOST_STEPS = 64
MOST_EVENTS = 1_000_000
LARGE_BYTES = 1024
"""Frames of at least so much count as communication, whatever they are; smaller ones only if they are data."""
_FRAMES = ("data", "hello", "abort", "bye", "control", "later", "waiting")
_STEPS, _COMPUTE, _ENCODE, _WAIT, _OPERATIONS, _VIEWS, _EVENTS, _TO, _FROM = range(9)
_DEVICE = {"compute": _COMPUTE, "encode": _ENCODE}
_OTHERS = {"exchange": ("waiting", _WAIT), "operation": ("collectives", _OPERATIONS)}
_STOPS = ("Crash", "Restart", "Pause", "Lid", "StuckDevice")
"""Faults in which a machine or its device does nothing."""
_CRASHES = ("Crash", "Restart")
_GOES_ON = ("start", "thaw", "unhang")
_HAPPENED = (
    "group failed", "view failed", "step refused", "stood still", "parameter server", "said", "refused", "script ended",
)  # fmt: skip
_NODE = re.compile(r"\bnode='([^']*)'")


class TimelineAnalysis(NamedTuple):
    """What a timeline shows, in figures."""

    steps: tuple[StepBreakdown, ...]
    path: tuple[PathSegment, ...]
    """Empty if frames were not recorded: a real machine sees only itself."""
    is_cut: bool
    """Whether the run went on after the end of the timeline."""


class _Machine(MachineActivity):
    """A machine, with its tracks."""

    def __init__(self, name: str, rank: int) -> None:
        super().__init__()
        self.name = name
        self.rank = rank
        self.chip = ""
        self.process: int | None = None
        self.lanes: dict[tuple[str, int], list[list[int]]] = {}
        """The tracks of each name: the number, and the end of the last slice."""
        self.open: dict[int, tuple[int, str, str]] = {}
        self.busy_until_ns = 0
        self.began_ns: int | None = None
        """Of the present step."""
        self.view: tuple[int, str] | None = None
        self.stopped_since_ns: int | None = None
        self.peers: list[str] = []
        """The members of its view, by rank."""

    def peer(self, rank: int) -> str:
        return self.peers[rank] if rank < len(self.peers) else f"rank {rank}"


def _frame(about: Sequence[int]) -> tuple[str, Notes]:
    operation, bucket, number, offset, size_bytes = about
    return f"bucket {bucket}, round {number}", {"operation": operation, "offset": offset, "bytes": size_bytes}


class Timeline(IntervalSink):
    """Writes the events of a run as a timeline, and says at the end where the time has gone."""

    def __init__(
        self,
        write: Callable[[bytes], None],
        most_steps: int = MOST_STEPS,
        most_events: int = MOST_EVENTS,
        origin: int = 0,
    ) -> None:
        self._file = PerfettoFile(write, origin)
        self._most_steps = most_steps
        self._left = most_events
        self._machines: dict[str, _Machine] = {}
        self._packets: dict[tuple[str, str], int] = {}
        """When the last packet of each kind was sent."""
        self._opened_ns: dict[str, int] = {}
        """When the receiver last made room, by stream."""
        self._under_way: dict[str, deque[tuple[int, tuple[Any, ...]]]] = {}
        self._flows = 0
        self._is_over = False
        self._now_ns = 0
        self._analysis: TimelineAnalysis | None = None
        self._take: dict[str, Callable[[int, str, Sequence[Any]], None]] = {
            "begin": self._begin,
            "end": self._end,
            "send": self._send,
            "deliver": self._deliver,
            "window opens": self._open,
            "sent": self._sent,
            "received": self._received,
            "clock": self._clock,
            "machine": self._meet,
            "progress": lambda at_ns, where, fields: self._step(at_ns, where, int(fields[0])),
            "step": lambda at_ns, where, fields: self._step(at_ns, where, int(fields[1])),
            "view": self._view,
            "fault": self._fault,
            **{kind: self._happened(kind) for kind in _HAPPENED},
        }

    def __call__(self, events: Sequence[Event]) -> None:
        for at_ns, kind, where, *fields in events:
            take = self._take.get(str(kind))
            if take is not None and not self._is_over:
                self._now_ns = int(at_ns)
                take(int(at_ns), str(where), fields)

    def end(self) -> TimelineAnalysis:
        """Write what is known only at the end, and return the analysis. Nothing is taken in after that."""
        if self._analysis is None:
            self._analysis = self._analysed()
        return self._analysis

    def _analysed(self) -> TimelineAnalysis:
        is_cut, self._is_over = self._is_over, True
        for machine in self._machines.values():
            self._go_on(machine, self._now_ns)
            self._end_view(machine, self._now_ns)
            for _, name, detail in machine.open.values():
                self._note(machine, "events", _EVENTS, f"did not end: {name} {detail}".rstrip(), {})
        machines: dict[str, MachineActivity] = dict(self._machines)
        steps = tuple(breakdown(machines))
        for each in steps:
            self._write_step(self._machines[each.machine], each)
        path = self._critical_path(machines)
        if path:
            track = self._file.track("critical path", self._file.process("critical path", -1), 0)
            for segment in path:
                self._file.slice(track, (segment.begin_ns, segment.end_ns), str(segment), {"kind": segment.kind})
        return TimelineAnalysis(steps, path, is_cut)

    # What happens, by kind of event.

    def _meet(self, _at_ns: int, where: str, fields: Sequence[Any]) -> None:
        self._machine(where).chip = str(fields[0])

    def _begin(self, at_ns: int, where: str, fields: Sequence[Any]) -> None:
        machine, (number, purpose, detail) = self._machine(where), fields[:3]
        machine.open[int(number)] = at_ns, str(purpose), str(detail)
        if machine.began_ns is None and purpose in _DEVICE:
            machine.began_ns = at_ns

    def _end(self, at_ns: int, where: str, fields: Sequence[Any]) -> None:
        machine = self._machine(where)
        begun = machine.open.pop(int(fields[0]), None)
        if begun is None:  # before a crash
            return
        begin_ns, purpose, detail = begun
        if purpose in _DEVICE:  # which does one piece after the other, in the order of the requests
            begin_ns = max(begin_ns, machine.busy_until_ns)
            machine.busy_until_ns = at_ns
            if begin_ns < at_ns:
                machine.work.append(DeviceWork(begin_ns, at_ns, purpose, detail))
                self._slice(machine, purpose, _DEVICE[purpose], (begin_ns, at_ns), detail or purpose)
            self._count()
        elif purpose == "repeat":
            machine.steps.append(StepSpan(begin_ns, at_ns, int(detail)))
        elif begin_ns < at_ns:
            if purpose == "operation":
                machine.operations.append((begin_ns, at_ns))
            name, rank = _OTHERS[purpose]
            self._slice(machine, name, rank, (begin_ns, at_ns), detail or name)
            self._count()

    def _send(self, at_ns: int, stream: str, fields: Sequence[Any]) -> None:
        if len(fields) > 1:
            self._under_way.setdefault(stream, deque()).append((at_ns, tuple(fields)))
        else:  # a packet outside of any connection
            self._packets[stream, str(fields[0])] = at_ns

    def _open(self, at_ns: int, stream: str, _fields: Sequence[Any]) -> None:
        self._opened_ns[stream] = at_ns

    def _deliver(self, at_ns: int, stream: str, fields: Sequence[Any]) -> None:
        under_way = self._under_way.get(stream)
        if len(fields) < 2:
            sent_ns = self._packets.get((stream, str(fields[0])))
            if sent_ns is not None:
                self._arrive(sent_ns, at_ns, stream, is_data=False)
            return
        if under_way is None:
            return
        begin_ns, frame = 0, None
        while under_way and frame != tuple(fields):  # one stream delivers in order, or not at all
            begin_ns, frame = under_way.popleft()
        if frame != tuple(fields):
            return
        kind, operation, bucket, number, offset, size_bytes = map(int, fields)
        source, target = self._arrive(begin_ns, at_ns, stream, is_data=kind == 0 or size_bytes >= LARGE_BYTES)
        name, notes = _frame((operation, bucket, number, offset, size_bytes))
        name = name if kind == 0 else _FRAMES[kind]
        self._flows += 1
        flows = (self._flows,)
        self._slice(source, f"→ {target.name}", _TO + 2 * target.rank, (begin_ns, at_ns), name, notes, flows)
        self._file.instant(
            self._lane(target, f"← {source.name}", _FROM + 2 * source.rank, (at_ns, at_ns)), at_ns, name, notes, flows
        )
        self._count()

    def _arrive(self, begin_ns: int, at_ns: int, stream: str, *, is_data: bool) -> tuple[_Machine, _Machine]:
        """Keep what has arrived; return its sender and its receiver."""
        source, target = (self._machine(name) for name in stream.partition("#")[0].split("→"))
        transfer = FrameTransfer(begin_ns, at_ns, source.name, target.name, self._opened_ns.get(stream, -1))
        if is_data:
            source.departures.append(transfer)
        (target.arrivals if is_data else target.signals).append(transfer)
        return source, target

    def _sent(self, at_ns: int, where: str, fields: Sequence[Any]) -> None:
        """A real machine knows when it has handed a frame over; another one, when it has arrived."""
        source, (peer, flow, took_ns, *about) = self._machine(where), fields
        name, notes = _frame(about)
        target, span_ns = f"→ {source.peer(peer)}", (at_ns - took_ns, at_ns)
        self._slice(source, target, _TO + 2 * peer, span_ns, name, notes, (flow,))
        self._count()

    def _received(self, at_ns: int, where: str, fields: Sequence[Any]) -> None:
        target, (peer, flow, _, *about) = self._machine(where), fields
        name, notes = _frame(about)
        lane = self._lane(target, f"← {target.peer(peer)}", _FROM + 2 * peer, (at_ns, at_ns))
        self._file.instant(lane, at_ns, name, notes, (flow,))
        self._count()

    def _clock(self, _at_ns: int, where: str, fields: Sequence[Any]) -> None:
        offset_ns, error_ns, reference = fields
        notes = {"ahead of ours (ns)": offset_ns, "error at most (ns)": error_ns, "whose": str(reference)}
        self._note(self._machine(where), "events", _EVENTS, "clock", notes)

    def _step(self, at_ns: int, where: str, number: int) -> None:
        machine = self._machine(where)
        if machine.began_ns is not None and machine.began_ns < at_ns:
            machine.steps.append(StepSpan(machine.began_ns, at_ns, number))
            self._is_over |= len(machine.steps) > self._most_steps
        machine.began_ns = at_ns

    def _view(self, at_ns: int, where: str, fields: Sequence[Any]) -> None:
        machine, (_, epoch, _, members) = self._machine(where), fields
        self._end_view(machine, at_ns)
        machine.peers = [each.partition("#")[0] for each in str(members).split(",")]
        machine.view = at_ns, f"view {epoch}: {', '.join(machine.peers)}"

    def _end_view(self, machine: _Machine, at_ns: int) -> None:
        if machine.view is not None and machine.view[0] < at_ns:
            self._slice(machine, "views", _VIEWS, (machine.view[0], at_ns), machine.view[1])

    def _fault(self, at_ns: int, what: str, fields: Sequence[Any]) -> None:
        text = " ".join(map(str, fields))
        named = _NODE.search(text)
        name = named[1] if named is not None else text.partition(" ")[0]
        machine = self._machines.get(name) or self._machine("the network")
        if what in _STOPS and machine.stopped_since_ns is None:
            machine.stopped_since_ns = at_ns
        if what in _CRASHES:
            machine.open.clear()
            machine.busy_until_ns = 0
        if what in _GOES_ON:
            self._go_on(machine, at_ns)
        self._note(machine, "events", _EVENTS, f"fault: {what}", {"what": text})

    def _go_on(self, machine: _Machine, at_ns: int) -> None:
        if machine.stopped_since_ns is not None:
            machine.stopped.append((machine.stopped_since_ns, at_ns))
            machine.stopped_since_ns = None

    def _happened(self, kind: str) -> Callable[[int, str, Sequence[Any]], None]:
        def take(_at_ns: int, where: str, fields: Sequence[Any]) -> None:
            text = " ".join(map(str, fields))
            self._note(self._machine(where), "events", _EVENTS, text if kind == "said" else kind, {"what": text})

        return take

    # Where it is written.

    def _machine(self, name: str) -> _Machine:
        machine = self._machines.get(name)
        if machine is None:
            machine = self._machines[name] = _Machine(name, len(self._machines))
        return machine

    def _count(self) -> None:
        self._left -= 1
        self._is_over |= self._left <= 0

    def _lane(self, machine: _Machine, name: str, rank: int, span_ns: tuple[int, int]) -> int:
        """Return the track of this name that is free from then on."""
        lanes = machine.lanes.setdefault((name, rank), [])
        lane = next((lane for lane in lanes if lane[1] <= span_ns[0]), None)
        if lane is None:
            if machine.process is None:
                title = f"{machine.name} ({machine.chip})" if machine.chip else machine.name
                machine.process = self._file.process(title, machine.rank)
            lane = [self._file.track(name, machine.process, rank), 0]
            lanes.append(lane)
        lane[1] = span_ns[1]
        return lane[0]

    def _slice(
        self,
        machine: _Machine,
        track: str,
        rank: int,
        span_ns: tuple[int, int],
        name: str,
        notes: Notes | None = None,
        flows: Sequence[int] = (),
    ) -> None:
        self._file.slice(self._lane(machine, track, rank, span_ns), span_ns, name, notes or {}, flows)

    def _note(self, machine: _Machine, track: str, rank: int, name: str, notes: Notes) -> None:
        at_ns = self._now_ns
        self._file.instant(self._lane(machine, track, rank, (at_ns, at_ns)), at_ns, name, notes)

    def _write_step(self, machine: _Machine, each: StepBreakdown) -> None:
        notes: dict[str, int | float | str] = {
            "compute_ns": each.compute_ns,
            "encode_ns": each.encode_ns,
            "exposed_communication_ns": each.exposed_ns,
            "idle_ns": each.idle_ns,
            "hidden_communication_ns": each.hidden_ns,
            **{f"waits for {kind} of {where} (ns)": spent_ns for (kind, where), spent_ns in each.causes},
        }
        self._slice(machine, "steps", _STEPS, (each.begin_ns, each.end_ns), f"step {each.number}", notes)

    def _critical_path(self, machines: dict[str, MachineActivity]) -> tuple[PathSegment, ...]:
        ends = [(activity.steps[-1].end_ns, name) for name, activity in machines.items() if activity.steps]
        if not ends or not any(activity.arrivals for activity in machines.values()):
            return ()
        begin_ns = min(activity.steps[0].begin_ns for activity in machines.values() if activity.steps)
        end_ns = max(end_ns for end_ns, _ in ends)
        last = next(name for at_ns, name in ends if at_ns == end_ns)
        return tuple(Causes(machines).path(last, (begin_ns, end_ns)))
