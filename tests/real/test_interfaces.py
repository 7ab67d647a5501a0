"""Wi-Fi is never taken for Ethernet, and only networks that lead to other machines are announced."""

from __future__ import annotations

from pathlib import Path

import pytest

from hcsim.real.interfaces import (
    best_first,
    is_apples_own,
    is_in_own_network,
    linux_medium,
    list_interfaces,
    macos_medium,
    parse_hardware_ports,
    parse_if_inet6,
    parse_ifconfig,
    reachable_at,
)
from hcsim.runtime.host import Interface, Medium

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
        ("bridge100", Medium.VIRTUAL, None),
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
    assert macos_medium(device, parse_hardware_ports(LISTING), parse_ifconfig(IFCONFIG)) == (medium, rate_bps)


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
    assert media == [Medium.ETHERNET, Medium.WIFI, Medium.VIRTUAL]


def test_a_linux_bridge_that_a_virtual_machine_shares_with_a_cable_leads_out(tmp_path: Path) -> None:
    entry(tmp_path, "eth0", hardware=True)
    (entry(tmp_path, "vnet0") / "tun_flags").write_text("0x1002\n")
    for name, joined in {"br0": ["eth0", "vnet0"], "br1": ["vnet0"]}.items():
        bridge = entry(tmp_path, name)
        (bridge / "bridge").mkdir()
        for member in joined:
            (bridge / f"lower_{member}").mkdir()
    assert linux_medium(tmp_path / "br0")[0] is Medium.ETHERNET
    assert linux_medium(tmp_path / "br1")[0] is Medium.VIRTUAL


@pytest.mark.parametrize("name", ["virbr0", "vmnet8", "vboxnet0", "docker0", "lxcbr0", "cni0"])
def test_networks_of_virtual_machines_are_known_by_name(tmp_path: Path, name: str) -> None:
    assert linux_medium(entry(tmp_path, name))[0] is Medium.VIRTUAL
    assert macos_medium(name, {}, {}) == (Medium.VIRTUAL, None)


def test_this_machine_has_a_loopback_with_its_address() -> None:
    loopback = next(interface for interface in list_interfaces() if interface.medium is Medium.LOOPBACK)
    assert "127.0.0.1" in loopback.addresses


# Macs in several languages: a Mac Studio that runs virtual machines, and laptops with adapters.

MAC_STUDIO = """\
lo0: flags=8049<UP,LOOPBACK,RUNNING,MULTICAST> mtu 16384 index 1
\toptions=1203<RXCSUM,TXCSUM,TXSTATUS,SW_TIMESTAMP>
\tinet 127.0.0.1 netmask 0xff000000
\tinet6 ::1 prefixlen 128
\tlink quality: 100 (good)
\tstate availability: 0 (true)
en0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500 index 6
\teflags=1000080<TXSTART,NOACKPRI,ECN_ENABLE>
\tether 00:00:5e:00:53:10
\tinet6 fe80::10ff:fe00:5310%en0 prefixlen 64 secured scopeid 0x6
\tinet6 2001:db8::418 prefixlen 64 autoconf secured
\tinet6 2001:db8::a31d prefixlen 64 deprecated autoconf temporary
\tinet6 2001:db8::77aa prefixlen 64 autoconf temporary
\tinet 192.0.2.10 netmask 0xffffff00 broadcast 192.0.2.255
\tnd6 options=201<PERFORMNUD,DAD>
\tmedia: autoselect (10Gbase-T <full-duplex,flow-control>)
\tstatus: active
\ttype: Ethernet
\tlink quality: 100 (good)
\tscheduler: FQ_CODEL
\tlink rate: 10.00 Gbps
en1: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500 index 15
\tether 00:00:5e:00:53:11
\tinet 192.0.2.11 netmask 0xffffff00 broadcast 192.0.2.255
\tmedia: autoselect
\tstatus: active
\ttype: Wi-Fi
\tlink quality: 100 (good)
\tscheduler: FQ_CODEL
\tuplink rate: 866.70 Mbps [eff] / 1200.00 Mbps [max]
\tdownlink rate: 866.70 Mbps [eff] / 1200.00 Mbps [max]
en2: flags=8963<UP,BROADCAST,SMART,RUNNING,PROMISC,SIMPLEX,MULTICAST> mtu 1500 index 11
\tmedia: autoselect <full-duplex>
\tstatus: active
\ttype: Ethernet
en3: flags=8963<UP,BROADCAST,SMART,RUNNING,PROMISC,SIMPLEX,MULTICAST> mtu 1500 index 12
\tmedia: autoselect <full-duplex>
\tstatus: inactive
\ttype: Ethernet
bridge0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500 index 16
\tConfiguration:
\t\tid 0:0:0:0:0:0 priority 0 hellotime 0 fwddelay 0
\tmember: en2 flags=3<LEARNING,DISCOVER>
\t        ifmaxaddr 0 port 11 priority 0 path cost 0
\tmember: en3 flags=3<LEARNING,DISCOVER>
\t        ifmaxaddr 0 port 12 priority 0 path cost 0
\tinet 169.254.31.7 netmask 0xffff0000 broadcast 169.254.255.255
\tmedia: <unknown type>
\tstatus: active
\ttype: Ethernet
vmenet0: flags=8963<UP,BROADCAST,SMART,RUNNING,PROMISC,SIMPLEX,MULTICAST> mtu 1500 index 22
\tmedia: autoselect
\tstatus: active
\ttype: Ethernet
bridge100: flags=8a63<UP,BROADCAST,SMART,RUNNING,ALLMULTI,SIMPLEX,MULTICAST> mtu 1500 index 23
\tinet 192.168.64.1 netmask 0xffffff00 broadcast 192.168.64.255
\tinet6 fd12:3456::1 prefixlen 64 autoconf secured
\tmember: vmenet0 flags=10003<LEARNING,DISCOVER,CSUM>
\t        ifmaxaddr 0 port 22 priority 0 path cost 0
\tmedia: autoselect
\tstatus: active
\ttype: Ethernet
bridge101: flags=8a63<UP,BROADCAST,SMART,RUNNING,ALLMULTI,SIMPLEX,MULTICAST> mtu 1500 index 24
\tinet 192.168.2.1 netmask 0xffffff00 broadcast 192.168.2.255
\tmember: en7 flags=3<LEARNING,DISCOVER>
\tmember: ap1 flags=10803<LEARNING,DISCOVER,PRIVATE,CSUM>
\tmedia: <unknown type>
\tstatus: active
\ttype: Ethernet
en7: flags=8963<UP,BROADCAST,SMART,RUNNING,PROMISC,SIMPLEX,MULTICAST> mtu 1500 index 25
\tmedia: autoselect (1000baseT <full-duplex>)
\tstatus: active
\ttype: Ethernet
en9: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500 index 27
\tmedia: autoselect (100baseTX <full-duplex>)
\ttype: Ethernet
utun4: flags=8051<UP,POINTOPOINT,RUNNING,MULTICAST> mtu 1380 index 30
\tinet 198.51.100.2 --> 198.51.100.2 netmask 0xffffffff
"""
PORTS = """
{port}: Ethernet
{device}: en0
{address}: 00:00:5e:00:53:10

{port}: {wifi}
{device}: en1
{address}: 00:00:5e:00:53:11

{port}: Thunderbolt 1
{device}: en2
{address}: 00:00:5e:00:53:12

{port}: Thunderbolt 2
{device}: en3
{address}: 00:00:5e:00:53:13

{port}: {bridge}
{device}: bridge0
{address}: 00:00:5e:00:53:12

{port}: {adapter}
{device}: en7
{address}: 00:00:5e:00:53:17

{port}: iPhone USB
{device}: en9
{address}: 00:00:5e:00:53:19

{vlans}
============"""
WORDS = ("port", "device", "address", "wifi", "bridge", "adapter", "vlans")
LANGUAGES = {
    "English": (
        "Hardware Port", "Device", "Ethernet Address", "Wi-Fi", "Thunderbolt Bridge", "USB 10/100/1000 LAN",
        "VLAN Configurations",
    ),
    "German": (
        "Hardware Port", "Device", "Ethernet Address", "WLAN", "Thunderbolt-Bridge", "USB 10/100/1000 LAN",
        "VLAN Configurations",
    ),
    "German keys": (
        "Hardwareanschluss", "Gerät", "Ethernet-Adresse", "WLAN", "Thunderbolt-Bridge", "Thunderbolt-Ethernet",
        "VLAN-Konfigurationen",
    ),
    "French": (
        "Port matériel", "Périphérique", "Adresse Ethernet", "Wi-Fi", "Pont Thunderbolt",
        "Emplacement Thunderbolt Ethernet 1", "Configurations VLAN",
    ),
    "Japanese": (
        "ハードウェアポート", "装置", "Ethernetアドレス", "Wi-Fi", "Thunderboltブリッジ", "AX88179A", "VLAN構成",
    ),
    "Chinese": (
        "硬件端口", "设备", "以太网地址", "无线局域网", "雷雳网桥", "USB 10/100/1000 LAN", "VLAN 配置",
    ),
}  # fmt: skip


@pytest.mark.parametrize("language", LANGUAGES)
def test_media_of_a_mac_do_not_depend_on_its_language(language: str) -> None:
    ports = parse_hardware_ports(PORTS.format_map(dict(zip(WORDS, LANGUAGES[language], strict=True))))
    devices = parse_ifconfig(MAC_STUDIO)
    assert {device: macos_medium(device, ports, devices) for device in devices} == {
        "lo0": (Medium.LOOPBACK, None),
        "en0": (Medium.ETHERNET, 10e9),
        "en1": (Medium.WIFI, 866.7e6),
        "en2": (Medium.THUNDERBOLT, None),
        "en3": (Medium.THUNDERBOLT, None),
        "bridge0": (Medium.THUNDERBOLT, None),
        "vmenet0": (Medium.VIRTUAL, None),
        "bridge100": (Medium.VIRTUAL, None),
        "bridge101": (Medium.WIFI, None),  # internet sharing, over a cable and over Wi-Fi
        "en7": (Medium.ETHERNET, 1e9),
        "en9": (Medium.UNKNOWN, None),
        "utun4": (Medium.TUNNEL, None),
    }


def test_without_the_types_of_devices_a_port_named_wlan_is_wifi() -> None:
    listing = "\n".join(line for line in MAC_STUDIO.splitlines() if "type: " not in line)
    ports = parse_hardware_ports(PORTS.format_map(dict(zip(WORDS, LANGUAGES["German"], strict=True))))
    assert macos_medium("en1", ports, parse_ifconfig(listing))[0] is Medium.WIFI
    assert macos_medium("en7", ports, parse_ifconfig(listing))[0] is Medium.ETHERNET


@pytest.mark.parametrize("listing", ["", "\n\n", "Hardware Port\nDevice\n", "x: y\n\n: :\n", "\tmedia: x\n\tinet6\n"])
def test_listings_in_another_form_name_nothing(listing: str) -> None:
    assert parse_hardware_ports(listing) == {}
    assert all(macos_medium(name or "en0", {}, {})[0] is Medium.UNKNOWN for name in parse_ifconfig(listing))


# What is announced.


def test_virtual_machines_and_tunnels_are_not_announced_and_a_thunderbolt_bridge_is() -> None:
    found = [
        Interface("lo0", Medium.LOOPBACK, None, ("127.0.0.1",)),
        Interface("bridge0", Medium.THUNDERBOLT, None, ("169.254.31.7",)),
        Interface("en1", Medium.WIFI, None, ("192.0.2.11", "fe80::1")),
        Interface("utun4", Medium.TUNNEL, None, ("198.51.100.2",)),
        Interface("bridge100", Medium.VIRTUAL, None, ("192.168.64.1", "fd12:3456::1")),
    ]
    assert reachable_at(found) == ("169.254.31.7", "192.0.2.11")
    assert reachable_at(found[-1:]) == ("127.0.0.1",)


def test_many_addresses_of_one_interface_leave_room_for_those_of_others() -> None:
    many = tuple(f"2001:db8::{number}" for number in range(1, 9))
    found = [
        Interface("bridge0", Medium.THUNDERBOLT, None, ("169.254.31.7",)),
        Interface("en0", Medium.ETHERNET, 10e9, ("192.0.2.10", "192.0.2.110", *many)),
        Interface("en1", Medium.WIFI, None, ("192.0.2.11", "2001:db8:1::1")),
    ]
    announced = reachable_at(found)
    assert announced == ("169.254.31.7", "192.0.2.10", "192.0.2.110", "2001:db8::1", "192.0.2.11", "2001:db8:1::1")


def test_temporary_and_deprecated_addresses_come_last() -> None:
    fleeting = parse_ifconfig(MAC_STUDIO)["en0"].fleeting
    assert fleeting == ("2001:db8::a31d", "2001:db8::77aa")
    ours = ("fe80::10ff:fe00:5310", "2001:db8::a31d", "2001:db8::418", "169.254.9.9", "192.0.2.10")
    assert best_first(ours, fleeting) == (
        "192.0.2.10", "169.254.9.9", "2001:db8::418", "2001:db8::a31d", "fe80::10ff:fe00:5310",
    )  # fmt: skip


def test_linux_tells_which_addresses_are_temporary_or_deprecated() -> None:
    listing = """\
20010db8000000000000000000000001 02 40 00 80   eth0
20010db8000000000000000000000002 02 40 00 01   eth0
20010db8000000000000000000000003 02 40 00 20   eth0
fe800000000000000000000000000001 02 40 20 80   eth0
"""
    assert parse_if_inet6(listing) == ["2001:db8::2", "2001:db8::3"]


@pytest.mark.parametrize(
    ("host", "own"),
    [("127.0.0.1", True), ("::1", True), ("203.0.113.1", False), ("2001:db8::1", False), ("mini.local", False)],
)
def test_which_machines_are_in_a_network_of_our_own(host: str, own: bool) -> None:
    assert is_in_own_network(host) is own
