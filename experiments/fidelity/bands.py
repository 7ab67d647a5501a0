"""The bands of the lab's predictions: what a cell's median time would be with other figures that are as likely.

What messages cost has the spread that was measured with it. How far the latency and the rate of a medium may be off
is what the calibrating cells say: the latency, or the rate, that would alone explain each of them varies from cell to
cell, and the figure's band is that of the middle eight of ten. So the band has what the model gets wrong, as far as it
shows in cells that are not reported. What chance does comes from other seeds.

The band is that of the median of a cell's repeats, which is what is predicted, and not of a single repeat. Two repeats
of a cell have the same latency and rate, so they say nothing of how far these are off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from experiments.fidelity.cells import KB, MB, AnyCell, Cell
from experiments.fidelity.homes import Network
from experiments.fidelity.worlds import Timing, predicted, predicted_s, scenario_of
from hcsim.config import Machine
from hcsim.twin.effects import band, chance, is_random, main_effects
from hcsim.twin.spread import made_slower

_SLOWER = 1.25
_MATTERS = 0.2
"""Of a time that is in proportion to a figure this is 1; cells below it say too little of the figure."""
_LATENCY, _RATE, _MESSAGES = "latency", "rate", "messages"


class NetworkSpread(msgspec.Struct, frozen=True):
    """Half of the distance between the 10th and the 90th percentile, relative to the figure."""

    latency_spread: float = 0.0
    rate_spread: float = 0.0


def network_spread(
    cells: Sequence[Cell], measured: Mapping[str, Timing], network: Network, machine: Machine
) -> NetworkSpread:
    """Return how far the figures of a network may be off, from the cells that have calibrated it."""

    def spread(figure: str, chosen: Sequence[Cell]) -> float:
        found = [_implied(cell, figure, measured[cell.name].median_s, network, machine) for cell in chosen]
        known = [value for value in found if value is not None]
        low, high = np.percentile(known, (10, 90)) if known else (0.0, 0.0)
        return math.sinh(float(high - low) / 2)

    short = [cell for cell in cells if cell.size_bytes <= 64 * KB]
    long = [cell for cell in cells if cell.size_bytes >= 1 * MB]
    return NetworkSpread(round(spread(_LATENCY, short), 4), round(spread(_RATE, long), 4))


def _implied(cell: Cell, figure: str, measured_s: float, network: Network, machine: Machine) -> float | None:
    """Return the logarithm of the factor on a figure that would explain the measured time; None if the figure matters
    too little."""
    point_s = predicted_s(cell, network, machine)
    changed_s = predicted_s(cell, _with(network, {figure: _SLOWER}), machine)
    matters = math.log(changed_s / point_s) / math.log(_SLOWER)
    return math.log(measured_s / point_s) / matters if matters > _MATTERS else None


def _with(network: Network, factors: Mapping[str, float]) -> Network:
    return replace(
        network,
        latency_s=network.latency_s * factors.get(_LATENCY, 1.0),
        rate_factor=network.rate_factor / factors.get(_RATE, 1.0),
    )


def banded(cell: AnyCell, expected: Timing, network: Network, spread: NetworkSpread, machine: Machine) -> Timing:
    """Return the prediction with its band in place of the percentiles of its own repeats."""
    seconds = _seconds_of(cell)
    costs = machine.messages
    spreads = {_LATENCY: spread.latency_spread, _RATE: spread.rate_spread}
    if costs is not None:
        spreads[_MESSAGES] = costs.basis.spread

    def timed(factors: Mapping[str, float]) -> float:
        factor = factors.get(_MESSAGES, 1.0)
        with_costs = machine if costs is None else replace(machine, messages=made_slower(costs, factor))
        return seconds(_with(network, factors), with_costs, 0)

    point_s = timed({})
    found = main_effects({name: value for name, value in spreads.items() if value}, point_s, timed)
    if is_random(scenario_of(cell, network, machine)):
        found = (*found, chance(point_s, [seconds(network, machine, seed) for seed in (1, 2, 3)]))
    low, high = band(found)
    return replace(expected, p10_s=low * expected.median_s, p90_s=high * expected.median_s)


def _seconds_of(cell: AnyCell) -> Callable[[Network, Machine, int], float]:
    if isinstance(cell, Cell):
        return lambda network, machine, seed: predicted_s(cell, network, machine, seed)
    return lambda network, machine, seed: predicted(cell, network, machine, seed).median_s
