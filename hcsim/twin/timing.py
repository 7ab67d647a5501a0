"""The time of one call: the median of several, each long enough for the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

SAMPLE_S = 200e-6
"""A sample is at least so long: shorter calls are repeated within it."""
FEWEST, FEWEST_APART, MOST = 3, 7, 25
_LONG = 5
"""Times the budget: calls that take so long together are the fewest, apart or not."""
_DISPLACING_BYTES = 8 << 20


class Timing(NamedTuple):
    """What several calls took."""

    seconds: float
    """The median of one call."""
    spread: float
    """As in `Basis`."""


def timed(call: Callable[[], object], budget_s: float) -> Timing:
    """Call the function for about this time, at least three times after a first one that does not count."""
    call()
    began_s = time.perf_counter()
    call()
    repeats = max(1, int(SAMPLE_S / max(time.perf_counter() - began_s, 1e-9)))
    began_s = time.perf_counter()
    samples_s: list[float] = []
    while len(samples_s) < FEWEST or (len(samples_s) < MOST and time.perf_counter() - began_s < budget_s):
        start_s = time.perf_counter()
        for _ in range(repeats):
            call()
        samples_s.append((time.perf_counter() - start_s) / repeats)
    return summary(samples_s)


def timed_apart(call: Callable[[], object], budget_s: float) -> Timing:
    """Time calls each of which finds its code and data displaced from the nearest caches, as within a training step."""
    call()
    began_s = time.perf_counter()
    samples_s: list[float] = []
    while len(samples_s) < MOST:
        spent_s = time.perf_counter() - began_s
        if len(samples_s) >= (FEWEST_APART if spent_s < _LONG * budget_s else FEWEST) and spent_s >= budget_s:
            break
        displace()
        start_s = time.perf_counter()
        call()
        samples_s.append(time.perf_counter() - start_s)
    return summary(samples_s)


def displace() -> None:
    """Write so much memory that the caches of a core hold nothing else."""
    others = _others()
    np.add(others, 1.0, out=others)


@cache
def _others() -> npt.NDArray[np.float32]:
    return np.zeros(_DISPLACING_BYTES // 4, np.float32)


def summary(samples: Sequence[float]) -> Timing:
    """Return the median, rounded to four digits, and half of the distance between the 10th and the 90th percentile."""
    middle = statistics.median(samples)
    tenths = statistics.quantiles(samples, n=10, method="inclusive") if len(samples) > 1 else [middle]
    return Timing(rounded(middle), rounded((tenths[-1] - tenths[0]) / 2 / middle, 2) if middle else 0.0)


def rounded(value: float, digits: int = 4) -> float:
    """Return the value as a person writes it: with a few significant digits."""
    return float(f"{value:.{digits}g}")
