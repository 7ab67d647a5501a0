"""Joining by an invitation: once, by whoever is first, until it expires, whatever else is said."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hcsim.cluster.joining import InvitationServer, Knock, Welcome, find, knock, thank
from hcsim.errors import HcsimError
from hcsim.identity.handshake import Credentials
from hcsim.identity.keys import ClusterSecret, NodeKey
from hcsim.identity.trust_list import Invitation
from hcsim.identity.trust_store import StoredTrust, TrustStore
from hcsim.runtime.frame import Header, Kind
from hcsim.transport.admission import AdmittedHost
from hcsim.virtual.host import VirtualHost
from hcsim.virtual.world import World
from tests.switches import on_switch

FIRST, INVITED = ClusterSecret(bytes(range(16))), ClusterSecret(bytes(range(1, 17)))
AT = "a:52418"


def key(name: str) -> NodeKey:
    return NodeKey(hashlib.sha256(name.encode()).digest())


def inside(host: VirtualHost, secret: ClusterSecret = INVITED) -> AdmittedHost:
    boot, nonces = host.rng("boot").getrandbits(40), host.rng("nonces", host.clock.elapsed() * 1e9 // 1)
    return AdmittedHost(host, Credentials(key(host.name), secret, boot, nonces.randbytes))


class Door:
    """a invites; what b, c and d do is up to the test."""

    def __init__(self, uses: int = 1, lasts_s: float = 600.0) -> None:
        self.world = World(on_switch(["a", "b", "c", "d"]))
        self.told: list[str] = []
        a = self.world.host("a")
        self.trusted = TrustStore(FIRST, key("a"), "a", StoredTrust(a.store))
        self.invitation = Invitation(uses, lasts_s)
        self.inviting = InvitationServer(inside(a), self.trusted, FIRST, self.invitation, self.told.append)
        self.was_used_up: bool | None = None

    def run(self, body: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
        async def main() -> Any:
            a, *others = self.world.hosts
            serving = a.spawn(self._serve(), name="invite")
            result = await body(*others)
            await serving
            return result

        return self.world.run(main())

    async def _serve(self) -> None:
        self.was_used_up = await self.inviting.serve(AT, INVITED.namespace.hex())

    def members(self) -> list[str]:
        return sorted(self.trusted.list.members.values())


async def joins(host: VirtualHost, *, thanks: bool = True, **changes: Any) -> Welcome:
    ours = Knock(**{"public": key(host.name).public, "name": host.name, **changes})
    welcome, channel = await knock(inside(host), AT, ours, 5.0)
    if thanks:
        await thank(channel)
    else:
        await channel.close()
    return welcome


def test_a_newcomer_finds_the_member_and_is_one_then() -> None:
    door = Door()

    async def body(b: VirtualHost, *others: VirtualHost) -> Welcome:
        assert await find(inside(b), INVITED.namespace.hex(), 5.0) == AT
        assert await find(inside(b), FIRST.namespace.hex(), 1.0) == ""
        return await joins(b)

    welcome = door.run(body)
    assert (door.members(), door.was_used_up) == (["a", "b"], True)
    store = TrustStore(ClusterSecret(welcome.first), key("b"), "b", StoredTrust(door.world.host("b").store))
    store.take(welcome.record)
    assert sorted(store.list.members.values()) == ["a", "b"]
    assert door.trusted.receive(store.told_to(key("a").public), "b", key("b").public)
    assert store.secret == door.trusted.secret


def test_of_those_that_use_it_at_once_as_many_join_as_it_is_for() -> None:
    door = Door(uses=2)

    async def body(*hosts: VirtualHost) -> list[Any]:
        return await asyncio.gather(*map(joins, hosts), return_exceptions=True)

    results = door.run(body)
    assert sum(isinstance(each, Welcome) for each in results) == 2
    assert len(door.members()) == 3
    [refused] = [str(each) for each in results if not isinstance(each, Welcome)]
    assert "used already" in refused or "nobody listens" in refused or "did not" in refused or "closed" in refused


def test_whoever_did_not_get_the_answer_may_ask_again_and_nobody_else() -> None:
    door = Door()

    async def body(b: VirtualHost, c: VirtualHost, d: VirtualHost) -> None:
        await joins(b, thanks=False)
        with pytest.raises(HcsimError, match="used already"):
            await joins(c)
        await joins(b)

    door.run(body)
    assert (door.members(), door.was_used_up) == (["a", "b"], True)


def test_an_invitation_expires_by_the_clock_of_who_made_it() -> None:
    door = Door(lasts_s=30.0)

    async def body(b: VirtualHost, *others: VirtualHost) -> None:
        await b.clock.sleep(31.0)
        with pytest.raises(HcsimError):
            await joins(b)

    door.run(body)
    assert (door.members(), door.was_used_up) == (["a"], False)


def test_what_uses_nothing_up() -> None:
    """Another secret, another's key, another cluster under that name, an expelled key, noise, and silence."""
    door = Door(lasts_s=120.0)
    door.trusted.enlist(key("d").public, "d")
    door.trusted.rotate(INVITED, [key("d").node_id])

    async def body(b: VirtualHost, c: VirtualHost, d: VirtualHost) -> None:
        with pytest.raises(HcsimError):
            await inside(c, FIRST).connect(AT, timeout_s=3.0)
        with pytest.raises(HcsimError):
            await joins(c, public=key("b").public)
        with pytest.raises(HcsimError, match="another cluster of that name"):
            await joins(c, namespace=bytes(32))
        with pytest.raises(HcsimError, match="was expelled"):
            await joins(d)
        for noise in (b"", b"\x81", b"\xc1" * 500, b"\x81\xa4type\xa5knock"):
            channel = await inside(c).connect(AT)
            await channel.send(Header(len(noise), Kind.CONTROL), memoryview(noise))
            await channel.close()
        silent = await inside(c).connect(AT)
        await joins(b)
        await silent.close()

    door.run(body)
    assert (door.members(), door.was_used_up) == (["a", "b"], True)


@pytest.mark.slow
@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from([b"b", b"c", b"d", b"e"]), st.sampled_from("ucg")), max_size=12),
)
def test_no_order_of_events_lets_more_keys_in_than_it_is_for(uses: int, events: list[tuple[bytes, str]]) -> None:
    invitation, inside = Invitation(uses, 10.0), dict[bytes, None]()
    for public, event in events:
        if event == "u" and not invitation.use(public, 1.0):
            inside[public] = None
        elif event == "c":
            invitation.confirm(public)
    assert len(inside) <= uses
    assert all(not invitation.use(public, 9.9) for public in inside)
    assert invitation.use(b"b", 10.0) == "the invitation has expired"


def test_an_invitation_is_no_phrase_and_a_phrase_no_invitation() -> None:
    assert ClusterSecret.from_invitation(INVITED.invitation()) == INVITED
    assert ClusterSecret.from_invitation(INVITED.phrase()) is None
    with pytest.raises(HcsimError, match="typo"):
        ClusterSecret.from_phrases(INVITED.invitation())
