"""What a node computes with, and a catalogue of machines by name.

Peaks are fp32 of the largest GPU of each chip: cores × 256 × GHz.
"""

from __future__ import annotations

import math

from hcsim.config.table import Table
from hcsim.registry import Registry
from hcsim.units import ByteRate, Bytes, FlopRate, PositiveShare, Seconds


class Machine(Table, frozen=True):
    """What a node computes with; efficiencies are the parts of the data-sheet figures that are reached."""

    name: str
    peak_flops: FlopRate
    memory_Bps: ByteRate
    efficiency_compute: PositiveShare = PositiveShare(0.8)
    efficiency_memory: PositiveShare = PositiveShare(0.8)  # not verified
    overhead_s: Seconds = Seconds(10e-6)  # not verified
    fanless: bool = False
    sustained: PositiveShare = PositiveShare(0.6)
    """The part of its speed that a fanless machine keeps when it is hot."""
    ram_bytes: Bytes | None = None
    """Only told to who asks: a run does not end because it is exceeded."""


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

CATALOGUE: Registry[Machine] = Registry(
    "machine",
    {
        **{name: _chip(name, name) for name in _CHIPS},
        **{name: _chip(name, chip, fanless=True) for name, chip in _FANLESS.items()},
        _IDEAL.name: _IDEAL,
    },
)
"""Machines by name. "ideal" takes no time for anything."""
