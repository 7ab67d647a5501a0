"""Compute, as a host offers it: done for real, or charged to a machine's profile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, TypeVar

import msgspec

T = TypeVar("T")


class Work(msgspec.Struct, frozen=True):
    """How much there is to do, for a machine whose time is modelled."""

    flops: float = 0.0
    moved_bytes: float = 0.0
    """Bytes read from and written to memory."""
    kernels: int = 1
    """Pieces that are launched one after the other, each with the machine's overhead."""


class Chip(msgspec.Struct, frozen=True):
    """What a machine is built on."""

    name: str
    """As its maker calls it: "Apple M2 Ultra"."""
    memory_bytes: int | None = None
    """All of the machine's memory; None where nobody knows."""


class Device(Protocol):
    """One machine's processor. Work on it is done one piece after the other."""

    @property
    def name(self) -> str:
        """For people: "M2 Ultra", "cuda:0", "cpu"."""

    @property
    def torch_name(self) -> str:
        """Where torch really computes: "mps", "cuda", "cpu"."""

    @property
    def chip(self) -> Chip:
        """What the machine is built on."""

    def exercise(self, kind: Literal["matmul", "axpy"], size: int) -> Callable[[], object]:
        """A function for `run`, to find out how fast it is here: a product of two square float32 matrices of that size,
        or a sum of two float32 vectors of that length, one of them in place."""

    async def run(self, work: Work, function: Callable[[], T], into: memoryview | None = None) -> T:
        """Call the function without holding up the network, and take the time the work takes.

        `into` is the memory that the function writes its numbers to, where it does not return them."""

    async def touch(self, moved_bytes: int) -> None:
        """Account for memory traffic that the caller causes itself, such as adding a segment."""
