"""Times the kernels of a step, and whole steps, on a processor and on devices that compute while Python goes on.

A processor computes while it is called. A GPU is asynchronous: the host launches kernels into a queue, and the device
takes them from there. A step then lasts as long as the longer of two paths, the host's launches and the device's
kernels, and each is measured apart from the other:

- The host's time of a launch ends when the call returns. Nobody waits for the device in between.
- The device's time of a kernel on CUDA is that between two events in its queue. Before each kernel the device is kept
  busy for a while, so that the host has put all three into the queue before the first is reached: otherwise the time
  would be that of the launch. Two events with nothing between them are some way apart, too: that is taken off.
- MPS has no such events. There the time is that from an idle device to an idle device, less that of a kernel with one
  number.
- The device's path of a whole step is the time between two events around it, behind a wait that is longer than its
  launches.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec
import torch
from torch._ops import OpOverload

from hcsim.torch_kernels import Kernel, KernelMode, Operation, kernel_of, signature_of, size_bytes
from hcsim.twin.timing import rounded

T = TypeVar("T")
ASYNCHRONOUS = ("cuda", "mps")
"""Devices that compute while the host goes on."""


class Sample(msgspec.Struct, array_like=True):
    """A kernel of a step, and the seconds that it took in each repetition."""

    name: str
    signature: str
    kernel: Kernel
    seconds: list[float]
    launches: list[float] = []
    """The seconds that its launch took the host, where the device is asynchronous."""
    gaps: list[float] = []
    """What the host did before each, since the last one: Python, autograd and views."""


class Steps(msgspec.Struct):
    """How long some steps took."""

    durations: list[float]
    """From an idle device to an idle device."""
    launches: list[float] = []
    """Until the host had launched all kernels, where the device is asynchronous."""
    queued: list[float] = []
    """On the device alone, where it can be told."""
    streamed: list[float] = []
    """Of several in a row, without a wait between them."""

    def add(self, later: Steps) -> None:
        """Add later repetitions."""
        self.durations.extend(later.durations)
        self.launches.extend(later.launches)
        self.queued.extend(later.queued)
        self.streamed.extend(later.streamed)


class CallTimer(Protocol):
    """Times calls one after the other."""

    def time(self, call: Callable[[], T]) -> T: ...

    def take(self) -> list[float]:
        """Return the seconds of each call since the last time."""
        ...


class HostTimer:
    """Times calls until they return, or, with `wait`, until the device is done, less what a call of nothing takes."""

    def __init__(self, wait: Callable[[], object] | None = None, empty_s: float = 0.0) -> None:
        self._wait, self._empty_s = wait, empty_s
        self._found: list[float] = []

    def time(self, call: Callable[[], T]) -> T:
        if self._wait is not None:
            self._wait()
        began_s = time.perf_counter()
        result = call()
        if self._wait is not None:
            self._wait()
        self._found.append(max(0.0, time.perf_counter() - began_s - self._empty_s))
        return result

    def take(self) -> list[float]:
        found, self._found = self._found, []
        return found


_AHEAD_S, _EACH_S = 10e-3, 100e-6
"""How long a CUDA device is kept busy before a step, and before each of its kernels."""
_MOST_QUEUED = 500
"""Kernels of a step that all fit into a CUDA device's queue, with room for those that are several."""


class _EventTimer:
    """Times what calls take on a CUDA device."""

    def __init__(self) -> None:
        self.empty_s = 0.0
        cycles = 10_000_000
        began, ended = self._event(), self._event()
        for _ in range(3):  # the first ones are of a device that saves power
            began.record()
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            ended.record()
        torch.cuda.synchronize()
        self._cycles_of_1s = cycles / (began.elapsed_time(ended) * 1e-3)
        self._found: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        for _ in range(100):
            self.time(lambda: None)
        self.empty_s = statistics.median(self.take())

    def _event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def keep_busy(self, lasts_s: float) -> None:
        torch.cuda._sleep(int(lasts_s * self._cycles_of_1s))  # type: ignore[no-untyped-call]

    def time(self, call: Callable[[], T]) -> T:
        self.keep_busy(_EACH_S if self._found else _AHEAD_S)
        began, ended = self._event(), self._event()
        began.record()
        result = call()
        ended.record()
        self._found.append((began, ended))
        return result

    def take(self) -> list[float]:
        torch.cuda.synchronize()
        found, self._found = self._found, []
        return [max(0.0, began.elapsed_time(ended) * 1e-3 - self.empty_s) for began, ended in found]

    def queued_s(self, step: Callable[[], object], launches_s: float) -> float:
        """Return the device's time of a step that is all in its queue before it begins."""
        began, ended = self._event(), self._event()
        torch.cuda.synchronize()
        self.keep_busy(1e-3 + 2 * launches_s)
        began.record()
        step()
        ended.record()
        torch.cuda.synchronize()
        return float(began.elapsed_time(ended) * 1e-3)


@functools.cache
def _event_clock() -> _EventTimer:
    return _EventTimer()


_EMPTY_CALLS = 50


def _device_clock(device: str) -> CallTimer:
    """Return what times calls on the device."""
    if device == "cuda":
        return _event_clock()
    wait: Callable[[], object] | None = None
    nothing: Callable[[], object] = _nothing
    if device in ASYNCHRONOUS:
        number = torch.zeros(1, device=device)
        wait, nothing = waiting(device), lambda: number.add_(1)
    clock = HostTimer(wait)
    for _ in range(_EMPTY_CALLS):
        clock.time(nothing)
    return HostTimer(wait, statistics.median(clock.take()))


class Stopwatch(KernelMode):  # type: ignore[no-untyped-call]
    """Times every kernel of a step by a clock, and what the program does before it."""

    def __init__(self, clock: CallTimer) -> None:
        super().__init__()
        self._clock = clock
        self.views = 0
        self.gaps_s: list[float] = []
        self._seen: list[tuple[str, str, Kernel]] = []
        self._left_s = time.perf_counter()

    def viewed(self) -> None:
        self.views += 1

    def launch(self, func: OpOverload, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.gaps_s.append(time.perf_counter() - self._left_s)
        signature = signature_of(func, args, kwargs)
        moved_bytes = size_bytes(args)
        result = self._clock.time(lambda: func(*args, **kwargs))
        moved_bytes += size_bytes(result)
        kernel = kernel_of(operation, operation.flops(args, kwargs, result), moved_bytes, args, result)
        self._seen.append((func.overloadpacket.__name__, signature, kernel))
        self._left_s = time.perf_counter()
        return result

    def samples(self) -> list[Sample]:
        """Return the kernels that were seen, each with its seconds."""
        found = zip(self._seen, self._clock.take(), self.gaps_s, strict=True)
        return [Sample(*seen, [rounded(lasted_s)], [], [rounded(gap_s)]) for seen, lasted_s, gap_s in found]


def waiting(device: str) -> Callable[[], object]:
    """Return a function that waits until the device is done."""
    return {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(device, _nothing)


def _nothing() -> None:
    """The CPU computes while it is called."""


def time_kernels(
    step: Callable[[], object], device: str = "cpu", *, repeats: int = 5, warm_up: int = 1, limit_s: float = 60.0
) -> tuple[list[Sample], int]:
    """Time the kernels of a step, some repetitions long; on an asynchronous device their launches, too. Return them,
    and the number of views."""
    for _ in range(warm_up):
        step()
    began_s = time.perf_counter()
    clock, wait = _device_clock(device), waiting(device)
    samples: list[Sample] = []
    views = 0
    for repeat in range(repeats):
        found, views = _watched(step, clock)
        if not repeat:
            samples = [Sample(each.name, each.signature, each.kernel, [], [], []) for each in found]
        for sample, again in alike(samples, found):
            sample.seconds.extend(again.seconds)
            if device not in ASYNCHRONOUS:
                sample.gaps.extend(again.gaps)
        if device in ASYNCHRONOUS:
            wait()
            for sample, again in alike(samples, _watched(step, HostTimer())[0]):
                sample.launches.extend(again.seconds)
                sample.gaps.extend(again.gaps)
            wait()
        if time.perf_counter() - began_s > limit_s:
            break
    return samples, views


def _watched(step: Callable[[], object], clock: CallTimer) -> tuple[list[Sample], int]:
    with Stopwatch(clock) as stopwatch:
        step()
    return stopwatch.samples(), stopwatch.views


def alike(samples: list[Sample], found: list[Sample]) -> list[tuple[Sample, Sample]]:
    """Return the samples in pairs, if both are of the same kernels."""
    if [sample.signature for sample in samples] != [sample.signature for sample in found]:
        return []
    return list(zip(samples, found, strict=True))


def time_steps(step: Callable[[], object], device: str = "cpu", *, repeats: int = 10, warm_up: int = 1) -> Steps:
    """Time some steps."""
    wait, found = waiting(device), Steps([])
    for number in range(warm_up + repeats):
        wait()
        began_s = time.perf_counter()
        step()
        launched_s = time.perf_counter() - began_s
        wait()
        lasted_s = time.perf_counter() - began_s
        if number >= warm_up:
            found.durations.append(lasted_s)
            if device in ASYNCHRONOUS:
                found.launches.append(launched_s)
    return found


def streamed_s(step: Callable[[], object], device: str, count: int = 5) -> float:
    """Return how long each of some steps takes where nothing waits between them."""
    wait = waiting(device)
    wait()
    began_s = time.perf_counter()
    for _ in range(count):
        step()
    wait()
    return (time.perf_counter() - began_s) / count


def time_queued(step: Callable[[], object], device: str, steps: Steps, kernels: int, repeats: int = 3) -> None:
    """Add what some steps of so many kernels take on the device alone, where that can be told."""
    if device == "cuda" and kernels <= _MOST_QUEUED:
        clock = _event_clock()
        steps.queued.extend(clock.queued_s(step, max(steps.launches)) for _ in range(repeats))
