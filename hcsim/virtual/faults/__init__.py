"""Fault injection: an explicit list in the scenario; each fault is a SimPy process that starts at its time.

A fault changes the world only; the components detect and handle it themselves. A temporary fault waits for its
end (`lasting`) and undoes its change. Random draws of a fault come from its own stream, so a failing list of
faults can be shortened without changing the rest of the run.
"""

from __future__ import annotations

from hcsim.virtual.faults import data, discovery, load, network, node
from hcsim.virtual.faults.apply import apply, schedule

__all__ = ["apply", "data", "discovery", "load", "network", "node", "schedule"]
