"""A sink that turns the times of each machine into those of a clock that all machines share (see
`runtime.timeline_clock`), for a timeline of a real run.

What happens before a machine knows that clock is held back until it does.
"""

from __future__ import annotations

from collections.abc import Sequence

from hcsim.telemetry.trace import Event, IntervalSink, Sink

_MOST_HELD = 100_000
"""The events that are held back; a machine that has more uses its own clock."""


class AlignedSink(IntervalSink):
    """Passes events on by the common clock."""

    wants_frames = True

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._offset_ns: dict[str, int] = {}
        self._held: dict[str, list[Event]] = {}

    def __call__(self, events: Sequence[Event]) -> None:
        for event in events:
            kind, where = str(event[1]), str(event[2])
            if kind == "clock":
                self._offset_ns[where] = int(event[3])
                self._let_go(where)
            if where in self._offset_ns:
                self._pass_on(where, (event,))
                continue
            held = self._held.setdefault(where, [])
            held.append(event)
            if len(held) > _MOST_HELD:
                self._offset_ns[where] = 0
                self._let_go(where)

    def end(self) -> None:
        """Pass on what is still held back, by the machine's own clock."""
        for where in list(self._held):
            self._let_go(where)

    def _let_go(self, where: str) -> None:
        self._pass_on(where, self._held.pop(where, ()))

    def _pass_on(self, where: str, events: Sequence[Event]) -> None:
        offset_ns = self._offset_ns.get(where, 0)
        if events:
            self._sink([(int(at_ns) + offset_ns, *rest) for at_ns, *rest in events])
