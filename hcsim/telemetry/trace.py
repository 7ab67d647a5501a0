"""The trace: every send, delivery, timer and fault of a run, with a SHA-256 over all of it.

A connection's frames are sent and delivered, and so are packets outside of any: calls and their answers, resets,
announcements.

Two runs are the same run when their digests are equal. An event is a flat tuple
`(time_ns, kind, where, *fields)` of strings and numbers; the digest is the SHA-256 of the
events' msgpack encodings in the order in which they happened, so it also depends on order
within one instant. Events are encoded in batches: the hot path is one list append.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

Event: TypeAlias = tuple[str | int | float, ...]
Sink: TypeAlias = Callable[[Sequence[Event]], None]

_BATCH = 256
"""Few enough that they stay in the processor's cache until they are encoded."""


class Trace:
    """Collects events, digests them, and hands them to a sink (a file, a test) if there is one."""

    def __init__(self, sink: Sink | None = None) -> None:
        self.count = 0
        self._sink = sink
        self._sha = hashlib.sha256()
        self._batch: list[Event] = []
        self._encode = msgspec.msgpack.Encoder().encode

    def record(self, event: Event) -> None:
        """Add one event: time in ns, kind, where, then whatever describes it."""
        batch = self._batch
        batch.append(event)
        if len(batch) >= _BATCH:
            self._flush()

    @property
    def is_kept(self) -> bool:
        """Whether somebody takes the events."""
        return self._sink is not None

    def append(self, events: Sequence[Event]) -> None:
        """Hand to the sink what only sums up the events before it: that is no event itself, and not in the digest."""
        self._flush()
        if self._sink is not None:
            self._sink(events)

    def digest(self) -> str:
        """The SHA-256 of everything recorded so far, in hex."""
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
