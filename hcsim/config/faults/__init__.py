"""What goes wrong in a run, as an explicit list: a failing one can be shortened."""

from __future__ import annotations

from typing import TypeAlias

from hcsim.config.faults.clock import ClockJump
from hcsim.config.faults.network import LinkChange, Partition, Reset
from hcsim.config.faults.node import Crash, Pause, Restart, Throttle

AnyFault: TypeAlias = Crash | Restart | Pause | Throttle | Partition | LinkChange | Reset | ClockJump

__all__ = ["AnyFault", "ClockJump", "Crash", "LinkChange", "Partition", "Pause", "Reset", "Restart", "Throttle"]
