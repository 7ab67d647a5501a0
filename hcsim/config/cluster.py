"""How a cluster forms and holds together: the `[cluster]` table.

Names and defaults that are also pmetal's: discovery_port, gradient_port, min_peers, peer_timeout,
connection_timeout, max_retries; heartbeats every 5 s, given up after 15 s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta

from hcsim.config.table import Count, Port, Table
from hcsim.errors import UsageError
from hcsim.units import PositiveSeconds


class Heartbeat(Table, frozen=True):
    """How members watch each other: somebody is suspected when the first of three limits is passed.

    Shorter intervals find a loss sooner, and cost more messages."""

    interval_s: PositiveSeconds = PositiveSeconds(5)
    timeout_s: PositiveSeconds = PositiveSeconds(15)
    """Silence that is too long for anybody."""
    failures: Annotated[int, Meta(ge=2)] = 3
    """So many heartbeats in a row are missed. One is not enough: it may be a millisecond late."""
    phi: Annotated[float, Meta(gt=0, le=300)] = 8.0
    """Silence whose odds are 10^-phi, given the rhythm so far. Higher: later, and surer."""

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
"""Wired and near; a cable that answers within milliseconds; a radio that goes away for a moment now and then."""


class Cluster(Table, frozen=True):
    """Who is waited for, and when somebody is given up."""

    nodes: Count | None = None
    """Work begins when so many are there; left out: `min_peers` and this one."""
    min_peers: Count = 1
    """Others that have to be there before work begins."""
    discovery_port: Port = 52415
    """Where members talk about each other."""
    gradient_port: Port = 52416
    """Where their collectives listen."""
    peers: tuple[str, ...] = ()
    """Addresses of others that need not be discovered."""
    discover: bool | None = None
    """Whether to announce ourselves on the local network, and to look for others there; left out: yes, unless there is
    a coordinator."""
    coordinator: str | None = None
    """Where members register (host:port), instead of agreeing among themselves; see docs/howto/cluster.md."""
    peer_timeout_s: PositiveSeconds = PositiveSeconds(30)
    """A peer that did not answer is tried again after so long, if it is still in view."""
    connection_timeout_s: PositiveSeconds = PositiveSeconds(5)
    max_retries: Count = 3
    """Attempts in a row to reach a peer."""
    quorum: Literal["majority", "tiebreak", "any"] = "tiebreak"
    """Who may go on when a cluster is split; see docs/howto/cluster.md."""
    preset: Literal["home", "low_latency", "wifi"] = "home"
    """Which heartbeats."""
    heartbeat: Heartbeat | None = None
    """Heartbeats of one's own."""
    settle_s: PositiveSeconds = PositiveSeconds(0.5)
    """How long the leader waits for more newcomers before it takes in those that are there."""

    checkpoint_every: Count = 100
    """Steps after which the first member saves, where it has a place that outlives a crash."""
    checkpoint_keep: Annotated[int, Meta(ge=1, le=16)] = 3
    """How many of its checkpoints a member keeps: when the newest is damaged, it goes on from the one before."""

    measure: Literal["nothing", "links", "order"] = "links"
    """What members of a view measure of the links between them, once for each pair; see docs/howto/cluster.md.

    - nothing: the first address that answers is dialled.
    - links: of several addresses the fastest is dialled, and `hcsim cluster status` says how fast it is.
    - order: the ring's order and `algorithm = "auto"` follow the figures too. Sums are then added in an order that
      depends on them: another run of the same job may differ in the last bits."""

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
        """How many members work begins with."""
        return self.min_peers + 1 if self.nodes is None else self.nodes

    @property
    def beat(self) -> Heartbeat:
        """The heartbeats that count."""
        return PRESETS[self.preset] if self.heartbeat is None else self.heartbeat
