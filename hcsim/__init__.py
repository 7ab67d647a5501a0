"""hcsim: train models on a home cluster of Macs, simulation first.

Names are loaded on first use, so `import hcsim` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hcsim.collectives.cost import Links
    from hcsim.collectives.group import Group
    from hcsim.collectives.select import Options
    from hcsim.config import Scenario, Training, load_scenario
    from hcsim.errors import HcsimError
    from hcsim.launch.real import real_group
    from hcsim.launch.virtual import Outcome, simulate, simulate_training
    from hcsim.launch.virtual_cluster import simulate_cluster
    from hcsim.real.tls import TlsFiles
    from hcsim.runtime.channel import Phantom
    from hcsim.training.run import Report
    from hcsim.training.trainer import train
    from hcsim.transport.groups import Wire

__version__ = "0.1.0"

__all__ = [
    "Group",
    "HcsimError",
    "Links",
    "Options",
    "Outcome",
    "Phantom",
    "Report",
    "Scenario",
    "TlsFiles",
    "Training",
    "Wire",
    "load_scenario",
    "real_group",
    "simulate",
    "simulate_cluster",
    "simulate_training",
    "train",
]

_HOMES = {
    "Group": "collectives.group",
    "HcsimError": "errors",
    "Links": "collectives.cost",
    "Options": "collectives.select",
    "Outcome": "launch.virtual",
    "Phantom": "runtime.channel",
    "Report": "training.run",
    "Scenario": "config",
    "TlsFiles": "real.tls",
    "Training": "config",
    "Wire": "transport.groups",
    "load_scenario": "config",
    "real_group": "launch.real",
    "simulate": "launch.virtual",
    "simulate_cluster": "launch.virtual_cluster",
    "simulate_training": "launch.virtual",
    "train": "training.trainer",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'hcsim' has no attribute {name!r}")
    return getattr(import_module(f"hcsim.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
