"""What a library has to offer to be measured, seen from outside and from inside a rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]
"""Of any of these kinds; bfloat16 comes from ml_dtypes."""
EXACT = {"float32": 2**24, "float16": 2**11, "bfloat16": 2**8}
"""The kinds, with the number up to which all whole ones are exact."""
Command = list[str]


class Job(msgspec.Struct, frozen=True):
    """What every rank of one team knows."""

    peer: str
    addresses: tuple[str, ...]
    """One free `host:port` on loopback for each rank."""
    folder: str
    """A folder of this team alone, for files by which its ranks find each other."""
    algorithm: str
    """hcsim's; the others choose for themselves."""
    dtype: str
    """What is added."""

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.addresses)


class Rank(Protocol):
    """One rank inside its process. Some methods are async because hcsim's are; the others just block."""

    def load(self, values: Floats) -> None:
        """Take these values as the tensor to reduce, in place of the last one."""

    async def all_reduce(self) -> None:
        """Sum the tensor over all ranks, in place where the library can."""

    async def barrier(self) -> None:
        """Wait for all ranks."""

    def read(self) -> Floats:
        """The tensor, without a copy."""


def one_process_each(rank_commands: list[Command]) -> list[Command]:
    """Start the ranks directly."""
    return rank_commands


class Peer(msgspec.Struct, frozen=True):
    """One library."""

    name: str
    """As in `--peers` and in the columns of the results."""
    missing: Callable[[], str | None]
    """Why it cannot be measured here, or None when it can."""
    join: Callable[[Job, int], AbstractAsyncContextManager[Rank]]
    """Inside a rank's process: connect it to the others; leave them at the end."""
    dtypes: tuple[str, ...] = tuple(EXACT)
    """What it can add."""
    launch: Callable[[list[Command]], list[Command]] = one_process_each
    """The command lines to start, from those of the ranks: the same, or one launcher for all."""
