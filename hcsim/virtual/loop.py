"""An asyncio event loop whose clock is SimPy's.

Tasks, futures, cancellation, `TaskGroup`, `timeout` and `Queue` are asyncio's own code; only
what lies below them is replaced: time, the queue of ready callbacks and the timers. Time is
SimPy's, in whole nanoseconds, and moves only when nothing is ready.

Order. Ready callbacks run first in, first out. When none is left, the world takes one step,
the earliest of SimPy's events and our timers, and what that made ready runs before the next
step. Timers with equal deadlines run in the order in which they were set. Within one instant
SimPy's own events come before timers. So a run depends on nothing but the program.

Timers wait in a heap of ours and not in SimPy's, from which nothing can be taken out: a
cancelled `timeout(60)` would stay there for a minute. SimPy's environment takes its time from the
loop (`Environment.now`), so that its processes and ours see one time.
Cancelled timers are swept out when they are half of the heap: O(log n) a timer, amortised. Those that the world
sets one after the other for one instant, as it does where hundreds of ranks move in step, wait there together: O(1).

Owners. A callback belongs to the host that `OWNER` names in its context. A frozen host's
callbacks are held back; a discarded host's (it crashed) are held back for good, so that not
even a `finally` of its coroutines runs before the world is torn down.
"""

from __future__ import annotations

import asyncio
import math
import sys
import weakref
from asyncio import Future
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextvars import Context, ContextVar, copy_context
from heapq import heapify, heappop, heappush
from typing import Any, TypeAlias, TypeVar, TypeVarTuple, Unpack, cast

import simpy
from simpy.resources.base import Get, Put
from simpy.resources.container import ContainerGet
from simpy.resources.resource import Request
from simpy.resources.store import StoreGet

from hcsim.errors import Deadlock, HcsimError, UsageError
from hcsim.virtual.deadlock import describe
from hcsim.virtual.handles import Callback, Environment, NumberedTask, new_callback
from hcsim.virtual.plain_loop import PlainLoop

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

OWNER: ContextVar[object] = ContextVar("OWNER", default=None)
"""The host that the running code belongs to; None is the world itself."""

_WorldTimer: TypeAlias = tuple[Callable[..., object], tuple[Any, ...]]
Timer: TypeAlias = tuple[int, int, Callback | None, Any, Any]
"""Deadline, number, and what runs then. The world's own cannot be cancelled or held, and are just function and args,
or None and several of them."""

_NEVER_NS = cast(int, math.inf)  # As SimPy says when it has no event: such a timer is no reason to go on.
_FEWEST_WORTH_SWEEPING = 64
_CLOSED = "the virtual loop is closed"


class VirtualLoop(PlainLoop):
    """Runs coroutines in SimPy's time, beside plain SimPy processes; see the top of this file.

    `on_timer`, if set, is called with the number of each timer that fires, the world's own excepted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 0
        """The world's time."""
        self.env = Environment(self)
        """Plain SimPy processes live here."""
        self.on_timer: Callable[[int], None] | None = None
        self._ready: deque[Callback] = deque()
        self._timers: list[Timer] = []
        self._timers_set = 0
        self._timers_cancelled = 0
        self._latest_ns = -1
        """For when the latest timer was set, if it was one of the world's own."""
        self._joint: deque[_WorldTimer] | None = None
        """Those that were set for then behind the first; in the heap they are one."""
        self._due: deque[_WorldTimer] = deque()
        """What is left of such a one that is due now."""
        self._at_instant_end: deque[Callable[[], object]] = deque()
        self._held: dict[object, deque[Callback]] = {}
        self._discarded: list[object] = []
        self._ends = False
        """Whether the world is being torn down: nothing is held back any more."""
        # The loop keeps its unfinished tasks alive: one that were collected while it waits would run
        # its `finally` blocks whenever the garbage collector pleases. The value is the task's owner.
        self._tasks: dict[asyncio.Task[Any], object] = {}
        self._tasks_made = 0
        self._asyncgens: weakref.WeakKeyDictionary[AsyncGenerator[Any, Any], None] = weakref.WeakKeyDictionary()
        self._closed = False

    # Time and callbacks.

    def time(self) -> float:
        """The world's time in seconds."""
        return self.now_ns / 1e9

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Run the callback in this instant, after what is ready already."""
        if self._closed:
            raise RuntimeError(_CLOSED)
        handle = new_callback()
        handle.loop = None
        handle.callback = callback
        handle.args = args
        handle.context = copy_context() if context is None else context
        self._ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> Callback:
        """Run the callback after that many seconds; any delay above zero takes a nanosecond at least."""
        deadline_ns = self.now_ns + (_nanoseconds(delay) or 1) if delay > 0 else self.now_ns
        return self._set_timer(deadline_ns, callback, args, copy_context() if context is None else context)

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> Callback:
        """Run the callback at that time in seconds; a time that has passed is now."""
        return self._set_timer(_nanoseconds(when), callback, args, copy_context() if context is None else context)

    def call_at_ns(self, when_ns: int, callback: Callable[[Unpack[Ts]], object], *args: *Ts) -> None:
        """Run the callback at that time, as the world: nothing stops it, and what it raises ends the run."""
        if self._closed:
            raise RuntimeError(_CLOSED)
        self._timers_set = number = self._timers_set + 1
        if when_ns != self._latest_ns:
            self._latest_ns, self._joint = when_ns, None
            heappush(self._timers, (when_ns, number, None, callback, args))
            return
        if self._joint is None:
            self._joint = deque()
            heappush(self._timers, (when_ns, number, None, None, self._joint))
        self._joint.append((callback, args))

    def call_at_instant_end(self, callback: Callable[[], object]) -> None:
        """Run the callback, as the world, once nothing else is left to do in this instant."""
        self._at_instant_end.append(callback)

    def _set_timer(
        self, deadline_ns: int, callback: Callable[..., object], args: tuple[Any, ...], context: Context
    ) -> Callback:
        if self._closed:
            raise RuntimeError(_CLOSED)
        self._timers_set = number = self._timers_set + 1
        timer = new_callback()
        timer.loop = self
        timer.deadline_ns = deadline_ns
        timer.callback = callback
        timer.args = args
        timer.context = context
        self._latest_ns = -1  # whatever the world sets from now on comes behind it
        heappush(self._timers, (deadline_ns, number, timer, None, ()))
        return timer

    def _count_cancelled_timer(self) -> None:
        self._timers_cancelled += 1
        if self._timers_cancelled > _FEWEST_WORTH_SWEEPING and 2 * self._timers_cancelled > len(self._timers):
            self._sweep_timers()

    def _sweep_timers(self) -> None:
        self._timers[:] = [entry for entry in self._timers if entry[2] is None or entry[2].loop is not None]
        heapify(self._timers)
        self._timers_cancelled = 0

    # Futures, tasks and SimPy's events.

    def create_future(self) -> asyncio.Future[Any]:
        """A future of this loop."""
        return Future(loop=self)

    def create_task(
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        name: str | None = None,
        context: Context | None = None,
        **kwargs: Any,
    ) -> asyncio.Task[T]:
        """Run a coroutine as a task. Without a name it is numbered within this loop, the same in every run."""
        if self._closed:
            raise RuntimeError(_CLOSED)
        self._tasks_made = number = self._tasks_made + 1
        task: asyncio.Task[T] = NumberedTask(
            number, coro, loop=self, name=name or f"task-{number}", context=context, **kwargs
        )
        self._tasks[task] = OWNER.get() if context is None else context.get(OWNER)
        task.add_done_callback(self._tasks.pop)
        return task

    def tasks_of(self, owner: object) -> int:
        """How many unfinished tasks it has."""
        return sum(each is owner for each in self._tasks.values())

    def event(self, event: simpy.Event) -> asyncio.Future[Any]:
        """A future with a SimPy event's value or failure. Cancelled, it leaves the event, or a resource's queue."""
        future = self.create_future()

        def deliver(event: simpy.Event) -> None:
            if future.done():
                return
            if event.ok:
                future.set_result(event.value)
            else:
                event.defused = True
                future.set_exception(cast(BaseException, event.value))

        def leave(future: asyncio.Future[Any]) -> None:
            if future.cancelled() and event.callbacks is not None:
                event.callbacks.remove(deliver)
                if isinstance(event, Get | Put):
                    _take_back(event)

        if event.callbacks is None:
            deliver(event)
        else:
            event.callbacks.append(deliver)
            future.add_done_callback(leave)
        return future

    # Owners.

    def freeze(self, owner: object) -> None:
        """Hold back every callback of this owner, ready or from timers, until it is thawed; not in the tearing down."""
        if owner is None:
            raise UsageError("the world itself cannot be frozen")
        if not self._ends:
            self._held.setdefault(owner, deque())

    def is_frozen(self, owner: object) -> bool:
        """Whether this owner's callbacks are held back."""
        return owner in self._held

    def thaw(self, owner: object) -> None:
        """Let the owner go on: what was held back is ready now, in its order. A discarded owner stays dead."""
        if owner not in self._discarded:
            # In front, because callbacks of this owner that are ready already came later.
            self._ready.extendleft(reversed(self._held.pop(owner, ())))

    def discard(self, owner: object) -> None:
        """End this owner as a crash does: its code runs no further line until the world is torn down."""
        self.freeze(owner)
        self._discarded.append(owner)
        for _, _, timer, *_ in self._timers:
            if timer is not None and timer.context.get(OWNER) is owner:
                timer.loop = None
        self._sweep_timers()

    def postpone(self, owner: object, by_ns: int) -> None:
        """Let all timers of this owner run out that much later."""
        for place, (deadline_ns, number, timer, *rest) in enumerate(self._timers):
            if timer is not None and timer.context.get(OWNER) is owner:
                timer.deadline_ns = deadline_ns + by_ns
                self._timers[place] = (timer.deadline_ns, number, timer, *rest)
        heapify(self._timers)

    def _is_held(self, handle: Callback) -> bool:
        held = self._held.get(handle.context.get(OWNER))
        if held is None:
            return False
        held.append(handle)
        return True

    # Running.

    def run_until_complete(self, future: Generator[Any, None, T] | Awaitable[T]) -> T:
        """Run the world until the future is done; raise `Deadlock` when that cannot happen any more."""
        if self._closed:
            raise RuntimeError(_CLOSED)
        if asyncio._get_running_loop() is not None:
            raise RuntimeError("a virtual loop cannot run inside a running event loop: await the coroutine instead")
        is_ours = not asyncio.isfuture(future)
        main: asyncio.Future[T] = asyncio.ensure_future(cast(Awaitable[T], future), loop=self)
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=self._note_asyncgen, finalizer=self._close_asyncgen)
        asyncio._set_running_loop(self)
        try:
            self._run(main)
        except BaseException:
            if is_ours and main.done() and not main.cancelled():
                main.exception()  # It is on its way out: nobody is to be told that it was never retrieved.
            raise
        finally:
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)
        return main.result()

    def run_to_end(self, main: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine, then tear the world down: cancel what is left, discarded owners too, and close."""
        try:
            result = self.run_until_complete(main)
        except BaseException as error:
            try:
                self._tear_down()
            except Deadlock as stuck:
                error.add_note(f"Then tasks would not end when they were cancelled: {stuck}")
            raise
        self._tear_down()
        return result

    def _tear_down(self) -> None:
        self._ends = True
        self._discarded.clear()
        for owner in tuple(self._held):
            self.thaw(owner)
        try:
            while unfinished := tuple(task for task in self._tasks if not task.done()):
                self._cancel(unfinished)
            self.run_until_complete(self.shutdown_asyncgens())
        finally:
            self.close()

    def _cancel(self, tasks: tuple[asyncio.Task[Any], ...]) -> None:
        for task in tasks:
            task.cancel()
        self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        for task in tasks:
            # What a dead host's tasks end with when they are let go is no news.
            if not task.cancelled() and (error := task.exception()) and not isinstance(error, HcsimError):
                message = "a task failed while the world was torn down"
                self.call_exception_handler({"message": message, "exception": error, "task": task})

    def _run(self, main: asyncio.Future[Any]) -> None:
        ready, done = self._ready, main.done
        while not done():
            if not ready:
                self._pass_time(done)
                continue
            # What these make ready waits for the next round, so that the end is noticed.
            for _ in range(len(ready)):
                handle = ready.popleft()
                if handle.callback is None or (self._held and self._is_held(handle)):
                    continue
                try:
                    handle.context.run(handle.callback, *handle.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self._report(handle, error)

    def _report(self, handle: Callback, error: BaseException) -> None:
        message = f"a callback failed: {handle.callback!r}"
        self.call_exception_handler({"message": message, "exception": error, "handle": handle})

    def _pass_time(self, done: Callable[[], bool]) -> None:
        """Take SimPy's next event or our next timer, whichever is earlier, until something is ready or all is done."""
        timers, env, ready, at_instant_end = self._timers, self.env, self._ready, self._at_instant_end
        due = self._due
        while not ready and not done():
            timer_ns = self.now_ns if due else timers[0][0] if timers else _NEVER_NS
            if env.waiting and self._takes_event(timer_ns):
                continue
            if due:
                function, args = due.popleft()
                function(*args)
                continue
            if timer_ns > self.now_ns:
                if at_instant_end:
                    at_instant_end.popleft()()
                    continue
                if timer_ns == _NEVER_NS:
                    raise Deadlock(describe(self._waiting(), self._held.__contains__))
            _, number, timer, function, args = heappop(timers)
            if timer is not None and timer.loop is None:
                self._timers_cancelled -= 1
                continue
            if timer_ns > self.now_ns:
                self.now_ns = timer_ns
            if timer is None:
                if function is None:
                    due = self._due = args
                    self._latest_ns = -1
                else:
                    function(*args)
                continue
            timer.loop = None
            if self.on_timer is not None:
                self.on_timer(number)
            if not (self._held and self._is_held(timer)):
                ready.append(timer)

    def _takes_event(self, timer_ns: int) -> bool:
        """Let SimPy's next event happen if it is due before our next timer and this instant's end; whether it was."""
        event_ns = self.env.peek()
        if event_ns > timer_ns or event_ns == _NEVER_NS or (event_ns > self.now_ns and self._at_instant_end):
            return False
        self.now_ns = _whole_ns(event_ns)
        self.env.step()
        return True

    def _waiting(self) -> dict[asyncio.Task[Any], object]:
        alive = ((task, owner) for task, owner in self._tasks.items() if owner not in self._discarded)
        return {task: owner for task, owner in alive if not task.done()}

    def is_running(self) -> bool:
        """Whether this loop is the one that runs."""
        return asyncio._get_running_loop() is self

    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Drop all callbacks and timers; the loop cannot be used again."""
        if self.is_running():
            raise RuntimeError("a running loop cannot be closed")
        self._closed = True
        self._ready.clear()
        self._timers.clear()
        self._due.clear()
        self._at_instant_end.clear()
        self._held.clear()

    # Async generators: as the standard loop, but closed in the order in which they were started.

    def _note_asyncgen(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._asyncgens[generator] = None

    def _close_asyncgen(self, generator: AsyncGenerator[Any, Any]) -> None:
        if not self._closed:
            self.call_soon(self.create_task, generator.aclose())

    async def shutdown_asyncgens(self) -> None:
        """Close the asynchronous generators that were started and not finished."""
        generators = tuple(self._asyncgens)
        self._asyncgens.clear()
        results = await asyncio.gather(*(generator.aclose() for generator in generators), return_exceptions=True)
        for generator, result in zip(generators, results, strict=True):
            if isinstance(result, Exception):
                message = f"an asynchronous generator could not be closed: {generator!r}"
                self.call_exception_handler({"message": message, "exception": result, "asyncgen": generator})

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Nothing to do: there are no threads here."""


def _take_back(event: Get[Any] | Put[Any]) -> None:
    """Nobody wants the event any more: what it was granted meanwhile goes back."""
    if not event.triggered:
        event.cancel()
    elif isinstance(event, Request):
        event.resource.release(event)
    elif isinstance(event, ContainerGet):
        event.resource.put(event.amount)
    elif isinstance(event, StoreGet):
        event.resource.items.insert(0, event.value)
        event.resource._trigger_get(None)


def _nanoseconds(seconds: float) -> int:
    """Rounded up, so that nothing runs early. A tenth is forgiven, because 0.1 + 0.2 is more than 0.3."""
    try:
        return int(seconds * 1e9 + 0.9)
    except OverflowError:
        return _NEVER_NS


def _whole_ns(time_ns: float) -> int:
    if not isinstance(time_ns, int):
        raise UsageError(f"SimPy's time is whole nanoseconds here, and an event has the time {time_ns!r}")
    return time_ns
