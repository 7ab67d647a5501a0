"""The tasks there are, by name. A task's module, and torch with it, is imported when the task is asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from hcsim.errors import ConfigError, UsageError
from hcsim.training.task import Task
from hcsim.units import did_you_mean


def _digits() -> Task:
    from hcsim.training.tasks.digits import digits

    return digits()


def _text() -> Task:
    from hcsim.training.tasks.text import text

    return text()


def _convex() -> Task:
    from hcsim.training.tasks.convex import Convex

    return Convex()


def _slopes() -> Task:
    from hcsim.training.tasks.slopes import Slopes

    return Slopes()


def _shapes(name: str) -> Task:
    from hcsim.training.tasks.shapes import SHAPES

    return SHAPES[name]()


_TASKS: dict[str, Callable[[], Task]] = {
    "digits": _digits,
    "text": _text,
    "convex": _convex,
    "slopes": _slopes,
    **{name: partial(_shapes, name) for name in ("resnet50", "gpt2", "llama-1b", "llama-7b")},
}


def register(name: str, make: Callable[[], Task]) -> None:
    """Have one more task, which a program outside the package brings with it."""
    if name in _TASKS:
        raise UsageError(f"there is a task {name!r} already")
    _TASKS[name] = make


def names() -> tuple[str, ...]:
    """Of all tasks."""
    return tuple(_TASKS)


@cache
def task(name: str) -> Task:
    """The task of that name. Ranks of one process share it, and with it the data."""
    if name not in _TASKS:
        raise ConfigError(f"there is no task {name!r}{did_you_mean(name, _TASKS)}; known tasks: {', '.join(_TASKS)}")
    return _TASKS[name]()
