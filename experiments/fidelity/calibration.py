"""What is known of the lab before it predicts: the machine by measuring it, the networks by a third of the cells.

Of a network two figures are fitted: the latency, to short messages, and the share of its nominal rate that a port has,
to long ones. All else is what the home was made with.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from experiments.fidelity.cells import KB, MB, Cell
from experiments.fidelity.homes import Network
from experiments.fidelity.worlds import Timing, predicted_s
from hcsim.config import Machine
from hcsim.twin.messages import measure_messages
from hcsim.units import ByteRate, FlopRate, PositiveShare, Seconds

_LATENCIES_S = (5e-6, 2e-3)
_ROUNDS = 2
_STEPS = 14
_GOLDEN = (math.sqrt(5) - 1) / 2
_COPIED_BYTES = 64 * MB


def this_machine() -> Machine:
    """Measure what collectives need of a machine. They are bound by memory; its arithmetic does not matter."""
    source, target = np.ones(_COPIED_BYTES, np.uint8), np.ones(_COPIED_BYTES, np.uint8)
    times_s = []
    for _ in range(7):
        began_s = time.perf_counter()
        np.copyto(target, source)
        times_s.append(time.perf_counter() - began_s)
    moved_Bps = 2 * _COPIED_BYTES / statistics.median(times_s)
    whole = PositiveShare(1.0)
    return Machine(
        "lab", FlopRate(1e15), ByteRate(moved_Bps), efficiency_compute=whole, efficiency_memory=whole,
        overhead_s=Seconds(0), messages=measure_messages(),
    )  # fmt: skip


def fitted(cells: Sequence[Cell], measured: dict[str, Timing], machine: Machine, cores: int = 2) -> Network:
    """Fit a network to cells in one medium."""
    short = [cell for cell in cells if cell.size_bytes <= 64 * KB]
    long = [cell for cell in cells if cell.size_bytes >= 1 * MB]
    network = Network(cores=cores)
    for _ in range(_ROUNDS):
        ratios = _ratios(long, measured, network, machine)
        network = _with_rate(network, network.rate_factor * statistics.median(ratios or [1.0]))
        if short:
            low, high = map(math.log, _LATENCIES_S)
            log = _least(
                lambda value, of=network: _off(short, measured, _with_latency(of, math.exp(value)), machine), low, high
            )
            network = _with_latency(network, math.exp(log))
    return network


def _with_rate(network: Network, factor: float) -> Network:
    return msgspec.structs.replace(network, rate_factor=round(factor, 5))


def _with_latency(network: Network, latency_s: float) -> Network:
    return msgspec.structs.replace(network, latency_s=round(latency_s, 8))


def _ratios(cells: Sequence[Cell], measured: dict[str, Timing], network: Network, machine: Machine) -> list[float]:
    return [predicted_s(cell, network, machine) / measured[cell.name].median_s for cell in cells]


def _off(cells: Sequence[Cell], measured: dict[str, Timing], network: Network, machine: Machine) -> float:
    return sum(abs(math.log(ratio)) for ratio in _ratios(cells, measured, network, machine))


def _least(function: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function with one minimum has it (golden-section search)."""
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(_STEPS):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = function(right)
    return (low + high) / 2
