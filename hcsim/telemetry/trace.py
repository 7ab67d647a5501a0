"""The trace: every send, delivery, timer and fault of a run, with a SHA-256 over all of them.

Sends and deliveries include a connection's frames and packets outside of any connection: calls and their
answers, resets, announcements.

Two runs are equal if their digests are equal. An event is a flat tuple `(time_ns, kind, where, *fields)` of
strings and numbers. The digest is the SHA-256 of the events' msgpack encodings in order of occurrence, so it
also depends on the order within one instant. Events are encoded in batches: the hot path is one list append.

For a timeline, hosts also say when they begin and end what takes time (`Intervals`). That is not in the digest.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from asyncio import Task, current_task
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from itertools import count
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import msgspec

Event: TypeAlias = tuple[str | int | float, ...]
Sink: TypeAlias = Callable[[Sequence[Event]], None]

_BATCH = 256
"""Small enough that a batch stays in the processor's cache until it is encoded."""


class IntervalSink(ABC):
    """A sink that receives intervals, too: (time, "begin", host, number, purpose, detail, thread, *figures) and (time,
    "end", host, number), with "failed" behind it if an error ended the block. A thread is an asyncio task, by a number;
    (time, "spawn", host, thread, parent) is the start of one."""

    wants_frames = False
    """Whether real machines are to note the frames that they send and receive: (time, "sent" or "received", host, rank
    of the peer, number, duration in ns, operation, bucket, round, offset, bytes). A virtual network does so anyway."""

    @abstractmethod
    def __call__(self, events: Sequence[Event]) -> None: ...


class Trace:
    """Collects events, hashes them, and passes them to a sink (a file, a test) if there is one."""

    def __init__(self, sink: Sink | None = None) -> None:
        self.count = 0
        self.has_intervals = isinstance(sink, IntervalSink)
        """Whether the sink receives intervals."""
        self.has_frames = isinstance(sink, IntervalSink) and sink.wants_frames
        """Whether the sink wants notes of frames."""
        self.numbers = count(1)
        """Of the intervals of all hosts."""
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


_NOTHING: AbstractContextManager[None] = nullcontext()
_thread: ContextVar[int] = ContextVar("_thread", default=0)
"""The number of the task that noted something last in this context: in a new task that of its parent."""


class Intervals:
    """What one host does, from when to when; noted only if the trace's sink receives intervals."""

    def __init__(self, trace: Trace | None, now_ns: Callable[[], int], host: str) -> None:
        self._trace = trace if trace is not None and trace.has_intervals else None
        self._now_ns = now_ns
        self._host = host
        self._threads: WeakKeyDictionary[Task[Any], int] = WeakKeyDictionary()

    def __call__(
        self, purpose: str, detail: object = "", about: Callable[[], Sequence[str | int | float]] | None = None
    ) -> AbstractContextManager[None]:
        """Note what the host does in this block; `about` is asked for figures if anybody receives them."""
        return _NOTHING if self._trace is None else self._noted(self._trace, purpose, str(detail), about)

    def spawned(self, task: Task[Any]) -> None:
        """Note that the present task has started this one."""
        if self._trace is not None:
            self._begin_thread(self._trace, task, self._present(self._trace))

    @contextmanager
    def _noted(
        self, trace: Trace, purpose: str, detail: str, about: Callable[[], Sequence[str | int | float]] | None
    ) -> Iterator[None]:
        number, thread = next(trace.numbers), self._present(trace)
        figures = () if about is None else about()
        trace.append([(self._now_ns(), "begin", self._host, number, purpose, detail, thread, *figures)])
        failed: tuple[str, ...] = ("failed",)
        try:
            yield
            failed = ()
        finally:
            trace.append([(self._now_ns(), "end", self._host, number, *failed)])

    def _present(self, trace: Trace) -> int:
        """Return the number of the present task; 0 outside of all. A task whose start was not noted is a child of the
        one from which it has its context."""
        try:
            task = current_task()
        except RuntimeError:  # no event loop runs
            task = None
        if task is None:
            return 0
        number = self._threads.get(task)
        if number is None:
            number = self._begin_thread(trace, task, _thread.get())
        _thread.set(number)
        return number

    def _begin_thread(self, trace: Trace, task: Task[Any], parent: int) -> int:
        number = self._threads[task] = next(trace.numbers)
        trace.append([(self._now_ns(), "spawn", self._host, number, parent)])
        return number
