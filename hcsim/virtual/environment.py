"""The SimPy environment, with all events of a virtual world in its single queue.

An entry of the SimPy queue is (time, priority, number, event). Entries of equal time and priority are processed
in the order in which they were scheduled. Times are whole nanoseconds. Two light event types are added. Both
are made without `__init__`, with a fixed tuple of callbacks:

-   A `Timer` is an asyncio call at a later time. It can be cancelled: it then stays in the heap as a tombstone,
    which does not advance time. Tombstones are removed when they are half of the queue: O(log n) per timer,
    amortised.
-   A `WorldCall` is a call of the simulator: a delivery, the end of work, a fault. Consecutive calls for one
    instant share one event, which is common where hundreds of ranks run in lockstep: O(1) each.

Ready callbacks (asyncio's `call_soon`) wait in a plain queue and run before the next event. A call for the end
of an instant has the lowest priority and runs last.

`step()` runs the ready callbacks, or else processes the next event; `peek()` returns the time of the next step.
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
    """A ready callback; its function is None once it was cancelled.

    There is no `__init__`, which would double the cost of creating one."""

    __slots__ = ("args", "callback", "context")

    callback: Any
    args: tuple[Any, ...]
    context: Any

    def cancel(self) -> None:
        """Cancel the call; no effect once it has run."""
        self.callback = None
        self.args = ()

    def cancelled(self) -> bool:
        return self.callback is None

    def __repr__(self) -> str:
        return f"<callback {self.callback!r}>"

    __eq__ = object.__eq__
    __hash__ = object.__hash__


class Timer(simpy.Event, Callback):
    """A callback at a later time."""

    __slots__ = ("callbacks", "deadline_ns", "env", "number")

    _ok = True
    _value = None
    env: Environment
    deadline_ns: int
    number: int

    def cancel(self) -> None:
        """Cancel the call; no effect once it has run."""
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
    """One or more calls of the simulator, which cannot be cancelled or held back."""

    __slots__ = ("args", "function", "more")

    _ok = True
    _value = None
    callbacks = (lambda event: event.function(*event.args),)  # type: ignore[assignment]
    function: Callable[..., object]
    args: tuple[Any, ...]
    more: _Calls | None
    """Further calls for the same instant."""


_TIMER_CALLBACKS = (lambda timer: timer.env.ready.append(timer),)
new_callback = partial(object.__new__, Callback)
_new_timer = partial(object.__new__, Timer)
_new_world_call = partial(object.__new__, WorldCall)


class Environment(simpy.Environment):
    """The clock and the event queue of a virtual world; see the module docstring."""

    def __init__(self) -> None:
        super().__init__()
        self._eid = count(1)
        self._instant_ends = count(1)
        self.now_ns = 0
        """The same as `now`, as a plain attribute: it is read several times for each message."""
        self.ready: deque[Callback] = deque()
        self.run_ready: Callable[[], None] = self.ready.clear
        """Runs the ready callbacks of this instant."""
        self.on_timer: Callable[[int], None] | None = None
        """Called with the number of each timer that fires."""
        self._rest: _Calls | None = None
        """The remaining calls of the last `WorldCall`."""
        self._tombstones = 0
        self._latest_ns = -1
        """The time of the most recently scheduled event, if that was a `WorldCall`."""
        self._latest: WorldCall | None = None

    def call_at(self, when_ns: int, function: Callable[..., object], *args: Any) -> None:
        """Call the function at that time. An exception that it raises ends the run."""
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
        """Call the function at the end of this instant, after everything else."""
        action = _new_world_call()
        action.function, action.args, action.more = function, (), None
        heappush(self._queue, (self.now_ns, INSTANT_END, next(self._instant_ends), action))

    def timer(self, when_ns: int, callback: Callable[..., object], args: tuple[Any, ...], context: Context) -> Timer:
        """Schedule an asyncio callback at that time."""
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
        if not isinstance(delay, int) and delay != inf:
            raise UsageError(f"SimPy's time is whole nanoseconds here, and an event has the delay {delay!r}")
        self._latest_ns = -1
        super().schedule(event, priority, delay)

    def peek(self) -> float:
        if self.ready or self._rest:
            return self._now
        return max(self._now, self._queue[0][0]) if self._queue else inf

    def step(self) -> None:
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
        """Count the cancellation of a queued timer."""
        self._tombstones += 1
        if self._tombstones > _FEWEST_WORTH_SWEEPING and 2 * self._tombstones > len(self._queue):
            self._keep(lambda event: event.callbacks is not None)

    def drop(self, is_dropped: Callable[[Timer], bool]) -> None:
        """Remove the matching timers from the queue."""
        self._keep(lambda event: event.callbacks is not None and not (type(event) is Timer and is_dropped(event)))

    def postpone(self, by_ns: int, is_concerned: Callable[[Timer], bool]) -> None:
        """Delay the matching timers."""
        for place, (_, priority, number, event) in enumerate(self._queue):
            if type(event) is Timer and event.callbacks is not None and is_concerned(event):
                event.deadline_ns += by_ns
                self._queue[place] = (event.deadline_ns, priority, number, event)
        heapify(self._queue)

    def clear(self) -> None:
        """Remove all scheduled events and ready callbacks."""
        self.ready.clear()
        self._queue.clear()
        self._rest = None

    def _keep(self, is_kept: Callable[[simpy.Event], bool]) -> None:
        self._queue[:] = [entry for entry in self._queue if is_kept(entry[3])]
        heapify(self._queue)
        self._tombstones = 0
