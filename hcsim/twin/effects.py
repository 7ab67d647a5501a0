"""A band of any simulated time, from two simulations for each figure that has a spread.

One figure at a time is put at its 10th and at its 90th percentile, with all others as they are. The logarithm of the
time is the sum of the effects of the figures; each is linear, on either side, in how many standard deviations the
figure is off. The percentiles are those of draws of all figures together, stratified as those of `spread.py`.

With one figure this is the time at its own percentiles, whatever its shape; with several, interactions are left out.
Draws of a figure depend on the seed and on its name alone. So times that rest on the same figures are compared draw by
draw: if all Macs are slower than was thought, one alone and four together are, and their quotient changes less than
either. `experiments.bands` compares such bands with those of 64 variants, for cells of the sweeps.

What chance does (jitter and losses) is one more effect, from a few simulations with other seeds. It is drawn for each
time by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from math import exp, log
from statistics import pstdev

import msgspec
import numpy as np
from msgspec.structs import replace

from hcsim import rng
from hcsim.config import Scenario, Wifi
from hcsim.twin.spread import BY_KIND, NORMAL, TENTH_Z, figures_of, rescaled, slower_at_p90

CHANCE = "chance"
_DRAWS = 512
_OTHER_SEEDS = 3
_NONE = 1e-6
"""An effect that is smaller is rounding."""


class Effect(msgspec.Struct, frozen=True):
    """How a time depends on one figure."""

    figure: str
    faster: float
    """The time with the figure at its faster percentile, relative to that with the figure as it is."""
    slower: float


def effects(scenario: Scenario, timed: Callable[[Scenario], float], point_s: float | None = None) -> tuple[Effect, ...]:
    """Return what the spread of each figure does to a time, and what chance does. Figures that do not matter are left
    out, and so are those of kinds of kernels, which matter only where work is counted by kinds. `point_s` is the time
    as it is, if it is known."""
    spreads = {
        name: basis.spread
        for name, basis in figures_of(scenario).items()
        if basis.spread and not name.startswith(BY_KIND)
    }
    seeds = [rng.stream(scenario.seed, "band", "seed", number).getrandbits(31) for number in range(_OTHER_SEEDS)]
    others = [replace(scenario, seed=seed) for seed in seeds] if is_random(scenario) else []
    if not (spreads or others):
        return ()
    if point_s is None:
        point_s = timed(scenario)

    def with_factors(factors: Mapping[str, float]) -> float:
        return timed(rescaled(scenario, lambda name, _: factors.get(name, 1.0)))

    found = main_effects(spreads, point_s, with_factors)
    if others:
        found = (*found, chance(point_s, [timed(each) for each in others]))
    return tuple(each for each in found if max(abs(log(each.faster)), abs(log(each.slower))) > _NONE)


def main_effects(
    spreads: Mapping[str, float], point_s: float, timed: Callable[[Mapping[str, float]], float]
) -> tuple[Effect, ...]:
    """Return the effect of each of these figures on a time, which is asked for with factors of figures."""
    return tuple(
        Effect(name, timed({name: 1 / slower_at_p90(spread)}) / point_s, timed({name: slower_at_p90(spread)}) / point_s)
        for name, spread in spreads.items()
    )


def chance(point_s: float, others_s: Iterable[float]) -> Effect:
    """Return the effect of chance, from the times with other seeds."""
    sigma = pstdev([log(other_s / point_s) for other_s in others_s], mu=0.0)
    return Effect(CHANCE, exp(-TENTH_Z * sigma), exp(TENTH_Z * sigma))


def is_random(scenario: Scenario) -> bool:
    """Return whether another seed gives another time: links have jitter or losses."""
    links = [*scenario.media, *scenario.wan]
    return any(
        getattr(link, "jitter_s", 0) or getattr(link, "loss", 0) or (isinstance(link, Wifi) and link.gate)
        for link in links
    )


def relative_times(found: Iterable[Effect], seed: int = 0, of: str = "") -> np.ndarray:
    """Return draws of a time, relative to the predicted one. `of` is whose chance it is."""
    logs = np.zeros(_DRAWS)
    for each in found:
        z = _draws(seed, each.figure, of if each.figure == CHANCE else "")
        logs += z / TENTH_Z * np.where(z > 0, log(each.slower), -log(each.faster))
    return np.asarray(np.exp(logs))


@cache
def _draws(seed: int, figure: str, of: str) -> np.ndarray:
    order = list(range(_DRAWS))
    rng.stream(seed, "band", figure, of).shuffle(order)
    return np.array([NORMAL.inv_cdf((place + 0.5) / _DRAWS) for place in order])


def percentiles(relative: np.ndarray) -> tuple[float, float]:
    """Return the 10th and the 90th percentile of draws, which always include the prediction."""
    low, high = np.quantile(relative, (0.1, 0.9), method="hazen")
    return min(1.0, float(low)), max(1.0, float(high))


def band(found: Iterable[Effect], seed: int = 0) -> tuple[float, float]:
    """Return the 10th and the 90th percentile of a time, relative to the predicted one."""
    return percentiles(relative_times(found, seed))
