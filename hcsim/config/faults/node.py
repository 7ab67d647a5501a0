"""What happens to a machine."""

from __future__ import annotations

from typing import Literal

from hcsim.config.faults.fault import Fault
from hcsim.config.table import Count
from hcsim.errors import UsageError
from hcsim.units import PositiveSeconds, PositiveShare, Seconds


class Crash(Fault, frozen=True, tag="crash"):
    """The node is gone; `clean`: its connections are reset and calls to it refused, otherwise it falls silent."""

    node: str
    clean: bool = False


class Restart(Fault, frozen=True, tag="restart"):
    """The node starts anew: at once if it has crashed, otherwise it crashes now and starts after `down`."""

    node: str
    state: Literal["kept", "lost", "stale"] = "kept"
    """What it finds in its store: all, nothing, or what was there at an earlier time."""
    down_s: Seconds = Seconds(1)
    clean: bool = False
    """As in a crash, if it has to crash first."""
    as_of_s: Seconds | None = None
    """The time that a stale store is from; left out, it is the start of the life before."""
    slow: PositiveShare = PositiveShare(1)
    """The part of its speed at which it computes at first."""
    slow_for_s: Seconds = Seconds(0)

    def __post_init__(self) -> None:
        if self.as_of_s is not None and (self.state != "stale" or self.as_of_s > self.at_s):
            raise UsageError('as_of is for a restart with state = "stale", and cannot be later than at')
        if (self.slow < 1) != (self.slow_for_s > 0):
            raise UsageError("a slow start needs both slow (less than 1) and slow_for (more than 0 s)")


class Pause(Fault, frozen=True, tag="pause"):
    """The node is alive and does nothing."""

    node: str
    duration_s: PositiveSeconds | None = None
    """None: for good."""


class Throttle(Fault, frozen=True, tag="throttle"):
    """The node computes at a part of its speed."""

    node: str
    factor: PositiveShare
    duration_s: PositiveSeconds | None = None
    """None: for good."""


class Lid(Fault, frozen=True, tag="lid"):
    """The node sleeps, and wakes up with its clock ahead by the time that it slept."""

    node: str
    duration_s: PositiveSeconds
    connections: Literal["kept", "dead"] = "kept"
    """Whether its connections are still there when it wakes up."""


class StuckDevice(Fault, frozen=True, tag="stuck_device"):
    """The node's device takes work and does not finish it; all else of the node goes on."""

    node: str
    duration_s: PositiveSeconds | None = None
    """None: for good, also after a restart."""


class FullDisk(Fault, frozen=True, tag="full_disk"):
    """The node's disk is full: nothing can be saved; what was saved before can be read."""

    node: str
    duration_s: PositiveSeconds | None = None
    """None: for good, also after a restart."""


class SlowDisk(Fault, frozen=True, tag="slow_disk"):
    """Whatever the node saves takes that much longer.

    Where its device saves (a checkpoint), the device is busy for so long; else all of the node waits meanwhile."""

    node: str
    takes_s: PositiveSeconds
    """For each record."""
    duration_s: PositiveSeconds | None = None
    """None: for good, also after a restart."""


class Leave(Fault, frozen=True, tag="leave"):
    """Somebody ends the node's program in an orderly way (Ctrl-C): a member leaves after its step."""

    node: str


class FewDescriptors(Fault, frozen=True, tag="few_descriptors"):
    """The node can have only so many connections at once, those that it tries to make included.

    More calls of its own fail. Who calls it has a connection, and gets no answer until another one has ended."""

    node: str
    connections: Count
    duration_s: PositiveSeconds | None = None
    """None: for good, also after a restart."""
