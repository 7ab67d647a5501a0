"""Admission, in both worlds: members get through, everybody else is told why and let go."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from hcsim import Group
from hcsim.errors import AdmissionRefused, ChannelBroken, ChannelClosed, ChannelError, DeadlineExceeded, PeerRefused
from hcsim.identity.handshake import MAX_MESSAGE_BYTES, Handshake, HandshakeRole
from hcsim.identity.keys import ClusterSecret
from hcsim.identity.trust_list import RefusalReason
from hcsim.runtime.frame import Header, Kind
from hcsim.runtime.host import PeerCheck
from hcsim.selftest.arena import Arena
from hcsim.selftest.contracts import OURS, allocate, listening, member
from hcsim.transport import admission
from hcsim.transport.admission import AdmissionOutcome, AdmittedHost
from hcsim.transport.groups import GroupMembership


def test_a_listener_of_another_cluster_is_not_trusted_either(arena: Arena) -> None:
    """It says yes to everybody, and cannot prove the secret."""

    async def body(left: Any, right: Any) -> None:
        impostor = ClusterSecret(bytes(16))
        impostor.namespace = OURS.namespace
        listener = await listening(arena, right, member("right", impostor))
        with pytest.raises(AdmissionRefused) as refused:
            await AdmittedHost(left, member("left")).connect(listener.address)
        assert refused.value.reason == RefusalReason.WRONG_SECRET.name
        await listener.close()

    arena.run(body)


def test_a_stranger_may_not_send_much(arena: Arena) -> None:
    async def body(left: Any, right: Any) -> None:
        seen: list[AdmissionOutcome] = []
        listener = await listening(arena, right, member("right"), seen)
        stranger = await left.connect(listener.address)
        size = MAX_MESSAGE_BYTES + 1
        await stranger.send(Header(size, Kind.HELLO), memoryview(bytes(size)))
        with pytest.raises(ChannelError):
            await stranger.recv(allocate)
        await stranger.close()
        assert [verdict.reason for verdict in seen] == [RefusalReason.MALFORMED]
        await listener.close()

    arena.run(body)


def test_a_silent_stranger_holds_nobody_up_is_let_go_and_told_why(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(left: Any, right: Any) -> None:
        listener = await listening(arena, right, member("right"))
        silent = await left.connect(listener.address)
        client = await AdmittedHost(left, member("left")).connect(listener.address)
        with monkeypatch.context() as patch:  # not for the client, which has as much time as a busy machine needs
            patch.setattr(admission, "ADMISSION_TIMEOUT_S", 0.2)
            another = await left.connect(listener.address)
            assert bytes((await another.recv(allocate))[1]) == bytes([3, RefusalReason.TOO_SLOW])
        for channel in (silent, another, client):
            await channel.close()
        await listener.close()

    arena.run(body)


def test_a_source_has_only_so_many_strangers_at_the_door(arena: Arena) -> None:
    async def body(left: Any, right: Any) -> None:
        listener = await listening(arena, right, member("right"))
        silent = [await left.connect(listener.address) for _ in range(admission.MAX_HALF_OPEN_PER_SOURCE)]
        one_more = await left.connect(listener.address)
        assert bytes((await one_more.recv(allocate))[1]) == bytes([3, RefusalReason.TOO_MANY_CALLERS])
        for channel in (*silent, one_more):
            await channel.close()
        client = await AdmittedHost(left, member("left")).connect(listener.address)  # once they are gone
        await client.close()
        await listener.close()

    arena.run(body)


def test_a_known_member_gets_in_beside_strangers_who_stand_at_the_door(arena: Arena) -> None:
    async def body(left: Any, right: Any) -> None:
        listener = await listening(arena, right, member("right"))
        known, late = AdmittedHost(left, member("left")), AdmittedHost(left, member("a new member"))
        await (await known.connect(listener.address)).close()
        silent = [await left.connect(listener.address) for _ in range(admission.MAX_HALF_OPEN_PER_SOURCE + 4)]
        await (await known.connect(listener.address, timeout_s=3.0)).close()
        with pytest.raises(AdmissionRefused, match="too many call it at once"):
            await late.connect(listener.address, timeout_s=1.0)
        for channel in silent:
            await channel.close()
        await (await late.connect(listener.address)).close()
        await listener.close()

    arena.run(body)


def test_who_only_claims_to_be_a_known_member_has_a_few_places_and_no_more(arena: Arena) -> None:
    async def body(left: Any, right: Any) -> None:
        listener = await listening(arena, right, member("right"))
        them = member("left")
        await (await AdmittedHost(left, them).connect(listener.address)).close()
        silent = [await left.connect(listener.address) for _ in range(admission.MAX_HALF_OPEN_PER_SOURCE)]

        async def claim() -> tuple[Any, bytes]:
            channel = await left.connect(listener.address)
            hello = Handshake(HandshakeRole.CALLER, them, channel.binding).first()
            assert hello is not None
            await channel.send(Header(len(hello), Kind.HELLO), memoryview(hello))
            return channel, bytes((await channel.recv(allocate))[1])

        claims = [await claim() for _ in range(admission.MAX_CLAIMS)]
        refused = bytes([3, RefusalReason.TOO_MANY_CALLERS])
        assert refused not in [answer for _, answer in claims]  # they are asked for the proof
        one_more, answer = await claim()
        assert answer == refused
        for channel in (*silent, *(each for each, _ in claims), one_more):
            await channel.close()
        await listener.close()

    arena.run(body)


@pytest.mark.slow
def test_guessing_gets_slower_and_a_known_member_on_the_same_machine_does_not_suffer(arena: Arena) -> None:
    async def body(left: Any, right: Any) -> None:
        listener = await listening(arena, right, member("right"))
        known = AdmittedHost(left, member("left"))
        await (await known.connect(listener.address)).close()
        guesses = 0
        while True:
            guess = AdmittedHost(left, member("guesser", ClusterSecret(guesses.to_bytes(16, "big"))))
            with pytest.raises(AdmissionRefused) as refused:
                await guess.connect(listener.address, timeout_s=2.0)
            if refused.value.reason == RefusalReason.TOO_MANY_FAILURES.name:
                break
            guesses += 1
        assert 6 <= guesses < 10
        await (await known.connect(listener.address)).close()
        stranger = AdmittedHost(left, member("a new member"))
        await (await stranger.connect(listener.address)).close()  # calls again until it is let in
        await listener.close()

    arena.run(body)


def test_time_that_runs_out_on_a_repeat_does_not_hide_what_the_door_said(arena: Arena) -> None:
    class Gone:
        """A way to the door that answers for `calls` calls, and then no longer."""

        def __init__(self, host: Any, calls: int) -> None:
            self._host, self._calls = host, calls

        def __getattr__(self, name: str) -> Any:
            return getattr(self._host, name)

        async def connect(self, address: str, *, timeout_s: float, is_peer: PeerCheck | None) -> Any:
            self._calls -= 1
            if self._calls < 0:
                raise DeadlineExceeded(f"{address} did not answer within {timeout_s:g} s")
            return await self._host.connect(address, timeout_s=timeout_s, is_peer=is_peer)

    async def body(left: Any, right: Any) -> None:
        listener = await listening(arena, right, member("right"))
        reasons = set()
        for guess in range(12):
            guesser = member("guesser", ClusterSecret(guess.to_bytes(16, "big")))
            with pytest.raises(AdmissionRefused) as refused:
                await AdmittedHost(Gone(left, 1), guesser).connect(listener.address)
            reasons.add(refused.value.reason)
        assert RefusalReason.TOO_MANY_FAILURES.name in reasons
        with pytest.raises(DeadlineExceeded):
            await AdmittedHost(Gone(left, 0), member("left")).connect(listener.address)
        await listener.close()

    arena.run(body)


def test_whoever_abuses_a_members_name_does_not_lock_it_out(arena: Arena) -> None:
    async def body(left: Any, right: Any) -> None:
        listener = await listening(arena, right, member("right"))
        honest = AdmittedHost(left, member("left"))
        await (await honest.connect(listener.address)).close()
        for _ in range(20):
            thief = member("thief")
            thief.key.public = member("left").key.public
            with pytest.raises(AdmissionRefused) as refused:
                await AdmittedHost(left, thief).connect(listener.address)
            assert refused.value.reason == RefusalReason.FOREIGN_PROOF.name
        await (await honest.connect(listener.address)).close()
        await listener.close()

    arena.run(body)


def test_a_caller_waits_for_a_listener_that_comes_later(arena: Arena) -> None:
    async def body(left: Any, right: Any) -> None:
        listener = await listening(arena, right, member("right"))
        address = listener.address
        await listener.close()
        with pytest.raises((PeerRefused, DeadlineExceeded)):
            await AdmittedHost(left, member("left")).connect(address, timeout_s=0.2)
        calling = asyncio.ensure_future(AdmittedHost(left, member("left")).connect(address))
        await left.clock.sleep(0.1)
        listener = await AdmittedHost(right, member("right")).listen(address)
        assert (await calling).identity == member("right").key.node_id
        await (await calling).close()
        await listener.close()

    arena.run(body)


def test_a_port_without_admission_is_named_as_such(arena: Arena) -> None:
    async def body(left: Any, right: Any) -> None:
        listener = await right.listen(arena.address(right))
        with pytest.raises(DeadlineExceeded, match="run without admission"):
            await AdmittedHost(left, member("left")).connect(listener.address, timeout_s=1.0)
        await listener.close()

    arena.run(body)


def test_closing_a_listener_lets_everybody_at_the_door_go(arena: Arena) -> None:
    async def body(left: Any, right: Any) -> None:
        listener = await listening(arena, right, member("right"))
        silent = await left.connect(listener.address)
        client = await AdmittedHost(left, member("left")).connect(listener.address)
        await listener.close()
        await listener.close()
        for channel in (silent, client):
            with pytest.raises(ChannelBroken):
                await channel.recv(allocate)
            await channel.close()
        with pytest.raises(ChannelClosed):
            await listener.accept()

    arena.run(body)


def test_a_frame_on_an_admitted_channel_costs_nothing_extra(arena: Arena) -> None:
    """Its methods are those of the channel within: nothing of ours runs when a frame passes."""

    async def body(left: Any, right: Any) -> None:
        listener = await listening(arena, right, member("right"))
        client = await AdmittedHost(left, member("left")).connect(listener.address)
        assert client.send.__self__ is client.recv.__self__ is not client
        await client.close()
        await listener.close()

    arena.run(body)


def test_a_group_works_on_admitted_hosts(arena: Arena) -> None:
    async def body(left: Any, right: Any) -> None:
        free = await right.listen(arena.address(right))
        address = free.address
        await free.close()
        hosts = AdmittedHost(right, member("right")), AdmittedHost(left, member("left"))
        addresses = (address, arena.address(left))

        async def sum_up(rank: int) -> Any:
            async with await Group.open(hosts[rank], GroupMembership(rank, addresses)) as group:
                return await group.all_reduce(np.full(100_000, rank + 1.0))

        for total in await asyncio.gather(sum_up(0), sum_up(1)):
            assert np.array_equal(total, np.full(100_000, 3.0))

    arena.run(body)
