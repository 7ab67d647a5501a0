"""Compute that is really done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Literal, TypeVar

import numpy as np

from hcsim.errors import ConfigError
from hcsim.real.chip import this_chip
from hcsim.runtime.device import Chip, Work
from hcsim.units import did_you_mean

T = TypeVar("T")


def best_torch_device() -> str:
    """The fastest device torch finds here: "mps", "cuda" or "cpu". Imports torch."""
    import torch

    if torch.backends.mps.is_available():
        return "mps"
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_torch_device(name: str) -> None:
    """Refuse a device that torch does not have here; "auto" is the best there is."""
    known = ("auto", "cpu", "mps", "cuda")
    if name not in known:
        raise ConfigError(f'device "{name}"{did_you_mean(name, known)}; known: {", ".join(known)}')
    if name == "cpu":
        return  # as everywhere; torch takes seconds to load, and not every task needs it
    import torch

    there = {"mps": torch.backends.mps.is_available(), "cuda": torch.cuda.is_available()}
    if not there.get(name, True):
        raise ConfigError(f'device "{name}": torch finds none on this machine; "auto" takes the best there is')


class RealDevice:
    """Runs functions one after the other in a thread of its own, so that the network goes on meanwhile."""

    def __init__(self, name: str = "cpu") -> None:
        self._name = name
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"hcsim-{name}")

    @property
    def name(self) -> str:
        """As torch calls it."""
        return self._name

    @property
    def torch_name(self) -> str:
        """The same."""
        return self._name

    @cached_property
    def chip(self) -> Chip:
        """What this machine says of itself."""
        return this_chip()

    def exercise(self, kind: Literal["matmul", "axpy"], size: int) -> Callable[[], object]:
        """See `runtime.device.Device.exercise`."""
        if self._name == "cpu":
            return _numpy_exercise(kind, size)
        return self._torch_exercise(kind, size)

    def _torch_exercise(self, kind: Literal["matmul", "axpy"], size: int) -> Callable[[], object]:
        import torch

        shape = (size, size) if kind == "matmul" else (size,)
        data = torch.ones(shape, dtype=torch.float32, device=self._name)

        def work() -> None:
            result = data @ data if kind == "matmul" else data.add_(data, alpha=0.5)
            result.reshape(-1)[:1].cpu()  # waits for the device

        return work

    async def run(self, work: Work, function: Callable[[], T], into: memoryview | None = None) -> T:
        """Call the function; what the work would cost elsewhere does not matter here, nor where it writes."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, function)

    async def touch(self, moved_bytes: int) -> None:
        """Nothing to account for: the caller has really waited for its memory."""

    def close(self) -> None:
        """Let the thread end once the function it runs now has ended; what waits behind it is dropped."""
        self._worker.shutdown(wait=False, cancel_futures=True)


def _numpy_exercise(kind: Literal["matmul", "axpy"], size: int) -> Callable[[], object]:
    if kind == "matmul":
        square = np.ones((size, size), np.float32)
        return partial(np.matmul, square, square, np.empty_like(square))
    vector, total = np.ones(size, np.float32), np.ones(size, np.float32)
    return partial(np.add, vector, total, total)
