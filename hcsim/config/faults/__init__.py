"""What goes wrong in a run, as an explicit list: a failing one can be shortened."""

from __future__ import annotations

from typing import TypeAlias, get_args

from hcsim.config.faults.clock import ClockDrift, ClockJump
from hcsim.config.faults.data import FlippedBit, Misbehave, Misbehaviour, NanGradient, StaleStep, WrongSize
from hcsim.config.faults.discovery import CopiedIdentity, MulticastLoss, OneWayVisibility, StaleRecord, Stranger
from hcsim.config.faults.fault import Fault
from hcsim.config.faults.network import (
    BlockedPort,
    CablePulled,
    Clog,
    Datagrams,
    HalfOpen,
    InterfaceChange,
    LinkChange,
    Partition,
    Reset,
    RouterReboot,
    WifiGate,
)
from hcsim.config.faults.node import (
    Crash,
    FewDescriptors,
    FullDisk,
    Leave,
    Lid,
    Pause,
    Restart,
    SlowDisk,
    StuckDevice,
    Throttle,
)
from hcsim.registry import Registry

AnyFault: TypeAlias = (
    Crash | Restart | Pause | Lid | Throttle
    | Partition | Clog | HalfOpen | Reset | LinkChange | Datagrams
    | WifiGate | CablePulled | InterfaceChange | RouterReboot
    | FlippedBit | WrongSize | StaleStep | NanGradient
    | ClockJump | ClockDrift
    | MulticastLoss | StaleRecord | OneWayVisibility | CopiedIdentity
    | StuckDevice | BlockedPort | Misbehave
    | FullDisk | SlowDisk | FewDescriptors | Stranger
    | Leave
)  # fmt: skip

OWN_FAULTS: dict[str, type[AnyFault]] = {kind.__struct_config__.tag: kind for kind in get_args(AnyFault)}
FAULTS: Registry[type[Fault]] = Registry("fault", OWN_FAULTS)
"""All of them, by their names in a file."""

__all__ = [
    "FAULTS",
    "OWN_FAULTS",
    "AnyFault",
    "BlockedPort",
    "CablePulled",
    "ClockDrift",
    "ClockJump",
    "Clog",
    "CopiedIdentity",
    "Crash",
    "Datagrams",
    "Fault",
    "FewDescriptors",
    "FlippedBit",
    "FullDisk",
    "HalfOpen",
    "InterfaceChange",
    "Leave",
    "Lid",
    "LinkChange",
    "Misbehave",
    "Misbehaviour",
    "MulticastLoss",
    "NanGradient",
    "OneWayVisibility",
    "Partition",
    "Pause",
    "Reset",
    "Restart",
    "RouterReboot",
    "SlowDisk",
    "StaleRecord",
    "StaleStep",
    "Stranger",
    "StuckDevice",
    "Throttle",
    "WifiGate",
    "WrongSize",
]
