"""Pools of processes that do many independent tasks: on this machine, or on many by way of Dask.

A task is bytes for a function, whose answer is bytes; `Pool.run` yields each as it is over. What a task comes to is the
same wherever it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Protocol, TypeAlias

import msgspec

TaskFunction: TypeAlias = Callable[[bytes], bytes]
"""A function of a module, which a worker imports by its name."""


class Finished(msgspec.Struct, frozen=True):
    """A task that is over."""

    task: bytes
    answer: bytes | None
    """None if there is none."""
    error: str
    """Why there is no answer."""
    seconds: float


class Pool(Protocol):
    """Workers."""

    def run(self, function: TaskFunction, tasks: Iterator[bytes]) -> Generator[Finished]:
        """Yield the tasks as they finish, in any order. They are taken only as fast as workers are free.

        One at a time: a run is over, or closed, before the next begins."""

    @property
    def size(self) -> int:
        """How many tasks are under way at once."""

    def close(self) -> None:
        """End the workers that belong to the pool, at once."""
