"""The trace: every send, delivery, timer and fault of a run, with a SHA-256 over all of them.

Sends and deliveries include a connection's frames and packets outside of any connection: calls and their
answers, resets, announcements.

Two runs are equal if their digests are equal. An event is a flat tuple `(time_ns, kind, where, *fields)` of
strings and numbers. The digest is the SHA-256 of the events' msgpack encodings in order of occurrence, so it
also depends on the order within one instant. Events are encoded in batches: the hot path is one list append.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

Event: TypeAlias = tuple[str | int | float, ...]
Sink: TypeAlias = Callable[[Sequence[Event]], None]

_BATCH = 256
"""Small enough that a batch stays in the processor's cache until it is encoded."""


class Trace:
    """Collects events, hashes them, and passes them to a sink (a file, a test) if there is one."""

    def __init__(self, sink: Sink | None = None) -> None:
        self.count = 0
        self._sink = sink
        self._sha = hashlib.sha256()
        self._batch: list[Event] = []
        self._encode = msgspec.msgpack.Encoder().encode

    def record(self, event: Event) -> None:
        """Record one event: time in ns, kind, where, then further fields."""
        batch = self._batch
        batch.append(event)
        if len(batch) >= _BATCH:
            self._flush()

    @property
    def is_kept(self) -> bool:
        """Whether there is a sink."""
        return self._sink is not None

    def append(self, events: Sequence[Event]) -> None:
        """Pass summaries of earlier events to the sink. They are not events, and not in the digest."""
        self._flush()
        if self._sink is not None:
            self._sink(events)

    def digest(self) -> str:
        """Return the SHA-256 of all events recorded so far, in hex."""
        self._flush()
        return self._sha.hexdigest()

    def _flush(self) -> None:
        batch = self._batch
        if not batch:
            return
        # A list is encoded as its items, one after the other, behind their number: one byte up to 15 items, else three.
        self._sha.update(memoryview(self._encode(batch))[1 if len(batch) < 16 else 3 :])
        if self._sink is not None:
            self._sink(batch)
        self.count += len(batch)
        self._batch = []
