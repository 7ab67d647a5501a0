"""Forged packets of multicast DNS on the loopback: what they may cost, and that they keep nobody from starting."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from zeroconf import DNSIncoming

from hcsim.cluster.discovery import DIAL_BURST, DIALS_PER_S, MOST_DIALS, Announcement, Discovery
from hcsim.config import Cluster
from hcsim.errors import DeadlineExceeded
from hcsim.real import mdns
from hcsim.real.host import RealHost, RealOptions
from hcsim.real.mdns import (
    BURST,
    MOST_RESOLVING,
    MOST_SOURCES,
    PACKETS_PER_S,
    SERVICE_TYPE,
    SOURCE_BURST,
    SOURCE_PACKETS_PER_S,
    MdnsLan,
    PacketRateLimiter,
)
from hcsim.runtime.host import Service
from tests.real.forged import GROUP, announcement, ghost, sender

HOME = ("127.0.0.1",)
OURS = f"ours-{os.getpid()}"


async def sees(lan: MdnsLan, name: str) -> None:
    """Skip the test where multicast does not reach the loopback."""
    sightings = lan.browse()
    try:
        async with asyncio.timeout(5):
            while (await anext(sightings)).service.name != name:
                pass
    except TimeoutError:
        pytest.skip("multicast does not reach loopback on this machine")
    finally:
        await sightings.aclose()


def pointer(name: bytes) -> bytes:
    """A packet that says that there is a service of that name, and nothing about it."""
    of_type = b"\x06_hcsim\x04_tcp\x05local\x00"
    named = bytes([len(name)]) + name + of_type
    return struct.pack("!6H", 0, 0x8400, 0, 1, 0, 0) + of_type + struct.pack("!HHIH", 12, 1, 4500, len(named)) + named


async def flood(packets: Callable[[int], bytes], count: int, sources: list[str]) -> None:
    socks = [sender(source) for source in sources]
    for number in range(count):
        socks[number % len(socks)].sendto(packets(number), GROUP)
        if number % 10 == 0:
            await asyncio.sleep(0.002)
    for sock in socks:
        sock.close()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("sources", [["127.0.7.7"], [f"127.0.1.{n}" for n in range(1, 51)]], ids=["one", "many"])
def test_a_flood_of_ghosts_costs_a_bounded_number_of_dials_tasks_and_descriptors(sources: list[str]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        dials = open_now = most_open = most_tasks = most_descriptors = 0
        told: list[str] = []

        async def dial(address: str, timeout_s: float, node: str) -> str:
            nonlocal dials, open_now, most_open
            dials, open_now = dials + 1, open_now + 1
            most_open = max(most_open, open_now)
            try:
                with socket.socket():
                    await asyncio.sleep(timeout_s)
            finally:
                open_now -= 1
            raise DeadlineExceeded(f"{address} did not answer")

        async with RealHost(RealOptions("us", lan_interfaces=HOME)) as host:
            us = Announcement(OURS, "us", "aa", 1, "127.0.0.1:1")
            discovery = Discovery(host, Cluster(), us, dial, lambda node: False, told.append)
            running = asyncio.ensure_future(discovery.run())
            await sees(host.lan, us.service().name)
            before_tasks, before_descriptors = len(asyncio.all_tasks()), len(os.listdir("/dev/fd"))
            began_s = loop.time()

            async def watch() -> None:
                nonlocal most_tasks, most_descriptors
                while True:
                    most_tasks = max(most_tasks, len(asyncio.all_tasks()))
                    most_descriptors = max(most_descriptors, len(os.listdir("/dev/fd")))
                    await asyncio.sleep(0.02)

            watching = asyncio.ensure_future(watch())
            await flood(lambda n: ghost(n, "aa", f"10.9.{n // 200}.{n % 200}"), 1000, sources)
            await flood(lambda n: pointer(b"silent %d" % n), 500, sources)
            async with asyncio.timeout(30):
                while not dials:  # other programs may have used up what all sources may send
                    await flood(lambda n: ghost(5000 + dials, "aa", "10.9.9.9"), 1, sources[:1])
                    await asyncio.sleep(0.2)
            elapsed_s = loop.time() - began_s
            watching.cancel()
            running.cancel()
            await discovery.goodbye()
        assert dials > 0
        assert most_open <= MOST_DIALS
        assert dials <= DIAL_BURST + DIALS_PER_S * (elapsed_s + 1)
        assert most_tasks <= before_tasks + MOST_DIALS + MOST_RESOLVING + 4
        assert most_descriptors <= before_descriptors + MOST_DIALS + len(sources) + 2
        assert len(told) <= 20

    asyncio.run(main())


class Counter:
    def __init__(self) -> None:
        self.passed: list[str] = []

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        self.passed.append(address[0])


def test_one_source_that_floods_does_not_drown_another() -> None:
    now_s, counter = 0.0, Counter()
    sieve = PacketRateLimiter(counter, lambda: now_s)
    for number in range(10_000):
        now_s = number / 1000
        sieve.datagram_received(b"", ("10.0.0.66", 5353))
        if number % 1000 == 0:
            sieve.datagram_received(b"", ("10.0.0.2", 5353))
    assert counter.passed.count("10.0.0.2") == 10
    assert counter.passed.count("10.0.0.66") <= SOURCE_BURST + 10 * SOURCE_PACKETS_PER_S


def test_packets_from_forged_sources_are_bounded_in_all() -> None:
    now_s, counter = 0.0, Counter()
    sieve = PacketRateLimiter(counter, lambda: now_s)
    for number in range(20_000):
        now_s = number / 1000
        sieve.datagram_received(b"", (f"10.0.{number // 250}.{number % 250}", 5353))
    assert len(counter.passed) <= BURST + 20 * PACKETS_PER_S


@pytest.mark.parametrize("others", [MOST_SOURCES - 1, MOST_SOURCES])
def test_no_more_than_some_sources_are_remembered(monkeypatch: pytest.MonkeyPatch, others: int) -> None:
    """The one that is forgotten may send as much as one that is new."""
    monkeypatch.setattr(mdns, "SOURCE_BURST", 2)
    counter = Counter()
    sieve = PacketRateLimiter(counter, lambda: 0.0)
    for source in ("a", "a", "a", *map(str, range(others)), "a"):
        sieve.datagram_received(b"", (source, 5353))
    assert counter.passed.count("a") == (3 if others == MOST_SOURCES else 2)


@asynccontextmanager
async def spoofer(*, of_all: bool) -> AsyncIterator[None]:
    """A stranger that has every name that somebody asks for, or those that begin with ours alone."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ear, sender("127.0.0.1") as mouth:
        ear.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            ear.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        ear.bind(("", GROUP[1]))
        group = socket.inet_aton(GROUP[0]) + socket.inet_aton("127.0.0.1")
        ear.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
        ear.setblocking(False)

        async def lie() -> None:
            while True:
                query = DNSIncoming(await asyncio.get_running_loop().sock_recv(ear, 9000))
                asked = [question.name for question in query.questions] if query.is_query() else []
                asked += [record.alias for record in query.answers() if hasattr(record, "alias")] if asked else []
                for name in dict.fromkeys(asked):
                    label = name.removesuffix(f".{SERVICE_TYPE}")
                    if name.endswith(f".{SERVICE_TYPE}") and (of_all or label == OURS):
                        mouth.sendto(announcement(label, "10.6.6.6", 1, {}), GROUP)

        lying = asyncio.ensure_future(lie())
        try:
            yield
        finally:
            lying.cancel()


@pytest.mark.slow
@pytest.mark.parametrize("of_all", [False, True], ids=["our name", "every name"])
def test_a_machine_whose_name_a_stranger_claims_starts_under_another(of_all: bool) -> None:
    async def main() -> None:
        lan, other = MdnsLan(HOME), MdnsLan(HOME)
        try:
            await other.advertise(Service(f"{OURS}-other", "127.0.0.1:2", {}))
            await sees(other, f"{OURS}-other")
            async with asyncio.timeout(60), spoofer(of_all=of_all):
                name = await lan.advertise(Service(OURS, "127.0.0.1:1", {"rank": "1"}))
                assert name != OURS
                assert name.startswith(f"{OURS}-")
                assert await lan.advertise(Service(OURS, "127.0.0.1:1", {"rank": "2"})) == name
                sightings = other.browse()
                while (seen := await anext(sightings)).service.name != name or not seen.service.properties:
                    pass
                assert seen.service.properties == {"rank": "2"}
                await sightings.aclose()
                await lan.withdraw(OURS)
        finally:
            await lan.close()
            await other.close()

    asyncio.run(main())
