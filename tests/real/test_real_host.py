"""Real hosts: addresses, security, interfaces, the neighbourhood."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from hcsim.errors import ChannelBroken, ChannelError, ConfigError, DeadlineExceeded, PeerRefused
from hcsim.real import host as real_host
from hcsim.real.host import RealHost, RealOptions
from hcsim.real.tls import Tls, TlsFiles
from hcsim.runtime.frame import Header
from hcsim.runtime.host import Service, Sighting
from tests.real.descriptors import descriptor_to

MIB = 2**20


def allocate(header: Header) -> None:
    return None


def between(left: RealOptions, right: RealOptions, body: Callable[[RealHost, RealHost], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), RealHost(left) as one, RealHost(right) as other:
            await body(one, other)

    asyncio.run(main())


class Authority:
    """A certificate authority that signs members."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = Ed25519PrivateKey.generate()
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(self._sign(self._name, self._key, is_ca=True))

    def member(self, name: str) -> TlsFiles:
        key = Ed25519PrivateKey.generate()
        cert_file, key_file = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        cert_file.write_bytes(self._sign(subject, key, is_ca=False))
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return TlsFiles(cert_file, key_file, self.file)

    def _sign(self, subject: x509.Name, key: Ed25519PrivateKey, *, is_ca: bool) -> bytes:
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .sign(self._key, None)
        )
        return certificate.public_bytes(serialization.Encoding.PEM)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"), "home")


def secure(authority: Authority, name: str, **options: Any) -> RealOptions:
    return RealOptions(name, tls=authority.member(name), shared_memory=False, **options)


@pytest.mark.parametrize("sizes", [[0, 1, 4096, 16384 - 56, 16384, 70_000], [3 * MIB + 1]])
def test_frames_cross_tls_in_both_directions_at_once(authority: Authority, sizes: list[int]) -> None:
    async def body(left: RealHost, right: RealHost) -> None:
        listener = await right.listen("127.0.0.1:0")
        ends = [await left.connect(listener.address), await listener.accept()]

        async def send(channel):
            for step, size in enumerate(sizes * 5):
                await channel.send(Header(size, step=step), memoryview(bytes([step]) * size))

        async with asyncio.TaskGroup() as group:
            for channel in ends:
                channel.limit(4 * MIB)
                group.create_task(send(channel))
            for channel in ends:
                for step, size in enumerate(sizes * 5):
                    header, payload = await channel.recv(allocate)
                    assert header.step == step
                    assert bytes(payload) == bytes([step]) * size
        for channel in ends:
            await channel.close()

    between(secure(authority, "left"), secure(authority, "right"), body)


@pytest.mark.parametrize("small", [0, 1])
def test_what_tls_has_decrypted_already_is_not_waited_for(authority: Authority, small: int) -> None:
    sizes = [100] * small + [10_000] * 8  # so that a turn ends between a header and its payload

    async def body(left: RealHost, right: RealHost) -> None:
        listener = await right.listen("127.0.0.1:0")
        client, server = await left.connect(listener.address), await listener.accept()
        for size in sizes:
            await client.send(Header(size), memoryview(bytes(size)))
        assert [(await server.recv(allocate))[0].length for _ in sizes] == sizes
        await client.close()
        await server.close()

    between(secure(authority, "left"), secure(authority, "right"), body)


def test_data_sent_over_tls_before_a_close_arrives(authority: Authority) -> None:
    async def body(left: RealHost, right: RealHost) -> None:
        listener = await right.listen("127.0.0.1:0")
        client, server = await left.connect(listener.address), await listener.accept()
        await client.send(Header(4), memoryview(b"last"))
        await client.close()
        assert (await server.recv(allocate))[1] == b"last"
        with pytest.raises(ChannelBroken, match="between two frames"):
            await server.recv(allocate)

    between(secure(authority, "left"), secure(authority, "right"), body)


def test_a_server_of_a_foreign_authority_is_refused(authority: Authority, tmp_path: Path) -> None:
    foreign = RealOptions("foreign", tls=Authority(tmp_path, "elsewhere").member("foreign"))

    async def body(left: RealHost, right: RealHost) -> None:
        listener = await right.listen("127.0.0.1:0")
        with pytest.raises(PeerRefused, match="certificate"):
            await left.connect(listener.address)

    between(secure(authority, "left"), foreign, body)


def test_a_client_of_a_foreign_authority_is_refused(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path, "elsewhere").member("foreign")
    foreign = RealOptions("foreign", tls=TlsFiles(other.cert, other.key, authority.file))

    async def body(left: RealHost, right: RealHost) -> None:
        listener = await right.listen("127.0.0.1:0")
        client = await left.connect(listener.address)  # in TLS 1.3 the client is done first
        with pytest.raises(PeerRefused, match="refused"):
            await client.recv(allocate)

    between(foreign, secure(authority, "right"), body)


@pytest.mark.slow
def test_a_plaintext_client_is_dropped_by_a_tls_port_and_holds_nobody_up(authority: Authority) -> None:
    async def body(left: RealHost, right: RealHost) -> None:
        loop = asyncio.get_running_loop()
        listener = await right.listen("127.0.0.1:0")
        host, _, port = listener.address.rpartition(":")
        with socket.socket() as silent, socket.socket() as talking:
            for stranger in (silent, talking):
                stranger.setblocking(False)
                await loop.sock_connect(stranger, (host, int(port)))
            await loop.sock_sendall(talking, b"hello, is this plaintext?" * 10)
            client, server = await left.connect(listener.address), await listener.accept()
            await client.send(Header(4), memoryview(b"data"))
            assert (await server.recv(allocate))[1] == b"data"
            assert await end_of(silent) == b""
            await end_of(talking)
        await client.close()
        await server.close()

    async def end_of(sock: socket.socket) -> bytes:
        """What the stream ends with: nothing, or a TLS alert, or a reset."""
        received = b""
        try:
            while chunk := await asyncio.get_running_loop().sock_recv(sock, 1000):
                received += chunk
        except ConnectionResetError:
            pass
        return received

    between(secure(authority, "left"), secure(authority, "right", handshake_timeout_s=2.0), body)


@pytest.mark.slow
def test_a_tls_client_gives_up_on_a_plaintext_server(authority: Authority) -> None:
    async def body(left: RealHost, right: RealHost) -> None:
        listener = await right.listen("127.0.0.1:0")

        async def serve() -> None:
            while True:
                channel = await listener.accept()
                with pytest.raises(ChannelError):
                    await channel.recv(allocate)

        right.spawn(serve(), name="serve")
        with pytest.raises((PeerRefused, DeadlineExceeded), match=r"TLS|reset"):
            await left.connect(listener.address, timeout_s=2.0)

    between(secure(authority, "left"), RealOptions("right"), body)


@pytest.mark.parametrize("which", ["cert", "key", "ca"])
@pytest.mark.parametrize("damage", ["missing", "garbage"])
def test_a_tls_file_that_cannot_be_used_is_named(authority: Authority, tmp_path: Path, which: str, damage: str) -> None:
    bad = tmp_path / f"{which}.pem"
    if damage == "garbage":
        bad.write_text("this is no certificate")
    good = authority.member("left")
    files = TlsFiles(**{**{part: getattr(good, part) for part in ("cert", "key", "ca")}, which: bad})
    with pytest.raises(ConfigError, match=str(bad)):
        RealHost(RealOptions("left", tls=files))


def test_a_key_that_belongs_to_another_certificate_is_refused(authority: Authority) -> None:
    one, other = authority.member("one"), authority.member("other")
    with pytest.raises(ConfigError, match=r"other\.key"):
        RealHost(RealOptions("left", tls=TlsFiles(one.cert, other.key, one.ca)))


def test_a_name_that_cannot_be_one_is_a_mistake_of_configuration() -> None:
    async def body(left: RealHost, right: RealHost) -> None:
        for attempt in (left.connect, left.listen):
            with pytest.raises(ConfigError, match=r"a\.\.b"):
                await attempt("a..b:0")

    between(RealOptions("left"), RealOptions("right"), body)


# TCP cannot dial these, so that nothing leaves the machine even if this test fails.
@pytest.mark.parametrize("address", ["0.0.0.0:0", "255.255.255.255:80", "[ff02::1]:80"])
def test_plaintext_is_refused_off_loopback_and_the_error_says_what_to_do(address: str) -> None:
    async def body(left: RealHost, right: RealHost) -> None:
        for attempt in (left.connect, left.listen):
            with pytest.raises(ConfigError, match="insecure"):
                await attempt(address)

    between(RealOptions("left"), RealOptions("right"), body)


def test_plaintext_off_loopback_can_be_allowed() -> None:
    async def body(left: RealHost, right: RealHost) -> None:
        listener = await left.listen("0.0.0.0:0")
        assert listener.address.startswith("0.0.0.0:")

    between(RealOptions("left", insecure=True), RealOptions("right"), body)


def test_a_port_in_use_is_a_mistake_of_configuration() -> None:
    async def body(left: RealHost, right: RealHost) -> None:
        listener = await left.listen("127.0.0.1:0")
        with pytest.raises(ConfigError, match="in use"):
            await right.listen(listener.address)

    between(RealOptions("left"), RealOptions("right"), body)


def has_ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6_loopback(), reason="this machine has no IPv6 loopback")
@pytest.mark.parametrize("everywhere", ["0.0.0.0", "[::]"])
def test_a_port_in_use_at_one_address_is_named_by_who_would_listen_everywhere(everywhere: str) -> None:
    async def body(left: RealHost, right: RealHost) -> None:
        port = (await left.listen("127.0.0.1:0")).address.rpartition(":")[2]
        with pytest.raises(ConfigError, match=r"already in use at 127\.0\.0\.1: does hcsim run here already\?"):
            await right.listen(f"{everywhere}:{port}")

    between(RealOptions("left"), RealOptions("right", insecure=True), body)


def test_ipv6_addresses_work() -> None:
    async def body(left: RealHost, right: RealHost) -> None:
        listener = await right.listen("[::1]:0")
        assert listener.address.startswith("[::1]:")
        client, server = await left.connect(listener.address), await listener.accept()
        await client.send(Header(4), memoryview(b"data"))
        assert (await server.recv(allocate))[1] == b"data"
        assert client.peer == listener.address
        await client.close()
        await server.close()

    between(RealOptions("left"), RealOptions("right"), body)


@pytest.mark.slow
def test_an_address_that_swallows_calls_holds_up_none_of_the_others(addresses) -> None:
    """Though it is the last one, where the first answers only later."""
    port = int(addresses(1)[0].rpartition(":")[2])

    async def main() -> None:
        with ExitStack() as stack:
            full = stack.enter_context(socket.create_server(("::1", port), family=socket.AF_INET6, backlog=0))
            for _ in range(4):
                caller = stack.enter_context(socket.socket(socket.AF_INET6))
                caller.setblocking(False)
                caller.connect_ex(full.getsockname())
            async with RealHost(RealOptions("one")) as one, RealHost(RealOptions("other")) as other:
                connecting = one.spawn(one.connect(f"127.0.0.1|[::1]:{port}", timeout_s=20), name="connect")
                await asyncio.sleep(0.1)  # it has begun to wait for the last
                listener = await other.listen(f"127.0.0.1:{port}")
                channel = await connecting
                assert channel.peer == listener.address
                await channel.close()

    asyncio.run(main())


@pytest.mark.parametrize("addresses_tried", ["127.0.0.1|[::1]", "[::1]|127.0.0.1"])
def test_an_address_where_no_handshake_is_answered_holds_up_none_of_the_others(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, addresses_tried: str
) -> None:
    """The one that answers is tried first the next time."""
    monkeypatch.setattr(real_host, "NEXT_PLACE_S", 0.001)

    async def body(left: RealHost, right: RealHost) -> None:
        listener = await right.listen("127.0.0.1:0")
        port = int(listener.address.rpartition(":")[2])
        with socket.create_server(("::1", port), family=socket.AF_INET6) as silent:
            silent.setblocking(False)
            for time in range(2):
                channel = await left.connect(f"{addresses_tried}:{port}", timeout_s=20)
                assert channel.peer == listener.address
                await channel.close()
                if time == 0:
                    monkeypatch.setattr(real_host, "NEXT_PLACE_S", 20.0)
                    with suppress(BlockingIOError):
                        while True:
                            silent.accept()[0].close()
            with pytest.raises(BlockingIOError):
                silent.accept()

    tls = authority.member("one")
    between(RealOptions("left", tls=tls, shared_memory=False), RealOptions("right", tls=tls), body)


@pytest.mark.slow
def test_an_address_that_answers_late_is_asked_again_while_another_keeps_silent(
    monkeypatch: pytest.MonkeyPatch, addresses: Callable[[int], list[str]]
) -> None:
    """The attempt at the silent one runs on, and those at the other do not wait for it."""
    monkeypatch.setattr(real_host, "NEXT_PLACE_S", 0.3)
    port = int(addresses(1)[0].rpartition(":")[2])
    tried: list[str] = []

    async def body(left: RealHost, right: RealHost) -> None:
        loop = asyncio.get_running_loop()
        connect = loop.sock_connect

        async def connected(sock: socket.socket, sockaddr: Any) -> None:
            tried.append(sockaddr[0])
            if sockaddr[0] == "::1":
                await asyncio.Event().wait()
            if len(tried) <= 7:
                raise ConnectionRefusedError
            await connect(sock, sockaddr)

        monkeypatch.setattr(loop, "sock_connect", connected)
        listener = await right.listen(f"127.0.0.1:{port}")
        channel = await left.connect(f"[::1]|127.0.0.1:{port}", timeout_s=15)
        assert channel.peer == listener.address
        assert tried.count("::1") == 1
        await channel.close()

    between(RealOptions("left", shared_memory=False), RealOptions("right"), body)


def test_an_address_that_answers_slowly_is_not_cut_off_for_another_that_does_not_answer(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real_host, "NEXT_PLACE_S", 0.05)
    handshakes = 0

    async def body(left: RealHost, right: RealHost) -> None:
        listener = await right.listen("127.0.0.1:0")
        port = int(listener.address.rpartition(":")[2])
        handshake = Tls.handshake

        async def slow(tls: Tls, sock: socket.socket, *, server_side: bool) -> Any:
            nonlocal handshakes
            if server_side:
                handshakes += 1
                await asyncio.sleep(0.5)
            return await handshake(tls, sock, server_side=server_side)

        monkeypatch.setattr(Tls, "handshake", slow)
        with socket.create_server(("::1", port), family=socket.AF_INET6):
            channel = await left.connect(f"[::1]|127.0.0.1:{port}", timeout_s=15)
            assert channel.peer == listener.address
            assert handshakes == 1
            await channel.close()

    between(secure(authority, "left"), secure(authority, "right"), body)


@pytest.mark.parametrize("cancelled", [False, True])
def test_attempts_at_several_addresses_leave_nothing_behind(authority: Authority, cancelled: bool) -> None:
    def open_files() -> set[str]:
        return set(os.listdir("/dev/fd"))

    async def body(left: RealHost, right: RealHost) -> None:
        with socket.create_server(("127.0.0.1", 0)) as one:
            port = one.getsockname()[1]
            with socket.create_server(("::1", port), family=socket.AF_INET6):
                before = len(open_files()), len(asyncio.all_tasks())
                address = f"127.0.0.1|[::1]:{port}"
                calls = [asyncio.create_task(left.connect(address, timeout_s=0.5 + n / 50)) for n in range(20)]
                if cancelled:
                    for call in calls:
                        await asyncio.sleep(0.003)
                        call.cancel()
                outcomes = await asyncio.gather(*calls, return_exceptions=True)
                expected = asyncio.CancelledError if cancelled else DeadlineExceeded
                assert {type(outcome) for outcome in outcomes} == {expected}
                assert (len(open_files()), len(asyncio.all_tasks())) == before

    between(secure(authority, "left"), secure(authority, "right"), body)


@pytest.mark.slow
@pytest.mark.parametrize("addresses_tried", ["127.0.0.1|[::1]", "[::1]|127.0.0.1"])
def test_a_certificate_that_is_not_trusted_is_told_whatever_the_other_addresses_say(
    authority: Authority, tmp_path: Path, addresses_tried: str
) -> None:
    async def body(left: RealHost, right: RealHost) -> None:
        listener = await right.listen("127.0.0.1:0")
        port = listener.address.rpartition(":")[2]
        with pytest.raises(PeerRefused, match="our authority did not sign its certificate"):
            await left.connect(f"{addresses_tried}:{port}", timeout_s=1)

    foreign = Authority(tmp_path, "foreign").member("two")
    between(RealOptions("left", tls=authority.member("one")), RealOptions("right", tls=foreign), body)


def test_a_certificate_that_is_not_trusted_ends_the_attempts_at_once_only_if_no_other_address_may_answer(
    authority: Authority, tmp_path: Path
) -> None:
    foreign = Authority(tmp_path, "foreign").member("two")

    async def body(left: RealHost, right: RealHost) -> None:
        async with RealHost(RealOptions("foreign", tls=foreign, shared_memory=False)) as stranger:
            port = (await stranger.listen("127.0.0.1:0")).address.rpartition(":")[2]
            address = f"127.0.0.1|[::1]:{port}"
            connecting = asyncio.create_task(left.connect(address, timeout_s=15))
            await asyncio.sleep(0.1)  # it has met the stranger
            listener = await right.listen(f"[::1]:{port}")
            channel = await connecting
            assert channel.peer == listener.address
            await channel.close()
            await listener.close()
            await stranger.listen(f"[::1]:{port}")
            with pytest.raises(PeerRefused, match="our authority did not sign its certificate"):
                await left.connect(address, timeout_s=600)

    between(secure(authority, "left"), secure(authority, "right"), body)


def test_nagle_is_off_at_both_ends() -> None:
    async def body(left: RealHost, right: RealHost) -> None:
        listener = await right.listen("127.0.0.1:0")
        for channel in (await left.connect(listener.address), await listener.accept()):
            with socket.socket(fileno=os.dup(descriptor_to(channel.peer))) as sock:
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            await channel.close()

    between(RealOptions("left"), RealOptions("right", shared_memory=False), body)


def test_closing_a_host_ends_its_tasks() -> None:
    async def main() -> None:
        host = RealHost(RealOptions("host"))
        task = host.spawn(asyncio.Event().wait(), name="for ever")
        await host.close()
        assert task.cancelled()

    asyncio.run(main())


@pytest.mark.slow
def test_a_real_host_does_not_load_torch() -> None:
    check = "import sys, hcsim.real.host; sys.exit('torch' in sys.modules or 'zeroconf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=240, check=False).returncode == 0


@pytest.mark.slow
def test_services_come_into_view_change_and_leave() -> None:
    name = f"hcsim-test-{os.getpid()}"  # there may be others on this machine

    async def body(left: RealHost, right: RealHost) -> None:
        sightings = right.lan.browse()

        async def sighted() -> Sighting:
            while (seen := await anext(sightings)).service.name != name:
                pass
            return seen

        await left.lan.advertise(Service(name, "127.0.0.1:4000", {"rank": "1"}))
        try:
            first = await asyncio.wait_for(sighted(), 5)
        except TimeoutError:
            await sightings.aclose()
            pytest.skip("multicast does not reach loopback on this machine")
        assert first.service == Service(name, "127.0.0.1:4000", {"rank": "1"})
        assert not first.gone
        await left.lan.advertise(Service(name, "127.0.0.1:4000", {"rank": "2"}))
        assert (await sighted()).service.properties == {"rank": "2"}
        await left.lan.withdraw(name)
        assert (await sighted()).gone
        await sightings.aclose()

    between(
        RealOptions("left", lan_interfaces=("127.0.0.1",)), RealOptions("right", lan_interfaces=("127.0.0.1",)), body
    )


HOLDS = """
import asyncio, sys
from pathlib import Path
from hcsim.real.host import RealHost, RealOptions

async def main():
    async with RealHost(RealOptions("first", state=Path(sys.argv[1]))) as host:
        host.store.save("view", b"theirs")
        print("here", flush=True)
        sys.stdin.read()

asyncio.run(main())
"""


def announcement(name: bytes) -> bytes:
    """A packet that says that there is a service of ours of that name, and nothing else about it."""
    of_type = b"".join(bytes([len(label)]) + label for label in (b"_hcsim", b"_tcp", b"local")) + b"\0"
    named = bytes([len(name)]) + name + of_type
    return struct.pack("!6H", 0, 0x8400, 0, 1, 0, 0) + of_type + struct.pack("!HHIH", 12, 1, 4500, len(named)) + named


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [[b"control\x01"], [b"x" * 63], [b"ghost %d" % number for number in range(20)]],
    ids=["bad", "long", "many"],
)
def test_names_that_nobody_answers_for_neither_end_nor_hold_up_the_search(names: list[bytes]) -> None:
    async def body(left: RealHost, right: RealHost) -> None:
        sightings = right.lan.browse()

        async def sighted(name: str) -> None:
            while (await anext(sightings)).service.name != name:
                pass

        first, second = (f"hcsim-test-{os.getpid()}-{number}" for number in range(2))
        await left.lan.advertise(Service(first, "127.0.0.1:4000", {}))
        try:
            await asyncio.wait_for(sighted(first), 5)
        except TimeoutError:
            await sightings.aclose()
            pytest.skip("multicast does not reach loopback on this machine")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            stranger.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
            for name in names:
                stranger.sendto(announcement(name), ("224.0.0.251", 5353))
        await left.lan.advertise(Service(second, "127.0.0.1:4001", {}))
        await sighted(second)
        await sightings.aclose()

    at_home = ("127.0.0.1",)
    between(RealOptions("left", lan_interfaces=at_home), RealOptions("right", lan_interfaces=at_home), body)


def test_a_folder_of_state_belongs_to_one_process_until_it_ends(tmp_path: Path) -> None:
    def second() -> bytes | None:
        async def main() -> bytes | None:
            async with RealHost(RealOptions("second", state=tmp_path)) as host:
                found = host.store.load("view")
                await host.close()  # twice
                return found

        return asyncio.run(main())

    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdin=pipe, stdout=pipe) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"here\n"
        with pytest.raises(ConfigError, match="another process keeps its state there"):
            second()
        first.kill()
    assert second() == b"theirs"
    assert second() == b"theirs"  # we let go of it


def test_a_folder_of_state_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")

    async def main() -> None:
        async with RealHost(RealOptions("host", state=tmp_path / "file")) as host:
            host.store.load("view")

    with pytest.raises(ConfigError, match="file: cannot be written"):
        asyncio.run(main())
