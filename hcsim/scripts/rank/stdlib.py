"""The script's `time`, `sys.stdout` and `sys.stderr`: the simulated machine's clock, sleep in virtual time, and
output that the simulator prints in the order of virtual time.
"""

from __future__ import annotations

import codecs
import importlib
import io
import os
import sys
import threading
import time
import timeit
from types import ModuleType
from typing import Any

from hcsim.scripts.ipc import Printed, Slept
from hcsim.scripts.rank.counting import WorkCounter
from hcsim.scripts.rank.simulator import SimulatorClient

BEGIN_S = 1_767_225_600.0
"""The start of the simulation for `time.time`: 2026-01-01, 0:00 UTC. It is fixed for reproducibility."""
_READING_S = 1e-6
"""The cost of reading the clock: it lets virtual time pass for a script that polls the clock in a loop."""

_REPLACED = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "sleep")

_REALLY_WAIT = [
    importlib.import_module(name)
    for name in (
        "asyncio.base_events", "concurrent.futures._base", "multiprocessing.connection", "multiprocessing.managers",
        "multiprocessing.queues", "multiprocessing.synchronize", "torch.multiprocessing.spawn",
    )
]  # fmt: skip
"""Functions that wait for threads and processes until a deadline, during which simulated time would stand
still."""
_REAL_TIME: Any = ModuleType("time")
_REAL_TIME.__dict__.update(vars(time))


class ScriptClock:
    """Reads the simulator's time. Only the main thread can ask the simulator; other threads see the last
    answer's time.

    A script may hold these functions under other names, also in processes that are not ranks."""

    def __init__(self, simulator: SimulatorClient, counter: WorkCounter) -> None:
        self._simulator = simulator
        self._counter = counter
        self._installed = False

    def install(self) -> None:
        self._installed = True
        time.time = self._now
        time.monotonic = time.perf_counter = self._elapsed
        time.time_ns = lambda: round(self._now() * 1e9)
        time.monotonic_ns = time.perf_counter_ns = lambda: round(self._elapsed() * 1e9)
        time.sleep = self._sleep  # type: ignore[assignment]
        importlib.reload(timeit)  # it has taken its timer already
        for module in _REALLY_WAIT:
            module.time = _REAL_TIME  # type: ignore[attr-defined]

    def uninstall(self) -> None:
        self._installed = False
        for name in _REPLACED:
            setattr(time, name, getattr(_REAL_TIME, name))

    def _now(self) -> float:
        if not self._installed:
            return float(_REAL_TIME.time())
        self._read()
        return BEGIN_S + self._simulator.now_s + self._counter.extra_s

    def _elapsed(self) -> float:
        if not self._installed:
            return float(_REAL_TIME.monotonic())
        self._read()
        return self._simulator.elapsed_s + self._counter.extra_s

    def _read(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if self._simulator.stale or self._counter.kernels:
            self._simulator.ask(Slept(0.0))
        self._counter.extra_s += _READING_S

    def _sleep(self, seconds: float) -> None:
        if not self._installed or threading.current_thread() is not threading.main_thread():
            _REAL_TIME.sleep(seconds)
        elif seconds < 0:
            raise ValueError("sleep length must be non-negative")
        else:
            self._simulator.ask(Slept(float(seconds)))


class _Told(io.RawIOBase):
    """Forwards bytes to the simulator or, in a process that is not a rank, to the original stream."""

    def __init__(self, simulator: SimulatorClient, stream: int) -> None:
        self._simulator = simulator
        self._stream = stream
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._rank = os.getpid()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream

    def write(self, data: Any) -> int:
        if os.getpid() == self._rank:
            self._simulator.tell(Printed(self._stream, self._decode(bytes(data))))
            return len(data)
        return os.write(self._stream, data)


def install_output(simulator: SimulatorClient) -> None:
    """Redirect `sys.stdout` and `sys.stderr` to the simulator."""
    for stream, name in ((1, "stdout"), (2, "stderr")):
        raw = io.BufferedWriter(_Told(simulator, stream))
        text = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
