"""Members of a cluster that are lost while they train: how soon the others notice, and when the next step is done.

The cluster, its job and the faults are those of the soak (`experiments.soak`), whose compute is slept for.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from experiments.fidelity.worlds import Timing
from experiments.soak.history import Change, History
from experiments.soak.real import soak
from experiments.soak.schedule import Planned, Profile
from experiments.soak.virtual import simulate

PROFILE = Profile(14.0, ("kill", "stop", "cable pulled"))
PERIODS = 10
"""Each fault twice."""
PRESET = "low_latency"
SEED = 1
_OTHER_SEEDS = (2, 3)
_TIMES: dict[str, Callable[[Change], float | None]] = {
    "noticed": lambda change: change.noticed_s,
    "next step": lambda change: change.resumed_s,
}


class ChurnCell(msgspec.Struct, frozen=True):
    """What follows from one kind of fault."""

    fault: str
    what: str

    calibrates = False

    @property
    def name(self) -> str:
        return f"churn/{self.fault}/{self.what}"

    @property
    def kind(self) -> str:
        """The class of cells that the cell is counted in."""
        return f"a member is lost: {self.what}"


def churn() -> list[ChurnCell]:
    return [ChurnCell(fault, what) for what in _TIMES for fault in PROFILE.kinds]


def measure_churn() -> dict[ChurnCell, Timing]:
    """Have members of a real cluster be lost."""
    with tempfile.TemporaryDirectory(prefix="hcsim-") as folder:
        outcome = soak(PROFILE, PERIODS, SEED, PRESET, Path(folder))
    times_s = _times_s(outcome.history, outcome.plan)
    return {cell: _timing(each_s, each_s) for cell, each_s in times_s.items()}


def predict_churn() -> dict[ChurnCell, Timing]:
    """Have members of a simulated cluster be lost. The band is that of a single loss: from those of other seeds too,
    which strike at other moments of a step and between other heartbeats."""
    times = [_times_s(*simulate(PROFILE, PERIODS, seed, PRESET)[:2]) for seed in (SEED, *_OTHER_SEEDS)]
    return {
        cell: _timing(times[0][cell], [time_s for each in times for time_s in each.get(cell, [])]) for cell in times[0]
    }


def _times_s(history: History, plan: Planned) -> dict[ChurnCell, list[float]]:
    found: dict[ChurnCell, list[float]] = {}
    for cell in churn():
        for strike in plan.strikes:
            began_s = plan.origin_s + strike.at_s
            change = history.change(strike.victim, began_s, began_s + PROFILE.period_s)
            seconds = _TIMES[cell.what](change)
            if strike.kind == cell.fault and strike.number < plan.count and seconds is not None:
                found.setdefault(cell, []).append(seconds)
    return found


def _timing(times_s: list[float], like_s: list[float]) -> Timing:
    """The median of some losses, and the percentiles of losses like them."""
    p10, p90 = (float(np.percentile(like_s, share)) for share in (10, 90))
    return Timing(statistics.median(times_s), p10, p90, len(times_s), "", "")
