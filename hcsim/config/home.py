"""The network of a home: the media that join its machines, and a line to the internet."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, field

from hcsim.config.machine import Basis
from hcsim.config.table import Mtu, Name, Table
from hcsim.errors import UsageError
from hcsim.registry import Registry
from hcsim.units import BitRate, Bytes, PositiveBytes, PositiveSeconds, PositiveShare, Seconds, Share


class Ethernet(Table, frozen=True, tag_field="kind", tag="ethernet"):
    """A full-duplex switch; media of one home are bridged by its router."""

    name: Name
    rate_bps: BitRate
    home: Name = "home"
    latency_s: Seconds = Seconds(0.1e-3)
    """One-way latency."""
    jitter_s: Seconds = Seconds(0)
    """Mean of an exponential extra delay."""
    loss: Share = Share(0)
    """Probability per packet."""
    mtu: Mtu = 1500
    queue_bytes: PositiveBytes | None = None
    """The buffer of each port of the switch. Connections that fill it lose packets and share the port unequally; None:
    they share it equally, and lose nothing."""
    queue_basis: Basis | None = None
    """Where the queue's size comes from, if not from where the other figures do."""
    basis: Basis | None = None
    """Where its figures come from, if the file says so."""


_SHORTEST_GATE_EVERY_S = 1e-3
"""Each closing of the gate is an event of the simulation, even while no station transmits."""


class Wifi(Table, frozen=True, tag_field="kind", tag="wifi"):
    """One access point, whose stations share its airtime. The standard supplies what the file leaves out."""

    name: Name
    phy_rate_bps: BitRate
    latency_s: Seconds
    jitter_s: Seconds
    loss: Share
    home: Name = "home"
    standard: Literal["wifi5", "wifi6", "wifi6e", "wifi7"] = "wifi6"
    efficiency: PositiveShare = PositiveShare(0.65)
    """TCP throughput divided by the PHY rate."""
    fairness: Literal["throughput", "airtime"] = "throughput"
    """The resource that the stations share equally; with "throughput" a slow station slows all. A station uses air
    time both when it sends and when it receives. Shares are per connection, so a station with two connections
    has two."""
    gate: bool = True
    """Now and then the medium closes (scans, power save, roaming), then flushes."""
    gate_every_s: PositiveSeconds = PositiveSeconds(33)
    gate_min_s: Seconds = Seconds(0.1)
    gate_max_s: Seconds = Seconds(0.25)
    mtu: Mtu = 1500
    basis: Basis | None = None

    def __post_init__(self) -> None:
        if self.gate_min_s > self.gate_max_s:
            raise UsageError(f"gate_min ({self.gate_min_s} s) is longer than gate_max ({self.gate_max_s} s)")
        if self.gate_every_s < _SHORTEST_GATE_EVERY_S:
            raise UsageError(
                f"gate_every ({self.gate_every_s} s) must be at least {_SHORTEST_GATE_EVERY_S} s; "
                "gate = false leaves the air open"
            )


# Latency 1.2 ms and an exponential jitter of mean 1 ms, each way, give a round trip with median
# 4.1 ms and 95th percentile 7.1 ms. Gate and losses hold up 0.8 % of the round trips, so that the 99th percentile,
# 11 ms, is still the jitter's: the 51 ms that were measured elsewhere do not come out with a gate every 33 s.
#
# The rates are those beside the access point. Ten metres away two streams carry about 360 of Wi-Fi 5's 560 Mb/s, and
# through walls less: so 80 % of homes are taken to lie within a factor of 1.5. That is an estimate; a switch, by
# contrast, carries its nominal rate, and has no spread.
_AIR: dict[str, object] = {
    "latency": "1.2 ms",
    "jitter": "1 ms",
    "loss": "0.12 %",
    "basis": {
        "kind": "estimated",
        "source": "rates beside the access point and 10 m away: duckware.com/tech/wifi-in-the-us.html",
        "spread": 0.4,
    },
}
WIFI_STANDARDS: dict[str, dict[str, object]] = {
    "wifi5": {"phy_rate": "866 Mb/s", **_AIR},
    "wifi6": {"phy_rate": "1.2 Gb/s", **_AIR},
    "wifi6e": {"phy_rate": "2.4 Gb/s", **_AIR},
    "wifi7": {"phy_rate": "1.44 Gb/s", **_AIR},
}
"""Defaults for an access point by standard, as the file would write them."""


class Cable(Table, frozen=True):
    """One Thunderbolt cable. Its two directions can differ; without `backward` they do not."""

    between: tuple[str, str]
    forward_bps: BitRate
    backward_bps: BitRate
    latency_s: Seconds = Seconds(0.2e-3)
    basis: Basis | None = None


class Thunderbolt(Table, frozen=True, tag_field="kind", tag="thunderbolt"):
    """A network of cables between hosts, which forward for each other; it is not bridged to other media.

    The rates known for Thunderbolt are TCP throughputs already. A large MTU keeps the headers, which every
    medium pays, from being subtracted a second time (1 %, not 6 %)."""

    name: Name
    cables: Annotated[tuple[Cable, ...], Meta(min_length=1)] = field(name="cable")
    forwarding_bps: BitRate | None = None
    """The rate at which one host can forward for others; None: as much as its cables carry."""
    mtu: Mtu = 9000
    basis: Basis | None = None


class Tunnel(Table, frozen=True):
    """A VPN or relay on a home's connection to the internet."""

    mtu: Mtu = 1280
    cap_bps: BitRate | None = None
    delay_s: Seconds = Seconds(0)


class Wan(Table, frozen=True):
    """A home's line to the internet's core, which joins all homes that have one."""

    home: Name
    up_bps: BitRate
    down_bps: BitRate
    latency_s: Seconds
    """One-way latency from the home to the core."""
    jitter_s: Seconds = Seconds(0)
    loss: Share = Share(0)
    buffer_bytes: Bytes | None = None
    """The queue in front of the line. When full, it adds buffer / rate to the round trip."""
    tunnel: Tunnel | None = None
    mtu: Mtu = 1500
    buffer_basis: Basis | None = None
    """Where the buffer's size comes from, if not from where the other figures do."""
    basis: Basis | None = None

    @property
    def ways(self) -> dict[str, tuple[str, ...]]:
        """The names that a fault has for the line and its directions, with the rates that each covers."""
        name = f"{self.home}.wan"
        return {name: ("up_bps", "down_bps"), f"{name}.up": ("up_bps",), f"{name}.down": ("down_bps",)}


AnyMedium: TypeAlias = Ethernet | Wifi | Thunderbolt
OWN_MEDIA = (Ethernet, Wifi, Thunderbolt)
MEDIA: Registry[type[AnyMedium]] = Registry("medium", {str(kind.__struct_config__.tag): kind for kind in OWN_MEDIA})
"""All kinds of media, by their names in a file. A plugin's kind is a subclass of a built-in one, and behaves
alike."""
