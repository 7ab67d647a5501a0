"""What happens to the knowledge of who is there."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from hcsim.config.faults.fault import Fault
from hcsim.errors import UsageError
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


class Stranger(Fault, frozen=True, tag="stranger"):
    """A machine on a home's network that is no node announces nodes that do not exist, or one that does."""

    home: str
    ghosts: Annotated[float, Meta(ge=0, le=10_000)] = 0.0
    """How many nodes that do not exist it announces in a second, each with an id of its own."""
    spoofs: str | None = None
    """A node under whose name, with whose id, it announces an address of its own, every second."""
    knows_namespace: bool = True
    """Whether its announcements have the cluster's namespace, as it hears it on the network; else another one."""
    addresses: Literal["refuse", "silent", "absent"] = "refuse"
    """What calls to the announced addresses come to: refused, not answered, or no such machine."""
    duration_s: PositiveSeconds | None = None
    """None: for good. At its end its records run out, and what is true is heard again."""

    def __post_init__(self) -> None:
        if not self.ghosts and self.spoofs is None:
            raise UsageError("a stranger needs ghosts (more than 0), or a node that it spoofs")
