"""Frames that arrive other than they were sent, past every checksum of the network.

A change waits for the next frame between two hosts that it can be made to, on whatever connection. Until
then their connections take a detour through here; all others are untouched and cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from hcsim.runtime.channel import Payload
from hcsim.runtime.frame import Header

if TYPE_CHECKING:
    from hcsim.telemetry.trace import Trace
    from hcsim.virtual.channel import VirtualChannel
    from hcsim.virtual.wiring import Wiring

Frame: TypeAlias = tuple[Header, Payload]
FLIP = "flip"
Alter: TypeAlias = Callable[["VirtualChannel", Header, Payload], Frame | None]
"""Given the sender's end and a frame: what arrives instead, or None to wait for another frame."""


class Tampering:
    """All changes that wait for their frame."""

    def __init__(self, wiring: Wiring, trace: Trace, *, sealed: bool) -> None:
        self._wiring = wiring
        self._trace = trace
        self._sealed = sealed
        self._waiting: dict[tuple[str, str], list[tuple[str, Alter]]] = {}
        wiring.on_join = self._watch

    def add(self, what: str, source: str, target: str, alter: Alter) -> None:
        """Change one frame from the one to the other; `what` names it in the trace."""
        self._waiting.setdefault((source, target), []).append((what, alter))
        for channel in self._wiring.channels(source, target):
            self._watch(channel)

    def _watch(self, channel: VirtualChannel) -> None:
        if self._waiting.get((channel.host.name, channel.peer)):
            channel.divert(self._passes)

    def _passes(self, channel: VirtualChannel, deliver: Callable[[Header, Payload], None], frame: Frame) -> None:
        waiting = self._waiting[channel.host.name, channel.peer]
        for change in waiting:
            what, alter = change
            altered = alter(channel, *frame)
            if altered is not None:
                waiting.remove(change)
                outgoing = channel.streams[0]
                outgoing.outstanding += altered[0].length - frame[0].length
                self._trace.record((channel.host.loop.now_ns, "fault", what, outgoing.name))
                frame = altered
                if self._sealed and what == FLIP:
                    channel.reset("a record was damaged on its way")
                    return
                break
        if not waiting:
            channel.divert(None)
        deliver(*frame)
