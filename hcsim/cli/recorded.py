"""A recorded run (`hcsim run … --trace FILE`), and how its cluster stood at any moment.

Beside the events, the file has lines for people: the machines, the work, and each member's steps and messages. What the
members would have answered to a status client at a moment is put together from these, so that the same page and the
same words show a running cluster and a recorded one.
"""

from __future__ import annotations

import ast
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hcsim.cluster.messages import Details, LinkStatus, Status, StatusReply
from hcsim.cluster.overview import EventOverview, NodeReport, Overview, overview
from hcsim.cluster.view import Member, View
from hcsim.errors import UNDECODABLE, ConfigError
from hcsim.runtime.host import Chip, Readings
from hcsim.telemetry.history import MOST_STEPS, HistoryMessage, HistoryStep, RunHistory
from hcsim.telemetry.trace import Event
from hcsim.transport.admission_queue import one_line

_KINDS = ("machine", "job", "progress", "said", "view", "follows", "measured", "fault", "metric")
_LAST_STEPS = 16
"""The number of last steps that are never left out."""

T = TypeVar("T")


class _Series(list[tuple[float, T]]):
    """Values with the times at which they came, in order."""

    def until(self, at_s: float) -> list[T]:
        """Return those that had come by then."""
        return [value for _, value in self[: bisect_right(self, at_s, key=lambda entry: entry[0])]]


class _Machine:
    """What the record has of one machine."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.chip: Chip | None = None
        self.steps: _Series[HistoryStep] = _Series()
        self.messages: _Series[HistoryMessage] = _Series()
        self.views: _Series[View] = _Series()
        self.follows: _Series[int] = _Series()
        self.lines: _Series[LinkStatus] = _Series()


class RecordedRun:
    """A run, as its record has it."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._work = ""
        self._total_steps = 0
        self._machines: dict[str, _Machine] = {}
        self._faults: _Series[EventOverview] = _Series()
        self.end_s = 0.0

    def listen(self, events: Sequence[Event]) -> None:
        """Take in events of a running simulation."""
        for at_ns, kind, where, *fields in events:
            if kind in _KINDS:
                self.take(int(at_ns) / 1e9, str(kind), str(where), fields)

    def take(self, at_s: float, kind: str, where: str, fields: Sequence[Any]) -> None:
        """Take in a line of the record."""
        self.end_s = max(self.end_s, at_s)
        if kind == "fault":
            begins = bool(fields) and str(fields[0]).startswith(f"{where}(")
            text = one_line(fault_words(str(fields[0])) if begins else _end_words(where, " ".join(map(str, fields))))
            self._faults.append((at_s, EventOverview(at_s, "the world", text, "bad" if begins else "plain")))
            return
        machine = self._machines.setdefault(where, _Machine(where))
        if kind == "machine":
            machine.chip = Chip(str(fields[0]), int(fields[1]) or None)
        elif kind == "job":
            self._work, self._total_steps = str(fields[0]), int(fields[1])
        elif kind == "progress":
            loss = float("nan") if fields[1] is None else float(fields[1])
            machine.steps.append((at_s, HistoryStep(at_s, int(fields[0]), loss, *fields[2:])))
        elif kind == "said":
            machine.messages.append((at_s, HistoryMessage(at_s, str(fields[0]))))
        elif kind == "view":
            lineage, epoch, previous, members = fields
            machine.views.append((at_s, View(lineage, epoch, _members(members), previous)))
        elif kind == "follows":
            machine.follows.append((at_s, int(fields[0])))
        elif kind == "measured":
            name, address, latency_s, there_Bps, back_Bps = fields
            line = LinkStatus(name, name, "", address, latency_s, "", ("", address), there_Bps, back_Bps)
            machine.lines.append((at_s, line))

    def at(self, at_s: float) -> Overview:
        """Return how the cluster stood at that moment."""
        reports = [self._report(machine, at_s) for machine in self._machines.values()]
        return overview(self._title, at_s, reports, self._faults.until(at_s))

    def _report(self, machine: _Machine, at_s: float) -> NodeReport:
        history = RunHistory(self._work, self._total_steps)
        history.extend(_thinned(machine.steps.until(at_s)), machine.messages.until(at_s))
        views = machine.views.until(at_s)
        if views:
            view = views[-1]
            formed = any(epoch >= 0 for epoch in machine.follows.until(at_s))
            view = msgspec.structs.replace(view, formed=formed)
        else:  # fixed ranks: all are there from the beginning
            view = View("", 0, tuple(_member(name) for name in self._machines), formed=not self._has_views)
        us = next((member for member in view.members if member.name == machine.name), _member(machine.name))
        lines = {line.node: line for line in machine.lines.until(at_s)}
        status = Status(us, "", view.lineage, view.epoch, len(view.members), view.formed)
        chip = machine.chip or Chip("")
        details = Details(at_s, chip, Readings(), self._work, self._total_steps)
        return NodeReport(StatusReply(status, view, tuple(lines.values()), (), details), history, at_s)

    def steps(self) -> tuple[HistoryStep, ...]:
        """Return the steps of the machine that has the most of them, of which the first."""
        taken = [tuple(step for _, step in machine.steps) for machine in self._machines.values()]
        return max(taken, key=lambda steps: len(steps), default=())

    @property
    def has_machines(self) -> bool:
        """Whether anything is known of the machines that took part."""
        return bool(self._machines)

    @property
    def _has_views(self) -> bool:
        return any(machine.views for machine in self._machines.values())


_ENDS = {
    "start": "{} starts again",
    "thaw": "{} goes on",
    "unhang": "{} goes on",
    "recover": "{} is as fast as before",
    "steady": "the clock of {} runs at its rate again",
    "mend": "the disk of {} works again",
    "give": "{} may open connections again",
    "behave": "{} sends what it should again",
    "heal": "the network is whole again",
}


def _end_words(what: str, where: str) -> str:
    """Return the end of a fault in words."""
    return _ENDS[what].format(where.partition(" ")[0]) if what in _ENDS else f"{what} {where}"


def fault_words(fault: str) -> str:
    """Return a fault in words, from its representation: "Pause(at_s=10.0, node='a', duration_s=20.0)" is "fault: Pause,
    node a, for 20 s"."""
    try:
        call = ast.parse(fault, mode="eval").body
        assert isinstance(call, ast.Call)
        fields = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    except (SyntaxError, ValueError, AssertionError):
        return f"fault: {fault}"
    words = [f"fault: {ast.unparse(call.func)}"]
    for name, value in fields.items():
        if name == "at_s" or value in (None, False, 0, ()):
            continue
        if isinstance(value, tuple):
            value = " | ".join(", ".join(map(str, each)) if isinstance(each, tuple) else str(each) for each in value)
        key, _, unit = name.rpartition("_")
        if name == "duration_s":
            words.append(f"for {value:g} s")
        elif unit == "s" and isinstance(value, float):
            words.append(f"{key.replace('_', ' ')} {value:g} s")
        else:
            words.append(f"{name.replace('_', ' ')} {value}")
    return ", ".join(words)


def _thinned(steps: list[HistoryStep]) -> list[HistoryStep]:
    """Return enough of these steps for a curve, and all of the last ones, which say how fast it goes."""
    stride = 1 + 2 * len(steps) // MOST_STEPS
    return [*steps[: -_LAST_STEPS or None : stride], *steps[-_LAST_STEPS:]]


def _members(text: str) -> tuple[Member, ...]:
    return tuple(_member(*each.rpartition("#")[::2]) for each in text.split(","))


def _member(name: str, boot: str = "0") -> Member:
    return Member(name, int(boot, 16), name, "")


def read_record(path: Path) -> RecordedRun:
    """Read the record of a run."""
    run = RecordedRun(path.name)
    decode: Callable[[bytes], list[Any]] = msgspec.json.Decoder(list).decode
    wanted = tuple(f'"{kind}"'.encode() for kind in _KINDS)
    first_ns: int | None = None
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                parts = line.split(b",", 2)
                if len(parts) < 3:
                    raise ConfigError(f"{path}, line {number}: this is no event of a run; give a file of --trace")
                if first_ns is None:
                    first_ns = int(parts[0].lstrip(b"["))
                if parts[1] not in wanted:
                    continue
                at_ns, kind, where, *fields = decode(line)
                run.take((at_ns - first_ns) / 1e9, kind, where, fields)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (*UNDECODABLE, ValueError, TypeError, LookupError) as error:
        raise ConfigError(
            f"{path}, line {number}: this is no event of a run ({error}); give a file of --trace"
        ) from None
    if not run.has_machines:
        raise ConfigError(f"{path}: no machine trains in it; record a training with `hcsim run SCENARIO --trace FILE`")
    return run
