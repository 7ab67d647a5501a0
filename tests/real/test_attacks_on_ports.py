"""20,000 wrong callers at real ports: none gets in, none leaves anything behind, and a member does not notice.

Three doors: admission on plaintext, admission on TLS, and the mesh of a group. The callers come from seeded
random streams: noise, damaged and truncated copies of what a member says, lengths without content, and
strangers that play by the rules up to some point.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import random
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import msgspec
import pytest

from hcsim.errors import ChannelBroken, ChannelClosed, ChannelError
from hcsim.identity.handshake import Credentials, Handshake, HandshakeRole
from hcsim.identity.keys import ClusterSecret, NodeKey
from hcsim.real.host import RealHost, RealOptions
from hcsim.real.tls import ClusterTls, Tls
from hcsim.rng import stream
from hcsim.runtime.channel import Channel
from hcsim.runtime.frame import HEADER_BYTES, Header, Kind, encode_header
from hcsim.transport import admission_queue
from hcsim.transport.admission import AdmittedHost
from hcsim.transport.groups import GroupHello, GroupMembership, Wire
from hcsim.transport.mesh import Mesh

pytestmark = pytest.mark.slow

OURS = ClusterSecret(bytes(range(16)))
HOST_KEY, FRIEND_KEY, THIEF_KEY = (NodeKey(bytes([number]) * 32) for number in (1, 2, 3))
AT_ONCE = 8
WARM_UP = 300
GUARD_S = 100.0
Attack = Callable[[random.Random], list[bytes]]
"""The bytes that a caller sends, piece by piece; it waits for an answer between two pieces."""


def credentials(key: NodeKey, secret: ClusterSecret = OURS) -> Credentials:
    return Credentials(key, secret, 1, os.urandom)


def frame(payload: bytes, kind: Kind = Kind.HELLO, **fields: int) -> bytes:
    return encode_header(Header(len(payload), kind, **fields)) + payload


def damaged(draw: random.Random, data: bytes) -> bytes:
    """Some bits flipped, a piece cut out, doubled, or the rest missing."""
    way = draw.randrange(4)
    if way == 0:
        changed = bytearray(data)
        for _ in range(draw.randint(1, 4)):
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        return bytes(changed)
    start = draw.randrange(len(data))
    end = draw.randint(start, len(data))
    return (data[:start], data[:start] + data[end:], data[:end] + data[start:])[way - 1]


def noise(draw: random.Random) -> list[bytes]:
    return [draw.randbytes(draw.randint(0, 300))]


def wrong_frames(draw: random.Random) -> list[bytes]:
    """Well-formed headers of any kind, with any content, or none of what they announce."""
    kinds = [draw.choice(list(Kind)) for _ in range(draw.randint(1, 4))]
    pieces = [frame(draw.randbytes(draw.randint(0, 260)), kind, step=draw.getrandbits(32)) for kind in kinds]
    announced = encode_header(Header(draw.choice([1, 257, 1 << 20, (1 << 32) - 1]), draw.choice(kinds)))
    return draw.choice([pieces, [b"".join(pieces)], [announced]])


def said_first(key: NodeKey, secret: ClusterSecret = OURS) -> bytes:
    hello = Handshake(HandshakeRole.CALLER, credentials(key, secret), b"").first()
    assert hello is not None
    return hello


def impostor(number: int) -> bytes:
    """The hello of somebody that has heard the name of our cluster, and not its secret."""
    secret = ClusterSecret(number.to_bytes(16, "big"))
    secret.namespace = OURS.namespace
    return said_first(NodeKey(number.to_bytes(32, "big")), secret)


FRIENDS_HELLO = said_first(FRIEND_KEY)
IMPOSTORS = [impostor(number) for number in range(50)]


def damaged_admission(draw: random.Random) -> list[bytes]:
    """A member's first message, damaged in its header, its content, or both."""
    return [draw.choice([frame(damaged(draw, FRIENDS_HELLO)), damaged(draw, frame(FRIENDS_HELLO))])]


def well_begun_admission(draw: random.Random) -> list[bytes]:
    """A hello without fault, and then a proof that cannot be right."""
    hello, proof = draw.choice([*IMPOSTORS, FRIENDS_HELLO]), b"\x02" + draw.randbytes(96)
    return [frame(hello), draw.choice([frame(proof), frame(damaged(draw, proof)), frame(proof)[:100], frame(hello)])]


def damaged_mesh_hello(draw: random.Random) -> list[bytes]:
    hello = GroupHello(
        "hcsim", draw.randrange(2), draw.randint(-1, 3), Wire().segment_bytes, 1, draw.randint(-2, 70000)
    )
    whole = frame(msgspec.msgpack.encode(hello))
    nested = frame(b"\x81\xa1x" + b"\x91" * draw.randrange(4000))
    return [draw.choice([whole, damaged(draw, whole), frame(damaged(draw, whole[HEADER_BYTES:])), nested])]


def client_hello() -> bytes:
    """What a TLS client says first, as OpenSSL writes it."""
    written = ssl.MemoryBIO()
    tls = Tls(ClusterTls(THIEF_KEY, OURS)).context(server_side=False).wrap_bio(ssl.MemoryBIO(), written)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return written.read()


CLIENT_HELLO = client_hello()


def damaged_tls(draw: random.Random) -> list[bytes]:
    return [damaged(draw, CLIENT_HELLO) + (draw.randbytes(50) if draw.random() < 0.3 else b"")]


def mixed(*attacks: Attack) -> Attack:
    return lambda draw: draw.choice(attacks)(draw)


async def attack_once(address: str, pieces: list[bytes], draw: random.Random) -> None:
    """Say it; listen to the end, or run away."""
    loop = asyncio.get_running_loop()
    host, _, port = address.rpartition(":")
    with socket.socket() as sock, suppress(OSError):  # it may let go of us first
        sock.setblocking(False)
        await loop.sock_connect(sock, (host, int(port)))
        for number, piece in enumerate(pieces):
            if number:
                await loop.sock_recv(sock, 1000)
            await loop.sock_sendall(sock, piece)
        if draw.random() < 0.7:
            sock.shutdown(socket.SHUT_WR)
            while await loop.sock_recv(sock, 1000):
                pass


async def attack(address: str, how: Attack, count: int, name: str) -> None:
    async def one_after_the_other(worker: int) -> None:
        draw = stream(1, name, worker)
        for _ in range(count // AT_ONCE):
            await attack_once(address, how(draw), draw)

    await asyncio.gather(*map(one_after_the_other, range(AT_ONCE)))


async def friendship(one: Channel, other: Channel) -> int:
    """A member's channel goes on working, whatever happens at the door; returns how often."""
    rounds = 0
    try:
        while True:
            data = hashlib.sha256(str(rounds).encode()).digest()
            await one.send(Header(32, Kind.CONTROL, step=rounds % 1000), memoryview(data))
            header, payload = await other.recv(lambda header: None)
            assert (bytes(payload), header.step) == (data, rounds % 1000)
            rounds += 1
            await asyncio.sleep(0.002)
    except asyncio.CancelledError:
        return rounds


class Leftovers(NamedTuple):
    blocks: int
    """Of memory that Python has handed out."""
    resident_bytes: int
    descriptors: int
    tasks: int


def leftovers() -> Leftovers:
    gc.collect()
    listed = subprocess.run(["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, text=True, check=True)
    return Leftovers(
        sys.getallocatedblocks(), int(listed.stdout) * 1024, len(os.listdir("/dev/fd")), len(asyncio.all_tasks())
    )


async def besieged(address: str, how: Attack, count: int, name: str) -> None:
    """Attack; nothing may stay behind but what the first few hundred attacks left."""
    await attack(address, how, WARM_UP, f"{name} warm-up")
    before = leftovers()
    await attack(address, how, count, name)
    await asyncio.sleep(0.3)  # the longest that a door waits for its last word to be read
    after = leftovers()
    assert after.blocks - before.blocks < count  # less than one for each
    assert after.resident_bytes - before.resident_bytes < 8 * 2**20
    assert after.descriptors <= before.descriptors + 2
    assert after.tasks <= before.tasks + 2


@asynccontextmanager
async def admission_port(*, tls: bool) -> AsyncIterator[tuple[Any, AdmittedHost]]:
    """An admission listener, and a friend's host that has been there before."""
    options = [
        RealOptions(name, tls=ClusterTls(key, OURS) if tls else None, handshake_timeout_s=2.0)
        for name, key in (("host", HOST_KEY), ("friend", FRIEND_KEY))
    ]
    async with RealHost(options[0]) as host, RealHost(options[1]) as friend:
        listener = await AdmittedHost(host, credentials(HOST_KEY)).listen("127.0.0.1:0")
        yield listener, AdmittedHost(friend, credentials(FRIEND_KEY))
        await listener.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without the throttle, which would answer most of the callers before anything reads what they say."""
    monkeypatch.setattr(admission_queue, "FREE_FAILURES", 10**9)
    return None


@pytest.fixture(params=[1, pytest.param(4, marks=pytest.mark.soak)], ids=["short", "long"])
def times(request: pytest.FixtureRequest) -> int:
    """By how much a siege is longer. What is sent is the same in every run, and a leak shows in a short one."""
    return int(request.param)


def siege(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        errors: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
        async with asyncio.timeout(GUARD_S):
            await body()
        assert errors == []

    asyncio.run(main())


async def admitted_siege(tls: bool, how: Attack, count: int, name: str) -> None:
    async with admission_port(tls=tls) as (listener, friend):
        ours = await friend.connect(listener.address)
        theirs = await listener.accept()
        talking = asyncio.ensure_future(friendship(ours, theirs))
        accepting = asyncio.ensure_future(listener.accept())
        await besieged(listener.address, how, count, name)
        assert not accepting.done(), "a stranger got in"
        again = await friend.connect(listener.address)  # the door still works
        assert (await accepting).identity == FRIEND_KEY.node_id
        talking.cancel()
        assert await talking > 10
        for channel in (ours, theirs, again, await accepting):
            await channel.close()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("how", "count"),
    [(mixed(noise, wrong_frames), 800), (damaged_admission, 800), (well_begun_admission, 400)],
    ids=["noise", "damaged", "well begun"],
)
def test_plaintext_admission_holds(how: Attack, count: int, times: int) -> None:
    siege(lambda: admitted_siege(False, how, times * count, "plaintext"))


def test_the_throttle_holds_too(times: int) -> None:
    siege(
        lambda: admitted_siege(False, mixed(noise, damaged_admission, well_begun_admission), times * 800, "throttled")
    )


@pytest.mark.parametrize(
    ("how", "count"),
    [(mixed(noise, wrong_frames, damaged_admission), 800), (damaged_tls, 800)],
    ids=["plaintext", "damaged TLS"],
)
def test_admission_on_tls_holds(how: Attack, count: int, times: int) -> None:
    siege(lambda: admitted_siege(True, how, times * count, "tls"))


@pytest.mark.usefixtures("patient")
def test_admission_holds_against_a_caller_that_got_through_tls(times: int) -> None:
    """It has a certificate of our authority, and still not the secret: certificates can be given by hand."""

    async def main() -> None:
        async with (
            admission_port(tls=True) as (listener, friend),
            RealHost(RealOptions("thief", tls=ClusterTls(THIEF_KEY, OURS))) as thief,
        ):
            accepting = asyncio.ensure_future(listener.accept())
            draw = stream(1, "inside tls")
            for _ in range(times * 200):
                channel = await thief.connect(listener.address)
                for piece in mixed(damaged_admission, well_begun_admission)(draw):
                    payload = piece[HEADER_BYTES:]
                    try:
                        await channel.send(Header(len(payload), Kind.HELLO), memoryview(payload))
                        await channel.recv(lambda header: None)
                    except ChannelBroken:
                        break
                await channel.close()
            assert not accepting.done()
            honest = await friend.connect(listener.address)
            assert (await accepting).identity == FRIEND_KEY.node_id
            await honest.close()
            await (await accepting).close()

    siege(main)


@pytest.mark.parametrize(
    ("how", "count"), [(mixed(noise, wrong_frames), 800), (damaged_mesh_hello, 800)], ids=["noise", "damaged"]
)
def test_the_mesh_holds(how: Attack, count: int, times: int, addresses: Callable[[int], list[str]]) -> None:
    """Nobody proves anything here, so a group of two is complete before, and its link goes on."""
    peers = tuple(addresses(2))

    async def main() -> None:
        async with RealHost(RealOptions("0")) as left, RealHost(RealOptions("1")) as right:
            meshes = [Mesh(host, GroupMembership(rank, peers)) for rank, host in enumerate((left, right))]
            for mesh in meshes:
                await mesh.open()
            down, up = await asyncio.gather(meshes[0].link(1), meshes[1].link(0))
            await besieged(peers[0], how, times * count, "mesh")
            assert list(meshes[0].links) == [1]
            await up.send(Header(3, sender=1, total=3), memoryview(b"abc"))
            assert bytes(await down.post((0, 0, 0, 0, 0), memoryview(bytearray(3)), 0, 3)) == b"abc"
            parting: ChannelError = ChannelClosed("the test is over")
            await asyncio.gather(*(mesh.close((Kind.BYE, ""), parting) for mesh in meshes))

    siege(main)
