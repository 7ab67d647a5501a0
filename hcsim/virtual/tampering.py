"""Frames that arrive other than they were sent, past every checksum of the network.

A change waits for the next frame between two hosts that it can be made to, on whatever connection. A rule changes
every frame that it applies to, until it is removed. While there is a change or a rule between two hosts, their
connections take a detour through here; all others are untouched and cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from hcsim.runtime.channel import Payload
from hcsim.runtime.frame import HEADER_BYTES, Header

if TYPE_CHECKING:
    from hcsim.telemetry.trace import Trace
    from hcsim.virtual.channel import VirtualChannel
    from hcsim.virtual.wiring import Wiring

Frame: TypeAlias = tuple[Header, Payload]
FLIP = "flip"
Alter: TypeAlias = Callable[["VirtualChannel", Header, Payload], Frame | None]
"""Given the sender's end and a frame: what arrives instead, or None to wait for another frame."""
Rule: TypeAlias = Callable[["VirtualChannel", Header, Payload], tuple[Frame, ...] | None]
"""Given the sender's end and a frame: what arrives instead, in this order, or None where nothing changes."""


class Tampering:
    """All changes that wait for their frame, and all rules."""

    def __init__(self, wiring: Wiring, trace: Trace, *, sealed: bool) -> None:
        self._wiring = wiring
        self._trace = trace
        self._sealed = sealed
        self._waiting: dict[tuple[str, str], list[tuple[str, Alter]]] = {}
        self._rules: dict[tuple[str, str], list[tuple[str, Rule]]] = {}
        wiring.on_join = self._watch

    def add(self, what: str, source: str, target: str, alter: Alter) -> None:
        """Change one frame from the one to the other; `what` names it in the trace."""
        self._waiting.setdefault((source, target), []).append((what, alter))
        self._watch_all(source, target)

    def add_rule(self, what: str, source: str, target: str, rule: Rule) -> None:
        """Apply a rule to all frames from the one to the other; `what` names it in the trace."""
        self._rules.setdefault((source, target), []).append((what, rule))
        self._watch_all(source, target)

    def remove_rule(self, source: str, target: str, rule: Rule) -> None:
        """Apply it no longer."""
        ways = self._rules[source, target]
        ways[:] = [entry for entry in ways if entry[1] is not rule]

    def _watch_all(self, source: str, target: str) -> None:
        for channel in self._wiring.channels(source, target):
            self._watch(channel)

    def _watch(self, channel: VirtualChannel) -> None:
        way = channel.host.name, channel.peer
        if self._waiting.get(way) or self._rules.get(way):
            channel.divert(self._passes)

    def _passes(self, channel: VirtualChannel, deliver: Callable[[Header, Payload], None], frame: Frame) -> None:
        way = channel.host.name, channel.peer
        waiting, rules = self._waiting.get(way, []), self._rules.get(way, [])
        size_bytes = frame[0].length
        for change in waiting:
            what, alter = change
            altered = alter(channel, *frame)
            if altered is not None:
                waiting.remove(change)
                self._note(channel, what)
                frame = altered
                if self._sealed and what == FLIP:
                    channel.reset("a record was damaged on its way")
                    return
                break
        frames: tuple[Frame, ...] = (frame,)
        for what, rule in rules:
            frames = tuple(out for each in frames for out in self._ruled(channel, what, rule, each))
        arrived_bytes = sum(HEADER_BYTES + header.length for header, _ in frames)
        channel.streams[0].outstanding += arrived_bytes - HEADER_BYTES - size_bytes
        if not waiting and not rules:
            channel.divert(None)
        for each in frames:
            deliver(*each)

    def _ruled(self, channel: VirtualChannel, what: str, rule: Rule, frame: Frame) -> tuple[Frame, ...]:
        made = rule(channel, *frame)
        if made is None:
            return (frame,)
        self._note(channel, what)
        return made

    def _note(self, channel: VirtualChannel, what: str) -> None:
        self._trace.record((channel.host.loop.env.now_ns, "fault", what, channel.streams[0].name))
