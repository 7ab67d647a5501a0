"""What happens to the knowledge of who is there."""

from __future__ import annotations

from typing import Literal

from hcsim.config.faults.fault import Fault
from hcsim.units import PositiveSeconds, PositiveShare, Seconds


class MulticastLoss(Fault, frozen=True, tag="multicast_loss"):
    """A share of the announcements and questions from and to a node is lost."""

    node: str
    share: PositiveShare
    duration_s: PositiveSeconds | None = None
    """None: for good."""
    direction: Literal["both", "from", "to"] = "both"


class StaleRecord(Fault, frozen=True, tag="stale_record"):
    """The oldest announcement of a node is back in its neighbours' view; then the truth is."""

    node: str
    duration_s: PositiveSeconds
    address: str | None = None
    """The address that the record has; left out, the one that it had."""


class OneWayVisibility(Fault, frozen=True, tag="one_way_visibility"):
    """The first node sees the second one's announcements; the second one does not see the first's."""

    between: tuple[str, str]
    duration_s: PositiveSeconds | None = None
    """None: for good."""


class CopiedIdentity(Fault, frozen=True, tag="copied_identity"):
    """The node goes down and starts from a copy of another node's store, its key included."""

    node: str
    of: str
    down_s: Seconds = Seconds(1)
