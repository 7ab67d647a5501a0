"""A task for `hcsim run --plugin hcsim.selftest.paced`: ridge regression whose steps take time until a file appears.

So a test has the time to kill a member and to start it again, however slow the machine, and hurries once it is back.
What is learned is what the task `convex` learns.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from hcsim.plugins import register_task
from hcsim.selftest.elastic import HURRY, PACED
from hcsim.training.task import Indices
from hcsim.training.tasks.convex import Convex, ConvexReplica

STEP_S = 0.1


class Paced(Convex):
    """The task."""

    name = PACED

    def replica(self, seed: int, device: str = "cpu") -> ConvexReplica:
        """Return a model that takes its time."""
        model = super().replica(seed, device)
        paced = PacedReplica(self.x, self.y, model.layout)
        paced.parameters[:] = model.parameters
        return paced


class PacedReplica(ConvexReplica):
    """A rank's copy."""

    def forward(self, batch: Indices) -> float:
        """Return the loss, after the time that a step takes."""
        if not Path(os.environ.get(HURRY, os.devnull)).exists():
            time.sleep(STEP_S)
        return super().forward(batch)


register_task(PACED, Paced)
