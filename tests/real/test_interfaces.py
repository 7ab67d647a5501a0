"""Wi-Fi must never be taken for Ethernet."""

from __future__ import annotations

from pathlib import Path

import pytest

from hcsim.real.interfaces import linux_medium, list_interfaces, macos_medium, parse_hardware_ports
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

VLAN Configurations
===================
"""


@pytest.mark.parametrize(
    ("device", "medium"),
    [
        ("lo0", Medium.LOOPBACK),
        ("en0", Medium.WIFI),
        ("en1", Medium.THUNDERBOLT),
        ("bridge0", Medium.THUNDERBOLT),
        ("en4", Medium.ETHERNET),
        ("en7", Medium.ETHERNET),
        ("en8", Medium.ETHERNET),
        ("en9", Medium.UNKNOWN),
        ("utun3", Medium.UNKNOWN),
    ],
)
def test_macos_says_what_a_device_is(device: str, medium: Medium) -> None:
    assert macos_medium(device, parse_hardware_ports(LISTING)) is medium


def entry(folder: Path, name: str, *, arp_type: int = 1, speed: str | None = None) -> Path:
    path = folder / name
    path.mkdir()
    (path / "type").write_text(f"{arp_type}\n")
    if speed is not None:
        (path / "speed").write_text(f"{speed}\n")
    return path


def test_linux_loopback(tmp_path: Path) -> None:
    assert linux_medium(entry(tmp_path, "lo", arp_type=772)) == (Medium.LOOPBACK, None)


@pytest.mark.parametrize(("speed", "rate_bps"), [("2500", 2.5e9), ("-1", None), (None, None)])
def test_linux_ethernet_tells_its_rate_where_it_knows(tmp_path: Path, speed: str, rate_bps: float) -> None:
    assert linux_medium(entry(tmp_path, "eth0", speed=speed)) == (Medium.ETHERNET, rate_bps)


def test_linux_wifi(tmp_path: Path) -> None:
    path = entry(tmp_path, "eth1")
    (path / "wireless").mkdir()
    assert linux_medium(path)[0] is Medium.WIFI


def test_linux_thunderbolt_by_driver_and_by_name(tmp_path: Path) -> None:
    by_driver = entry(tmp_path, "eth2")
    driver = tmp_path / "drivers" / "thunderbolt-net"
    driver.mkdir(parents=True)
    (by_driver / "device").mkdir()
    (by_driver / "device" / "driver").symlink_to(driver)
    assert linux_medium(by_driver)[0] is Medium.THUNDERBOLT
    assert linux_medium(entry(tmp_path, "thunderbolt0"))[0] is Medium.THUNDERBOLT


def test_this_machine_has_a_loopback_with_its_address() -> None:
    loopback = next(interface for interface in list_interfaces() if interface.medium is Medium.LOOPBACK)
    assert "127.0.0.1" in loopback.addresses
