"""Small clusters to train on, and what they learned."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from hcsim.compressors.base import Array
from hcsim.config import Scenario, load_scenario
from hcsim.training.run import Run


def quiet_cluster(ranks: int) -> Scenario:
    """So many equal Macs on one switch."""
    scenario = load_scenario("four-macs-1gbe")
    nodes = tuple(replace(scenario.nodes[0], name=f"mac-{rank}") for rank in range(ranks))
    return replace(scenario, name=f"{ranks}-macs", nodes=nodes)


class Parameters:
    """Keeps what each rank ends with."""

    def __init__(self) -> None:
        self.by_rank: dict[int, Array] = {}

    def point(self, rank: int, point: object) -> None:
        pass

    def finished(self, run: Run) -> None:
        assert isinstance(run.learner.replica.parameters, np.ndarray)
        self.by_rank[run.group.rank] = run.learner.replica.parameters.copy()
