"""Work for unlike machines in proportion to their speed: samples of a step, or steps of a period.

What a step costs a rank is a fixed time and a time per sample: a + c·b seconds for b samples. At first both follow
from the machine's profile. Then each rank compares its own steps with that, and scales both by the ratio: a median
of several steps, so that one odd step counts for nothing, taken in full the first time, and half of it later. The
ranks exchange these figures, and all compute the same shares from them. New shares are taken only if a step would
become at least `WORTH` times as fast. A rank whose profile is unknown is taken for an average one until it has taken
steps.

    shares   the samples of a step, such that the last rank finishes as early as possible: ranks with the same
             finish time T take (T − a)/c samples, and single samples that are left go where they finish first.
             Not in proportion to peak FLOPS: a fixed cost weighs more on a small share. Each rank gets one sample
             at least while there are enough; otherwise the fastest get one each.
    paces    the steps of a period of H steps: the fastest takes H, the others what they finish meanwhile, at least
             one (DyLU: Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024, arXiv
             2401.09135). They may all take up to `SLACK` longer, if more samples a second come of it: rounding down
             would cost a rank that takes 3.9 steps a quarter of its speed.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Callable, Sequence
from math import floor, isfinite, nan
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hcsim.training.data import Turns

WORTH = 1.05
SLACK = 1.1
EVERY_STEPS = 8
"""Steps after which ranks that exchange in every step compare their speeds."""
_HALVINGS = 60
Figures: TypeAlias = npt.NDArray[np.float64]


class StepCost(NamedTuple):
    """What a step costs a rank."""

    fixed_s: float
    sample_s: float

    def step_s(self, samples: int) -> float:
        return self.fixed_s + self.sample_s * samples

    @property
    def is_known(self) -> bool:
        return isfinite(self.fixed_s) and isfinite(self.sample_s) and self.fixed_s >= 0 and self.sample_s > 0


UNKNOWN = StepCost(nan, nan)
_ALIKE = StepCost(0.0, 1.0)


def predicted(step_s: Callable[[int], float | None], samples: int) -> StepCost:
    """Return the cost of steps with about so many samples, from how long one takes by a machine's profile, if that is
    known."""
    one_s, many_s = step_s(1), step_s(1 + max(1, samples))
    if one_s is None or many_s is None:
        return UNKNOWN
    sample_s = max(0.0, many_s - one_s) / max(1, samples)
    return StepCost(max(0.0, one_s - sample_s), sample_s)


def assumed(told: Sequence[StepCost]) -> tuple[StepCost, ...]:
    """Return the costs, with those of an average rank for ranks whose costs are unknown."""
    known = [cost for cost in told if cost.is_known]
    usual = StepCost(*(statistics.fmean(each) for each in zip(*known, strict=True))) if known else _ALIKE
    return tuple(cost if cost.is_known else usual for cost in told)


def fastest(costs: Sequence[StepCost], samples: int) -> int:
    """Return the rank that takes a step with so many samples in the least time; of several, the first."""
    return min(range(len(costs)), key=lambda rank: (costs[rank].step_s(samples), rank))


def shares(costs: Sequence[StepCost], samples: int) -> tuple[int, ...]:
    """Share out the samples of a step, so that the last rank finishes as early as possible."""
    ranks = range(len(costs))
    if samples <= len(costs):
        first = sorted(ranks, key=lambda rank: (costs[rank].step_s(1), rank))[:samples]
        return tuple(int(rank in first) for rank in ranks)

    def by(time_s: float) -> list[int]:
        return [max(1, floor((time_s - cost.fixed_s) / cost.sample_s)) for cost in costs]

    early_s, late_s = 0.0, max(cost.step_s(samples) for cost in costs)
    for _ in range(_HALVINGS):
        middle_s = (early_s + late_s) / 2
        early_s, late_s = (middle_s, late_s) if sum(by(middle_s)) <= samples else (early_s, middle_s)
    found = by(early_s)
    queue = [(costs[rank].step_s(found[rank] + 1), rank) for rank in ranks]
    heapq.heapify(queue)
    for _ in range(samples - sum(found)):
        _, rank = queue[0]
        found[rank] += 1
        heapq.heapreplace(queue, (costs[rank].step_s(found[rank] + 1), rank))
    return tuple(found)


def paces(times_s: Sequence[float], sizes: Sequence[int], every: int) -> tuple[int, ...]:
    """Return how many steps of a period each rank takes, given the time of a step and the samples in it, by rank. The
    fastest takes `every`."""
    working = [time_s for time_s, size in zip(times_s, sizes, strict=True) if size] or [1.0]
    least_s = every * min(working)
    ends_s = [steps * time_s for time_s in working for steps in range(1, every + 1)]

    def by(end_s: float) -> tuple[int, ...]:
        return tuple(max(1, min(every, floor(end_s / time_s + 1e-9))) if time_s > 0 else every for time_s in times_s)

    def samples_per_s(end_s: float) -> float:
        steps = by(end_s)
        lasts_s = max(count * time_s for count, time_s in zip(steps, times_s, strict=True))
        return sum(count * size for count, size in zip(steps, sizes, strict=True)) / max(lasts_s, 1e-12)

    candidates = [least_s, *sorted(end_s for end_s in ends_s if least_s < end_s <= SLACK * least_s)]
    return by(max(candidates, key=samples_per_s))


class Division(NamedTuple):
    """What each rank does, by rank."""

    sizes: tuple[int, ...]
    """Samples in a step."""
    turns: Turns | None = None
    """The steps of a period in which it takes part; None: all of them."""

    def sample_s(self, costs: Sequence[StepCost]) -> float:
        """Return how long a sample takes, of all ranks together."""
        counts = self.turns.counts if self.turns is not None else (1,) * len(costs)
        lasts_s = max(cost.step_s(size) * n for cost, size, n in zip(costs, self.sizes, counts, strict=True))
        return lasts_s / sum(size * n for size, n in zip(self.sizes, counts, strict=True))


class Balance:
    """What steps cost this rank, and the work that all ranks have agreed on."""

    def __init__(self, own: StepCost, *, samples: int | None, per_rank: int, every: int | None) -> None:
        """With `samples`, or with `per_rank` as many for each rank, a step is shared out; with `every`, a period of so
        many steps."""
        self.costs: tuple[StepCost, ...] = ()
        """Of all ranks, once they have compared them."""
        self._own = own
        self._observed: list[float] = []
        self._has_observed = False
        self._samples = samples
        self._per_rank = per_rank
        self._every = every

    @property
    def divides(self) -> bool:
        """Whether ranks take shares; otherwise they only compare what steps cost them."""
        return bool(self._per_rank or self._every)

    def observe(self, samples: int, compute_s: float) -> None:
        """Note how long this rank has computed for a step with so many samples."""
        if samples and compute_s > 0 and self._own.is_known:
            self._observed.append(compute_s / self._own.step_s(samples))

    def told(self) -> Figures:
        """Return this rank's figures, for the others."""
        if self._observed:
            ratio = statistics.median(self._observed)
            ratio = (1 + ratio) / 2 if self._has_observed else ratio
            self._own = StepCost(*(ratio * seconds for seconds in self._own))
            self._observed, self._has_observed = [], True
        return np.array(self._own, np.float64)

    def agree(self, told: Sequence[Figures], rank: int) -> None:
        """Take the figures of all ranks, alike on all of them."""
        self.costs = assumed([StepCost(*map(float, each)) for each in told])
        self._own = self.costs[rank]

    def best(self, sizes: Sequence[int]) -> Division:
        """Return the best work by what is known; `sizes` are used where samples are not shared out."""
        if self._per_rank:
            sizes = shares(self.costs, self._samples or self._per_rank * len(self.costs))
        times_s = [cost.step_s(size) for cost, size in zip(self.costs, sizes, strict=True)]
        every = self._every
        return Division(tuple(sizes), Turns(every, paces(times_s, sizes, every)) if every is not None else None)

    def better(self, now: Division) -> Division | None:
        """Return other work than now, if it is worth the change."""
        best = self.best(now.sizes)
        return best if best.sample_s(self.costs) * WORTH <= now.sample_s(self.costs) else None
