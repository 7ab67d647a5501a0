"""Members of a cluster that are lost while they train: how soon the others notice, and when the next step is done.

The cluster, its job and the faults are those of the soak (`experiments.soak`), whose compute is slept for.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from experiments.fidelity.worlds import Timing
from experiments.soak.history import Change, History
from experiments.soak.real import soak
from experiments.soak.schedule import Planned, Profile
from experiments.soak.virtual import BEGINS_S, simulate

PROFILE = Profile(14.0, ("kill", "stop", "cable pulled"))
PERIODS = 26
"""Each fault six times."""
SIMULATED_PERIODS = 10
PHASES = 4
"""How soon a loss is noticed depends on when the last heartbeat came, and on where in a step it strikes. So it is
simulated that often, with faults that strike at other times."""
APART_S = 0.137
"""So much later each time; no multiple of it is near one of a heartbeat's interval."""
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
    """All of them, but for how soon a killed process is noticed: at once, sooner than the lab knows when it struck."""
    cells = [ChurnCell(fault, what) for what in _TIMES for fault in PROFILE.kinds]
    return [cell for cell in cells if (cell.fault, cell.what) != ("kill", "noticed")]


def measure_churn() -> dict[ChurnCell, Timing]:
    """Have members of a real cluster be lost."""
    with tempfile.TemporaryDirectory(prefix="hcsim-") as folder:
        outcome = soak(PROFILE, PERIODS, SEED, PRESET, Path(folder))
    return _timings([(outcome.history, outcome.plan)])


def predict_churn() -> dict[ChurnCell, Timing]:
    """Have members of a simulated cluster be lost."""
    begin_s = [BEGINS_S + APART_S * number for number in range(PHASES)]
    runs = [simulate(PROFILE, SIMULATED_PERIODS, SEED, PRESET, each_s) for each_s in begin_s]
    return _timings([(history, plan) for history, plan, _ in runs])


def _timings(runs: Sequence[tuple[History, Planned]]) -> dict[ChurnCell, Timing]:
    found = {}
    for cell in churn():
        times_s = [seconds for history, plan in runs for seconds in _times_s(cell, history, plan)]
        if times_s:
            p10, p90 = (float(np.percentile(times_s, share)) for share in (10, 90))
            found[cell] = Timing(statistics.median(times_s), p10, p90, len(times_s), "", "")
    return found


def _times_s(cell: ChurnCell, history: History, plan: Planned) -> Iterator[float]:
    for strike in plan.strikes:
        if strike.kind == cell.fault and strike.number < plan.count:
            began_s = plan.origin_s + strike.at_s
            seconds = _TIMES[cell.what](history.change(strike.victim, began_s, began_s + PROFILE.period_s))
            if seconds is not None:
                yield seconds
