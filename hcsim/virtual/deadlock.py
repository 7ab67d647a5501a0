"""What every task of a world that came to a stop waits for, in words.

A suspended coroutine knows what it awaits, which is again a coroutine, down to a future.
Along this chain the innermost frame outside the standard library is the place that a person
recognises: it is named with its file, line and source text, and with the object it belongs to.
The text holds no memory address, so that two runs of one scenario stop with the same words.
"""

from __future__ import annotations

import asyncio
import linecache
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

_STANDARD_LIBRARY = str(Path(asyncio.__file__).parent.parent)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_LONGEST_REPR = 200


def describe(tasks: Mapping[asyncio.Task[Any], object], is_frozen: Callable[[object], bool]) -> str:
    """One line for each task, in the order given; `tasks` says whose each one is."""
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
    """The frames from the task's own coroutine to the innermost, as far as Python shows them."""
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
