"""What a host is made of: its clock, its processor and memory as macOS or Linux tell of them, and its disk."""

from __future__ import annotations

import asyncio
import fcntl
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property, partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeVar

import numpy as np

from hcsim.config import CATALOGUE, Machine
from hcsim.errors import ConfigError
from hcsim.files import text_of, write_whole
from hcsim.real.interfaces import output_of
from hcsim.runtime.clock import Limit
from hcsim.runtime.host import Chip, Work
from hcsim.runtime.work_time import seconds
from hcsim.units import did_you_mean

_SYSCTL = ("sysctl", "machdep.cpu.brand_string", "hw.memsize")


def this_chip() -> Chip:
    """Return the chip and memory of this machine: the architecture if the chip's name is unknown, None for unknown
    memory."""
    if sys.platform == "darwin":
        found = parse_sysctl(output_of(*_SYSCTL))
    else:
        found = parse_proc(text_of(Path("/proc/cpuinfo")), text_of(Path("/proc/meminfo")))
    return found if found.name else Chip(platform.machine() or "unknown", found.memory_bytes)


def parse_sysctl(listing: str) -> Chip:
    """Parse the output of `sysctl machdep.cpu.brand_string hw.memsize`: one `name: value` per line."""
    values = dict(line.split(": ", 1) for line in listing.splitlines() if ": " in line)
    memory = values.get("hw.memsize", "").strip()
    return Chip(values.get("machdep.cpu.brand_string", "").strip(), int(memory) if memory.isdecimal() else None)


def parse_proc(cpuinfo: str, meminfo: str) -> Chip:
    """Parse /proc/cpuinfo and /proc/meminfo. ARM kernels give no model name there; some boards do, as `Model`."""
    model = re.search(r"^(?:model name|Model|Hardware)\s*: *(\S.*?)\s*$", cpuinfo, re.MULTILINE)
    memory = re.search(r"^MemTotal:\s*(\d+) kB$", meminfo, re.MULTILINE)
    return Chip(model.group(1) if model else "", 1024 * int(memory.group(1)) if memory else None)


LIBRARIES = ("numpy", "torch", "mlx")


def system_name() -> str:
    """Return the operating system and the processor's architecture."""
    macos = platform.mac_ver()[0]
    return f"{f'macOS {macos}' if macos else f'{platform.system()} {platform.release()}'}, {platform.machine()}"


def installed_versions(has_module: Callable[[str], object] = find_spec) -> dict[str, str]:
    """Return the versions of Python, of hcsim and of what it computes with."""
    versions = {"python": platform.python_version(), "hcsim": metadata.version("hcsim")}
    for library in LIBRARIES:
        if has_module(library):
            versions[library] = metadata.version(library)
    versions["BLAS"] = _blas()
    return versions


def _blas() -> str:
    """Return the linear algebra library of numpy: its products are rounded in its own way."""
    built = np.show_config(mode="dicts") or {}
    found = built.get("Build Dependencies", {}).get("blas", {})
    return f"{found.get('name', 'unknown')} {found.get('version', '')}".removesuffix(" unknown").strip()


T = TypeVar("T")


def best_torch_device() -> str:
    """Return the fastest device that torch finds here: "mps", "cuda" or "cpu". Imports torch."""
    import torch

    if torch.backends.mps.is_available():
        return "mps"
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_torch_device(name: str) -> None:
    """Reject a device that torch does not have here; "auto" stands for the best one."""
    known = ("auto", "cpu", "mps", "cuda")
    if name not in known:
        raise ConfigError(f'device "{name}"{did_you_mean(name, known)}; known: {", ".join(known)}')
    if name == "cpu":
        return  # as everywhere; torch takes seconds to load, and not every task needs it
    import torch

    there = {"mps": torch.backends.mps.is_available(), "cuda": torch.cuda.is_available()}
    if not there.get(name, True):
        raise ConfigError(f'device "{name}": torch finds none on this machine; "auto" takes the best there is')


def training_step_error(device: str) -> str:
    """Take one step on the device and one by hand; return how they differ, if they do."""
    import torch

    torch.manual_seed(0)
    data, target, weights = torch.randn(32, 8), torch.randn(32, 1), torch.randn(8, 1)
    error = data @ weights - target
    expected = weights - 0.1 * (2 / len(data)) * (data.T @ error)
    model = torch.nn.Linear(8, 1, bias=False)
    model.weight.data.copy_(weights.T)
    model.to(device)
    torch.nn.functional.mse_loss(model(data.to(device)), target.to(device)).backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    worst = (model.weight.detach().cpu().T - expected).abs().max().item()
    return "" if worst < 1e-4 else f"a training step is wrong by {worst:.2g}"


SLEEP = "sleep:"
"""Before the name of a machine: the device that takes its time."""


def check_device(name: str) -> None:
    """Reject a device that is neither torch's here nor a known machine's to sleep for."""
    if name.startswith(SLEEP):
        _slept_for(name)
    else:
        check_torch_device(name)


def _slept_for(device: str) -> Machine:
    try:
        return CATALOGUE.named(device.removeprefix(SLEEP))
    except ConfigError as error:
        raise ConfigError(f'device "{device}": {error}') from None


def device_named(name: str, tell: Callable[[str], None]) -> RealDevice:
    """Return the device. `tell` is called for what a user should know of it."""
    return SleepingDevice(_slept_for(name), tell) if name.startswith(SLEEP) else RealDevice(name)


class RealDevice:
    """Runs functions one after the other in a thread of its own, so that network I/O continues meanwhile."""

    def __init__(self, name: str = "cpu") -> None:
        self._name = name
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"hcsim-{name}")

    @property
    def name(self) -> str:
        return self._name

    @property
    def torch_name(self) -> str:
        return self._name

    @cached_property
    def chip(self) -> Chip:
        return this_chip()

    def exercise(self, kind: Literal["matmul", "axpy"], size: int) -> Callable[[], object]:
        """See `runtime.host.Device.exercise`."""
        if self._name == "cpu":
            return _numpy_exercise(kind, size)
        return self._torch_exercise(kind, size)

    def _torch_exercise(self, kind: Literal["matmul", "axpy"], size: int) -> Callable[[], object]:
        import torch

        shape = (size, size) if kind == "matmul" else (size,)

        @cache
        def filled() -> torch.Tensor:
            return torch.ones(shape, dtype=torch.float32, device=self._name)

        def work() -> None:
            data = filled()  # in the thread that runs it: MPS is left to one
            result = data @ data if kind == "matmul" else data.add_(data, alpha=0.5)
            result.reshape(-1)[:1].cpu()  # waits for the device

        return work

    def predict_s(self, work: Work) -> float | None:
        """See `runtime.host.Device.predict_s`. Profiles are those of Macs' graphics processors."""
        name = self.chip.name.removeprefix("Apple ")
        if self._name != "mps" or name not in CATALOGUE:
            return None
        return seconds(CATALOGUE.named(name), work)

    async def run(self, work: Work, function: Callable[[], T], into: memoryview | None = None) -> T:
        """Call the function. The simulated cost of the work and `into` are ignored here."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, function)

    async def touch(self, moved_bytes: int) -> None:
        """Do nothing: the memory traffic has taken real time already."""

    def close(self) -> None:
        """Stop the thread after the function that it runs now. Functions in the queue are dropped."""
        self._worker.shutdown(wait=False, cancel_futures=True)


_WORTH_TELLING_S = 1e-3
_LONGER = 1.1


class SleepingDevice(RealDevice):
    """Takes the time that a machine of another kind would take: functions are run on this machine's processor, since
    their results count, and the rest of the time is slept.

    So a machine can have many of them. Memory traffic beside functions takes the time that it takes here."""

    def __init__(self, machine: Machine, tell: Callable[[str], None] = lambda what: None) -> None:
        super().__init__("cpu")
        self._machine = machine
        self._tell = tell
        self._told = False
        self._busy_until_s = 0.0

    @property
    def name(self) -> str:
        return f"{SLEEP}{self._machine.name}"

    @cached_property
    def chip(self) -> Chip:
        ram_bytes = self._machine.ram_bytes
        return Chip(self._machine.name, None if ram_bytes is None else int(ram_bytes))

    def exercise(self, kind: Literal["matmul", "axpy"], size: int) -> Callable[[], object]:
        """Return a function that does nothing; only the duration of the work counts."""
        return lambda: None

    def predict_s(self, work: Work) -> float | None:
        """See `runtime.host.Device.predict_s`."""
        return seconds(self._machine, work)

    async def run(self, work: Work, function: Callable[[], T], into: memoryview | None = None) -> T:
        """Call the function, and return when the machine would have done the work."""
        lasts_s = seconds(self._machine, work)
        self._busy_until_s = until_s = max(self._busy_until_s, time.monotonic()) + lasts_s
        result, took_s = await super().run(work, partial(_until, until_s, function))
        if lasts_s > 0.0 and took_s > max(_LONGER * lasts_s, _WORTH_TELLING_S) and not self._told:
            self._told = True
            self._tell(
                f"device {self.name}: this machine is slower: work of {1e3 * lasts_s:.2g} ms there takes "
                f"{1e3 * took_s:.2g} ms here, so times will be too long"
            )
        return result


def _until(until_s: float, function: Callable[[], T]) -> tuple[T, float]:
    """Call the function and sleep until that time. Return its result, and how long it took."""
    began_s = time.monotonic()
    result = function()
    ended_s = time.monotonic()
    time.sleep(max(0.0, until_s - ended_s))
    return result, ended_s - began_s


def _numpy_exercise(kind: Literal["matmul", "axpy"], size: int) -> Callable[[], object]:
    if kind == "matmul":
        square = np.ones((size, size), np.float32)
        return partial(np.matmul, square, square, np.empty_like(square))
    vector, total = np.ones(size, np.float32), np.ones(size, np.float32)
    return partial(np.add, vector, total, total)


if sys.platform == "darwin":
    _SLEEPLESS = time.CLOCK_MONOTONIC_RAW
else:
    _SLEEPLESS = time.CLOCK_BOOTTIME


class RealClock:
    """The machine's monotonic clock."""

    def __init__(self) -> None:
        self._limits: _Limits | None = None

    def now(self) -> float:
        """Return the seconds since an unspecified moment; never decreases."""
        return time.monotonic()

    def elapsed(self) -> float:
        """Return the same as `now`, since this clock never jumps."""
        return time.monotonic()

    def asleep(self) -> float:
        """Return the difference between a clock that goes on while the machine sleeps, and this one."""
        return time.clock_gettime(_SLEEPLESS) - time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait; zero or less lets every other ready task run once."""
        await asyncio.sleep(max(seconds, 0.0))

    def timeout(self, seconds: float | None) -> Limit:
        """Return a time limit that works like `asyncio.timeout`."""
        if seconds is None or not seconds > 0:
            return asyncio.timeout(seconds)
        loop = asyncio.get_running_loop()
        if self._limits is None or self._limits.loop is not loop:
            self._limits = _Limits(loop)
        return _Limit(self._limits, seconds)

    def postpone(self, limit: Limit, seconds: float) -> None:
        """See `runtime.clock.Clock.postpone`."""
        if isinstance(limit, _Limit):  # any other is due at once, or never
            limit.postpone(seconds)


class _Limits:
    """The time limits of one event loop, behind one timer.

    Nearly all limits end long before they are due, and setting and cancelling a timer would be most of their cost.
    There are tens of them, so they need no order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._due_s: dict[_Limit, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        """Set for the earliest limit, or for an earlier one that has ended."""

    def add(self, limit: _Limit, due_s: float) -> None:
        """Call `limit.expire` at that time unless the limit is removed before."""
        self._due_s[limit] = due_s
        if self._timer is None or due_s < self._timer.when():
            self._set(due_s)

    def remove(self, limit: _Limit) -> None:
        self._due_s.pop(limit, None)

    def postpone(self, limit: _Limit, due_s: float) -> None:
        """Let the limit end no earlier than that; the timer, set for an earlier time, is then set again."""
        if limit in self._due_s:
            self._due_s[limit] = max(self._due_s[limit], due_s)

    def _set(self, due_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_at(due_s, self._look)

    def _look(self) -> None:
        assert self._timer is not None
        now_s = max(self.loop.time(), self._timer.when())  # the loop may call a clock's tick too early
        self._timer = None
        try:
            late = [limit for limit, due_s in self._due_s.items() if due_s <= now_s]
            for limit in sorted(late, key=self._due_s.__getitem__):  # a machine that stood still finds several
                del self._due_s[limit]
                limit.expire()
        finally:  # whatever one of them waits for may refuse to be cancelled
            if self._due_s:
                self._set(min(self._due_s.values()))


class _Limit:
    """One time limit around the work of one task."""

    __slots__ = ("_cancelled_before", "_expired", "_limits", "_seconds", "_task")

    def __init__(self, limits: _Limits, seconds: float) -> None:
        self._limits = limits
        self._seconds = seconds
        self._expired = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelled_before = task.cancelling()
        self._limits.add(self, self._limits.loop.time() + self._seconds)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._expired:
            self._limits.remove(self)
        elif self._task.uncancel() <= self._cancelled_before and kind is asyncio.CancelledError:
            raise TimeoutError from error  # nobody else has cancelled it as well

    def expired(self) -> bool:
        return self._expired

    def postpone(self, seconds: float) -> None:
        self._limits.postpone(self, self._limits.loop.time() + seconds)

    def expire(self) -> None:
        self._expired = True
        self._task.cancel()


_LOCK = "in_use"


class FolderStore:
    """Records as files, each replaced atomically after its data are on the disk. Only one process can use a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from None
        try:
            # Ends with this process, however it ends; a child that was forked does not have it.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigError(
                f"{folder}: another process keeps its state there: end it, or give this one a folder of its own"
            ) from None

    def close(self) -> None:
        """Release the folder's lock. Closing twice is harmless."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def where(self, name: str) -> str:
        """Return the path of the record's file."""
        return str(self._folder / name)

    def load(self, name: str) -> bytes | None:
        """See `runtime.host.Store.load`."""
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"{self._folder / name}: cannot be read: {error.strerror}") from None

    def save(self, name: str, data: bytes) -> None:
        """See `runtime.host.Store.save`."""
        path = self._folder / name
        try:
            write_whole(path, data)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


class MemoryStore:
    """Records in memory, for a host whose state ends with its process."""

    def __init__(self) -> None:
        self._records: dict[str, bytes] = {}

    def where(self, name: str) -> str:
        """Return a description for messages."""
        return f"{name}, in memory"

    def load(self, name: str) -> bytes | None:
        """See `runtime.host.Store.load`."""
        return self._records.get(name)

    def save(self, name: str, data: bytes) -> None:
        """See `runtime.host.Store.save`."""
        self._records[name] = data

    def close(self) -> None: ...
