"""WebSocket and gRPC channels where they differ from TCP: addresses, security, proxies, strangers."""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import numpy as np
import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from hcsim.errors import ChannelBroken, ChannelError, ConfigError, DeadlineExceeded, PeerRefused, RemoteProtocolError
from hcsim.real import websocket
from hcsim.real.host import RealHost, RealOptions
from hcsim.real.listener import MAX_UNACCEPTED
from hcsim.real.tls import TlsFiles
from hcsim.real.websocket import WebSocketListener
from hcsim.runtime.address import parse
from hcsim.runtime.frame import Header, encode_header
from tests.real.test_real_host import Authority
from tests.training.parameter_server.bench import NAMES, Bench, alone, of_the_round, worker_on

MIB = 2**20
CARRIERS = ("ws://127.0.0.1:0", "grpc://127.0.0.1:0")
SECURE = ("wss://127.0.0.1:0", "grpc://127.0.0.1:0")


def allocate(header: Header) -> None:
    return None


def between(body: Callable[[RealHost, RealHost], Awaitable[None]], left: Any = None, right: Any = None) -> None:
    async def main() -> None:
        ours, theirs = left or RealOptions("left"), right or RealOptions("right")
        async with asyncio.timeout(30), RealHost(ours) as one, RealHost(theirs) as other:
            await body(one, other)

    asyncio.run(main())


class EcAuthority:
    """Signs members that have ECDSA keys, which every TLS library knows."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(self._sign(self._name, self._key, is_ca=True))

    def member(self, name: str) -> TlsFiles:
        key = ec.generate_private_key(ec.SECP256R1())
        files = TlsFiles(self.folder / f"{name}.crt", self.folder / f"{name}.key", self.file)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        files.cert.write_bytes(self._sign(subject, key, is_ca=False))
        plain = serialization.NoEncryption()
        form = serialization.PrivateFormat.PKCS8
        files.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
        return files

    def _sign(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, is_ca: bool) -> bytes:
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder(self._name, subject, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(hours=1))
        builder = builder.add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        if not is_ca:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("some.mac")]), critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> EcAuthority:
    return EcAuthority(tmp_path_factory.mktemp("carriers"), "home")


def secure(authority: EcAuthority, name: str) -> RealOptions:
    return RealOptions(name, tls=authority.member(name), handshake_timeout_s=2.0)


@pytest.mark.parametrize("address", CARRIERS)
def test_what_the_accepting_side_sent_before_it_closed_arrives(address: str) -> None:
    async def body(left: RealHost, right: RealHost) -> None:
        listener = await right.listen(address)
        client, server = await left.connect(listener.address), await listener.accept()
        for channel in (client, server):
            channel.limit(4 * MIB)
        for step in range(3):
            await server.send(Header(100_000, step=step), memoryview(bytes([step]) * 100_000))
        await server.close()
        for step in range(3):
            header, payload = await client.recv(allocate)
            assert (header.step, payload) == (step, bytes([step]) * 100_000)
        with pytest.raises(ChannelBroken):
            await client.recv(allocate)
        await client.close()
        await listener.close()

    between(body)


@pytest.mark.parametrize("address", CARRIERS)
def test_a_peer_that_says_a_little_again_and_again_finds_out_that_we_have_gone(address: str) -> None:
    async def body(left: RealHost, right: RealHost) -> None:
        listener = await right.listen(address)
        client, server = await left.connect(listener.address), await listener.accept()

        async def talk() -> None:
            for _ in range(100):
                await server.send(Header(10), memoryview(bytes(10)))
                await asyncio.sleep(0.04)

        await client.close()
        with pytest.raises(ChannelBroken):
            await talk()
        await server.close()
        await listener.close()

    between(body)


@pytest.mark.parametrize("address", SECURE)
def test_members_reach_each_other_over_mutual_tls(authority: EcAuthority, address: str) -> None:
    async def body(left: RealHost, right: RealHost) -> None:
        listener = await right.listen(address)
        client, server = await left.connect(listener.address), await listener.accept()
        server.limit(MIB)
        await client.send(Header(MIB), memoryview(bytes(MIB)))
        assert (await server.recv(allocate))[0].length == MIB
        await client.close()
        await server.close()
        await listener.close()

    between(body, secure(authority, "left"), secure(authority, "right"))


@pytest.mark.parametrize("address", SECURE)
def test_a_stranger_with_a_certificate_of_its_own_is_not_let_in(
    authority: EcAuthority, address: str, tmp_path: Path
) -> None:
    foreign = EcAuthority(tmp_path, "elsewhere").member("stranger")

    async def body(left: RealHost, right: RealHost) -> None:
        listener = await right.listen(address)
        with pytest.raises((ChannelError, DeadlineExceeded)):
            await left.connect(listener.address, timeout_s=1.0)
        await listener.close()

    between(body, RealOptions("stranger", tls=foreign), secure(authority, "right"))


@pytest.mark.slow
@pytest.mark.parametrize("address", SECURE)
def test_to_know_the_authority_does_not_make_a_member(authority: EcAuthority, address: str, tmp_path: Path) -> None:
    """It trusts our authority, but its own certificate is from another: the server must notice."""
    other = EcAuthority(tmp_path, "elsewhere").member("stranger")
    stranger = TlsFiles(other.cert, other.key, authority.file)

    async def body(left: RealHost, right: RealHost) -> None:
        listener = await right.listen(address)
        accepting = right.spawn(listener.accept(), name="accept")
        with pytest.raises((ChannelError, DeadlineExceeded)):
            await left.connect(listener.address, timeout_s=1.0)
        assert not accepting.done()
        await listener.close()
        await asyncio.gather(accepting, return_exceptions=True)

    between(body, RealOptions("stranger", tls=stranger), secure(authority, "right"))


@pytest.mark.parametrize("address", SECURE)
def test_plaintext_is_not_let_in_where_tls_is_spoken(authority: EcAuthority, address: str) -> None:
    async def body(left: RealHost, right: RealHost) -> None:
        listener = await right.listen(address)
        plain = listener.address.replace("wss://", "ws://")
        with pytest.raises((ChannelError, DeadlineExceeded)):
            await left.connect(plain, timeout_s=0.5)
        await listener.close()

    between(body, RealOptions("left"), secure(authority, "right"))


@pytest.mark.parametrize("address", ["ws://192.0.2.1:80/x", "grpc://192.0.2.1:80"])
def test_plaintext_stays_on_this_machine(address: str) -> None:
    async def body(left: RealHost, right: RealHost) -> None:
        with pytest.raises(ConfigError, match="plaintext"):
            await left.connect(address)
        with pytest.raises(ConfigError, match="plaintext"):
            await left.listen(address)

    between(body)


def test_tls_files_do_not_make_ws_safe(authority: EcAuthority) -> None:
    async def body(left: RealHost, right: RealHost) -> None:
        with pytest.raises(ConfigError, match="plaintext"):
            await left.connect("ws://192.0.2.1:80/")

    between(body, secure(authority, "left"))


def test_addresses_are_taken_apart_or_refused() -> None:
    assert parse("ws://a.example/x/y")[1:] == ("ws", ("a.example",), 80, "/x/y")
    assert parse("wss://a.example")[1:] == ("wss", ("a.example",), 443, "")
    assert parse("wss://[::1]/z")[1:] == ("wss", ("::1",), 443, "/z")
    assert parse("grpc://[::1]:5")[1:] == ("grpc", ("::1",), 5, "")
    assert parse("b:5")[1:] == ("tcp", ("b",), 5, "")
    for wrong in ("http://a:1", "grpc://a", "grpc://a:1/path", "ws://:1", "://a:1"):
        with pytest.raises(ConfigError, match="'"):
            parse(wrong)


def test_to_listen_with_tls_takes_certificates() -> None:
    async def body(left: RealHost, right: RealHost) -> None:
        with pytest.raises(ConfigError, match="certificate"):
            await left.listen("wss://127.0.0.1:0")

    between(body)


@pytest.mark.parametrize("address", CARRIERS)
def test_a_port_that_is_taken_is_said_to_be(address: str) -> None:
    async def body(left: RealHost, right: RealHost) -> None:
        listener = await left.listen(address)
        with pytest.raises(ConfigError, match="cannot listen"):
            await left.listen(listener.address)
        await listener.close()

    between(body)


# WebSockets.


async def reverse_proxy(prefix: str, upstream: str) -> tuple[web.AppRunner, str]:
    """As a tunnel or nginx does it: whatever comes under the prefix goes on to another server, without it."""

    async def pump(source: Any, sink: Any) -> None:
        async for message in source:
            await sink.send_bytes(message.data)
        await sink.close()

    async def forward(request: web.Request) -> web.StreamResponse:
        here = web.WebSocketResponse()
        await here.prepare(request)
        rest = request.path.removeprefix(prefix)
        async with aiohttp.ClientSession() as session, session.ws_connect(upstream + rest) as there:
            await asyncio.gather(pump(here, there), pump(there, here))
        return here

    app = web.Application()
    app.router.add_get(prefix + "/{rest:.*}", forward)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"ws://127.0.0.1:{runner.addresses[0][1]}{prefix}"


def test_a_parameter_server_stands_behind_a_reverse_proxy_with_a_prefix() -> None:
    """Three workers train over ws://, through the proxy, and get what one process gets."""

    async def body(left: RealHost, right: RealHost) -> None:
        bench = Bench(right, 12)
        listener = await bench.open("ws://127.0.0.1:0/ps")
        port = listener.address.partition("127.0.0.1:")[2].partition("/")[0]
        proxy, public = await reverse_proxy("/home/cluster", f"ws://127.0.0.1:{port}")
        workers = [worker_on(left, name) for name in NAMES]

        async def counted(version: int, loss: float) -> None:
            """Nobody looks on."""

        tasks = [
            left.spawn(worker.run(f"{public}/ps", of_the_round(worker.name), counted), name=worker.name)
            for worker in workers
        ]
        await asyncio.gather(*tasks, bench.serving)
        await proxy.cleanup()
        np.testing.assert_allclose(bench.learner.replica.parameters, alone(12), rtol=2e-5, atol=2e-6)

    between(body)


def test_a_path_that_is_not_ours_is_refused_at_once() -> None:
    async def body(left: RealHost, right: RealHost) -> None:
        listener = await right.listen("ws://127.0.0.1:0/right/path")
        with pytest.raises(PeerRefused, match="404"):
            await left.connect(listener.address.replace("/right/path", "/wrong"))
        longer = await left.connect(listener.address.replace("/right", "/prefix/right"))
        await longer.close()
        await listener.close()

    between(body)


@pytest.mark.slow
def test_a_proxy_whose_server_is_not_up_yet_is_asked_again() -> None:
    async def body(left: RealHost, right: RealHost) -> None:
        asked = 0

        async def later(request: web.Request) -> web.StreamResponse:
            nonlocal asked
            asked += 1
            raise web.HTTPBadGateway

        app = web.Application()
        app.router.add_get("/", later)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        with pytest.raises(DeadlineExceeded, match="502"):
            await left.connect(f"ws://127.0.0.1:{runner.addresses[0][1]}/", timeout_s=2.0)
        assert asked > 2
        await runner.cleanup()

    between(body)


def test_web_pages_and_browsers_are_sent_away() -> None:
    async def body(left: RealHost, right: RealHost) -> None:
        listener = await right.listen("ws://127.0.0.1:0")
        page = listener.address.replace("ws://", "http://")
        async with aiohttp.ClientSession() as session:
            async with session.get(page) as answer:
                assert answer.status == 426
            with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
                await session.ws_connect(listener.address, headers={"Origin": "https://evil.example"})
            assert caught.value.status == 403
        await listener.close()

    between(body)


def test_a_caller_that_never_asks_for_a_websocket_is_cut_off() -> None:
    async def body(left: RealHost, right: RealHost) -> None:
        listener = await right.listen("ws://127.0.0.1:0")
        port = int(listener.address.rpartition(":")[2])
        loop = asyncio.get_running_loop()
        with socket.socket() as sock:
            sock.setblocking(False)
            await loop.sock_connect(sock, ("127.0.0.1", port))
            await loop.sock_sendall(sock, b"GET / HTTP/1.1\r\n")
            assert await loop.sock_recv(sock, 100) == b""
        await listener.close()

    between(body, right=RealOptions("right", handshake_timeout_s=0.2))


@pytest.mark.parametrize(
    ("send", "error"),
    [
        (lambda ws: ws.send_str("hello"), ChannelBroken),
        (lambda ws: ws.send_bytes(b"hello"), RemoteProtocolError),
        (lambda ws: ws.send_bytes(bytes(MIB)), ChannelBroken),
        (lambda ws: ws.send_bytes(encode_header(Header(70_000))), RemoteProtocolError),
        (lambda ws: ws.send_bytes(encode_header(Header(2)) + b"abc"), RemoteProtocolError),
    ],
    ids=["text", "no header", "a large message", "a large frame", "too much"],
)
def test_what_no_correct_peer_sends_over_a_websocket_ends_the_channel(send: Any, error: type[Exception]) -> None:
    async def body(left: RealHost, right: RealHost) -> None:
        listener = await right.listen("ws://127.0.0.1:0")
        async with aiohttp.ClientSession() as session, session.ws_connect(listener.address) as ws:
            server = await listener.accept()
            await send(ws)
            with pytest.raises(error):
                await server.recv(allocate)
            await server.close()
        await listener.close()

    between(body)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8")
def test_silent_callers_do_not_shut_others_out_of_a_websocket_listener() -> None:
    """Of too many the oldest goes, of the address that has the most."""

    async def body(left: RealHost, right: RealHost) -> None:
        listener = await right.listen("ws://127.0.0.1:0")
        assert isinstance(listener, WebSocketListener)
        port = int(listener.address.rpartition(":")[2])
        with ExitStack() as stack:

            async def call(source: str) -> socket.socket:
                connecting = socket.create_connection(("127.0.0.1", port), source_address=(source, 0))
                for _ in range(10):  # by then it has been taken in
                    await asyncio.sleep(0)
                return stack.enter_context(connecting)

            single = await call("127.0.0.1")
            crowd = [await call("127.0.0.2") for _ in range(MAX_UNACCEPTED - 1)]
            for _ in range(2):
                near = await left.connect(listener.address, timeout_s=10)
                far = await listener.accept()
                await far.close()
                await near.close()
            crowd[0].settimeout(10)
            assert crowd[0].recv(1) == b""
            single.setblocking(False)
            with pytest.raises(BlockingIOError):
                single.recv(1)
        await listener.close()

    between(body, RealOptions("left"), RealOptions("right", handshake_timeout_s=600))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8")
def test_who_is_in_its_tls_handshake_is_not_sent_away_for_newer_callers(authority: EcAuthority) -> None:
    files = authority.member("early")
    context = ssl.create_default_context(cafile=str(files.ca))
    context.check_hostname = False
    context.load_cert_chain(files.cert, files.key)

    async def body(left: RealHost, right: RealHost) -> None:
        listener = await right.listen("wss://127.0.0.1:0")
        port = int(listener.address.rpartition(":")[2])

        def call(source: str) -> socket.socket:
            return socket.create_connection(("127.0.0.1", port), source_address=(source, 0), timeout=10)

        with ExitStack() as stack:
            early = stack.enter_context(call("127.0.0.1"))
            for _ in range(MAX_UNACCEPTED + 8):
                stack.enter_context(call("127.0.0.2"))
                await asyncio.sleep(0.002)  # it is taken in

            def speak() -> bytes:
                with context.wrap_socket(early) as tls:
                    tls.sendall(
                        b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
                    )
                    return tls.recv(12)

            assert await asyncio.to_thread(speak) == b"HTTP/1.1 101"
            await (await listener.accept()).close()
        await listener.close()

    between(body, right=RealOptions("right", tls=authority.member("right"), handshake_timeout_s=600))


def test_an_idle_websocket_is_kept_alive_by_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "PING_S", 0.05)

    async def body(left: RealHost, right: RealHost) -> None:
        listener = await right.listen("ws://127.0.0.1:0")
        async with aiohttp.ClientSession() as session, session.ws_connect(listener.address, autoping=False) as ws:
            server = await listener.accept()
            assert (await ws.receive()).type is aiohttp.WSMsgType.PING
            await server.close()
        await listener.close()

    between(body)


# gRPC.


def test_keys_that_grpc_does_not_know_are_refused_before_anybody_is_called(tmp_path: Path) -> None:
    async def body(left: RealHost, right: RealHost) -> None:
        for use in (left.listen, left.connect):
            with pytest.raises(ConfigError, match="Ed25519"):
                await use("grpc://127.0.0.1:0")

    between(body, RealOptions("left", tls=Authority(tmp_path, "home").member("left")))


def test_a_grpc_server_that_is_none_of_ours_is_told_apart() -> None:
    async def body(left: RealHost, right: RealHost) -> None:
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        with pytest.raises(PeerRefused, match="none of ours"):
            await left.connect(f"grpc://127.0.0.1:{port}")
        await server.stop(None)

    between(body)
