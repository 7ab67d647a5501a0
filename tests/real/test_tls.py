"""TLS among a cluster's members: held against openssl, and told clearly when it fails."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import ssl
import subprocess
import tempfile
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from hcsim import Wire, real_group
from hcsim.errors import (
    AdmissionRefused,
    ChannelBroken,
    ChannelError,
    CollectiveError,
    DeadlineExceeded,
    PeerRefused,
    RemoteProtocolError,
)
from hcsim.identity.keys import ClusterSecret, NodeKey, node_id_of
from hcsim.identity.trust_list import RefusalReason
from hcsim.real import certificates
from hcsim.real.certificates import FOREVER, make_certificates
from hcsim.real.host import RealHost, RealOptions
from hcsim.real.keys import credentials
from hcsim.real.sockets import is_distrust
from hcsim.real.tls import ClusterTls, Tls, TlsFiles
from hcsim.runtime.channel import Channel
from hcsim.runtime.frame import Header, Kind
from hcsim.transport.admission import AdmittedHost

OURS, THEIRS = ClusterSecret(bytes(range(16))), ClusterSecret(bytes(range(1, 17)))
LEFT, RIGHT, MIDDLE = (NodeKey(bytes([number]) * 32) for number in (1, 2, 3))
NOW = datetime.now(UTC)
DAY = timedelta(days=1)

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
Refusals = asyncio.Queue[ChannelError]
Body = Callable[[RealHost, RealHost, Refusals], Awaitable[None]]


def allocate(header: Header) -> None:
    return None


def member(key: NodeKey, secret: ClusterSecret = OURS) -> RealOptions:
    return RealOptions(key.node_id[:4], tls=ClusterTls(key, secret), handshake_timeout_s=2.0, shared_memory=False)


def files(
    folder: Path, key: NodeKey, secret: ClusterSecret = OURS, validity: tuple[datetime, datetime] = FOREVER
) -> TlsFiles:
    made = make_certificates(key, secret, validity)
    paths = TlsFiles(*(folder / f"{key.node_id}.{part}" for part in ("crt", "key", "ca")))
    for path, data in ((paths.cert, made.leaf), (paths.key, made.key), (paths.ca, made.authority)):
        path.write_bytes(data)
    return paths


def between(left: RealOptions, right: RealOptions, body: Body) -> None:
    """The queue fills with what the right host reports of those that it did not let in."""

    async def main() -> None:
        refused: Refusals = asyncio.Queue()
        async with (
            asyncio.timeout(20),
            RealHost(left) as one,
            RealHost(right, on_refused=refused.put_nowait) as other,
        ):
            await body(one, other, refused)

    asyncio.run(main())


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_close_delivers_what_was_sent_though_the_peer_says_something_before_or_after_it(when):
    async def body(left: RealHost, right: RealHost, refused: Refusals) -> None:
        listener = await right.listen("127.0.0.1:0")
        near = await left.connect(listener.address)
        far = await listener.accept()
        if when == "before":
            await far.send(Header(100), memoryview(bytes(100)))  # nobody reads it
        for number in range(10):
            await near.send(Header(50_000, operation=number), memoryview(bytes(50_000)))
        await near.close()
        if when == "after":
            await far.send(Header(0))
        numbers = [(await far.recv(allocate))[0].operation for _ in range(10)]
        assert numbers == list(range(10))
        with pytest.raises(ChannelBroken, match="between two frames"):
            await far.recv(allocate)

    between(member(LEFT), member(RIGHT), body)


@pytest.mark.parametrize("turns", range(1, 8))
def test_a_handshake_does_not_outlive_its_listener_whenever_closing_is_cancelled(turns):
    async def main() -> None:
        async with asyncio.timeout(20), RealHost(member(LEFT)) as host:
            listener = await host.listen("127.0.0.1:0")
            name, port = listener.address.rsplit(":", 1)
            with socket.create_connection((name, int(port))) as caller:
                await asyncio.sleep(0.02)  # it is waited for what the caller says
                closing = asyncio.ensure_future(listener.close())
                for _ in range(turns):
                    await asyncio.sleep(0)
                closing.cancel()
                await asyncio.gather(closing, return_exceptions=True)
                caller.settimeout(1.0)  # half as long as a handshake may take
                assert await asyncio.to_thread(caller.recv, 1) == b""

    asyncio.run(main())


async def eventually(refused: Refusals) -> str:
    return str(await refused.get())


# -- members


def test_both_ends_know_each_other_and_the_connection() -> None:
    async def body(left: RealHost, right: RealHost, refused: Refusals) -> None:
        listener = await right.listen("127.0.0.1:0")
        bindings = []
        for _ in range(3):
            client = await left.connect(listener.address)
            server = await listener.accept()
            assert (client.identity, server.identity) == (RIGHT.node_id, LEFT.node_id)
            assert client.carrier == server.carrier == "TLS"
            assert client.binding == server.binding
            assert len(client.binding) == 32
            bindings.append(client.binding)
            await client.close()
            await server.close()
        assert len(set(bindings)) == 3
        assert refused.empty()

    between(member(LEFT), member(RIGHT), body)


def test_certificates_of_ones_own_authority_give_an_identity_too(tmp_path: Path) -> None:
    """Of any kind of key: here P-256, whose node id is the digest of the key as the certificate has it."""
    commands = """
        openssl ecparam -name prime256v1 -genkey -noout -out ca.key
        openssl req -x509 -new -key ca.key -subj /CN=ca -days 2 -out ca.crt
        openssl ecparam -name prime256v1 -genkey -noout -out leaf.key
        openssl req -new -key leaf.key -subj /CN=leaf -out leaf.csr
        openssl x509 -req -in leaf.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 1 -out leaf.crt
        openssl ec -in leaf.key -pubout -outform DER -out leaf.pub
    """
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    for command in filter(None, map(str.strip, commands.splitlines())):
        subprocess.run(command.split(), cwd=tmp_path, capture_output=True, check=True)
    own = RealOptions("own", tls=TlsFiles(tmp_path / "leaf.crt", tmp_path / "leaf.key", tmp_path / "ca.crt"))

    async def body(left: RealHost, right: RealHost, refused: Refusals) -> None:
        listener = await right.listen("127.0.0.1:0")
        client = await left.connect(listener.address)
        server = await listener.accept()
        assert client.identity == server.identity == node_id_of((tmp_path / "leaf.pub").read_bytes())
        assert client.binding == server.binding != b""
        await client.close()
        await server.close()

    between(own, own, body)


def test_admission_over_tls_is_bound_to_the_connection() -> None:
    """The man in the middle has a certificate that both accept, and passes every frame on, to both sides."""

    async def pump(source: Channel, target: Channel) -> None:
        while True:
            header, payload = await source.recv(allocate)
            await target.send(header, payload)

    async def main() -> None:
        async with (
            asyncio.timeout(20),
            RealHost(member(LEFT)) as left,
            RealHost(member(RIGHT)) as right,
            RealHost(member(MIDDLE)) as middle,
        ):
            reasons: list[RefusalReason | None] = []
            keeper = AdmittedHost(right, credentials(RIGHT, OURS), lambda verdict: reasons.append(verdict.reason))
            listener = await keeper.listen("127.0.0.1:0")
            honest = await AdmittedHost(left, credentials(LEFT, OURS)).connect(listener.address)
            assert honest.identity == RIGHT.node_id
            await honest.close()

            relay = await middle.listen("127.0.0.1:0")

            async def carry() -> None:
                one = await relay.accept()
                other = await middle.connect(listener.address)
                await asyncio.gather(pump(one, other), pump(other, one), return_exceptions=True)
                await one.close()
                await other.close()

            carrying = middle.spawn(carry(), name="carry")
            with pytest.raises(AdmissionRefused) as refused:
                await AdmittedHost(left, credentials(LEFT, OURS)).connect(relay.address)
            assert refused.value.reason == RefusalReason.FOREIGN_PROOF.name
            assert reasons == [None, RefusalReason.FOREIGN_PROOF]
            await carrying

    asyncio.run(main())


@pytest.mark.parametrize("validity", [(NOW + 99 * DAY, NOW + 100 * DAY), (NOW - 9 * DAY, NOW - 2 * DAY)])
def test_members_do_not_compare_the_time_with_certificates_that_members_made(
    tmp_path: Path, validity: tuple[datetime, datetime], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the clock of the one that made its certificate had been wrong, or that of the other were."""
    real = certificates.make_certificates
    monkeypatch.setattr(certificates, "make_certificates", lambda key, secret: real(key, secret, validity))

    async def body(left: RealHost, right: RealHost, refused: Refusals) -> None:
        listener = await right.listen("127.0.0.1:0")
        client = await left.connect(listener.address)
        taken = await listener.accept()
        assert (client.identity, taken.identity) == (RIGHT.node_id, LEFT.node_id)
        await client.close()
        await taken.close()

    between(member(LEFT), member(RIGHT), body)


@needs_openssl
@pytest.mark.parametrize("at", [datetime(2020, 1, 2, tzinfo=UTC), datetime(2099, 1, 1, tzinfo=UTC)])
def test_a_member_s_certificate_is_valid_whatever_the_clock_says(tmp_path: Path, at: datetime) -> None:
    made = files(tmp_path, LEFT)
    clock = ("-attime", str(int(at.timestamp())))
    done = openssl("verify", *clock, "-x509_strict", "-CAfile", str(made.ca), str(made.cert))
    assert (done.returncode, done.stderr) == (0, "")


def test_no_key_is_left_in_a_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    Tls(ClusterTls(LEFT, OURS))
    assert list(tmp_path.iterdir()) == []


# -- openssl's opinion


def openssl(*arguments: str, data: str | None = None) -> subprocess.CompletedProcess[str]:
    command = ["openssl", *arguments]
    return subprocess.run(command, input=data, capture_output=True, text=True, timeout=20, check=False)


@needs_openssl
def test_openssl_finds_the_certificates_strictly_valid_for_both_ends(tmp_path: Path) -> None:
    left, right = files(tmp_path, LEFT), files(tmp_path, RIGHT)
    assert left.ca.read_bytes() == right.ca.read_bytes()  # every member makes the same authority
    for purpose in ("sslserver", "sslclient"):
        done = openssl("verify", "-x509_strict", "-purpose", purpose, "-CAfile", str(left.ca), str(right.cert))
        assert (done.returncode, done.stderr) == (0, "")
    text = openssl("x509", "-in", str(left.cert), "-noout", "-text").stdout
    assert f"CN = {LEFT.node_id}" in text
    assert "ED25519" in text
    assert "CA:FALSE" in text


@needs_openssl
def test_openssl_does_not_accept_another_clusters_certificate_nor_a_members_as_an_authority(tmp_path: Path) -> None:
    ours = files(tmp_path, LEFT)
    foreign = files(tmp_path, RIGHT, THEIRS)
    assert openssl("verify", "-CAfile", str(ours.ca), str(foreign.cert)).returncode != 0
    made_by_left = x509.load_pem_x509_certificate(ours.cert.read_bytes())
    assert not made_by_left.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


@needs_openssl
@pytest.mark.parametrize(
    ("arguments", "works", "report"),
    [
        ((), False, "showed no certificate"),
        (("-cert", "{cert}", "-key", "{key}"), True, ""),
        (("-cert", "{cert}", "-key", "{key}", "-tls1_2"), False, "does not speak TLS 1.3"),
        (("-cert", "{foreign.cert}", "-key", "{foreign.key}"), False, "our authority did not sign its certificate"),
        (("-cert", "{cert}", "-key", "{key}", "-CAfile", "{foreign.ca}"), False, "authority did not sign our cert"),
    ],
    ids=["no certificate", "a member", "TLS 1.2", "a member of another cluster", "one that trusts another cluster"],
)
def test_openssl_as_a_client(tmp_path: Path, arguments: tuple[str, ...], works: bool, report: str) -> None:
    paths, foreign = files(tmp_path, LEFT), files(tmp_path, MIDDLE, THEIRS)
    given = [argument.format(cert=paths.cert, key=paths.key, foreign=foreign) for argument in arguments]

    async def body(left: RealHost, right: RealHost, refused: Refusals) -> None:
        listener = await right.listen("127.0.0.1:0")
        command = ["s_client", "-connect", listener.address, "-CAfile", str(paths.ca), "-verify_return_error", *given]
        done = await asyncio.to_thread(openssl, *command, data="")
        if works:
            assert "Verify return code: 0 (ok)" in done.stdout
            assert "TLSv1.3" in done.stdout
            channel = await listener.accept()
            assert channel.identity == LEFT.node_id
            await channel.close()
        else:
            assert report in await eventually(refused)

    between(member(LEFT), member(RIGHT), body)


@needs_openssl
def test_openssl_as_a_server(tmp_path: Path, addresses: Callable[[int], list[str]]) -> None:
    paths, [address] = files(tmp_path, RIGHT), addresses(1)
    keys = ["-cert", str(paths.cert), "-key", str(paths.key), "-CAfile", str(paths.ca)]

    async def main() -> None:
        server = await asyncio.create_subprocess_exec(
            "openssl", "s_server", "-accept", address, *keys, "-Verify", "1", "-verify_return_error",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            async with asyncio.timeout(20), RealHost(member(LEFT)) as left:
                channel = await left.connect(address)
                assert channel.identity == RIGHT.node_id
                await channel.close()
        finally:
            server.kill()
            await server.communicate()

    asyncio.run(main())


# -- failures, at both ends


def test_another_clusters_member_is_refused_in_tls_and_both_hear_why() -> None:
    async def body(left: RealHost, right: RealHost, refused: Refusals) -> None:
        listener = await right.listen("127.0.0.1:0")
        with pytest.raises(PeerRefused, match=r"our authority did not sign its certificate.*hcsim cluster join"):
            await left.connect(listener.address)
        assert "its authority did not sign our certificate" in await eventually(refused)

    between(member(LEFT, THEIRS), member(RIGHT), body)


def test_a_client_of_another_cluster_that_trusts_us_is_refused_and_both_hear_why(tmp_path: Path) -> None:
    theirs, ours = files(tmp_path, LEFT, THEIRS), files(tmp_path, RIGHT)
    client_options = RealOptions("left", tls=TlsFiles(theirs.cert, theirs.key, ours.ca))

    async def body(left: RealHost, right: RealHost, refused: Refusals) -> None:
        listener = await right.listen("127.0.0.1:0")
        client = await left.connect(listener.address)  # in TLS 1.3 the client is done first
        await client.send(Header(5), memoryview(b"hello"))
        with pytest.raises(PeerRefused, match="its authority did not sign our certificate"):
            await client.recv(allocate)
        assert "our authority did not sign its certificate" in await eventually(refused)

    between(client_options, member(RIGHT), body)


@pytest.mark.parametrize(
    ("validity", "words"),
    [((NOW - 30 * DAY, NOW - 20 * DAY), "has expired"), ((NOW + 20 * DAY, NOW + 30 * DAY), "not valid yet")],
)
def test_a_certificate_out_of_its_time_is_named_at_both_ends(
    tmp_path: Path, validity: tuple[datetime, datetime], words: str
) -> None:
    stale = RealOptions("stale", tls=files(tmp_path, LEFT, validity=validity), shared_memory=False)
    fresh = RealOptions("fresh", tls=files(tmp_path, RIGHT), shared_memory=False)

    async def as_server(left: RealHost, right: RealHost, refused: Refusals) -> None:
        listener = await right.listen("127.0.0.1:0")
        with pytest.raises(PeerRefused, match=f"its certificate .*{words}.*clocks"):
            await left.connect(listener.address)
        assert "clocks" in await eventually(refused)

    async def as_client(left: RealHost, right: RealHost, refused: Refusals) -> None:
        listener = await right.listen("127.0.0.1:0")
        client = await left.connect(listener.address)
        await client.send(Header(5), memoryview(b"hello"))
        with pytest.raises(PeerRefused, match=r"our certificate .*clocks"):
            await client.recv(allocate)
        assert words in await eventually(refused)

    between(fresh, stale, as_server)
    between(stale, fresh, as_client)


def test_a_plaintext_client_at_a_tls_port_is_told_at_both_ends() -> None:
    async def body(left: RealHost, right: RealHost, refused: Refusals) -> None:
        listener = await right.listen("127.0.0.1:0")
        client = await left.connect(listener.address)
        await client.send(Header(500, Kind.HELLO), memoryview(bytes(500)))
        with pytest.raises(RemoteProtocolError, match="expects TLS, and we spoke plaintext"):
            await client.recv(allocate)
        assert "speaks plaintext where TLS is needed" in await eventually(refused)

    between(RealOptions("left"), member(RIGHT), body)


@pytest.mark.slow
def test_a_tls_client_at_a_plaintext_port_is_told_at_both_ends() -> None:
    async def body(left: RealHost, right: RealHost, refused: Refusals) -> None:
        listener = await right.listen("127.0.0.1:0")

        async def serve() -> str:
            channel = await listener.accept()
            with pytest.raises(RemoteProtocolError) as failure:
                await channel.recv(allocate)
            return str(failure.value)

        serving = right.spawn(serve(), name="serve")
        with pytest.raises(DeadlineExceeded, match="during the TLS handshake: does it expect plaintext"):
            await left.connect(listener.address, timeout_s=2.0)
        assert "spoke TLS to a plaintext port" in await serving

    between(member(LEFT), RealOptions("right"), body)


def test_who_hangs_up_in_the_middle_of_a_handshake_is_not_taken_for_one_without_tls() -> None:
    async def body(left: RealHost, right: RealHost, refused: Refusals) -> None:
        listener = await right.listen("127.0.0.1:0")
        host, _, port = listener.address.rpartition(":")
        with socket.create_connection((host, int(port))):
            pass
        assert str(await refused.get()).endswith("ended the connection during the TLS handshake")

    between(member(LEFT), member(RIGHT), body)


def test_one_address_cannot_take_all_places_at_the_door() -> None:
    async def body(left: RealHost, right: RealHost, refused: Refusals) -> None:
        loop = asyncio.get_running_loop()
        listener = await right.listen("127.0.0.1:0")
        host, _, port = listener.address.rpartition(":")
        silent = [socket.socket() for _ in range(40)]
        try:
            for stranger in silent:
                stranger.setblocking(False)
                await loop.sock_connect(stranger, (host, int(port)))
            assert "too many TLS handshakes" in await eventually(refused)
        finally:
            for stranger in silent:
                stranger.close()
        client = await left.connect(listener.address)
        await client.close()

    between(member(LEFT), member(RIGHT), body)


def test_frames_are_refused_after_a_failed_handshake_and_the_port_serves_on() -> None:
    async def body(left: RealHost, right: RealHost, refused: Refusals) -> None:
        listener = await right.listen("127.0.0.1:0")
        for _ in range(3):
            with socket.create_connection(listener.address.split(":"), timeout=5) as stranger:
                stranger.sendall(b"\x16\x03\x01\x02\x00\x01" + bytes(600))
                await eventually(refused)
        client = await left.connect(listener.address)
        server = await listener.accept()
        await client.close()
        with pytest.raises(ChannelBroken):
            await server.recv(allocate)

    between(member(LEFT), member(RIGHT), body)


@pytest.mark.parametrize(
    ("reason", "is_final"),
    [
        ("TLSV1_ALERT_UNKNOWN_CA", True),
        ("SSLV3_ALERT_BAD_CERTIFICATE", True),
        ("SSLV3_ALERT_CERTIFICATE_EXPIRED", True),
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", True),
        ("TLSV1_ALERT_INTERNAL_ERROR", False),
        ("TLSV1_ALERT_PROTOCOL_VERSION", False),
        ("WRONG_VERSION_NUMBER", False),
    ],
)
def test_only_distrust_ends_the_attempts_to_connect(reason: str, is_final: bool) -> None:
    error = ssl.SSLError(ssl.SSL_ERROR_SSL, reason)
    error.reason = reason
    assert is_distrust(error) is is_final


@pytest.mark.slow
def test_who_waits_for_a_rank_of_another_authority_is_told_of_it(addresses: Callable[[int], list[str]]) -> None:
    peers, wire = addresses(2), Wire(connect_timeout_s=2.0)

    async def rank(number: int, key: NodeKey, secret: ClusterSecret) -> str:
        async with real_group(number, peers, wire=wire, tls=ClusterTls(key, secret), shared_memory=False) as group:
            with pytest.raises(CollectiveError) as failed:
                await group.barrier()
        return str(failed.value)

    async def main() -> list[str]:
        return await asyncio.gather(rank(0, LEFT, OURS), rank(1, RIGHT, THEIRS))

    waiting, calling = asyncio.run(main())
    assert re.search("rank 1 did not call within 2 s; a caller was refused: .*authority did not sign", waiting)
    assert "authority did not sign" in calling
