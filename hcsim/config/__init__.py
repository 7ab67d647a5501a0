"""A scenario: the homes, machines, links, faults and the job of one run, as one tree of frozen structs.

It is written in TOML. A quantity is text with its unit there (`latency = "0.15 ms"`); here the
attribute's name carries the unit (`latency_s`), so a key is its attribute without the suffix.
Shorthands (a link by its medium's name, a Wi-Fi standard, `count`, `effects = "ideal"`) are spelled
out while loading: who reads the tree never meets one. Every mistake is a `ConfigError` that names
the file, the place, what was found, and what would be valid there.

Errors that need more than one table (an unknown medium, two nodes without a route) are found while
loading too, so a tree that was read from a file makes sense as a whole.
"""

from __future__ import annotations

from hcsim.config.cluster import Cluster, Heartbeat
from hcsim.config.faults import (
    FAULTS,
    OWN_FAULTS,
    AnyFault,
    BlockedPort,
    CablePulled,
    ClockDrift,
    ClockJump,
    Clog,
    CopiedIdentity,
    Crash,
    Datagrams,
    Fault,
    FewDescriptors,
    FlippedBit,
    FullDisk,
    HalfOpen,
    InterfaceChange,
    Leave,
    Lid,
    LinkChange,
    Misbehave,
    Misbehaviour,
    MulticastLoss,
    NanGradient,
    OneWayVisibility,
    Partition,
    Pause,
    Reset,
    Restart,
    RouterReboot,
    SlowDisk,
    StaleRecord,
    StaleStep,
    Stranger,
    StuckDevice,
    Throttle,
    WifiGate,
    WrongSize,
)
from hcsim.config.load import load_scenario, parse_scenario, shipped_scenarios
from hcsim.config.machines import CATALOGUE, Machine
from hcsim.config.media import MEDIA, AnyMedium, Cable, Ethernet, Thunderbolt, Tunnel, Wan, Wifi
from hcsim.config.scenario import Attachment, Job, Node, Scenario, Tcp, idealised
from hcsim.config.training import Training
from hcsim.config.write import write_faults, write_job, write_scenario

__all__ = [
    "CATALOGUE",
    "FAULTS",
    "MEDIA",
    "OWN_FAULTS",
    "AnyFault",
    "AnyMedium",
    "Attachment",
    "BlockedPort",
    "Cable",
    "CablePulled",
    "ClockDrift",
    "ClockJump",
    "Clog",
    "Cluster",
    "CopiedIdentity",
    "Crash",
    "Datagrams",
    "Ethernet",
    "Fault",
    "FewDescriptors",
    "FlippedBit",
    "FullDisk",
    "HalfOpen",
    "Heartbeat",
    "InterfaceChange",
    "Job",
    "Leave",
    "Lid",
    "LinkChange",
    "Machine",
    "Misbehave",
    "Misbehaviour",
    "MulticastLoss",
    "NanGradient",
    "Node",
    "OneWayVisibility",
    "Partition",
    "Pause",
    "Reset",
    "Restart",
    "RouterReboot",
    "Scenario",
    "SlowDisk",
    "StaleRecord",
    "StaleStep",
    "Stranger",
    "StuckDevice",
    "Tcp",
    "Throttle",
    "Thunderbolt",
    "Training",
    "Tunnel",
    "Wan",
    "Wifi",
    "WifiGate",
    "WrongSize",
    "idealised",
    "load_scenario",
    "parse_scenario",
    "shipped_scenarios",
    "write_faults",
    "write_job",
    "write_scenario",
]
