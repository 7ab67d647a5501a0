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
    return _timings(outcome.history, outcome.plan)


def predict_churn() -> dict[ChurnCell, Timing]:
    """Have members of a simulated cluster be lost."""
    history, plan, _ = simulate(PROFILE, PERIODS, SEED, PRESET)
    return _timings(history, plan)


def _timings(history: History, plan: Planned) -> dict[ChurnCell, Timing]:
    found = {}
    for cell in churn():
        times_s = []
        for strike in plan.strikes:
            began_s = plan.origin_s + strike.at_s
            change = history.change(strike.victim, began_s, began_s + PROFILE.period_s)
            seconds = _TIMES[cell.what](change)
            if strike.kind == cell.fault and strike.number < plan.count and seconds is not None:
                times_s.append(seconds)
        if times_s:
            p10, p90 = (float(np.percentile(times_s, share)) for share in (10, 90))
            found[cell] = Timing(statistics.median(times_s), p10, p90, len(times_s), "", "")
    return found
