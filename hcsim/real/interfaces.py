"""The network interfaces of this machine, and their media.

An interface's name does not tell its medium: `en0` is Wi-Fi on most Macs, and the first Ethernet port on
others. On macOS the hardware port and the media line of a device are queried, on Linux its driver and kind. An
interface is only reported as wired if that is known.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import ifaddr

from hcsim.runtime.host import Interface, Medium, fastest_first

_MOST_ADDRESSES = 6
"""Bounded so that they fit into one announcement."""
_ARPHRD_ETHER = "1"
_ARPHRD_LOOPBACK = "772"
_SPEED_ORDER = list(Medium)

_APPLES_OWN = ("awdl", "llw", "anpi", "ap")
"""Peer-to-peer Wi-Fi, internal links, the access point of internet sharing: they have addresses, but are not
usable."""
_TUNNELS = ("utun", "ipsec", "ppp", "gif", "stf", "tun", "tap", "wg", "tailscale", "zt")
_BASE = re.compile(r"(?P<number>[\d.]+)(?P<giga>G)?base", re.IGNORECASE)


def list_interfaces() -> tuple[Interface, ...]:
    """Return this machine's usable interfaces that have an address."""
    macos = sys.platform == "darwin"
    ports = parse_hardware_ports(output_of("networksetup", "-listallhardwareports")) if macos else {}
    media = parse_media(output_of("ifconfig", "-a")) if macos else {}
    found = []
    for adapter in ifaddr.get_adapters():
        name = adapter.name
        if macos and is_apples_own(name):
            continue
        medium, rate_bps = macos_medium(name, ports, media) if macos else linux_medium(Path("/sys/class/net") / name)
        # IPv6 addresses come as (address, flow, scope).
        addresses = tuple(ip.ip if isinstance(ip.ip, str) else ip.ip[0] for ip in adapter.ips)
        if addresses:
            found.append(Interface(name, medium, rate_bps, addresses))
    return fastest_first(found)


def reachable_at(interfaces: Sequence[Interface]) -> tuple[str, ...]:
    """Return the addresses at which machines on the local network reach this one, fastest medium first; without any,
    loopback.

    Link-local IPv6 addresses are left out, because their meaning depends on the machine."""
    found = [
        address
        for interface in interfaces
        if interface.medium not in (Medium.LOOPBACK, Medium.TUNNEL)
        for address in interface.addresses
        if not (ipaddress.ip_address(address).version == 6 and ipaddress.ip_address(address).is_link_local)
    ]
    return tuple(found[:_MOST_ADDRESSES]) or ("127.0.0.1",)


def host_name() -> str:
    """Return this machine's host name without its domain."""
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname().partition(".")[0]) or "node"


# Linux.


def linux_medium(entry: Path) -> tuple[Medium, float | None]:
    speed_mbps = _text(entry / "speed")
    return _linux_kind(entry), float(speed_mbps) * 1e6 if speed_mbps.isdigit() else None


def _linux_kind(entry: Path) -> Medium:
    kind = _text(entry / "type")
    driver = entry / "device" / "driver"
    if kind == _ARPHRD_LOOPBACK:
        return Medium.LOOPBACK
    if (entry / "wireless").exists() or (entry / "phy80211").exists():  # the first only with old extensions built in
        return Medium.WIFI
    if entry.name.startswith("thunderbolt") or (driver.exists() and driver.resolve().name == "thunderbolt-net"):
        return Medium.THUNDERBOLT
    if (entry / "tun_flags").exists() or _is_named(entry.name, _TUNNELS):
        return Medium.TUNNEL
    if (entry / "bridge").exists() or (entry / "bonding").exists():
        return _slowest_member(entry)
    if (entry / "device").exists() and kind == _ARPHRD_ETHER:  # hardware, or what a virtual machine takes for it
        return Medium.ETHERNET
    return Medium.UNKNOWN  # veth, dummy, macvlan: cables within this machine


def _slowest_member(entry: Path) -> Medium:
    """Return the slowest medium that a bridge or a bond joins; unknown if it joins only containers and virtual
    machines."""
    joined = sorted(path.name.removeprefix("lower_") for path in entry.glob("lower_*"))
    joined += sorted(path.name for path in entry.glob("brif/*"))
    media = [_linux_kind(entry.parent / name) for name in joined]
    known = [medium for medium in media if medium is not Medium.UNKNOWN]
    return max(known, key=_SPEED_ORDER.index, default=Medium.UNKNOWN)


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # the speed of an interface that is down cannot be read
        return ""


# macOS.


def is_apples_own(device: str) -> bool:
    return _is_named(device, _APPLES_OWN)


def parse_hardware_ports(listing: str) -> dict[str, str]:
    """Map devices to hardware ports, from the output of `networksetup -listallhardwareports`."""
    ports = {}
    port = ""
    for line in listing.splitlines():
        key, _, value = line.partition(": ")
        if key == "Hardware Port":
            port = value.strip()
        elif key == "Device":
            ports[value.strip()] = port
    return ports


def parse_media(listing: str) -> dict[str, str]:
    """Map devices to media lines, from the output of `ifconfig -a`."""
    media = {}
    device = ""
    for line in listing.splitlines():
        if line[:1].strip():  # a new device starts at the margin
            device = line.partition(":")[0]
        elif line.strip().startswith("media: "):
            media[device] = line.strip().removeprefix("media: ")
    return media


def macos_medium(device: str, ports: dict[str, str], media: dict[str, str]) -> tuple[Medium, float | None]:
    """Return the medium of a macOS device, and its line rate if known, given the hardware ports and media lines."""
    port = ports.get(device, "")
    # Only wires say how fast they are ("1000baseT", "2500Base-T", "10Gbase-T"); Wi-Fi and bridges say "autoselect".
    base = _BASE.search(media.get(device, ""))
    rate_bps = float(base["number"]) * (1e9 if base["giga"] else 1e6) if base else None
    if device.startswith("lo"):
        return Medium.LOOPBACK, None
    if _is_named(device, _TUNNELS):
        return Medium.TUNNEL, None
    if port in ("Wi-Fi", "AirPort"):
        return Medium.WIFI, None
    if "Ethernet" in port or "LAN" in port:  # also "Thunderbolt Ethernet Slot 1", an adapter
        return Medium.ETHERNET, rate_bps
    if port.startswith("Thunderbolt"):
        return Medium.THUNDERBOLT, None
    if base and port and "iPhone" not in port and "iPad" not in port:  # an adapter that bears its chip's name
        return Medium.ETHERNET, rate_bps
    return Medium.UNKNOWN, None


def _is_named(device: str, families: tuple[str, ...]) -> bool:
    """Return whether a device's name is one of these followed by a number."""
    return device.rstrip("0123456789") in families


def output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
