"""Compute that is really done, and what does it: this machine's chip and memory, as macOS or Linux tell."""

from __future__ import annotations

import asyncio
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from hcsim.errors import ConfigError
from hcsim.runtime.device import Chip, Work
from hcsim.units import did_you_mean

_SYSCTL = ("sysctl", "machdep.cpu.brand_string", "hw.memsize")


def this_chip() -> Chip:
    """The chip and the memory of this machine; what the system does not tell is its architecture, and None."""
    if sys.platform == "darwin":
        found = parse_sysctl(_output_of(_SYSCTL))
    else:
        found = parse_proc(_text_of(Path("/proc/cpuinfo")), _text_of(Path("/proc/meminfo")))
    return found if found.name else Chip(platform.machine() or "unknown", found.memory_bytes)


def parse_sysctl(listing: str) -> Chip:
    """From the output of `sysctl machdep.cpu.brand_string hw.memsize`: one `name: value` a line."""
    values = dict(line.split(": ", 1) for line in listing.splitlines() if ": " in line)
    memory = values.get("hw.memsize", "").strip()
    return Chip(values.get("machdep.cpu.brand_string", "").strip(), int(memory) if memory.isdecimal() else None)


def parse_proc(cpuinfo: str, meminfo: str) -> Chip:
    """From /proc/cpuinfo and /proc/meminfo. ARM kernels name no model there; some boards do, as `Model`."""
    model = re.search(r"^(?:model name|Model|Hardware)\s*: *(\S.*?)\s*$", cpuinfo, re.MULTILINE)
    memory = re.search(r"^MemTotal:\s*(\d+) kB$", meminfo, re.MULTILINE)
    return Chip(model.group(1) if model else "", 1024 * int(memory.group(1)) if memory else None)


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _output_of(command: tuple[str, ...]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


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
