"""How this system's scheduler shares a core, measured: `python -m experiments.fidelity.scheduler CORE FILE`.

A neighbour that always works is on the core, and beside it one of three programs:

- one that always works, which sees the neighbour's turns as gaps in its own time;
- one that sleeps and works by turns: how late it wakes up, by how long it sleeps and how long it works;
- two that wake each other up and work in turns, as the threads of a program do.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path

import msgspec

from hcsim.files import write_whole

SLEEPS_S = (0.0001, 0.0003, 0.001, 0.002, 0.003, 0.004, 0.006, 0.01, 0.02)
WORKS_S = (0.00003, 0.0003, 0.002, 0.006)
_LONGER_S = 2e-4
"""A gap that is longer is a turn of another program."""
_LONG_WORK_S = 0.002
_TICKS_S = (1e-3, 1 / 300, 4e-3, 1e-2)
"""Of Linux."""
_EACH_S = 0.4
_SETTLE_S = 0.2


class Wakes(msgspec.Struct, frozen=True):
    """A program that sleeps and works by turns."""

    sleep_s: float
    work_s: float
    loaded: bool
    """Whether the neighbour works."""
    turns: int
    mean_late_s: float
    late_s: tuple[float, ...]
    """Deciles of how late it wakes up."""
    mean_work_s: float
    """How long its work takes."""


class Turns(msgspec.Struct, frozen=True):
    """Programs that work by turns."""

    loaded: bool
    work_s: float
    turns: int
    mean_s: float
    """Of a turn, with the wake-up before it."""


class Scheduler(msgspec.Struct, frozen=True):
    """How a core is shared."""

    gaps_s: tuple[float, ...]
    """Turns of the neighbour beside a program that always works."""
    own_s: tuple[float, ...]
    """Turns of that program."""
    wakes: tuple[Wakes, ...]
    pairs: tuple[Turns, ...]

    @property
    def slice_s(self) -> float:
        """How long a program keeps a core for which another one waits that has just woken up: the longest wait, about,
        of one that hardly sleeps and works long, so that it is never behind its share."""
        alone_s = statistics.median(wakes.late_s[4] for wakes in self.wakes if not wakes.loaded)
        late_s = [
            wakes.late_s[-1] for wakes in self.wakes
            if wakes.loaded and wakes.sleep_s == SLEEPS_S[0] and wakes.work_s >= _LONG_WORK_S
        ]  # fmt: skip
        return round(statistics.median(late_s) - alone_s, 6)

    @property
    def tick_s(self) -> float:
        """The interval of the timer, of those that systems have: turns of programs that always work are whole ones."""
        turn_s = statistics.median(self.gaps_s)
        return min(_TICKS_S, key=lambda tick_s: abs(ceil(self.slice_s / tick_s) * tick_s - turn_s))


def measure_scheduler(core: int) -> Scheduler:
    """Measure, on this core, which is this process's from now on."""
    os.sched_setaffinity(0, {core})
    wakes = [_wakes(sleep_s, work_s, loaded=False) for sleep_s in SLEEPS_S for work_s in WORKS_S[:1]]
    pairs = [_pair(work_s, loaded=False) for work_s in WORKS_S[:3]]
    with neighbour():
        own_s, gaps_s = _gaps()
        wakes += [_wakes(sleep_s, work_s, loaded=True) for sleep_s in SLEEPS_S for work_s in WORKS_S]
        pairs += [_pair(work_s, loaded=True) for work_s in WORKS_S[:3]]
    return Scheduler(gaps_s, own_s, tuple(wakes), tuple(pairs))


@contextmanager
def neighbour() -> Iterator[None]:
    """A process that always works, on the core of this one."""
    process = subprocess.Popen([sys.executable, "-m", "experiments.fidelity.neighbour", "1", "1", "0"])
    try:
        time.sleep(2 * _SETTLE_S)
        yield
    finally:
        process.kill()
        process.wait()


def _gaps() -> tuple[tuple[float, ...], tuple[float, ...]]:
    own_s, gaps_s = [], []
    before_s = since_s = time.perf_counter()
    until_s = before_s + 4 * _EACH_S
    while before_s < until_s:
        now_s = time.perf_counter()
        if now_s - before_s > _LONGER_S:
            own_s.append(before_s - since_s)
            gaps_s.append(now_s - before_s)
            since_s = now_s
        before_s = now_s
    return tuple(own_s), tuple(gaps_s)


def _wakes(sleep_s: float, work_s: float, *, loaded: bool) -> Wakes:
    late_s, worked_s = [], []
    until_s = time.perf_counter() + _EACH_S
    while (began_s := time.perf_counter()) < until_s:
        time.sleep(sleep_s)
        woke_s = time.perf_counter()
        _work(work_s)
        late_s.append(woke_s - began_s - sleep_s)
        worked_s.append(time.perf_counter() - woke_s)
    deciles = tuple(statistics.quantiles(late_s, n=10)) if len(late_s) > 1 else tuple(late_s)
    return Wakes(sleep_s, work_s, loaded, len(late_s), statistics.fmean(late_s), deciles, statistics.fmean(worked_s))


def _pair(work_s: float, *, loaded: bool) -> Turns:
    """Two processes on the core hand a byte to each other and work in turns."""
    ours, theirs = socket.socketpair()
    other = os.fork()
    if other == 0:
        while theirs.recv(1) == b"x":
            _work(work_s)
            theirs.send(b"x")
        os._exit(0)
    turns, began_s = 0, time.perf_counter()
    while time.perf_counter() < began_s + _EACH_S:
        ours.send(b"x")
        ours.recv(1)
        _work(work_s)
        turns += 2
    lasted_s = time.perf_counter() - began_s
    ours.send(b"q")
    os.waitpid(other, 0)
    ours.close()
    theirs.close()
    return Turns(loaded, work_s, turns, lasted_s / turns)


def _work(seconds: float) -> None:
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


if __name__ == "__main__":
    write_whole(
        Path(sys.argv[2]), msgspec.json.format(msgspec.json.encode(measure_scheduler(int(sys.argv[1])))) + b"\n"
    )
