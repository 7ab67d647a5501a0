"""An asyncio event loop driven by the SimPy clock.

Tasks, futures, cancellation, `TaskGroup`, `timeout` and `Queue` are asyncio's own code. Only the layer below is
replaced: time, the queue of ready callbacks, and the timers. Time is SimPy's, in whole nanoseconds, and
advances only when nothing is ready.

Order. Ready callbacks run first in, first out. When none is left, SimPy processes one event
(`hcsim.virtual.environment`: timers, deliveries, work and faults are events too); the callbacks that it made
ready run before the next one. Events of one time are processed in the order in which they were scheduled. A run
therefore depends on the program only.

Owners. A callback belongs to the host that `OWNER` names in its context. Callbacks of a frozen host are held
back. Those of a discarded host (after a crash) are held back for good, so that not even a `finally` of its
coroutines runs before teardown.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import weakref
from asyncio import Future
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from functools import partial
from typing import Any, NoReturn, TypeVar, TypeVarTuple, Unpack, cast

import simpy
from simpy.core import EmptySchedule
from simpy.resources.base import Get, Put
from simpy.resources.container import ContainerGet
from simpy.resources.resource import Request
from simpy.resources.store import StoreGet

from hcsim.errors import Deadlock, HcsimError, UsageError
from hcsim.virtual.environment import Callback, Environment, new_callback
from hcsim.virtual.stall_detector import describe

ExceptionHandler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object]

_log = logging.getLogger(__name__)


def _refuse(*args: object, **kwargs: object) -> NoReturn:
    raise NotImplementedError(
        "the virtual world has no sockets, threads, processes, signals or task factories, and runs only until "
        "something is complete: take channels and compute from the host"
    )


_ABSENT: Any = _refuse


class PlainLoop(asyncio.AbstractEventLoop):
    """An event loop base: handles errors as asyncio does, and rejects what the virtual world does not support."""

    def __init__(self) -> None:
        self._exception_handler: ExceptionHandler | None = None

    get_debug: Any = bool
    """Return whether asyncio's debug mode is on. It is called for every new future, and a method takes five times as
    long."""

    def set_debug(self, enabled: bool) -> None:
        """Turn asyncio's debug mode on or off; in debug mode, futures record where they were created."""
        self.get_debug = partial(bool, enabled)

    # Errors that no task receives.

    def get_exception_handler(self) -> ExceptionHandler | None:
        return self._exception_handler

    def set_exception_handler(self, handler: ExceptionHandler | None) -> None:
        self._exception_handler = handler

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        _log.error("%s", context.get("message", "an error that no task receives"), exc_info=context.get("exception"))

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Pass an unhandled error to the handler, as asyncio does. Interrupts are raised elsewhere."""
        if isinstance(context.get("exception"), KeyboardInterrupt | SystemExit):
            return
        if self._exception_handler is None:
            self.default_exception_handler(context)
            return
        try:
            self._exception_handler(self, context)
        except Exception as error:
            self.default_exception_handler({"message": "the exception handler failed", "exception": error})
            self.default_exception_handler(context)

    # What asyncio's interface has beyond this.

    create_connection = create_server = create_datagram_endpoint = start_tls = sendfile = _ABSENT
    sock_accept = sock_connect = sock_recv = sock_recv_into = sock_recvfrom = sock_recvfrom_into = _ABSENT
    sock_sendall = sock_sendto = sock_sendfile = getaddrinfo = getnameinfo = _ABSENT
    add_reader = remove_reader = add_writer = remove_writer = connect_read_pipe = connect_write_pipe = _ABSENT
    subprocess_exec = subprocess_shell = add_signal_handler = remove_signal_handler = _ABSENT
    call_soon_threadsafe = run_in_executor = set_default_executor = _ABSENT
    run_forever = stop = get_task_factory = set_task_factory = _ABSENT


T = TypeVar("T")
Ts = TypeVarTuple("Ts")

OWNER: ContextVar[object] = ContextVar("OWNER", default=None)
"""The host that the running code belongs to; None for the simulator itself."""

_NEVER_NS = cast(int, math.inf)  # As SimPy says when it has no event: such a timer is no reason to go on.
_CLOSED = "the virtual loop is closed"


class VirtualLoop(PlainLoop):
    """The asyncio event loop of a virtual world; see the module docstring."""

    def __init__(self) -> None:
        super().__init__()
        self.env = Environment()
        self.env.run_ready = self._step
        self._ready = self.env.ready
        self._held: dict[object, deque[Callback]] = {}
        self._discarded: list[object] = []
        self._ends = False
        """Whether the world is being torn down; then no callbacks are held back."""
        # The loop keeps its unfinished tasks alive: one that were collected while it waits would run
        # its `finally` blocks whenever the garbage collector pleases. The value is the task's owner.
        self._tasks: dict[asyncio.Task[Any], object] = {}
        self._tasks_made = 0
        self._asyncgens: weakref.WeakKeyDictionary[AsyncGenerator[Any, Any], None] = weakref.WeakKeyDictionary()
        self._closed = False

    # Time and callbacks.

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self.env.now_ns / 1e9

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Run the callback in this instant, after those already ready."""
        if self._closed:
            raise RuntimeError(_CLOSED)
        handle = new_callback()
        handle.callback = callback
        handle.args = args
        handle.context = copy_context() if context is None else context
        self._ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> Callback:
        """Run the callback after this many seconds. A positive delay takes at least one nanosecond."""
        deadline_ns = self.env.now_ns + (_nanoseconds(delay) or 1) if delay > 0 else self.env.now_ns
        return self._set_timer(deadline_ns, callback, args, copy_context() if context is None else context)

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> Callback:
        """Run the callback at that time in seconds, or now if it has passed."""
        return self._set_timer(_nanoseconds(when), callback, args, copy_context() if context is None else context)

    def _set_timer(
        self, deadline_ns: int, callback: Callable[..., object], args: tuple[Any, ...], context: Context
    ) -> Callback:
        if self._closed:
            raise RuntimeError(_CLOSED)
        return self.env.timer(deadline_ns, callback, args, context)

    # Futures, tasks and SimPy's events.

    def create_future(self) -> asyncio.Future[Any]:
        return Future(loop=self)

    def create_task(
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        name: str | None = None,
        context: Context | None = None,
        **kwargs: Any,
    ) -> asyncio.Task[T]:
        """Run a coroutine as a task. An unnamed task gets a number of this loop, the same in every run."""
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
        return sum(each is owner for each in self._tasks.values())

    def event(self, event: simpy.Event) -> asyncio.Future[Any]:
        """Return a future with the value or failure of a SimPy event.

        A cancelled future stops waiting for the event, and leaves the queue of a SimPy resource."""
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
        """Hold back every callback of this owner, including timers, until it is thawed. No effect during teardown."""
        if owner is None:
            raise UsageError("the world itself cannot be frozen")
        if not self._ends:
            self._held.setdefault(owner, deque())

    def is_frozen(self, owner: object) -> bool:
        return owner in self._held

    def thaw(self, owner: object) -> None:
        """Release the held callbacks of this owner, in order. A discarded owner stays frozen."""
        if owner not in self._discarded:
            # In front, because callbacks of this owner that are ready already came later.
            self._ready.extendleft(reversed(self._held.pop(owner, ())))

    def discard(self, owner: object) -> None:
        """Stop this owner as a crash does: its code does not run again until teardown."""
        self.freeze(owner)
        self._discarded.append(owner)
        self.env.drop(lambda timer: timer.context.get(OWNER) is owner)

    def postpone(self, owner: object, by_ns: int) -> None:
        """Delay all timers of this owner."""
        self.env.postpone(by_ns, lambda timer: timer.context.get(OWNER) is owner)

    def _is_held(self, handle: Callback) -> bool:
        held = self._held.get(handle.context.get(OWNER))
        if held is None:
            return False
        held.append(handle)
        return True

    # Running.

    def run_until_complete(self, future: Generator[Any, None, T] | Awaitable[T]) -> T:
        """Run the world until the future is done; raise `Deadlock` if no event is left."""
        if self._closed:
            raise RuntimeError(_CLOSED)
        if asyncio._get_running_loop() is not None:
            raise RuntimeError("a virtual loop cannot run inside a running event loop: await the coroutine instead")
        is_ours = not asyncio.isfuture(future)
        main: asyncio.Future[T] = asyncio.ensure_future(cast(Awaitable[T], future), loop=self)
        try:
            with self._running():
                self._run(main)
        except BaseException:
            if is_ours and main.done() and not main.cancelled():
                main.exception()  # It is on its way out: nobody is to be told that it was never retrieved.
            raise
        return main.result()

    @contextmanager
    def _running(self) -> Iterator[None]:
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=self._note_asyncgen, finalizer=self._close_asyncgen)
        asyncio._set_running_loop(self)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def run_to_end(self, main: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine, then tear the world down: cancel all remaining tasks, including those of discarded owners,
        and close the loop."""
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
        ready, done, step, run_ready = self._ready, main.done, self.env.step, self._run_ready
        try:
            while not done():
                if ready:
                    run_ready()
                else:
                    step()
        except EmptySchedule:
            raise Deadlock(describe(self._waiting(), self._held.__contains__)) from None

    def _step(self) -> None:
        """Run the ready callbacks, also for a caller of `env.step` outside of this loop."""
        if asyncio._get_running_loop() is self:
            self._run_ready()
            return
        with self._running():
            self._run_ready()

    def _run_ready(self) -> None:
        """Run the ready callbacks. Those that become ready meanwhile wait for the next call, so that the caller can
        stop
        in between."""
        ready = self._ready
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

    def _waiting(self) -> dict[asyncio.Task[Any], object]:
        alive = ((task, owner) for task, owner in self._tasks.items() if owner not in self._discarded)
        return {task: owner for task, owner in alive if not task.done()}

    def is_running(self) -> bool:
        return asyncio._get_running_loop() is self

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Drop all callbacks and timers. A closed loop cannot be used again."""
        if self.is_running():
            raise RuntimeError("a running loop cannot be closed")
        self._closed = True
        self.env.clear()
        self._held.clear()

    # Async generators: as the standard loop, but closed in the order in which they were started.

    def _note_asyncgen(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._asyncgens[generator] = None

    def _close_asyncgen(self, generator: AsyncGenerator[Any, Any]) -> None:
        if not self._closed:
            self.call_soon(self.create_task, generator.aclose())

    async def shutdown_asyncgens(self) -> None:
        """Close the asynchronous generators that have started and not finished."""
        generators = tuple(self._asyncgens)
        self._asyncgens.clear()
        results = await asyncio.gather(*(generator.aclose() for generator in generators), return_exceptions=True)
        for generator, result in zip(generators, results, strict=True):
            if isinstance(result, Exception):
                message = f"an asynchronous generator could not be closed: {generator!r}"
                self.call_exception_handler({"message": message, "exception": result, "asyncgen": generator})

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Do nothing: there are no threads."""


def _take_back(event: Get[Any] | Put[Any]) -> None:
    """Cancel the request, or return what it was granted meanwhile."""
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
    """Return whole nanoseconds, rounded up so that nothing runs early. A fraction of up to 0.1 ns is dropped, because
    0.1 + 0.2 is more than 0.3."""
    try:
        return int(seconds * 1e9 + 0.9)
    except OverflowError:
        return _NEVER_NS


class NumberedTask(asyncio.Task[T]):
    """A task whose hash is its number.

    `TaskGroup` cancels its tasks in the order of a set, which would otherwise depend on addresses."""

    __slots__ = ("_number",)

    def __init__(self, number: int, coro: Any, **kwargs: Any) -> None:
        self._number = number  # First, because asyncio hashes the task while it makes it.
        super().__init__(coro, **kwargs)

    def __hash__(self) -> int:
        return self._number
