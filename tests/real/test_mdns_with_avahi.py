"""Discovery held against Avahi: what a node announces is what others see, and what others publish does no harm."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hcsim.real.keys import load_node_key, load_secret
from tests.real.avahi import Avahi
from tests.real.namespaces import Machine
from tests.real.together import Together, digest, together

pytestmark = pytest.mark.slow

long = pytest.mark.namespaces_long
CONTROL_PORT = 52415
BROWSE = """
import asyncio
from hcsim.real.mdns import MdnsLan

async def main():
    async for sighting in MdnsLan().browse():
        service = sighting.service
        print("gone" if sighting.gone else "came", service.name, service.address, service.properties, flush=True)

asyncio.run(main())
"""


@pytest.fixture
def ab(tmp_path: Path) -> Iterator[Together]:
    with together(tmp_path, "ab") as cluster:
        yield cluster


def announced(machine: Machine) -> dict[str, str]:
    """What a node on that machine says of itself, but for its boot."""
    return {
        "node": load_node_key(machine.folder).node_id,
        "namespace": load_secret(machine.folder, "home").namespace.hex(),
        "at": f"{machine.ip}|[{machine.ip6}]:{CONTROL_PORT}",
    }


def test_avahi_sees_a_node_where_it_is_and_that_it_leaves(ab: Together) -> None:
    avahi, b = Avahi(ab.lan["a"]), ab.lan["b"]
    watch = avahi.watch()
    ab.write(2, 10)
    (node,) = ab.start("b")
    expected = announced(b)
    name = f"b-{expected['node'][:8]}"
    watch.says(f"^=;eth0;IPv4;{name};")
    seen = avahi.sees(name)
    assert (seen.name, seen.host, seen.port) == (name, f"{name}.local", CONTROL_PORT)
    assert {key: value for key, value in seen.text.items() if key != "boot"} == expected
    assert re.fullmatch("[0-9a-f]+", seen.text["boot"])
    assert avahi.resolve(4, seen.host) == b.ip
    assert avahi.resolve(6, seen.host) == b.ip6
    before = len(watch.lines)
    node.send(signal.SIGINT)
    node.ends()
    for version in ("IPv4", "IPv6"):  # long before the record would run out, which takes more than an hour
        watch.says(f"^-;eth0;{version};{name};", before)


@long
def test_one_that_was_killed_stays_in_view_until_it_is_started_again(ab: Together) -> None:
    avahi = Avahi(ab.lan["a"])
    ab.write(2, 10)
    (node,) = ab.start("b")
    first = avahi.sees("b-")
    node.kill()
    assert avahi.browse() == [first]
    ab.start("b")
    second = avahi.sees("b-", boot_other_than=first.text["boot"])
    assert second.name == first.name
    assert second.text["node"] == first.text["node"]


@long
@pytest.mark.parametrize(
    ("name", "seen_as"),
    [
        ("Anna's Mac mini", r"Anna\039s\032Mac\032mini"),
        ("Küche", r"K\195\188che"),
        ("mini.example.org", "mini-example-org"),
        ("x" * 100, "x" * 54),
    ],
)
def test_names_that_people_give_their_machines_are_seen(ab: Together, name: str, seen_as: str) -> None:
    avahi, b = Avahi(ab.lan["a"]), ab.lan["b"]
    job = str(ab.write(2, 10))
    b.hcsim("run", "--real", job, "--set", f"name={name}", "--set", "device=cpu")
    seen = avahi.sees(f"{seen_as}-{announced(b)['node'][:8]}")
    assert avahi.resolve(4, seen.host) == b.ip


@long
def test_nodes_meet_through_a_record_of_avahis_among_malformed_ones(ab: Together) -> None:
    """One node announces nothing: Avahi does it for it, and gives no `at`, so that the record's own addresses count."""
    a, b = ab.lan["a"], ab.lan["b"]
    avahi, about = Avahi(a), announced(a)
    ours = f"namespace={about['namespace']}"
    nobody = f"at={a.ip}:9"
    for number, text in enumerate(
        [
            [],
            ["node", "namespace"],
            ["node=", ours],
            ["=x", "==", "node=1"],
            [b"node=\xff\xfe", ours, b"\xff=\xff"],
            ["node=2", ours, "at=no address"],
            ["node=3", ours, "at=||:::1:99999999999999"],
            ["node=4", ours, "at=\x1b[2Jhidden:52415"],
            ["node=" + "5" * 240, ours, nobody],
            ["node=6", "node=7", ours, nobody],
            [f"node={announced(b)['node']}", ours, nobody],
        ]
    ):
        avahi.publish(f"stranger {number}", 9, *text)
    avahi.publish("for a", CONTROL_PORT, f"node={about['node']}", ours)
    quiet = str(ab.write(2, 10, "discover = false"))
    first = a.hcsim("run", "--real", quiet, "--set", "name=a", "--set", "device=cpu")
    first.says("is node")
    ab.write(2, 10)
    (second,) = ab.start("b")
    assert (first.ends(), second.ends()) == (0, 0), first.text + second.text
    assert digest(first) == digest(second)
    assert "Traceback" not in second.text
    assert "\x1b" not in second.text


@long
def test_a_published_record_is_read_as_it_was_written_and_its_end_is_seen(ab: Together) -> None:
    a, b = ab.lan["a"], ab.lan["b"]
    avahi = Avahi(a)
    browser = b.start(sys.executable, "-c", BROWSE)
    published = avahi.publish("Büro. 2", 4711, "node=1", "at=10.0.0.1:5", "empty=", "flag")
    where = re.escape(f"{a.ip}|[{a.ip6}]:4711")
    said = re.escape("{'node': '1', 'at': '10.0.0.1:5', 'empty': '', 'flag': ''}")
    browser.says(rf"^came Büro\. 2 {where} {said}$")
    published.send(signal.SIGINT)
    browser.says(r"^gone Büro\. 2 ")


@long
def test_a_machine_whose_address_was_given_by_name_is_announced_where_that_leads(ab: Together) -> None:
    avahi, b = Avahi(ab.lan["a"]), ab.lan["b"]
    job = str(ab.write(2, 10))
    b.hcsim("run", "--real", job, "--set", "name=b", "--set", "device=cpu", "--set", f"at={b.ip},localhost")
    seen = avahi.sees("b-")
    assert seen.text["at"] == f"{b.ip}|localhost:{CONTROL_PORT}"
    assert avahi.resolve(4, seen.host) in (b.ip, "127.0.0.1")
