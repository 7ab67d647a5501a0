"""The tasks by name. A task's module, and torch with it, is imported when the task is requested."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from hcsim.registry import Registry
from hcsim.training.task import Task


def _digits() -> Task:
    """Images of handwritten digits, by a small convolutional network."""
    from hcsim.training.tasks.torch_task import digits

    return digits()


def _text() -> Task:
    """The names of Unicode's characters, by a small transformer."""
    from hcsim.training.tasks.torch_task import text

    return text()


def _convex() -> Task:
    """Ridge regression: small, quick, and its optimum is known."""
    from hcsim.training.tasks.convex import Convex

    return Convex()


def _slopes() -> Task:
    """Gradients that do not depend on the model, to count what was learned."""
    from hcsim.training.tasks.convex import LinearTask

    return LinearTask()


def _shapes(name: str) -> Task:
    """Only the shapes of a large model: to simulate, not to train for real."""
    from hcsim.training.tasks.shapes import SHAPES

    return SHAPES[name]()


TASKS: Registry[Callable[[], Task]] = Registry(
    "task",
    {
        "digits": _digits,
        "text": _text,
        "convex": _convex,
        "slopes": _slopes,
        **{name: partial(_shapes, name) for name in ("resnet50", "gpt2", "llama-1b", "llama-7b")},
    },
)


@cache
def task(name: str) -> Task:
    """Return the task of that name. Ranks of one process share it and its data."""
    return TASKS.named(name)()
