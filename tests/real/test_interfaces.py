"""Wi-Fi must never be taken for Ethernet."""

from __future__ import annotations

from pathlib import Path

import pytest

from hcsim.real.interfaces import (
    is_apples_own,
    linux_medium,
    list_interfaces,
    macos_medium,
    parse_hardware_ports,
    parse_media,
)
from hcsim.runtime.host import Medium

LISTING = """
Hardware Port: Ethernet Adapter (en4)
Device: en4
Ethernet Address: 00:00:5e:00:53:01

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 00:00:5e:00:53:02

Hardware Port: Wi-Fi
Device: en0
Ethernet Address: 00:00:5e:00:53:03

Hardware Port: Thunderbolt 1
Device: en1
Ethernet Address: 00:00:5e:00:53:04

Hardware Port: Thunderbolt Ethernet Slot 2
Device: en7
Ethernet Address: 00:00:5e:00:53:05

Hardware Port: USB 10/100/1000 LAN
Device: en8
Ethernet Address: 00:00:5e:00:53:06

Hardware Port: iPhone USB
Device: en9
Ethernet Address: 00:00:5e:00:53:07

Hardware Port: AX88179A
Device: en10
Ethernet Address: 00:00:5e:00:53:08

VLAN Configurations
===================
"""

IFCONFIG = """\
lo0: flags=8049<UP,LOOPBACK,RUNNING,MULTICAST> mtu 16384
\tinet 127.0.0.1 netmask 0xff000000
en0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tether 00:00:5e:00:53:03
\tinet 192.0.2.17 netmask 0xffffff00 broadcast 192.0.2.255
\tmedia: autoselect
\tstatus: active
bridge0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tmember: en1 flags=3<LEARNING,DISCOVER>
\t        ifmaxaddr 0 port 8 priority 0 path cost 0
\tmedia: <unknown type>
\tstatus: active
bridge100: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tmedia: autoselect
en1: flags=8963<UP,BROADCAST,SMART,RUNNING,PROMISC,SIMPLEX,MULTICAST> mtu 1500
\tmedia: autoselect <full-duplex>
en4: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tmedia: autoselect (10Gbase-T <full-duplex,flow-control>)
en7: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tmedia: autoselect (1000baseT <full-duplex>)
en8: flags=8863<UP,BROADCAST,SMART,SIMPLEX,MULTICAST> mtu 1500
\tmedia: autoselect (none)
\tstatus: inactive
en9: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tmedia: autoselect (100baseTX <full-duplex>)
en10: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tmedia: autoselect (2500Base-T <full-duplex>)
en11: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tmedia: autoselect (1000baseT <full-duplex>)
utun3: flags=8051<UP,POINTOPOINT,RUNNING,MULTICAST> mtu 1380
\tinet 198.51.100.2 --> 198.51.100.2 netmask 0xffffffff
"""


@pytest.mark.parametrize(
    ("device", "medium", "rate_bps"),
    [
        ("lo0", Medium.LOOPBACK, None),
        ("en0", Medium.WIFI, None),
        ("en1", Medium.THUNDERBOLT, None),
        ("bridge0", Medium.THUNDERBOLT, None),
        ("bridge100", Medium.UNKNOWN, None),
        ("en4", Medium.ETHERNET, 10e9),
        ("en7", Medium.ETHERNET, 1e9),
        ("en8", Medium.ETHERNET, None),
        ("en9", Medium.UNKNOWN, None),
        ("en10", Medium.ETHERNET, 2.5e9),
        ("en11", Medium.UNKNOWN, None),
        ("utun3", Medium.TUNNEL, None),
        ("ipsec0", Medium.TUNNEL, None),
    ],
)
def test_macos_says_what_a_device_is(device: str, medium: Medium, rate_bps: float | None) -> None:
    assert macos_medium(device, parse_hardware_ports(LISTING), parse_media(IFCONFIG)) == (medium, rate_bps)


@pytest.mark.parametrize("device", ["en0", "en1", "bridge0"])
def test_a_name_alone_makes_no_ethernet(device: str) -> None:
    assert macos_medium(device, {}, {}) == (Medium.UNKNOWN, None)


def test_what_macos_keeps_for_itself_is_left_out() -> None:
    assert [device for device in ("awdl0", "llw0", "anpi1", "ap1", "en0", "apple0") if is_apples_own(device)] == [
        "awdl0", "llw0", "anpi1", "ap1",
    ]  # fmt: skip


def entry(folder: Path, name: str, *, arp_type: int = 1, speed: str | None = None, hardware: bool = False) -> Path:
    path = folder / name
    path.mkdir()
    (path / "type").write_text(f"{arp_type}\n")
    if speed is not None:
        (path / "speed").write_text(f"{speed}\n")
    if hardware:
        (path / "device").mkdir()
    return path


def test_linux_loopback(tmp_path: Path) -> None:
    assert linux_medium(entry(tmp_path, "lo", arp_type=772)) == (Medium.LOOPBACK, None)


@pytest.mark.parametrize(("speed", "rate_bps"), [("2500", 2.5e9), ("-1", None), (None, None)])
def test_linux_ethernet_tells_its_rate_where_it_knows(tmp_path: Path, speed: str, rate_bps: float) -> None:
    assert linux_medium(entry(tmp_path, "eth0", speed=speed, hardware=True)) == (Medium.ETHERNET, rate_bps)


@pytest.mark.parametrize("sign", ["wireless", "phy80211"])
def test_linux_wifi(tmp_path: Path, sign: str) -> None:
    path = entry(tmp_path, "eth1", hardware=True)
    (path / sign).mkdir()
    assert linux_medium(path)[0] is Medium.WIFI


def test_linux_thunderbolt_by_driver_and_by_name(tmp_path: Path) -> None:
    by_driver = entry(tmp_path, "eth2", hardware=True)
    driver = tmp_path / "drivers" / "thunderbolt-net"
    driver.mkdir(parents=True)
    (by_driver / "device" / "driver").symlink_to(driver)
    assert linux_medium(by_driver)[0] is Medium.THUNDERBOLT
    assert linux_medium(entry(tmp_path, "thunderbolt0"))[0] is Medium.THUNDERBOLT


def test_linux_tunnels_by_their_flags_and_by_name(tmp_path: Path) -> None:
    by_flags = entry(tmp_path, "vpn", arp_type=65534)
    (by_flags / "tun_flags").write_text("0x1001\n")
    assert linux_medium(by_flags)[0] is Medium.TUNNEL
    assert linux_medium(entry(tmp_path, "wg0", arp_type=65534))[0] is Medium.TUNNEL


def test_linux_cables_within_the_machine_are_no_ethernet(tmp_path: Path) -> None:
    assert linux_medium(entry(tmp_path, "veth1a2b3c", speed="10000"))[0] is Medium.UNKNOWN


def test_a_linux_bridge_is_what_it_joins(tmp_path: Path) -> None:
    entry(tmp_path, "eth0", hardware=True)
    entry(tmp_path, "veth0")
    (entry(tmp_path, "wlan0", hardware=True) / "phy80211").mkdir()
    for name, joined in {"br0": ["eth0", "veth0"], "br1": ["eth0", "wlan0"], "docker0": ["veth0"]}.items():
        bridge = entry(tmp_path, name)
        (bridge / "bridge").mkdir()
        (bridge / "brif").mkdir()
        for member in joined:
            (bridge / "brif" / member).mkdir()
    media = [linux_medium(tmp_path / name)[0] for name in ("br0", "br1", "docker0")]
    assert media == [Medium.ETHERNET, Medium.WIFI, Medium.UNKNOWN]


def test_this_machine_has_a_loopback_with_its_address() -> None:
    loopback = next(interface for interface in list_interfaces() if interface.medium is Medium.LOOPBACK)
    assert "127.0.0.1" in loopback.addresses
