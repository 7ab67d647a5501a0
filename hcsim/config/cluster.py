"""The formation and the failure detection of a cluster: the `[cluster]` table.

Some names and defaults are those of pmetal: discovery_port, gradient_port, min_peers, peer_timeout,
connection_timeout, max_retries; heartbeats every 5 s, and a time limit of 15 s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta

from hcsim.config.table import Count, Port, Table
from hcsim.errors import UsageError
from hcsim.units import PositiveSeconds


class Heartbeat(Table, frozen=True):
    """The failure detector of the members: a peer is suspected when the first of three limits is passed.

    Shorter intervals find a loss sooner, and cost more messages."""

    interval_s: PositiveSeconds = PositiveSeconds(5)
    timeout_s: PositiveSeconds = PositiveSeconds(15)
    """Silence after which any peer is suspected."""
    failures: Annotated[int, Meta(ge=2)] = 3
    """Number of consecutive heartbeats that are missed. One is not enough: a heartbeat may be a millisecond late."""
    phi: Annotated[float, Meta(gt=0, le=300)] = 8.0
    """Silence whose probability is 10^-phi, given the intervals so far. A higher value detects later and more
    surely."""

    def __post_init__(self) -> None:
        if self.timeout_s <= self.interval_s:
            raise UsageError(
                f"heartbeat: after {self.timeout_s:g} s of silence everybody is given up, but heartbeats come only"
                f" every {self.interval_s:g} s: the timeout must be longer than the interval"
            )


PRESETS: Mapping[str, Heartbeat] = {
    "home": Heartbeat(),
    "low_latency": Heartbeat(interval_s=PositiveSeconds(0.5), timeout_s=PositiveSeconds(2)),
    "wifi": Heartbeat(interval_s=PositiveSeconds(5), timeout_s=PositiveSeconds(30), failures=4, phi=12.0),
}
"""Presets for a wired local network, for a cable that answers within milliseconds, and for a radio with short
outages."""


class Cluster(Table, frozen=True):
    """The conditions for forming a cluster and for giving up a member."""

    nodes: Count | None = None
    """Number of nodes with which work begins; left out: `min_peers` and this one."""
    min_peers: Count = 1
    """Other nodes that must be present before work begins."""
    discovery_port: Port = 52415
    """Port of the control channel between members."""
    gradient_port: Port = 52416
    """Port on which the members' collectives listen."""
    peers: tuple[str, ...] = ()
    """Addresses of other nodes that need not be discovered."""
    discover: bool | None = None
    """Whether to announce ourselves on the local network, and to look for others there; left out: yes, unless there is
    a coordinator."""
    coordinator: str | None = None
    """Where members register (host:port), instead of agreeing among themselves; see docs/howto/cluster.md."""
    peer_timeout_s: PositiveSeconds = PositiveSeconds(30)
    """Time after which a peer that did not answer is tried again, if it is still in view."""
    connection_timeout_s: PositiveSeconds = PositiveSeconds(5)
    max_retries: Count = 3
    """Consecutive attempts to reach a peer."""
    quorum: Literal["majority", "tiebreak", "any"] = "tiebreak"
    """Which side goes on when a cluster is split; see docs/howto/cluster.md."""
    preset: Literal["home", "low_latency", "wifi"] = "home"
    """Preset of the heartbeats."""
    heartbeat: Heartbeat | None = None
    """Heartbeats that replace those of the preset."""
    settle_s: PositiveSeconds = PositiveSeconds(0.5)
    """Time that the leader waits for more newcomers before it admits those that are present."""

    checkpoint_every: Count = 100
    """Steps between checkpoints of the first member, where its storage survives a crash."""
    checkpoint_keep: Annotated[int, Meta(ge=1, le=16)] = 3
    """Number of its checkpoints that a member keeps: if the newest is damaged, it resumes from the one before."""

    measure: Literal["nothing", "links", "order"] = "links"
    """What the members of a view measure of the links between them, once for each pair; see docs/howto/cluster.md.

    - nothing: the first address that answers is dialled.
    - links: of several addresses the fastest is dialled, and `hcsim cluster status` shows its measurements.
    - order: the ring's order and `algorithm = "auto"` follow the measurements too. The order of the sums then depends
    on
      them: another run of the same job may differ in the last bits."""

    def __post_init__(self) -> None:
        if self.discovery_port == self.gradient_port:
            raise UsageError(f"discovery_port and gradient_port are both {self.gradient_port}: each needs its own")
        if self.coordinator is not None:
            self._check_coordinated(self.coordinator)

    def _check_coordinated(self, address: str) -> None:
        """Refuse what means nothing with a coordinator."""
        host, _, port = address.rpartition(":")
        if not host or "/" in host or not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise UsageError(f'coordinator = "{address}": this has to be a host and a port, such as "mini.local:52417"')
        if int(port) == self.gradient_port:
            raise UsageError(f"the coordinator's port and gradient_port are both {port}: each needs its own")
        for name, given, usual in (
            ("peers", self.peers, ()),
            ("discover", self.discover or None, None),
            ("quorum", self.quorum, "tiebreak"),
        ):
            if given != usual:
                raise UsageError(f"{name} is for members that find each other and agree; leave it out with coordinator")
        if self.measure == "order":
            raise UsageError('measure = "order": with a coordinator nothing is measured; leave it out')

    @property
    def coordinating_host(self) -> str:
        """The host where the coordinator is; empty where there is none."""
        return "" if self.coordinator is None else self.coordinator.rpartition(":")[0]

    @property
    def needed(self) -> int:
        """The number of members with which work begins."""
        return self.min_peers + 1 if self.nodes is None else self.nodes

    @property
    def beat(self) -> Heartbeat:
        """The heartbeats in effect."""
        return PRESETS[self.preset] if self.heartbeat is None else self.heartbeat
