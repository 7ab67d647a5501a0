"""What this machine is attached to, and which of it is fast.

A name says little: `en0` is Wi-Fi on most Macs, and the first Ethernet on others. So macOS is asked
which hardware port a device belongs to, and Linux which driver stands behind it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ifaddr

from hcsim.runtime.host import Interface, Medium

_ARPHRD_LOOPBACK = "772"


def list_interfaces() -> tuple[Interface, ...]:
    """This machine's interfaces that have an address, fastest medium first, then by name."""
    ports = _macos_ports() if sys.platform == "darwin" else {}
    found = []
    for adapter in ifaddr.get_adapters():
        name = adapter.name
        medium, rate_bps = (
            (macos_medium(name, ports), None)
            if sys.platform == "darwin"
            else linux_medium(Path("/sys/class/net") / name)
        )
        # IPv6 addresses come as (address, flow, scope).
        addresses = tuple(ip.ip if isinstance(ip.ip, str) else ip.ip[0] for ip in adapter.ips)
        if addresses:
            found.append(Interface(name, medium, rate_bps, addresses))
    speed_order = list(Medium)
    return tuple(sorted(found, key=lambda interface: (speed_order.index(interface.medium), interface.name)))


def linux_medium(entry: Path) -> tuple[Medium, float | None]:
    """Medium and line rate of one entry of /sys/class/net."""
    if _text(entry / "type") == _ARPHRD_LOOPBACK:
        return Medium.LOOPBACK, None
    driver = entry / "device" / "driver"
    if (entry / "wireless").exists():
        medium = Medium.WIFI
    elif entry.name.startswith("thunderbolt") or (driver.exists() and driver.resolve().name == "thunderbolt-net"):
        medium = Medium.THUNDERBOLT
    else:
        medium = Medium.ETHERNET
    speed_mbps = _text(entry / "speed")
    return medium, float(speed_mbps) * 1e6 if speed_mbps.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # the speed of an interface that is down cannot be read
        return ""


def parse_hardware_ports(listing: str) -> dict[str, str]:
    """Device to hardware port, from the output of `networksetup -listallhardwareports`."""
    ports = {}
    port = ""
    for line in listing.splitlines():
        key, _, value = line.partition(": ")
        if key == "Hardware Port":
            port = value.strip()
        elif key == "Device":
            ports[value.strip()] = port
    return ports


def macos_medium(device: str, ports: dict[str, str]) -> Medium:
    """Medium of a macOS device, given the hardware ports."""
    port = ports.get(device, "")
    if device.startswith("lo"):
        return Medium.LOOPBACK
    if port == "Wi-Fi":
        return Medium.WIFI
    if "Ethernet" in port or "LAN" in port:  # also "Thunderbolt Ethernet", an adapter
        return Medium.ETHERNET
    if port.startswith("Thunderbolt"):
        return Medium.THUNDERBOLT
    return Medium.UNKNOWN


def _macos_ports() -> dict[str, str]:
    try:
        listing = subprocess.run(
            ["networksetup", "-listallhardwareports"], capture_output=True, text=True, timeout=5, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_hardware_ports(listing)
