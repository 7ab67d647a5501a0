"""What a node's metrics say of its steps, held against the trace."""

from __future__ import annotations

from collections import Counter

import pytest

from hcsim.launch.virtual_cluster import simulate_cluster
from hcsim.telemetry.trace import Event


@pytest.mark.slow
def test_a_node_counts_the_steps_that_it_took_and_none_that_the_others_took_without_it() -> None:
    events: list[Event] = []
    outcome = simulate_cluster("four-macs-churn", sink=events.extend)
    applied = Counter(str(where) for _, kind, where, *_ in events if kind == "applied")
    counted = {name: metrics.value("hcsim_training_steps_total") for name, metrics in outcome.metrics.items()}
    assert counted["mini-2"] < counted["mini-3"] == 35
    # The first is started anew on its way, and its figures with it.
    assert {name: counted[name] for name in counted if name != "mini-1"} == applied - Counter({"mini-1": 35})
    assert counted["mini-1"] < applied["mini-1"]
