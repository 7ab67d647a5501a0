"""What the virtual loop is made of: SimPy's clock, callbacks and tasks."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import simpy

if TYPE_CHECKING:
    from hcsim.virtual.loop import VirtualLoop

T = TypeVar("T")


class Environment(simpy.Environment):
    """SimPy's, at the loop's time, with a count of the events that wait in it."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self.waiting = 0
        self._loop = loop

    @property
    def now(self) -> int:
        """See `simpy.Environment.now`."""
        return self._loop.now_ns

    def schedule(
        self, event: simpy.Event, priority: simpy.events.EventPriority = simpy.events.NORMAL, delay: float = 0
    ) -> None:
        """See `simpy.Environment.schedule`."""
        self.waiting += 1
        self._now = self._loop.now_ns
        super().schedule(event, priority, delay)

    def step(self) -> None:
        """See `simpy.Environment.step`."""
        self.waiting -= 1
        super().step()


class Callback(asyncio.TimerHandle):
    """A call that is ready or, with a deadline, a timer. Its callback is None when it was cancelled.

    `loop` is set while it waits in the loop's heap of timers.
    It has no `__init__`, which would double the cost of making one.
    """

    __slots__ = ("args", "callback", "context", "deadline_ns", "loop")

    loop: VirtualLoop | None
    deadline_ns: int
    callback: Any
    args: tuple[Any, ...]
    context: Any

    def cancel(self) -> None:
        """Do not run. Harmless when it has run."""
        loop, self.loop = self.loop, None
        self.callback = None
        self.args = ()
        if loop is not None:
            loop._count_cancelled_timer()

    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self.callback is None

    def when(self) -> float:
        """A timer's deadline in seconds."""
        return self.deadline_ns / 1e9

    def __repr__(self) -> str:
        return f"<callback {self.callback!r}>"

    __eq__ = object.__eq__
    __hash__ = object.__hash__


new_callback = partial(object.__new__, Callback)


class NumberedTask(asyncio.Task[T]):
    """A task that hashes as its number: `TaskGroup` cancels in the order of a set, which is else that of addresses."""

    __slots__ = ("_number",)

    def __init__(self, number: int, coro: Any, **kwargs: Any) -> None:
        self._number = number  # First, because asyncio hashes the task while it makes it.
        super().__init__(coro, **kwargs)

    def __hash__(self) -> int:
        return self._number
