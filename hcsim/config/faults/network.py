"""What happens between machines."""

from __future__ import annotations

from typing import Literal

from hcsim.config.faults.fault import Fault
from hcsim.config.table import Port
from hcsim.errors import UsageError
from hcsim.units import BitRate, PositiveSeconds, Seconds, Share


class Partition(Fault, frozen=True, tag="partition"):
    """Nothing passes between the two sides; `oneway`: nothing from the first to the second."""

    sides: tuple[tuple[str, ...], tuple[str, ...]]
    duration_s: PositiveSeconds | None = None
    """None: for good."""
    oneway: bool = False

    def __post_init__(self) -> None:
        if not all(self.sides) or any(node in self.sides[1] for node in self.sides[0]):
            raise UsageError("the two sides of a partition need nodes, and no node can be on both")


class LinkChange(Fault, frozen=True, tag="link_change"):
    """A medium, one node's attachment to it, or a home's line to the internet gets other properties.

    Those of a medium hold for every node on it. A node's attachment to Thunderbolt are its cables, both ways; they
    lose nothing. The line of a home is its `Wan.ways`: a rate is that of both directions, or of the one that is named;
    latency and loss belong to both. A tunnel keeps its own figures."""

    medium: str
    node: str | None = None
    rate_bps: BitRate | None = None
    latency_s: Seconds | None = None
    loss: Share | None = None
    duration_s: PositiveSeconds | None = None
    """None: for good."""

    def __post_init__(self) -> None:
        if self.rate_bps is None and self.latency_s is None and self.loss is None:
            raise UsageError("a link_change needs at least one of rate, latency and loss")


class Reset(Fault, frozen=True, tag="reset"):
    """The connections between two nodes are reset; `mid_frame`: when part of a frame has arrived."""

    between: tuple[str, str]
    mid_frame: bool = True


class HalfOpen(Fault, frozen=True, tag="half_open"):
    """The first node has lost its connections to the second, which does not know until it sends."""

    between: tuple[str, str]


class Clog(Fault, frozen=True, tag="clog"):
    """What two nodes send to each other is taken, and arrives only when the clog is gone: if it stays, never."""

    between: tuple[str, str]
    duration_s: PositiveSeconds | None = None
    """None: for good."""


class Datagrams(Fault, frozen=True, tag="datagrams"):
    """Datagrams that cross a medium (announcements, questions who is there) are lost, late, doubled or overtaken."""

    medium: str
    duration_s: PositiveSeconds | None = None
    """None: for good."""
    loss: Share = Share(0)
    delay_s: Seconds = Seconds(0)
    duplicate: Share = Share(0)
    reorder: Share = Share(0)

    def __post_init__(self) -> None:
        if not (self.loss or self.delay_s or self.duplicate or self.reorder):
            raise UsageError("datagrams needs at least one of loss, delay, duplicate and reorder")


class WifiGate(Fault, frozen=True, tag="wifi_gate"):
    """An access point's air is closed for a moment, then flushes."""

    medium: str
    duration_s: PositiveSeconds


class CablePulled(Fault, frozen=True, tag="cable_pulled"):
    """A node is off an Ethernet or Thunderbolt medium, until the cable is plugged in again, if ever.

    Connections over it stall; new ones go another way if there is one."""

    node: str
    medium: str
    duration_s: PositiveSeconds | None = None
    """None: for good."""
    to: str | None = None
    """Thunderbolt: where the cable leads; left out, all cables of the node are pulled."""


class InterfaceChange(Fault, frozen=True, tag="interface_change"):
    """A node leaves one medium for another: its connections over the old one are gone, and its peers are not told."""

    node: str
    medium: str
    to: str
    duration_s: PositiveSeconds | None = None
    """None: it does not go back."""

    def __post_init__(self) -> None:
        if self.medium == self.to:
            raise UsageError("an interface_change needs two different media")


class RouterReboot(Fault, frozen=True, tag="router_reboot"):
    """All Ethernet and Wi-Fi of a home are down for a while, and so is its way out; Thunderbolt is not."""

    home: str
    duration_s: PositiveSeconds | None = None
    """None: for good."""


class BlockedPort(Fault, frozen=True, tag="blocked_port"):
    """One port of a node is not reached by the others; whatever the node calls itself is.

    `closed`: calls to it are refused, and connections that were made to it are reset. `silent`: calls to it get no
    answer, and nothing passes on connections that were made to it, in both directions; nobody is told."""

    node: str
    port: Port | Literal["gradient", "discovery"]
    """A number, or which port of the scenario's `[cluster]`."""
    how: Literal["closed", "silent"]
    duration_s: PositiveSeconds | None = None
    """None: for good, also after a restart."""
