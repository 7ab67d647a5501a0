"""Crowds of strangers at the ports for metrics, WebSockets, gRPC, gradients and the coordinator: what they may cost."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import aiohttp
import pytest

from hcsim.cluster.coordinator.messages import CoordinatorPolicy
from hcsim.cluster.coordinator.service import FIRST_LIMIT_BYTES, LIMITS, Coordinator
from hcsim.identity.keys import ClusterSecret, NodeKey
from hcsim.real import http
from hcsim.real.host import RealHost, RealOptions
from hcsim.real.http import MOST_CONNECTIONS, serving_metrics
from hcsim.real.listener import MAX_UNACCEPTED
from hcsim.real.tls import ClusterTls
from hcsim.runtime.address import split_address
from hcsim.runtime.frame import Header, Kind, encode_header
from hcsim.telemetry.metrics import HostMetrics
from hcsim.transport.admission_queue import MAX_UNADMITTED

FEW = 256
CROWD = 400
SECRET = ClusterSecret(bytes(16))


@contextmanager
def few_descriptors() -> Iterator[None]:
    """As many as a Mac allows by default, counted from those that are open now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = max(map(int, os.listdir("/dev/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + FEW, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


CALLER = """
import resource, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
host, port, count, said = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), bytes.fromhex(sys.argv[4])
socks = []
for _ in range(count):
    sock = socket.socket()
    sock.settimeout(1)
    try:
        sock.connect((host, port))
        sock.sendall(said)
    except OSError:
        pass
    socks.append(sock)
print("called", flush=True)
sys.stdin.read()
"""


async def crowd(address: str, said: bytes = b"", count: int = CROWD) -> asyncio.subprocess.Process:
    """Connections from another process, which stay."""
    host, port = split_address(address.rpartition("/")[2])
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CALLER, host, str(port), str(count), said.hex(), stdin=pipe, stdout=pipe,
    )  # fmt: skip
    assert process.stdout is not None
    assert await process.stdout.readline() == b"called\n"
    return process


async def disperse(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    await process.wait()


def descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def besieged(body: Callable[[], Awaitable[None]]) -> None:
    """Run it; the event loop has nothing to complain about."""

    async def main() -> None:
        complaints: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        async with asyncio.timeout(60):
            await body()
        assert complaints == []

    asyncio.run(main())


async def scraped(address: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}/metrics") as response:
        assert response.status == 200
        return await response.text()


@pytest.mark.slow
def test_idle_connections_to_the_metrics_port_are_bounded_and_a_scrape_gets_through() -> None:
    async def body() -> None:
        with few_descriptors():
            async with serving_metrics(HostMetrics(), "127.0.0.1:0") as address:
                before = descriptors()
                strangers = await crowd(address)
                assert descriptors() <= before + MOST_CONNECTIONS + 8
                await scraped(address)
                await disperse(strangers)

    besieged(body)


def test_a_connection_to_the_metrics_port_that_asks_for_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "LONGEST_S", 0.1)

    async def body() -> None:
        async with serving_metrics(HostMetrics(), "127.0.0.1:0") as address:
            reader, writer = await asyncio.open_connection(*split_address(address))
            writer.write(b"GET /metrics HTTP/1.1\r\n")
            assert await reader.read() == b""
            writer.close()

    besieged(body)


@pytest.mark.parametrize("where", ["metrics", "ws"])
def test_malformed_http_gets_one_line_and_no_traceback(where: str, caplog: pytest.LogCaptureFixture) -> None:
    bad = [
        b"GET /metrics HTTP/1.1\r\nHost: x\r\n\x00\x1b[2J: y\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00" * 20,
        b"GET " + b"/" * 20000 + b" HTTP/1.1\r\n\r\n",
        b"POST /metrics HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"GET /metrics HTTP/9.9\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    ]

    async def bother(address: str) -> None:
        for data in bad * 3:
            reader, writer = await asyncio.open_connection(*split_address(address))
            writer.write(data)
            writer.write_eof()
            await reader.read()
            writer.close()

    async def body() -> None:
        if where == "metrics":
            async with serving_metrics(HostMetrics(), "127.0.0.1:0") as address:
                await bother(address)
                await scraped(address)
        else:
            async with RealHost(RealOptions("host", handshake_timeout_s=1.0)) as host:
                listener = await host.listen("ws://127.0.0.1:0")
                await bother(listener.address.rpartition("/")[2])

    with caplog.at_level(logging.WARNING):
        besieged(body)
    assert len(caplog.records) <= 1
    assert all(record.exc_info is None and "\x1b" not in record.getMessage() for record in caplog.records)


@pytest.mark.slow
def test_idle_connections_to_a_websocket_port_are_bounded_and_a_member_gets_through() -> None:
    async def body() -> None:
        with few_descriptors():
            async with RealHost(RealOptions("host")) as host, RealHost(RealOptions("friend")) as friend:
                listener = await host.listen("ws://127.0.0.1:0")
                before = descriptors()
                strangers = await crowd(listener.address)
                assert descriptors() <= before + MAX_UNACCEPTED + 8
                channel = await friend.connect(listener.address)
                await (await listener.accept()).close()
                await channel.close()
                await disperse(strangers)
                await listener.close()

    besieged(body)


def test_idle_connections_to_a_grpc_port_are_bounded() -> None:
    pytest.importorskip("grpc")

    async def body() -> None:
        with few_descriptors():
            async with RealHost(RealOptions("host")) as host:
                listener = await host.listen("grpc://127.0.0.1:0")
                before = descriptors()
                strangers = await crowd(listener.address)
                while descriptors() > before + 2 * MAX_UNACCEPTED + 16:  # noqa: ASYNC110 - gRPC cuts them off by itself
                    await asyncio.sleep(0.05)
                await disperse(strangers)
                await listener.close()

    besieged(body)


def client_hello() -> bytes:
    written = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), written, server_hostname="x").do_handshake()
    return written.read()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8")
@pytest.mark.parametrize("said", [b"", client_hello()[:100]], ids=["silent", "half-open"])
def test_strangers_in_their_tls_handshake_are_bounded_and_a_member_gets_through(said: bytes) -> None:
    async def body() -> None:
        keys = [NodeKey(bytes([number]) * 32) for number in (1, 2)]
        options = [
            RealOptions(name, tls=ClusterTls(key, SECRET), shared_memory=False, handshake_timeout_s=600.0)
            for name, key in zip(("host", "friend"), keys, strict=True)
        ]
        with few_descriptors():
            async with RealHost(options[0]) as host, RealHost(options[1]) as friend:
                listener = await host.listen("127.0.0.1:0")
                before = descriptors()
                with ExitStack() as stack:
                    for source in ("127.0.0.2", "127.0.0.3"):  # each as many as one address may have
                        for _ in range(32):
                            place = split_address(listener.address)
                            sock = socket.create_connection(place, source_address=(source, 0))
                            sock.sendall(said)
                            stack.enter_context(sock)
                            await asyncio.sleep(0.001)
                    assert descriptors() <= before + 64 + 64 + 8  # both ends are here
                    channel = await friend.connect(listener.address, timeout_s=20.0)
                    taken = await listener.accept()
                    assert taken.identity == keys[1].node_id
                    await channel.close()
                    await taken.close()
                await listener.close()

    besieged(body)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux how much memory is resident")
def test_a_silent_caller_costs_the_coordinator_little_memory_and_is_bounded() -> None:
    async def body() -> None:
        async with RealHost(RealOptions("host", shared_memory=False)) as host:
            listener = await host.listen("127.0.0.1:0")
            coordinator = Coordinator(host, CoordinatorPolicy(workers=2))
            coordinator.open(listener)
            before, resident = descriptors(), resident_bytes()
            strangers = await crowd(listener.address)
            await asyncio.sleep(0.2)
            assert descriptors() <= before + MAX_UNADMITTED + 72
            assert resident_bytes() - resident < (MAX_UNADMITTED + 64) * 256 * 1024
            await disperse(strangers)
            await coordinator.close()
            await listener.close()
            while descriptors() > before:  # noqa: ASYNC110 - the last ones close beside us
                await asyncio.sleep(0.05)

    besieged(body)


def test_a_caller_that_has_not_registered_cannot_announce_a_large_frame_to_the_coordinator() -> None:
    async def body() -> None:
        async with RealHost(RealOptions("host", shared_memory=False)) as host:
            listener = await host.listen("127.0.0.1:0")
            coordinator = Coordinator(host, CoordinatorPolicy(workers=2))
            coordinator.open(listener)
            reader, writer = await asyncio.open_connection(*split_address(listener.address))
            assert LIMITS.max_frame_bytes > FIRST_LIMIT_BYTES
            writer.write(encode_header(Header(LIMITS.max_frame_bytes, Kind.CONTROL)))
            async with asyncio.timeout(4):  # less than a caller has to register
                while await reader.read(1000):
                    pass
            writer.close()
            await coordinator.close()

    besieged(body)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
