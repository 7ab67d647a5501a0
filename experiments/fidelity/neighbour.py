"""Another program on the core of a machine: `python -m experiments.fidelity.neighbour SHARE PERIOD_S SEED`.

It works for a share of each period and sleeps for the rest. Work is counted in processor time, so that where the core
is shared both the work and the period take longer. Each period is between half and one and a half of what is asked for,
at random, so that neighbours of several machines do not stay in step.
"""

from __future__ import annotations

import os
import random
import sys
import time


def main(share: float, period_s: float, seed: int) -> None:
    draws, parent = random.Random(seed), os.getppid()
    while os.getppid() == parent:  # else the lab has ended without a word
        lasts_s = period_s * draws.uniform(0.5, 1.5)
        _work(share * lasts_s)
        if share < 1.0:
            time.sleep((1.0 - share) * lasts_s)


def _work(seconds: float) -> None:
    """Use so much processor time."""
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
