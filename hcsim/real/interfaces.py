"""The network interfaces of this machine, their media, and the addresses at which others reach it.

An interface's name does not tell its medium: `en0` is Wi-Fi on most Macs, and the first Ethernet port on
others. On macOS the type and the media line of a device count (`ifconfig -v`), and then its hardware port, whose name
is in the user's language and may be the name of an adapter's chip. On Linux a device's driver and kind count. An
interface is only reported as wired if that is known.

Networks that exist only within this machine (of virtual machines and containers) have the same address on many
machines, such as 192.168.64.1 on every Mac. No other machine reaches them, and they are not announced.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import ifaddr

from hcsim.files import text_of
from hcsim.runtime.host import Interface, Medium, fastest_first

_MOST_ADDRESSES = 6
"""Bounded so that they fit into one announcement."""
_ARPHRD_ETHER = "1"
_ARPHRD_LOOPBACK = "772"
_SPEED_ORDER = list(Medium)

_APPLES_OWN = ("awdl", "llw", "anpi", "ap")
"""Peer-to-peer Wi-Fi, internal links, the access point of internet sharing: they have addresses, but are not
usable."""
_TUNNELS = ("utun", "ipsec", "ppp", "gif", "stf", "tun", "tap", "wg", "tailscale", "zt", "feth")
_VIRTUAL = ("vmnet", "vmenet", "vboxnet", "vnic", "docker", "virbr", "lxcbr", "lxdbr", "podman", "cni")
"""Networks of VMware, Apple's virtualisation, VirtualBox, Parallels, Docker, libvirt, LXC, Podman and Kubernetes."""
_FIRST_VIRTUAL_BRIDGE = 100
"""macOS numbers the bridges of virtual machines and of internet sharing from here on, those of its users from 0."""
_BASE = re.compile(r"(?P<number>[\d.]+)(?P<giga>G)?base", re.IGNORECASE)
_RATE = re.compile(r"(?P<number>[\d.]+) (?P<unit>[KMG])bps")
_UNITS = {"K": 1e3, "M": 1e6, "G": 1e9}
_WIFI_PORT = re.compile(r"wi-?fi|airport|wlan|802\.11", re.IGNORECASE)
_WIRED_PORT = re.compile(r"ethernet|(?<![a-z])lan\b", re.IGNORECASE)
_NOT_A_NETWORK = re.compile(r"iphone|ipad|bluetooth", re.IGNORECASE)
"""Ports of devices that share their own connection."""
_TEMPORARY, _DEPRECATED, _TENTATIVE = 0x01, 0x20, 0x40
"""Flags of IPv6 addresses in Linux's <linux/if_addr.h>."""


def list_interfaces() -> tuple[Interface, ...]:
    """Return this machine's usable interfaces that have an address."""
    macos = sys.platform == "darwin"
    ports = parse_hardware_ports(output_of("networksetup", "-listallhardwareports")) if macos else {}
    devices = parse_ifconfig(output_of("ifconfig", "-av") or output_of("ifconfig", "-a")) if macos else {}
    fleeting = [address for device in devices.values() for address in device.fleeting]
    if not macos:
        fleeting += parse_if_inet6(text_of(Path("/proc/net/if_inet6")))
    found = []
    for adapter in ifaddr.get_adapters():
        name = adapter.name
        if macos and is_apples_own(name):
            continue
        medium, rate_bps = macos_medium(name, ports, devices) if macos else linux_medium(Path("/sys/class/net") / name)
        # IPv6 addresses come as (address, flow, scope).
        addresses = best_first((ip.ip if isinstance(ip.ip, str) else ip.ip[0] for ip in adapter.ips), fleeting)
        if addresses:
            found.append(Interface(name, medium, rate_bps, addresses))
    return fastest_first(found)


def best_first(addresses: Iterable[str], fleeting: Collection[str]) -> tuple[str, ...]:
    """Sort an interface's addresses: IPv4 before IPv6, self-assigned and fleeting ones behind others."""

    def order(address: str) -> tuple[int, bool, bool]:
        ip = ipaddress.ip_address(address)
        return ip.version, ip.is_link_local, address in fleeting

    return tuple(sorted(addresses, key=order))


def leads_out(interface: Interface) -> bool:
    """Return whether other machines of the local network are reached over the interface itself."""
    return interface.medium not in (Medium.LOOPBACK, Medium.TUNNEL, Medium.VIRTUAL)


def reachable_at(interfaces: Sequence[Interface]) -> tuple[str, ...]:
    """Return the addresses at which machines on the local network reach this one, fastest medium first; without any,
    loopback.

    There are at most six. Interfaces take turns, with an IPv4 and then an IPv6 address each, so that many addresses
    of one do not crowd out another. Link-local IPv6 addresses are left out, because their meaning depends on the
    machine."""
    outward = [interface for interface in interfaces if leads_out(interface)]
    lists = [[a for a in each.addresses if _is_usable(a, version)] for version in (4, 6) for each in outward]
    by_turns = [each[turn] for turn in range(max(map(len, lists), default=0)) for each in lists if turn < len(each)]
    chosen = by_turns[:_MOST_ADDRESSES]
    return tuple(a for each in outward for a in each.addresses if a in chosen) or ("127.0.0.1",)


def _is_usable(address: str, version: int) -> bool:
    ip = ipaddress.ip_address(address)
    return ip.version == version and not (version == 6 and ip.is_link_local)


def link_local_interfaces(version: int) -> tuple[str, ...]:
    """Return the interfaces that have a link-local address of this IP version, fastest medium first."""
    return tuple(
        each.name
        for each in list_interfaces()
        if leads_out(each)
        and any(ip.version == version and ip.is_link_local for ip in map(ipaddress.ip_address, each.addresses))
    )


def is_in_own_network(host: str) -> bool:
    """Return whether this is the IP address of a machine in a network that an interface of this one is in."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    for adapter in ifaddr.get_adapters():
        for ip in adapter.ips:
            ours = ip.ip if isinstance(ip.ip, str) else ip.ip[0]
            if address in ipaddress.ip_network(f"{ours}/{ip.network_prefix}", strict=False):
                return True
    return False


def host_name() -> str:
    """Return this machine's host name without its domain."""
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname().partition(".")[0]) or "node"


# Linux.


def linux_medium(entry: Path) -> tuple[Medium, float | None]:
    speed_mbps = text_of(entry / "speed").strip()
    return _linux_kind(entry), float(speed_mbps) * 1e6 if speed_mbps.isdigit() else None


def _linux_kind(entry: Path) -> Medium:
    kind = text_of(entry / "type").strip()
    driver = entry / "device" / "driver"
    if kind == _ARPHRD_LOOPBACK:
        return Medium.LOOPBACK
    if (entry / "wireless").exists() or (entry / "phy80211").exists():  # the first only with old extensions built in
        return Medium.WIFI
    if entry.name.startswith("thunderbolt") or (driver.exists() and driver.resolve().name == "thunderbolt-net"):
        return Medium.THUNDERBOLT
    if (entry / "tun_flags").exists() or _is_named(entry.name, _TUNNELS):
        return Medium.TUNNEL
    if _is_named(entry.name, _VIRTUAL):
        return Medium.VIRTUAL
    if (entry / "bridge").exists() or (entry / "bonding").exists():
        joined = sorted(path.name.removeprefix("lower_") for path in entry.glob("lower_*"))
        joined += sorted(path.name for path in entry.glob("brif/*"))
        alone = Medium.VIRTUAL if (entry / "bridge").exists() else Medium.UNKNOWN
        return _slowest((_linux_kind(entry.parent / name) for name in joined), alone)
    if (entry / "device").exists() and kind == _ARPHRD_ETHER:  # hardware, or what a virtual machine takes for it
        return Medium.ETHERNET
    return Medium.UNKNOWN  # veth, dummy, macvlan: cables within this machine


def parse_if_inet6(listing: str) -> list[str]:
    """Return the temporary, deprecated and not yet usable addresses of /proc/net/if_inet6."""
    lines = [words for line in listing.splitlines() if len(words := line.split()) == 6]
    fleeting = _TEMPORARY | _DEPRECATED | _TENTATIVE
    return [str(ipaddress.IPv6Address(bytes.fromhex(words[0]))) for words in lines if int(words[4], 16) & fleeting]


# macOS.


class MacDevice(NamedTuple):
    """What `ifconfig -v` tells of a device."""

    media: str = ""
    type: str = ""
    rate_bps: float | None = None
    """The rate at which Wi-Fi sends."""
    members: tuple[str, ...] = ()
    """Of a bridge."""
    fleeting: tuple[str, ...] = ()
    """Its IPv6 addresses that are temporary, deprecated or not yet usable."""


def is_apples_own(device: str) -> bool:
    return _is_named(device, _APPLES_OWN)


def parse_hardware_ports(listing: str) -> dict[str, str]:
    """Map devices to hardware ports, from the output of `networksetup -listallhardwareports`.

    Port and device are the first two lines of a block. Names of ports, and on some systems the keys, are in the user's
    language."""
    ports = {}
    for block in re.split(r"\n\s*\n", listing):
        lines = [re.split("[:\uff1a]", line, maxsplit=1) for line in block.splitlines()]
        values = [line[1].strip() for line in lines if len(line) == 2]
        if len(values) >= 2 and re.fullmatch(r"[A-Za-z]+\d+", values[1]):
            ports[values[1]] = values[0]
    return ports


def parse_ifconfig(listing: str) -> dict[str, MacDevice]:
    """Parse the output of `ifconfig -av`. Without `-v` types and rates are missing."""
    devices: dict[str, MacDevice] = {}
    name = ""
    for line in listing.splitlines():
        if line[:1].strip():  # a new device starts at the margin
            name = line.partition(":")[0]
            devices[name] = MacDevice()
            continue
        key, _, value = line.strip().partition(" ")
        here = devices.get(name, MacDevice())
        if key == "media:":
            here = here._replace(media=value)
        elif key == "type:":
            here = here._replace(type=value)
        elif key == "member:":
            here = here._replace(members=(*here.members, value.partition(" ")[0]))
        elif line.strip().startswith(("uplink rate:", "link rate:")) and (rate := _RATE.search(line)):
            here = here._replace(rate_bps=float(rate["number"]) * _UNITS[rate["unit"]])
        elif key == "inet6" and {"temporary", "deprecated", "tentative", "duplicated"} & {*value.split()}:
            here = here._replace(fleeting=(*here.fleeting, value.partition(" ")[0].partition("%")[0]))
        devices[name] = here
    return devices


def macos_medium(
    device: str, ports: Mapping[str, str], devices: Mapping[str, MacDevice]
) -> tuple[Medium, float | None]:
    """Return the medium of a macOS device, and its line rate if known, given all hardware ports and devices."""
    port, here = ports.get(device, ""), devices.get(device, MacDevice())
    # Only wires say how fast they are ("1000baseT", "2500Base-T", "10Gbase-T"); Wi-Fi and bridges say "autoselect".
    base = _BASE.search(here.media)
    rate_bps = float(base["number"]) * (1e9 if base["giga"] else 1e6) if base else None
    if device.startswith("lo"):
        return Medium.LOOPBACK, None
    if _is_named(device, _TUNNELS):
        return Medium.TUNNEL, None
    if _is_named(device, _VIRTUAL):
        return Medium.VIRTUAL, None
    if _is_named(device, ("bridge",)):
        return _bridge_medium(device, ports, devices), None
    if _WIFI_PORT.search(here.type or port) or _is_named(device, ("ap",)):
        return Medium.WIFI, here.rate_bps
    if not port or _NOT_A_NETWORK.search(port):
        return Medium.UNKNOWN, None
    if base or _WIRED_PORT.search(port):  # also "Thunderbolt Ethernet Slot 1", and an adapter with its chip's name
        return Medium.ETHERNET, rate_bps
    return Medium.THUNDERBOLT if "Thunderbolt" in port else Medium.UNKNOWN, None


def _bridge_medium(bridge: str, ports: Mapping[str, str], devices: Mapping[str, MacDevice]) -> Medium:
    """Return the slowest medium that a bridge joins. One that macOS made for virtual machines joins none."""
    if "Thunderbolt" in ports.get(bridge, ""):
        return Medium.THUNDERBOLT
    virtual = bridge not in ports and int(bridge.removeprefix("bridge") or 0) >= _FIRST_VIRTUAL_BRIDGE
    members = [member for member in devices.get(bridge, MacDevice()).members if not _is_named(member, ("bridge",))]
    media = (macos_medium(member, ports, devices)[0] for member in members)
    return _slowest(media, Medium.VIRTUAL if virtual else Medium.UNKNOWN)


def _slowest(media: Iterable[Medium], otherwise: Medium) -> Medium:
    """Return the slowest medium of those that lead to other machines; a tunnel in a bridge belongs to a virtual
    machine."""
    known = [medium for medium in media if medium not in (Medium.UNKNOWN, Medium.VIRTUAL, Medium.TUNNEL)]
    return max(known, key=_SPEED_ORDER.index, default=otherwise)


def _is_named(device: str, families: tuple[str, ...]) -> bool:
    """Return whether a device's name is one of these followed by a number."""
    return device.rstrip("0123456789") in families


def output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
