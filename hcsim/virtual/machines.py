"""What a machine computes with, and how long a piece of work takes on it.

The roofline of Williams, Waterman and Patterson ("Roofline: an insightful visual performance
model for multicore architectures", CACM 52:4, 2009): a kernel is bound either by arithmetic or
by memory,

    T = max(FLOPs / (η_c · peak), bytes / (η_b · bandwidth)) / throttle + overhead.

η_c and η_b are the parts of the data-sheet figures that real kernels reach. A fanless machine
counts at its sustained rate from the start, because training lasts much longer than its
heat reserve. `overhead` is paid once per piece of work.

Peaks are fp32 of the largest GPU of each chip: cores × 256 × GHz.
"""

from __future__ import annotations

import math

from hcsim.config import Machine, Node
from hcsim.errors import ConfigError, UsageError
from hcsim.units import ByteRate, FlopRate, Seconds, did_you_mean

__all__ = ["CATALOGUE", "Machine", "machine_of", "seconds"]

# name: (fp32 TFLOPS, memory GB/s). A "?" marks peaks that are not verified; where sources give
# a range, the middle stands here.
_CHIPS = {
    "M1": (2.62, 68),
    "M1 Pro": (5.31, 200),
    "M1 Max": (10.6, 400),
    "M1 Ultra": (21.2, 800),
    "M2": (3.58, 100),
    "M2 Pro": (6.80, 200),
    "M2 Max": (13.6, 400),
    "M2 Ultra": (27.2, 800),
    "M3": (3.58, 100),
    "M3 Pro": (6.44, 150),
    "M3 Max": (14.3, 400),
    "M3 Ultra": (28.6, 819),
    "M4": (3.9, 120),  # ? 3.8 to 4.0
    "M4 Pro": (8.1, 273),  # ?
    "M4 Max": (16.7, 546),  # ? 16.2 to 17.2
    "M5": (4.04, 153),
    "M5 Pro": (8.3, 307),  # ?
    "M5 Max": (17.3, 614),  # ? 16.6 to 18
}
_FANLESS = {"M1 Air": "M1", "M2 Air": "M2", "M3 Air": "M3", "M4 Air": "M4"}


def _chip(name: str, chip: str, *, fanless: bool = False) -> Machine:
    tflops, gigabytes_per_s = _CHIPS[chip]
    return Machine(name, FlopRate(tflops * 1e12), ByteRate(gigabytes_per_s * 1e9), fanless=fanless)


_IDEAL = Machine("ideal", FlopRate(math.inf), ByteRate(math.inf), overhead_s=Seconds(0))

CATALOGUE: dict[str, Machine] = {
    **{name: _chip(name, name) for name in _CHIPS},
    **{name: _chip(name, chip, fanless=True) for name, chip in _FANLESS.items()},
    _IDEAL.name: _IDEAL,
}
"""Machines by name. "ideal" takes no time for anything."""


def machine_of(node: Node) -> Machine:
    """The node's own profile, or the one it names."""
    if isinstance(node.machine, Machine):
        return node.machine
    if node.machine not in CATALOGUE:
        hint = did_you_mean(node.machine, CATALOGUE)
        known = ", ".join(CATALOGUE)
        raise ConfigError(f'node "{node.name}": unknown machine "{node.machine}"{hint}; known: {known}')
    return CATALOGUE[node.machine]


def seconds(machine: Machine, flops: float, moved_bytes: float, throttle: float = 1.0) -> float:
    """How long the work takes; `throttle` (0 to 1] is the part of its speed that the machine has left."""
    if not 0 < throttle <= 1:
        raise UsageError(f"a throttle of {throttle} is not in (0, 1]")
    compute_s = flops / (machine.efficiency_compute * machine.peak_flops)
    memory_s = moved_bytes / (machine.efficiency_memory * machine.memory_Bps)
    steady = machine.sustained if machine.fanless else 1.0
    return max(compute_s, memory_s) / (throttle * steady) + machine.overhead_s
