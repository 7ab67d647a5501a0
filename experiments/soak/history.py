"""What the members' traces say: which steps were done when, in which views, and where the time of a fault went."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

from hcsim.telemetry.trace import Event

NS = 1e-9
PHASES = ("group failed", "view", "follows", "synchronised", "applied")
"""The kinds of events that are looked at."""


class Change(NamedTuple):
    """Seconds from a fault to what followed from it on the members that it did not strike; None: it did not."""

    noticed_s: float | None
    agreed_s: float | None
    """All had a view without the victim."""
    resumed_s: float | None
    """A step was done in it."""
    returned_s: float | None
    """Between the two steps around the victim's return."""


class History:
    """The events of all members, in their order."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.events = sorted(events, key=lambda event: event[0])
        first: dict[int, float] = {}
        for event in self.events:
            if event[1] == "applied":
                first.setdefault(int(event[4]), _time_s(event))
        self._done_s = sorted(first.values())
        """When each step was first done by somebody."""

    @property
    def count(self) -> int:
        """How many steps were done."""
        return len(self._done_s)

    def steps(self, since_s: float, until_s: float) -> int:
        """How many were done meanwhile."""
        return bisect.bisect_left(self._done_s, until_s) - bisect.bisect_left(self._done_s, since_s)

    def longest_gap_s(self) -> float:
        """Between two steps."""
        return max(after - before for before, after in pairwise(self._done_s))

    def plan(self) -> list[tuple[int, list[str]]]:
        """Who was there after so many steps."""
        members = {int(event[4]): str(event[6]) for event in self.events if event[1] == "view" and "," in str(event[6])}
        began = {int(event[3]): int(event[4]) for event in self.events if event[1] == "synchronised"}
        by_step = {began[epoch]: _names(members[epoch]) for epoch in sorted(began) if epoch in members}
        return sorted(by_step.items())

    def splits(self) -> list[str]:
        """Epochs of which there were two views that worked: this must never be."""
        seen: dict[int, str] = {}
        worked = {int(event[3]) for event in self.events if event[1] == "applied"}
        views = [(int(event[4]), str(event[6])) for event in self.events if event[1] == "view"]
        formed = [view for view in views if view[0] in worked and "," in view[1]]
        return [
            f"epoch {e}: {seen[e]} and {members}" for e, members in formed if seen.setdefault(e, members) != members
        ]

    def change(self, victim: str, since_s: float, until_s: float) -> Change:
        """What followed from a fault of that time."""
        events = [e for e in self._between(since_s, until_s) if e[2] != victim and e[1] in PHASES]
        views = [n for n, event in enumerate(events) if event[1] == "view" and "," in str(event[6])]
        out = next((n for n in views if victim not in _names(str(events[n][6]))), None)
        if out is None:
            return Change(None, None, None, None)
        noticed = next(event for event in events if event[1] in ("group failed", "view"))
        agreed = [event for event in events[out:] if event[1] == "view" and event[4] == events[out][4]]
        resumed = next((event for event in events[out:] if event[1] == "applied"), None)
        back = next((events[n] for n in views if n > out and victim in _names(str(events[n][6]))), None)
        after = [None if event is None else _time_s(event) - since_s for event in (noticed, agreed[-1], resumed)]
        return Change(*after, None if back is None else self._pause_at(_time_s(back)))

    def _pause_at(self, time_s: float) -> float:
        """The longest time without a step near that one: the step that was under way may still have been done."""
        at = bisect.bisect_left(self._done_s, time_s)
        near = self._done_s[max(0, at - 1) : at + 3]
        return max((after - before for before, after in pairwise(near)), default=0.0)

    def told(self, since_s: float, until_s: float) -> Iterator[str]:
        """The events of that time, for people."""
        for event in self._between(since_s, until_s):
            yield f"{_time_s(event) - since_s:8.3f} {event[2]} {event[1]} {' '.join(map(str, event[3:]))[:150]}"

    def _between(self, since_s: float, until_s: float) -> list[Event]:
        lo = bisect.bisect_left(self.events, since_s, key=_time_s)
        return self.events[lo : bisect.bisect_left(self.events, until_s, key=_time_s)]


def read_trace(path: Path) -> list[Event]:
    """The events of a real member; the last line may be cut where it was killed."""
    decode = msgspec.json.Decoder(tuple[str | int | float, ...]).decode
    lines = path.read_bytes().split(b"\n")
    return [decode(line) for line in lines[:-1] if line]


def _time_s(event: Event) -> float:
    return int(event[0]) * NS


def _names(members: str) -> list[str]:
    return [member.partition("#")[0] for member in members.split(",")]
