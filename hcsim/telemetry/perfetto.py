"""Files of Perfetto (https://ui.perfetto.dev): a protobuf `Trace` of `TracePacket`s with `TrackEvent`s.

A file is a sequence of packets, each a field of the outermost message, so it can be written as it comes into being.
Only a dozen fields of the schema are needed.

The numbers are those of
protos/perfetto/trace/{trace_packet,track_event/track_event,track_event/track_descriptor}.proto.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum

from hcsim.telemetry.protobuf import delimited, double, fixed64, text, uint

_NUMBER_BITS, _PROCESS_BITS = 20, 8
"""How many tracks, and how many processes, a file has at most beside others."""
_BEGIN, _END, _INSTANT = 1, 2, 3
_EXPLICIT_ORDER = 3
_CLEARED = 1
"""The first packet says that nothing before it is referred to."""


class _Field(IntEnum):
    PACKET = 1
    PACKET_TIMESTAMP = 8
    PACKET_SEQUENCE = 10
    PACKET_EVENT = 11
    PACKET_FLAGS = 13
    PACKET_TRACK = 60
    TRACK_UUID = 1
    TRACK_NAME = 2
    TRACK_PROCESS = 3
    TRACK_PARENT = 5
    TRACK_ORDERING = 11
    TRACK_RANK = 12
    PROCESS_PID = 1
    PROCESS_NAME = 6
    EVENT_NOTE = 4
    EVENT_TYPE = 9
    EVENT_TRACK = 11
    EVENT_NAME = 23
    EVENT_FLOWS = 47
    NOTE_INT = 4
    NOTE_DOUBLE = 5
    NOTE_TEXT = 6
    NOTE_NAME = 10


Notes = Mapping[str, int | float | str]
"""What the page shows of a slice that is clicked on."""
_NO_NOTES: Notes = {}


class PerfettoFile:
    """Writes tracks, slices and instants. Slices of one track must not overlap, and are written in order.

    Files may be concatenated if each has another `origin`, a random number: their numbers differ then."""

    def __init__(self, write: Callable[[bytes], None], origin: int = 0) -> None:
        self._write = write
        self._tracks = origin % (1 << 63 - _NUMBER_BITS) << _NUMBER_BITS
        self._processes = origin % (1 << 31 - _PROCESS_BITS) << _PROCESS_BITS
        self._sequence = uint(_Field.PACKET_SEQUENCE, 1 + origin % ((1 << 32) - 1))
        self._packet(uint(_Field.PACKET_FLAGS, _CLEARED))

    def process(self, name: str, rank: int) -> int:
        """Add a process, which holds tracks; return its number. Those of lower rank are shown further up."""
        self._processes += 1
        about = uint(_Field.PROCESS_PID, self._processes) + text(_Field.PROCESS_NAME, name)
        return self._track(delimited(_Field.TRACK_PROCESS, about) + uint(_Field.TRACK_ORDERING, _EXPLICIT_ORDER), rank)

    def track(self, name: str, process: int, rank: int) -> int:
        """Add a track; return its number. Tracks of one name are shown as one."""
        return self._track(text(_Field.TRACK_NAME, name) + uint(_Field.TRACK_PARENT, process), rank)

    def slice(
        self, track: int, span_ns: tuple[int, int], name: str, notes: Notes = _NO_NOTES, flows: Iterable[int] = ()
    ) -> None:
        """Write a slice. A flow is an arrow from here to the instant that has its number."""
        begin_ns, end_ns = span_ns
        about = [text(_Field.EVENT_NAME, name), *map(_note, notes.items())]
        about += [fixed64(_Field.EVENT_FLOWS, flow) for flow in flows]
        self._event(begin_ns, track, _BEGIN, b"".join(about))
        self._event(end_ns, track, _END, b"")

    def instant(self, track: int, at_ns: int, name: str, notes: Notes = _NO_NOTES, flows: Iterable[int] = ()) -> None:
        """Write an instant, at which the flows end. One that has not begun by then begins here."""
        about = [text(_Field.EVENT_NAME, name), *map(_note, notes.items())]
        about += [fixed64(_Field.EVENT_FLOWS, flow) for flow in flows]
        self._event(at_ns, track, _INSTANT, b"".join(about))

    def _track(self, about: bytes, rank: int) -> int:
        self._tracks += 1
        about = uint(_Field.TRACK_UUID, self._tracks) + about + uint(_Field.TRACK_RANK, rank)
        self._packet(delimited(_Field.PACKET_TRACK, about))
        return self._tracks

    def _event(self, at_ns: int, track: int, kind: int, about: bytes) -> None:
        event = uint(_Field.EVENT_TYPE, kind) + uint(_Field.EVENT_TRACK, track) + about
        self._packet(uint(_Field.PACKET_TIMESTAMP, at_ns) + delimited(_Field.PACKET_EVENT, event))

    def _packet(self, about: bytes) -> None:
        self._write(delimited(_Field.PACKET, about + self._sequence))


def _note(item: tuple[str, int | float | str]) -> bytes:
    name, value = item
    if isinstance(value, str):
        encoded = text(_Field.NOTE_TEXT, value)
    elif isinstance(value, int):
        encoded = uint(_Field.NOTE_INT, value)
    else:
        encoded = double(_Field.NOTE_DOUBLE, value)
    return delimited(_Field.EVENT_NOTE, text(_Field.NOTE_NAME, name) + encoded)
