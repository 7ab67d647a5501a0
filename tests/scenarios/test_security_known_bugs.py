"""What went wrong in other systems' security, and does not here: one test each."""

from __future__ import annotations

import ast
import asyncio
import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import hcsim
from hcsim import Group, Options
from hcsim.errors import AdmissionRefused, ChannelBroken, CollectiveError, PeerRefused, RemoteProtocolError
from hcsim.identity.handshake import Credentials
from hcsim.identity.keys import ClusterSecret, NodeKey
from hcsim.identity.trust_list import RefusalReason
from hcsim.real.host import RealHost, RealOptions
from hcsim.real.tls import ClusterTls
from hcsim.rng import stream
from hcsim.runtime.channel import Channel
from hcsim.runtime.frame import Header, Kind
from hcsim.runtime.host import Host
from hcsim.training.parameter_server import messages
from hcsim.transport.admission import AdmittedHost
from hcsim.transport.groups import GroupHello, GroupMembership, Wire
from hcsim.transport.messages import Schema
from hcsim.virtual.host import VirtualHost
from hcsim.virtual.world import World
from tests.switches import on_switch

OURS = ClusterSecret(bytes(range(16)))
PORT = 52416
SHORT = Options(timeout_s=3.0)
_machines = itertools.count()


def member(name: str, secret: ClusterSecret = OURS, boot: int = 1) -> Credentials:
    draws = stream(1, "fresh", next(_machines)).randbytes
    return Credentials(NodeKey(hashlib.sha256(name.encode()).digest()), secret, boot, draws)


def node(name: str) -> str:
    return member(name).key.node_id


def allocate(header: Header) -> None:
    return None


def in_a_world(names: list[str], body: Callable[..., Any]) -> Any:
    world = World(on_switch(names))
    return world.run(body(*world.hosts))


class _Tap:
    """A host on whose channels somebody listens in."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.heard: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    async def connect(self, address: str, **options: Any) -> Any:
        return _TappedChannel(await self._host.connect(address, **options), self.heard)


class _TappedChannel:
    def __init__(self, channel: Channel, heard: list[bytes]) -> None:
        self._channel = channel
        self._heard = heard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    async def send(self, header: Header, payload: Any) -> None:
        self._heard.append(bytes(payload))
        await self._channel.send(header, payload)

    async def recv(self, place: Any) -> Any:
        header, payload = await self._channel.recv(place)
        self._heard.append(bytes(payload))
        return header, payload


def test_psk_in_clear() -> None:
    """Who has heard a whole handshake knows no secret, and what it heard opens no door."""

    async def body(mini: VirtualHost, studio: VirtualHost, thief: VirtualHost) -> None:
        listener = await AdmittedHost(studio, member("studio")).listen("studio:1")
        tap = _Tap(mini)
        await (await AdmittedHost(tap, member("mini")).connect(listener.address)).close()
        caller_said, listener_said = tap.heard[0::2], tap.heard[1::2]
        assert len(caller_said) == len(listener_said) == 2

        for kept in (bytes(range(16)), OURS.phrase().encode(), OURS.derive("admission"), OURS.derive("tls authority")):
            assert kept not in b"".join(tap.heard)

        replay = await thief.connect(listener.address)
        for message in caller_said:
            await replay.send(Header(len(message), Kind.HELLO), memoryview(message))
        answers = [bytes((await replay.recv(allocate))[1]) for _ in range(2)]
        assert answers[1] == bytes([3, RefusalReason.FOREIGN_PROOF])
        with pytest.raises(ChannelBroken):
            await replay.recv(allocate)

        fake = await thief.listen("thief:1")

        async def play_back() -> None:
            channel = await fake.accept()
            for message in listener_said:
                await channel.recv(allocate)
                await channel.send(Header(len(message), Kind.HELLO), memoryview(message))
            await channel.close()

        thief.spawn(play_back(), name="play back")
        with pytest.raises(AdmissionRefused, match="not made for this connection"):
            await AdmittedHost(mini, member("mini")).connect("thief:1")

    in_a_world(["mini", "studio", "thief"], body)


def test_no_default_secret() -> None:
    """There is no way to make credentials without a secret, nor a secret without 128 random bits."""
    with pytest.raises(TypeError):
        ClusterSecret()  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Credentials(NodeKey(bytes(32)))  # type: ignore[call-arg]


@pytest.mark.slow
def test_tls_half_wired(addresses: Callable[[int], list[str]]) -> None:
    """With TLS every connection of a group is TLS, on both ends: a rank without it takes no part."""
    peers = tuple(addresses(3))
    keys = [NodeKey(bytes([rank + 1]) * 32) for rank in range(3)]
    identities = tuple(key.node_id for key in keys)

    async def on_rank(rank: int, secured: bool) -> Any:
        options = RealOptions(str(rank), tls=ClusterTls(keys[rank], OURS) if secured else None)
        us = GroupMembership(rank, peers, wire=Wire(connect_timeout_s=2.0), identities=identities)
        async with RealHost(options) as host, await Group.open(host, us, SHORT) as group:
            return (await group.all_reduce(np.full(1000, rank + 1.0)))[0]

    async def main(secured: tuple[bool, ...]) -> list[Any]:
        async with asyncio.timeout(20):
            tasks = [on_rank(rank, tls) for rank, tls in enumerate(secured)]
            return await asyncio.gather(*tasks, return_exceptions=True)

    assert asyncio.run(main((True, True, True))) == [6.0, 6.0, 6.0]  # and every link has proved the identity expected
    for outcome in asyncio.run(main((True, True, False))):
        assert isinstance(outcome, CollectiveError), outcome


@pytest.mark.parametrize("claims_to_be", [1, 2])
def test_anonymous_rank(claims_to_be: int) -> None:
    """A member of the cluster claims another member's rank: it is refused by name, and the rank stays free."""
    names = ["mini", "studio", "book", "thief"]
    addresses = tuple(f"{name}:{PORT}" for name in names[:3])
    identities = tuple(node(name) for name in names[:3])

    async def body(*hosts: VirtualHost) -> None:
        inside = [AdmittedHost(host, member(host.name)) for host in hosts]

        async def honest(rank: int) -> Any:
            us = GroupMembership(rank, addresses, identities=identities)
            async with await Group.open(inside[rank], us, SHORT) as group:
                await hosts[rank].clock.sleep(1.0)
                return (await group.all_reduce(np.full(10, rank + 1.0)))[0]

        async def thief() -> str:
            channel = await inside[3].connect(addresses[0])
            hello = GroupHello("hcsim", 0, 3, Wire().segment_bytes, 1, claims_to_be)
            data = msgspec.msgpack.encode(hello)
            await channel.send(Header(len(data), Kind.HELLO), memoryview(data))
            header, payload = await channel.recv(allocate)
            assert header.kind is Kind.ABORT
            return bytes(payload).decode()

        *sums, refusal = await asyncio.gather(honest(0), honest(1), honest(2), thief())
        assert sums == [6.0, 6.0, 6.0]
        assert refusal == f"rank {claims_to_be} is node {identities[claims_to_be]}, and you are node {node('thief')}"

    in_a_world(names, body)


@pytest.mark.parametrize("proves", [True, False])
def test_anonymous_rank_that_is_dialled(proves: bool) -> None:
    """Somebody else sits at a rank's address: who dials it notices before it says anything."""

    async def body(mini: VirtualHost, thief: VirtualHost) -> None:
        addresses = (f"thief:{PORT}", f"mini:{PORT}")
        inside = AdmittedHost(thief, member("thief")) if proves else thief
        listener = await inside.listen(addresses[0])
        host = AdmittedHost(mini, member("mini")) if proves else mini
        us = GroupMembership(1, addresses, identities=(node("studio"), node("mini")))
        async with await Group.open(host, us, SHORT) as group:
            seen = f"proved to be node {node('thief')}" if proves else "proved nothing"
            with pytest.raises(CollectiveError, match=f"should be rank 0, node {node('studio')}, but {seen}"):
                await group.all_reduce(np.zeros(10))
        await listener.close()

    in_a_world(["mini", "thief"], body)


def test_copied_identity() -> None:
    """Two machines with the same key: whichever calls the other, both are told, and the original goes on."""

    async def body(mini: VirtualHost, copy: VirtualHost, studio: VirtualHost) -> None:
        listener = await AdmittedHost(mini, member("mini")).listen("mini:1")
        with pytest.raises(AdmissionRefused, match=r"node_key was copied.*delete it on one of them") as refused:
            await AdmittedHost(copy, member("mini", boot=77)).connect(listener.address)
        assert refused.value.reason == RefusalReason.COPIED_IDENTITY.name
        friend = await AdmittedHost(studio, member("studio")).connect(listener.address)
        assert (await listener.accept()).identity == node("studio")
        assert friend.identity == node("mini")

    in_a_world(["mini", "copy", "studio"], body)


@pytest.mark.slow
def test_pin_guessing() -> None:
    """Ten minutes of guessing, as fast as the door lets one: some twenty guesses, of 2¹²⁸ secrets."""

    async def body(studio: VirtualHost, thief: VirtualHost) -> int:
        guesses = 0

        def count(verdict: Any) -> None:
            nonlocal guesses
            guesses += verdict.reason is RefusalReason.OTHER_CLUSTER

        listener = await AdmittedHost(studio, member("studio"), count).listen("studio:1")
        number = 0
        while thief.clock.elapsed() < 600.0:
            guess = AdmittedHost(thief, member("thief", ClusterSecret(number.to_bytes(16, "big"))))
            with pytest.raises(PeerRefused):
                await guess.connect(listener.address, timeout_s=30.0)
            number += 1
        await listener.close()
        return guesses

    assert 10 < in_a_world(["studio", "thief"], body) < 30


@pytest.mark.slow
def test_nothing_that_arrives_is_unpickled() -> None:
    """Nothing in the package imports pickle or its kin."""
    kin = ("pickle", "cloudpickle", "dill", "marshal", "shelve")
    for path in sorted(Path(hcsim.__file__).parent.rglob("*.py")):
        for found in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in found.names] if isinstance(found, ast.Import) else []
            names += [found.module or ""] if isinstance(found, ast.ImportFrom) else []
            assert not [name for name in names if name.partition(".")[0] in kin], path


@pytest.mark.parametrize("schema", [messages.QUESTIONS, messages.ANSWERS])
@pytest.mark.parametrize(
    "data", [b"\x81\xa1x" + b"\x91" * 100_000, b"\x81\xa4type\xa2\xff\xff"], ids=["nested", "no text"]
)
def test_a_message_made_to_crash_the_reader_is_a_fault_of_its_sender(schema: Schema[Any], data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="cannot be read"):
        schema.decode(data, "stranger")
