"""Deadlock detection: end a run in which nothing can happen any more, and report what each task waits for.

A suspended coroutine knows what it awaits, which is again a coroutine, down to a future. The report names the
innermost frame of this chain outside the standard library: its file, line, source text, and the object it
belongs to. The text contains no memory address, so two runs of one scenario give the same text.

Where hosts still send heartbeats, the event queue never runs empty. There a `StallDetector` detects a livelock:
members have finished or are gone for good, and the others wait for a message that never comes. A real cluster
logs this and waits; a simulated one would run for ever.
"""

from __future__ import annotations

import asyncio
import linecache
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from hcsim.errors import TrainingError
from hcsim.virtual.environment import NS, Environment

_STANDARD_LIBRARY = str(Path(asyncio.__file__).parent.parent)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_LONGEST_REPR = 200


def describe(tasks: Mapping[asyncio.Task[Any], object], is_frozen: Callable[[object], bool]) -> str:
    """Return one line for each task, in the order given. `tasks` maps each task to its owner."""
    if not tasks:
        return "nothing is left to do, no task waits, and what was to be completed never was"
    waiting = "1 task still waits" if len(tasks) == 1 else f"{len(tasks)} tasks still wait"
    lines = [f"nothing is left to do, and {waiting}:"]
    for task, owner in tasks.items():
        whose = "" if owner is None else f" of {_plain(getattr(owner, 'name', owner))}"
        frozen = ", frozen" if is_frozen(owner) else ""
        lines.append(f"  {task.get_name()}{whose}{frozen}: {_place(task)}")
    return "\n".join(lines)


def _place(task: asyncio.Task[Any]) -> str:
    frames = list(_frames(task.get_coro()))
    if not frames:
        return "not started"
    ours = [frame for frame in frames if not _is_standard(frame.f_code.co_filename)]
    frame = ours[-1] if ours else frames[-1]
    filename, line = frame.f_code.co_filename, frame.f_lineno
    text = f"{frame.f_code.co_qualname} ({Path(filename).name}:{line})"
    this = frame.f_locals.get("self")
    if this is not None and _says_what_it_is(this):
        text += f" on {_plain(this)}"
    source = linecache.getline(filename, line).strip()
    return f"{text}: {source}" if source else text


def _frames(awaitable: object) -> Iterator[FrameType]:
    """Yield the frames from the task's own coroutine to the innermost one, as far as Python exposes them."""
    while awaitable is not None:
        for kind, awaits in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
            frame = getattr(awaitable, f"{kind}_frame", None)
            if frame is not None:
                yield frame
                awaitable = getattr(awaitable, awaits)
                break
        else:
            return


def _says_what_it_is(this: object) -> bool:
    return any("__repr__" in vars(kind) for kind in type(this).__mro__ if kind is not object)


def _is_standard(filename: str) -> bool:
    return filename.startswith(_STANDARD_LIBRARY) and "site-packages" not in filename


def _plain(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = _ADDRESS.sub("", text)
    return text if len(text) <= _LONGEST_REPR else text[:_LONGEST_REPR] + "…"


class StallDetector:
    """Periodic livelock check: `moved` returns a different value if there was progress."""

    def __init__(
        self,
        env: Environment,
        moved: Callable[[], object],
        *,
        every_s: float,
        from_s: float = 0.0,
        limit_s: float | None = None,
    ) -> None:
        """Before `from_s` the check is off, because something may still happen without progress: a fault heals."""
        self._env = env
        self._every_s = every_s
        self._moved = moved
        self._limit_s = limit_s
        self._seen: object = None
        self._running: dict[asyncio.Timeout, None] = {}
        self._look_at(from_s)

    @asynccontextmanager
    async def noticed(self, last_words: Callable[[], str]) -> AsyncIterator[None]:
        """End the block when there is no progress, with the text of `last_words`, and at the limit in any case."""
        timeout = asyncio.timeout_at(self._limit_s)
        self._running[timeout] = None
        try:
            async with timeout:
                yield
        except TimeoutError:
            if not timeout.expired() or (self._limit_s is not None and self._env.now / NS >= self._limit_s):
                raise
            raise TrainingError(
                f"nothing has moved for {self._every_s:g} s, and it said last: {last_words()}"
            ) from None
        finally:
            del self._running[timeout]

    def _look_at(self, time_s: float) -> None:
        # The world's own timer: a frozen or crashed host does not stop it.
        self._env.call_at(round(time_s * NS), self._look)

    def _look(self) -> None:
        now = self._moved()
        if now != self._seen:
            self._seen = now
            self._look_at(self._env.now / NS + self._every_s)
            return
        for timeout in self._running:
            if not timeout.expired():  # at the limit: what runs here takes its time to end
                timeout.reschedule(self._env.now / NS)
