"""What the soak's cluster does, in both worlds."""

from __future__ import annotations

from experiments.soak.task import NAME
from hcsim.selftest.script import SEED

NAMES = ("a", "b", "c", "d")
TIMEOUT_S = 4.0
"""Of a collective operation: slow and silent members are found by it."""
_JOB = """
name = "soak"
seed = {seed}
[cluster]
preset = "{preset}"
nodes = {nodes}
[training]
task = "{task}"
algorithm = "ring"
evaluate_every = 20
timeout = "{timeout_s:g} s"
steps = {steps}
"""


def job(steps: int, preset: str) -> str:
    """So many steps, with these heartbeats, as a file says it."""
    return _JOB.format(seed=SEED, preset=preset, nodes=len(NAMES), task=NAME, timeout_s=TIMEOUT_S, steps=steps)
