"""Networks by the names that people have for them: "wifi6", "1gbe", "2.5gbe switch", "thunderbolt", "300 Mb/s"."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from hcsim.config.home import MEDIA, WIFI_STANDARDS, AnyMedium, Cable, Ethernet, Thunderbolt, Wifi
from hcsim.config.machine import Basis
from hcsim.errors import ConfigError
from hcsim.units import BitRate, decode_quantity, did_you_mean

THUNDERBOLT_BPS = BitRate(16.4e9)
"""TCP over a Thunderbolt 4 bridge, in the faster direction of a measured pair."""
THUNDERBOLT_BASIS = Basis(
    "published",
    "14.7 to 20 Gb/s between two Macs: jiribrejcha.net/tag/macbook, github.com/hellas-ai/thunderbolt-ibverbs/pull/44, "
    "github.com/swellweb/targetBridge/issues/110",
    spread=0.16,
)
ETHERNET_BPS = {"100mbe": 100e6, "1gbe": 1e9, "2.5gbe": 2.5e9, "5gbe": 5e9, "10gbe": 10e9}
_ALSO = {
    "wifi": "wifi6", "wlan": "wifi6", "ethernet": "1gbe", "lan": "1gbe", "gigabit": "1gbe", "cable": "1gbe",
    "gbe": "1gbe", "wired": "1gbe", "tb": "thunderbolt", "tb3": "thunderbolt", "tb4": "thunderbolt",
    "thunderbolt3": "thunderbolt", "thunderbolt4": "thunderbolt",
}  # fmt: skip
_FILLER = re.compile(r"\b(switch|switches|router|network|bridge|the|a|an)\b|[\s_-]+")
_RATE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[gm])(b(/s|ps|it/s|it|e)?|bit)?\Z")


def medium_name(words: str) -> str:
    """Return the usual name of the network that these words mean: that of a Wi-Fi standard, "1gbe" and others,
    "thunderbolt", or a rate of Ethernet, such as "300mbe"."""
    short = _FILLER.sub("", words.strip().lower().removeprefix("ethernet:"))
    short = short.removesuffix("ethernet") or short
    short = _ALSO.get(short, short)
    if short in (*WIFI_STANDARDS, *ETHERNET_BPS, "thunderbolt"):
        return short
    if (rate := _RATE.fullmatch(short)) is not None:
        return f"{float(rate['number']):g}{rate['unit']}be"
    known = [*WIFI_STANDARDS, *ETHERNET_BPS, *(name for name in MEDIA if name not in ("wifi", "ethernet"))]
    raise ConfigError(f'there is no network "{words.strip()}"{did_you_mean(short, known)}; known: {", ".join(known)}')


def ethernet_bps(name: str) -> float | None:
    """Return the rate of a network with such a name; None if it is no Ethernet."""
    rate = _RATE.fullmatch(name)
    return None if rate is None else float(rate["number"]) * (1e9 if rate["unit"] == "g" else 1e6)


def medium_of(name: str, home: str, nodes: Sequence[str] = ()) -> AnyMedium:
    """Return the medium of that usual name. Thunderbolt is a cable from each of these nodes to the next, around."""
    rate_bps = ethernet_bps(name)
    if rate_bps is not None:
        return Ethernet(name, BitRate(rate_bps), home)
    if name in WIFI_STANDARDS:
        return access_point(name, name, home)
    around = list(zip(nodes, [*nodes[1:], *nodes[:1]], strict=True))[: len(nodes) if len(nodes) > 2 else 1]
    cables = tuple(Cable(pair, THUNDERBOLT_BPS, THUNDERBOLT_BPS) for pair in around)
    return Thunderbolt(name, cables, basis=THUNDERBOLT_BASIS)


def access_point(standard: str, name: str = "air", home: str = "home") -> Wifi:
    """Return an access point with the usual figures of its standard."""
    table = {"kind": "wifi", "name": name, "standard": standard, "home": home, **WIFI_STANDARDS[standard]}
    return msgspec.convert(table, Wifi, dec_hook=decode_quantity)
