"""SimPy's environment, with everything that happens in a virtual world in its one queue.

An entry of SimPy's queue is (time, priority, number, event). Entries of one time and priority are processed in the
order in which they were scheduled. Times are whole nanoseconds. Besides SimPy's own events, two light ones wait here,
both made without `__init__`, with a fixed tuple of callbacks:

-   A `Timer` is a call that asyncio asked for at a later time. It can be cancelled: it then stays in the queue as a
    tombstone, since nothing can be taken out of a heap, and does not move time. Tombstones are swept out when they are
    half of the queue: O(log n) a timer, amortised.
-   A `WorldCall` is a call of the world's own: a delivery, the end of work, a fault. Calls that are scheduled one
    after the other for one instant, as where hundreds of ranks move in step, share one event: O(1) each.

Callbacks that are ready in this instant (asyncio's `call_soon`) wait in a plain queue, and run before the next event.
A call for the end of an instant has the lowest priority: all else of that instant comes first.

`step()` runs what is ready, or else processes the next event; `peek()` is when that will be.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Any, TypeAlias

import simpy
from simpy.core import EmptySchedule
from simpy.events import NORMAL, EventPriority

from hcsim.errors import UsageError

NS = 1_000_000_000
INSTANT_END = EventPriority(10)
_Calls: TypeAlias = deque[tuple[Callable[..., object], tuple[Any, ...]]]
_FEWEST_WORTH_SWEEPING = 64


class Callback(asyncio.TimerHandle):
    """A call that is ready. Its callback is None when it was cancelled.

    It has no `__init__`, which would double the cost of making one.
    """

    __slots__ = ("args", "callback", "context")

    callback: Any
    args: tuple[Any, ...]
    context: Any

    def cancel(self) -> None:
        """Do not run. Harmless when it has run."""
        self.callback = None
        self.args = ()

    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self.callback is None

    def __repr__(self) -> str:
        return f"<callback {self.callback!r}>"

    __eq__ = object.__eq__
    __hash__ = object.__hash__


class Timer(simpy.Event, Callback):
    """A call at a later time."""

    __slots__ = ("callbacks", "deadline_ns", "env", "number")

    _ok = True
    _value = None
    env: Environment
    deadline_ns: int
    number: int

    def cancel(self) -> None:
        """Do not run. Harmless when it has run."""
        self.callback = None
        self.args = ()
        if self.callbacks is not None:
            self.callbacks = None  # type: ignore[assignment]  # as SimPy marks what is over
            self.env.count_tombstone()

    def when(self) -> float:
        """The deadline in seconds."""
        return self.deadline_ns / 1e9

    __repr__ = Callback.__repr__
    __eq__ = object.__eq__
    __hash__ = object.__hash__


class WorldCall(simpy.Event):
    """A call of the world's own, or several: nothing cancels it or holds it back."""

    __slots__ = ("args", "function", "more")

    _ok = True
    _value = None
    callbacks = (lambda event: event.function(*event.args),)  # type: ignore[assignment]
    function: Callable[..., object]
    args: tuple[Any, ...]
    more: _Calls | None
    """What is to be called after it."""


_TIMER_CALLBACKS = (lambda timer: timer.env.ready.append(timer),)
new_callback = partial(object.__new__, Callback)
_new_timer = partial(object.__new__, Timer)
_new_world_call = partial(object.__new__, WorldCall)


class Environment(simpy.Environment):
    """The time and the queue of a virtual world; see the top of this file."""

    def __init__(self) -> None:
        super().__init__()
        self._eid = count(1)
        self._instant_ends = count(1)
        self.now_ns = 0
        """The same as `now`, which is a property and read several times for a message."""
        self.ready: deque[Callback] = deque()
        self.run_ready: Callable[[], None] = self.ready.clear
        """Runs what is ready at this moment."""
        self.on_timer: Callable[[int], None] | None = None
        """Called with the number of each timer whose time has come."""
        self._rest: _Calls | None = None
        """What is left of the last event that is several calls."""
        self._tombstones = 0
        self._latest_ns = -1
        """For when the latest event was scheduled, if it was a call of the world's."""
        self._latest: WorldCall | None = None

    def call_at(self, when_ns: int, function: Callable[..., object], *args: Any) -> None:
        """Call the function at that time; what it raises ends the run."""
        if when_ns != self._latest_ns:
            action = _new_world_call()
            action.function = function
            action.args = args
            action.more = None
            self._latest_ns, self._latest = when_ns, action
            heappush(self._queue, (when_ns, NORMAL, next(self._eid), action))
            return
        next(self._eid)
        assert self._latest is not None
        if self._latest.more is None:
            self._latest.more = deque()
        self._latest.more.append((function, args))

    def call_at_instant_end(self, function: Callable[[], object]) -> None:
        """Call the function once nothing else is left to do in this instant."""
        action = _new_world_call()
        action.function, action.args, action.more = function, (), None
        heappush(self._queue, (self.now_ns, INSTANT_END, next(self._instant_ends), action))

    def timer(self, when_ns: int, callback: Callable[..., object], args: tuple[Any, ...], context: Context) -> Timer:
        """A call that asyncio wants at that time."""
        timer = _new_timer()
        timer.env = self
        timer.callbacks = _TIMER_CALLBACKS  # type: ignore[assignment]
        timer.deadline_ns = when_ns
        timer.number = number = next(self._eid)
        timer.callback = callback
        timer.args = args
        timer.context = context
        self._latest_ns = -1  # what the world schedules from now on comes behind it
        heappush(self._queue, (when_ns, NORMAL, number, timer))
        return timer

    def schedule(self, event: simpy.Event, priority: EventPriority = NORMAL, delay: float = 0) -> None:
        """See `simpy.Environment.schedule`."""
        if not isinstance(delay, int) and delay != inf:
            raise UsageError(f"SimPy's time is whole nanoseconds here, and an event has the delay {delay!r}")
        self._latest_ns = -1
        super().schedule(event, priority, delay)

    def peek(self) -> float:
        """See `simpy.Environment.peek`."""
        if self.ready or self._rest:
            return self._now
        return max(self._now, self._queue[0][0]) if self._queue else inf

    def step(self) -> None:
        """See `simpy.Environment.step`."""
        if self.ready:
            self.run_ready()
            return
        if self._rest:
            function, args = self._rest.popleft()
            function(*args)
            return
        queue = self._queue
        if not queue or queue[0][0] == inf:
            raise EmptySchedule
        time_ns = queue[0][0]
        event: Any = queue[0][3]
        kind = type(event)
        if kind is not WorldCall and kind is not Timer:
            self.now_ns = time_ns  # type: ignore[assignment]
            super().step()
            return
        heappop(queue)
        if event.callbacks is None:
            self._tombstones -= 1
            return
        if time_ns > self._now:
            self._now = self.now_ns = time_ns  # type: ignore[assignment]
        if kind is Timer:
            event.callbacks = None
            if self.on_timer is not None:
                self.on_timer(event.number)
            self.ready.append(event)
            return
        if event is self._latest:
            self._latest_ns = -1  # nothing more can be added to it
        self._rest = event.more
        event.function(*event.args)

    def count_tombstone(self) -> None:
        """A timer that waits here was cancelled."""
        self._tombstones += 1
        if self._tombstones > _FEWEST_WORTH_SWEEPING and 2 * self._tombstones > len(self._queue):
            self._keep(lambda event: event.callbacks is not None)

    def drop(self, is_dropped: Callable[[Timer], bool]) -> None:
        """Take out timers that nobody waits for any more."""
        self._keep(lambda event: event.callbacks is not None and not (type(event) is Timer and is_dropped(event)))

    def postpone(self, by_ns: int, is_concerned: Callable[[Timer], bool]) -> None:
        """Let some timers run out that much later."""
        for place, (_, priority, number, event) in enumerate(self._queue):
            if type(event) is Timer and event.callbacks is not None and is_concerned(event):
                event.deadline_ns += by_ns
                self._queue[place] = (event.deadline_ns, priority, number, event)
        heapify(self._queue)

    def clear(self) -> None:
        """Forget all that was to happen."""
        self.ready.clear()
        self._queue.clear()
        self._rest = None

    def _keep(self, is_kept: Callable[[simpy.Event], bool]) -> None:
        self._queue[:] = [entry for entry in self._queue if is_kept(entry[3])]
        heapify(self._queue)
        self._tombstones = 0
