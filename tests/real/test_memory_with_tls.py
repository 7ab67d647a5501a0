"""Processes of one machine that have TLS prove themselves with it, and then share memory."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hcsim.errors import ChannelError, PeerRefused, RemoteProtocolError
from hcsim.identity.keys import ClusterSecret, NodeKey
from hcsim.real.certificates import make_certificates
from hcsim.real.host import RealHost, RealOptions
from hcsim.real.shm import stream
from hcsim.real.stream_channel import StreamChannel
from hcsim.real.tls import ClusterTls, TlsFiles
from hcsim.runtime.channel import Channel, Listener
from hcsim.runtime.frame import Header
from tests.real.squatting import met_by_a_squatter

pytest.importorskip("hcsim.real.shm.rings", reason="there was no C compiler when hcsim was installed")

LEFT, RIGHT = NodeKey(bytes(31) + b"\1"), NodeKey(bytes(31) + b"\2")
OURS, THEIRS = ClusterSecret(bytes(16)), ClusterSecret(bytes(15) + b"\1")
LIMIT_S = 60.0
SOON_S = 0.5


def member(key: NodeKey, secret: ClusterSecret = OURS, **options: bool) -> RealOptions:
    return RealOptions(key.node_id[:4], tls=ClusterTls(key, secret), **options)


def run(body: Awaitable[None]) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S):
            await body

    asyncio.run(main())


@asynccontextmanager
async def listening(options: RealOptions, refused: list[ChannelError] | None = None) -> AsyncIterator[Listener]:
    said = refused if refused is not None else []
    async with RealHost(options, on_refused=said.append) as host:
        yield await host.listen("127.0.0.1:0")


@asynccontextmanager
async def connected(left: RealOptions, right: RealOptions) -> AsyncIterator[tuple[StreamChannel, StreamChannel]]:
    """Both ends of a channel, over which a frame has gone each way."""
    async with RealHost(left) as near, listening(right) as listener:
        ours, theirs = await near.connect(listener.address), await listener.accept()
        for one, other in ((ours, theirs), (theirs, ours)):
            await one.send(Header(4, step=7), memoryview(b"data"))
            header, payload = await other.recv(lambda _: None)
            assert (header.step, payload) == (7, b"data")
        assert isinstance(ours, StreamChannel)
        assert isinstance(theirs, StreamChannel)
        yield ours, theirs
        await ours.close()
        await theirs.close()


async def nobody_comes(listener: Listener) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(SOON_S):
            await listener.accept()


async def hung_up(channel: Channel) -> None:
    await channel.send(Header(0))
    await channel.recv(lambda _: None)


def test_both_prove_themselves_and_share_memory() -> None:
    async def body() -> None:
        bindings = []
        for _ in range(2):
            async with connected(member(LEFT), member(RIGHT)) as (ours, theirs):
                assert {ours.carrier, theirs.carrier} == {"shared memory"}
                assert (ours.identity, theirs.identity) == (RIGHT.node_id, LEFT.node_id)
                assert ours.binding == theirs.binding
                bindings.append(ours.binding)
        assert bindings[0] != bindings[1]
        assert b"" not in bindings

    run(body())


@pytest.mark.parametrize(("left", "right"), [(True, False), (False, True)])
def test_who_does_not_want_to_share_gets_tls_over_tcp(left: bool, right: bool) -> None:
    async def body() -> None:
        options = member(LEFT, shared_memory=left), member(RIGHT, shared_memory=right)
        async with connected(*options) as (ours, theirs):
            assert {ours.carrier, theirs.carrier} == {"TLS"}
            assert ours.identity == RIGHT.node_id

    run(body())


def test_the_environment_can_forbid_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(stream.SWITCH, "0")

    async def body() -> None:
        async with connected(member(LEFT), member(RIGHT)) as (ours, _):
            assert ours.carrier == "TLS"

    run(body())


def test_a_stranger_of_the_same_user_is_refused_and_both_are_told_once() -> None:
    async def body() -> None:
        told: list[ChannelError] = []
        async with RealHost(member(LEFT, THEIRS)) as stranger, listening(member(RIGHT), told) as listener:
            with pytest.raises(PeerRefused, match="our authority did not sign its certificate"):
                await stranger.connect(listener.address, timeout_s=10.0)
            await nobody_comes(listener)
        assert len(told) == 1
        assert "its authority did not sign our certificate" in str(told[0])

    run(body())


def test_who_trusts_us_and_is_not_trusted_is_refused_at_once(tmp_path: Path) -> None:
    ours, theirs = (make_certificates(LEFT, of) for of in (OURS, THEIRS))
    for name, data in (("cert", theirs.leaf), ("key", theirs.key), ("ca", ours.authority)):
        (tmp_path / name).write_bytes(data)
    stranger = RealOptions("stranger", tls=TlsFiles(tmp_path / "cert", tmp_path / "key", tmp_path / "ca"))

    async def body() -> None:
        told: list[ChannelError] = []
        async with RealHost(stranger) as near, listening(member(RIGHT), told) as listener:
            with pytest.raises(PeerRefused, match="its authority did not sign our certificate"):
                await near.connect(listener.address, timeout_s=LIMIT_S)
            await nobody_comes(listener)
        assert len(told) == 1
        assert "our authority did not sign its certificate" in str(told[0])

    run(body())


def test_who_speaks_plaintext_is_told_so_as_by_the_network() -> None:
    async def body() -> None:
        told: list[ChannelError] = []
        async with RealHost(RealOptions("plain")) as plain, listening(member(RIGHT), told) as listener:
            channel = await plain.connect(listener.address)
            assert channel.carrier == "TCP"
            with pytest.raises(RemoteProtocolError, match="expects TLS, and we spoke plaintext"):
                await hung_up(channel)
            await nobody_comes(listener)
            await channel.close()
        assert len(told) == 1
        assert "speaks plaintext where TLS is needed" in str(told[0])

    run(body())


def test_another_cluster_at_one_address_does_not_hide_ours_at_the_next() -> None:
    async def body() -> None:
        async with RealHost(member(RIGHT)) as far, RealHost(member(RIGHT, THEIRS)) as foreign:
            listener = await far.listen("[::1]:0")
            port = listener.address.rpartition(":")[2]
            await foreign.listen(f"127.0.0.1:{port}")
            async with RealHost(member(LEFT)) as near:
                ours = await near.connect(f"127.0.0.1|[::1]:{port}", timeout_s=LIMIT_S)
                theirs = await listener.accept()
                assert ours.identity == RIGHT.node_id
                await ours.close()
                await theirs.close()

    run(body())


@pytest.mark.skipif(sys.platform != "linux", reason="knows Linux's names")
def test_a_door_where_nobody_speaks_tls_is_passed_by() -> None:
    async def body() -> None:
        async with RealHost(member(LEFT)) as near, listening(member(RIGHT, shared_memory=False)) as listener:
            squatting = met_by_a_squatter(near, listener.address, kind="tls-", timeout_s=LIMIT_S)
            async with squatting as (dialling, guest):
                guest.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                ours, theirs = await dialling, await listener.accept()
            assert ours.carrier == "TLS"
            await ours.close()
            await theirs.close()

    run(body())


BETWEEN = """if True:
    import os, select, socket, sys
    ours, theirs = sys.argv[1:]
    door = socket.socket(socket.AF_UNIX)
    door.bind("\\0" + ours)
    door.listen()
    print("open", flush=True)
    for _ in range(1000):
        near = door.accept()[0]
        far = socket.socket(socket.AF_UNIX)
        far.connect("\\0" + theirs)
        greeting, memory, _, _ = socket.recv_fds(near, 64, 1)
        socket.send_fds(far, [greeting], memory)
        print("passed on", flush=True)
        while True:
            ready = select.select([near, far], [], [], 20)[0]
            data = ready and ready[0].recv(65536)
            if not data:
                break
            (far if ready[0] is near else near).sendall(data)
        for each in near, far:
            each.close()
        os.close(memory[0])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="knows Linux's names")
def test_a_process_that_gets_between_two_and_keeps_the_memory_is_found_out() -> None:
    """It passes everything on, so TLS itself finds nothing wrong; but it is not the process it would have to be."""

    async def body() -> None:
        told: list[ChannelError] = []
        async with RealHost(member(LEFT)) as near, listening(member(RIGHT), told) as listener:
            port = int(listener.address.rpartition(":")[2])
            trap = f"127.0.0.2:{port}"
            command = [sys.executable, "-c", BETWEEN, f"hcsim-4-tls-{trap}", f"hcsim-4-tls-{listener.address}"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as between:  # noqa: ASYNC220
                assert between.stdout is not None
                assert between.stdout.readline() == "open\n"
                try:
                    with pytest.raises(ChannelError):
                        await near.connect(trap, timeout_s=3.0)
                    assert between.stdout.readline() == "passed on\n"
                finally:
                    between.kill()
            await nobody_comes(listener)
        assert told
        assert "went away again" in str(told[0])

    run(body())
