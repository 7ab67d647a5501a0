"""How much faster a cluster is than its fastest machine alone, for the same samples of a step.

Both times are simulated from the same figures. Where Macs are slower than was thought, the cluster and the machine
alone both are, so the quotient has a band of its own: that of the quotients of the variants (`spread.py`).
"""

from __future__ import annotations

import msgspec
import numpy as np
from msgspec.structs import replace

from hcsim.config import Scenario
from hcsim.twin.effects import percentiles
from hcsim.twin.prediction import PredictedRun, predict
from hcsim.twin.spread import variants

ALONE = "single"


class Speedup(msgspec.Struct, frozen=True):
    """Times a step, and their quotient."""

    alone_s: float
    """Of the fastest machine alone."""
    together_s: float
    band: tuple[float, float] | None = None
    """The 10th and the 90th percentile of the quotient, if it was asked for."""

    @property
    def times(self) -> float:
        return self.alone_s / self.together_s


def speedup(scenario: Scenario, run: PredictedRun, count: int = 0) -> Speedup:
    """Return the speed-up of a training, with a band from so many variants. Faults are left out."""
    run = replace(run, forms_cluster=False)
    single = replace(run, settings=replace(run.settings, strategy=ALONE, compressor="none"), rank=0)

    def both(where: Scenario) -> tuple[float, float]:
        return predict(where, single).phases["step"], predict(where, run).phases["step"]

    alone_s, together_s = both(scenario)
    times = alone_s / together_s
    quotients = [alone / together for alone, together in map(both, variants(scenario, count))]
    if not quotients:
        return Speedup(alone_s, together_s)
    low, high = percentiles(np.array(quotients) / times)
    return Speedup(alone_s, together_s, (low * times, high * times))
