"""The bands of the lab's predictions, from what is wrong in cells that are not reported.

The cells that calibrate a network are predicted with it, too. How far their measured times are off, relative to the
predicted ones, is how far those of other cells of the medium will be (split conformal prediction: Vovk, Gammerman and
Shafer 2005; Lei et al., JASA 113, 2018): between the 10th and the 90th percentile of these ratios lie 80 % of cells
that are like them. Short messages have ratios of their own, since other figures make them long or short. Trainings have
those of long messages, and where compute is real, what the spread of the measured kernels adds.

The band is that of the median of a cell's repeats, which is what is predicted, and not of a single repeat.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from experiments.fidelity.cells import MB, AnyCell, Cell
from experiments.fidelity.homes import Network
from experiments.fidelity.worlds import Timing, predicted_s
from hcsim.config import Machine

Band = tuple[float, float]
_FEWEST = 5
"""Fewer cells say nothing of percentiles."""


class Residuals(msgspec.Struct, frozen=True):
    """The 10th and the 90th percentile of measured times, relative to the predicted ones."""

    short: Band = (1.0, 1.0)
    """Of messages of less than 1 MB."""
    long: Band = (1.0, 1.0)


class Calibration(NamedTuple):
    """Measured times relative to predicted ones, of the cells that have calibrated a network."""

    short: list[float]
    long: list[float]

    @classmethod
    def of(
        cls, cells: Sequence[Cell], measured: Mapping[str, Timing], network: Network, machine: Machine
    ) -> Calibration:
        found = cls([], [])
        for cell in cells:
            ratio = measured[cell.name].median_s / predicted_s(cell, network, machine)
            (found.short if _is_short(cell) else found.long).append(ratio)
        return found


def residuals(groups: Sequence[Sequence[str]], calibrations: Mapping[str, Calibration]) -> dict[str, Residuals]:
    """Return how far the cells that have calibrated the networks are off, by medium. Media of one group share them: a
    dozen cells say little of percentiles."""
    found = {}
    for media in groups:
        short, long = ([ratio for each in media for ratio in calibrations[each][size]] for size in (0, 1))
        found |= dict.fromkeys(media, Residuals(_percentiles(short), _percentiles(long)))
    return found


def _is_short(cell: AnyCell) -> bool:
    return isinstance(cell, Cell) and cell.size_bytes < MB


def _percentiles(ratios: Sequence[float]) -> Band:
    """Return the ratios between which another one lies with a probability of 80 %: of n, the k-th from either end, with
    k = (n + 1)/10 rounded down."""
    if len(ratios) < _FEWEST:
        return 1.0, 1.0
    in_order, kth = sorted(ratios), max(1, (len(ratios) + 1) // 10)
    return round(min(in_order[kth - 1], 1.0), 5), round(max(in_order[-kth], 1.0), 5)


def banded(cell: AnyCell, expected: Timing, network: Residuals) -> Timing:
    """Return the prediction with its band in place of the percentiles of its own repeats."""
    return with_band(expected, network.short if _is_short(cell) else network.long)


def with_band(expected: Timing, *bands: Band) -> Timing:
    """Return the prediction with a band that follows from several independent ones."""
    low, high = (math.hypot(*(math.log(band[end]) for band in bands)) for end in (0, 1))
    return replace(expected, p10_s=expected.median_s * math.exp(-low), p90_s=expected.median_s * math.exp(high))
