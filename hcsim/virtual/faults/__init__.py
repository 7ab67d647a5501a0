"""Faults: an explicit list in the scenario, each a SimPy process that begins at its moment.

A fault changes the world and nothing else; what the components make of it is theirs. One that ends waits for its end
(`lasting`), and undoes what it did. What a fault draws at random comes from a stream of its own, so a failing list can
be shortened without changing the rest of the run.
"""

from __future__ import annotations

from hcsim.virtual.faults import data, discovery, network, node
from hcsim.virtual.faults.apply import apply, schedule

__all__ = ["apply", "data", "discovery", "network", "node", "schedule"]
