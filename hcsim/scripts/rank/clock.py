"""The script's `time`: what its machine's clock shows in the simulation, and sleep that passes there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from hcsim.scripts.conversation import Slept
from hcsim.scripts.rank.counting import Counter
from hcsim.scripts.rank.simulator import Simulator

BEGIN_S = 1_767_225_600.0
"""When the simulation begins, for `time.time`: 2026-01-01, 0:00 UTC. A day that is always the same."""
_READING_S = 1e-6
"""How long it takes to look at the clock: a script that does nothing else until some time sees it come."""

_REAL: dict[str, Callable[..., object]] = {
    name: getattr(time, name)
    for name in ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "sleep")
}


class Clock:
    """Reads the simulator's time. Only the main thread can have it asked; others see what was last heard."""

    def __init__(self, simulator: Simulator, counter: Counter) -> None:
        self._simulator = simulator
        self._counter = counter
        self._sleep_really: Callable[[float], object] = time.sleep

    def install(self) -> None:
        """Have the module `time` say it."""
        time.time = self._now
        time.monotonic = time.perf_counter = self._elapsed
        time.time_ns = lambda: round(self._now() * 1e9)
        time.monotonic_ns = time.perf_counter_ns = lambda: round(self._elapsed() * 1e9)
        time.sleep = self._sleep  # type: ignore[assignment]

    @staticmethod
    def uninstall() -> None:
        """Have it say the real time again."""
        for name, real in _REAL.items():
            setattr(time, name, real)

    def _now(self) -> float:
        self._read()
        return BEGIN_S + self._simulator.now_s + self._counter.extra_s

    def _elapsed(self) -> float:
        self._read()
        return self._simulator.elapsed_s + self._counter.extra_s

    def _read(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if self._simulator.stale or self._counter.kernels:
            self._simulator.ask(Slept(0.0))
        self._counter.extra_s += _READING_S

    def _sleep(self, seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            self._sleep_really(seconds)
        elif seconds < 0:
            raise ValueError("sleep length must be non-negative")
        else:
            self._simulator.ask(Slept(float(seconds)))
