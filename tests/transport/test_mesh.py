"""The mesh: who may call, what a stranger can do (nothing), and how links open and close."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from hcsim import real_group
from hcsim.collectives.group import Group
from hcsim.collectives.select import Options
from hcsim.config import parse_scenario
from hcsim.errors import ChannelBroken, ChannelClosed, CollectiveError, DeadlineExceeded, PeerRefused, UsageError
from hcsim.real.host import RealHost, RealOptions
from hcsim.runtime.channel import Channel, Phantom
from hcsim.runtime.frame import HEADER_BYTES, Header, Kind, encode_header
from hcsim.runtime.host import Host
from hcsim.transport.admission_queue import MAX_UNADMITTED, RefusalLog
from hcsim.transport.groups import HELLO_LIMIT_BYTES, HELLO_TIMEOUT_S, GroupHello, GroupMembership, Wire
from hcsim.transport.link import Link
from hcsim.transport.mesh import Mesh
from hcsim.virtual.host import VirtualHost
from hcsim.virtual.world import World

GOODBYE = ((Kind.BYE, ""), ChannelClosed("the test is over"))
WIRE = Wire(connect_timeout_s=20.0)
HELLO = GroupHello("hcsim", 0, 3, WIRE.segment_bytes, 1, 1)
"""What rank 1 of the group says when it calls."""


def run(body: Callable[..., Awaitable[Any]], hosts: int = 3, latency_ms: float = 0.1) -> Any:
    scenario = parse_scenario(
        f"""
        name = "mesh"
        effects = "ideal"
        medium = [{{ kind = "ethernet", name = "switch", rate = "1 Gb/s", latency = "{latency_ms} ms" }}]
        node = [{{ name = "mac", count = {hosts}, machine = "ideal", links = ["switch"] }}]
        """,
        "mesh",
    )
    world = World(scenario)
    return world.run(body(*world.hosts))


def membership(rank: int, **changes: Any) -> GroupMembership:
    us = GroupMembership(rank, tuple(f"mac-{n}:1000" for n in (1, 2, 3)), wire=WIRE)
    return msgspec.structs.replace(us, **changes)


async def opened(host: VirtualHost, rank: int, **changes: Any) -> Mesh:
    mesh = Mesh(host, membership(rank, **changes))
    await mesh.open()
    return mesh


async def call(host: VirtualHost, hello: GroupHello | bytes, kind: Kind = Kind.HELLO) -> tuple[Channel, Header, bytes]:
    """Call rank 0 and say that; its answer."""
    channel = await host.connect("mac-1:1000")
    data = hello if isinstance(hello, bytes) else msgspec.msgpack.encode(hello)
    await channel.send(Header(len(data), kind), memoryview(data))
    header, payload = await channel.recv(lambda _: None)
    return channel, header, bytes(payload)


def test_links_open_when_they_are_needed_and_both_ends_have_the_same():
    async def body(*hosts: VirtualHost) -> None:
        meshes = [await opened(host, rank) for rank, host in enumerate(hosts)]
        assert [mesh.links for mesh in meshes] == [{}, {}, {}]
        up, down, again = await asyncio.gather(meshes[2].link(0), meshes[0].link(2), meshes[2].link(0))
        assert up is again
        await up.send(Header(3, sender=2, total=3), memoryview(b"abc"))
        place = memoryview(bytearray(3))
        assert bytes(await down.post((0, 0, 0, 0, 0), place, 0, 3)) == b"abc"
        assert not meshes[1].links
        for mesh in meshes:
            await mesh.close(*GOODBYE)

    run(body)


def test_a_rings_links_open_side_by_side_however_many_there_are():
    def begins_after_s(ranks: int) -> float:
        """When the first operation can begin, at the slowest: it ends that much later than a second one."""
        us = GroupMembership(0, tuple(f"mac-{n + 1}:1000" for n in range(ranks)))

        async def member(host: VirtualHost, rank: int) -> float:
            async with await Group.open(host, msgspec.structs.replace(us, rank=rank)) as group:
                lasted_s = []
                for _ in range(2):
                    began_s = host.clock.elapsed()
                    await group.all_reduce(Phantom(ranks), algorithm="ring")
                    lasted_s.append(host.clock.elapsed() - began_s)
            return lasted_s[0] - lasted_s[1]

        async def body(*hosts: VirtualHost) -> list[float]:
            return await asyncio.gather(*(member(host, rank) for rank, host in enumerate(hosts)))

        return max(run(body, ranks))

    assert 0.0 < begins_after_s(24) < 1.5 * begins_after_s(3)


REFUSED = {
    "another world": (msgspec.structs.replace(HELLO, world=4), "your world is 4, ours is 3"),
    "another name": (msgspec.structs.replace(HELLO, name="other"), "your name is other, ours is hcsim"),
    "other segments": (msgspec.structs.replace(HELLO, segment_bytes=7), "your segment_bytes is 7"),
    "other stripes": (msgspec.structs.replace(HELLO, stripes=2), "your stripes is 2, ours is 1"),
    "a rank beyond the world": (msgspec.structs.replace(HELLO, rank=3), "rank 3 .* has no business"),
    "a negative rank": (msgspec.structs.replace(HELLO, rank=-1), "rank -1 .* has no business"),
    "our own rank": (msgspec.structs.replace(HELLO, rank=0), "rank 0 .* has no business"),
    "a stripe beyond": (msgspec.structs.replace(HELLO, stripe=1), "connection 1"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_caller_that_does_not_belong_here_is_told_why_and_let_go(what):
    hello, reason = REFUSED[what]

    async def body(ours: VirtualHost, caller: VirtualHost, _: VirtualHost) -> None:
        mesh = await opened(ours, 0)
        channel, header, text = await call(caller, hello)
        assert header.kind is Kind.ABORT
        assert re.search(reason, text.decode())
        with pytest.raises(ChannelBroken):
            await channel.recv(lambda _: None)
        assert mesh.links == {}
        await mesh.close(*GOODBYE)

    run(body)


@pytest.mark.parametrize("what", REFUSED)
def test_who_waits_for_a_rank_in_vain_says_whom_it_turned_away(what):
    hello, reason = REFUSED[what]
    told: list[str] = []

    async def body(ours: VirtualHost, caller: VirtualHost, _: VirtualHost) -> None:
        mesh = await opened(ours, 0, refusals=RefusalLog(told.append))
        await (await call(caller, hello))[0].close()
        assert len(told) == 1
        with pytest.raises(DeadlineExceeded) as late:
            await mesh.link(1)
        assert str(late.value) == f"rank 1 did not call within 20 s; {told[0]}"
        await mesh.close(*GOODBYE)

    run(body)
    assert re.fullmatch(f"a caller was refused: mac-2.*, as rank {hello.rank}, was told: .*{reason}.*", told[0])


def test_a_stranger_cannot_fill_our_error_or_command_our_terminal():
    told: list[str] = []

    async def body(ours: VirtualHost, caller: VirtualHost, _: VirtualHost) -> None:
        mesh = await opened(ours, 0, refusals=RefusalLog(told.append))
        name = "\x1b]0;mine\x07" + "x" * 3000
        await (await call(caller, msgspec.structs.replace(HELLO, name=name)))[0].close()
        await mesh.close(*GOODBYE)

    run(body)
    assert told[0].isprintable()
    assert len(told[0]) < 400


def test_an_operation_that_ends_before_the_wait_for_its_links_says_it_too():
    async def body(ours: VirtualHost, caller: VirtualHost, _: VirtualHost) -> str:
        async with await Group.open(ours, membership(0), Options(timeout_s=5.0)) as group:
            operation = group.barrier()
            await (await call(caller, msgspec.structs.replace(HELLO, world=4)))[0].close()
            with pytest.raises(CollectiveError) as late:
                await operation
        return str(late.value)

    assert re.search(
        "opening a link to rank 1 in round 0; a caller was refused: .*your world is 4, ours is 3", run(body)
    )


@pytest.mark.parametrize(("step", "named"), [(0, 1), (1, 0), (3, 2), (4, 1), (2**32 - 1, 1)])
def test_who_gives_up_may_name_a_rank_of_the_group_and_no_other(step, named):
    async def body(ours: VirtualHost, caller: VirtualHost, _: VirtualHost) -> int | None:
        async with await Group.open(ours, membership(0), Options(timeout_s=5.0)) as group:
            operation = group.recv(np.ones(1), 1)
            channel, _, _ = await call(caller, HELLO)
            await channel.send(Header(3, Kind.ABORT, sender=1, step=step), memoryview(b"why"))
            with pytest.raises(CollectiveError, match="rank 1 gave up: why") as told:
                await operation
            await channel.close()
        return told.value.peer

    assert run(body) == named


@pytest.mark.parametrize(
    ("changes", "understood"),
    [
        ({"world": 99, "rank": 77}, True),
        ({"rank": -5}, True),
        ({"rank": 0}, True),
        ({"stripes": 3}, True),
        ({"epoch": 1 << 40}, False),
    ],
)
def test_a_stranger_that_claims_a_later_epoch_does_not_end_a_group(changes, understood):
    async def body(*hosts: VirtualHost) -> None:
        groups = [await Group.open(host, membership(rank)) for rank, host in enumerate(hosts)]
        await asyncio.gather(*(group.all_reduce(np.ones(1)) for group in groups))
        hello = msgspec.to_builtins(HELLO) | {"epoch": 1} | changes
        stranger = await hosts[2].connect("mac-1:1000")
        data = msgspec.msgpack.encode(hello)
        await stranger.send(Header(len(data), Kind.HELLO), memoryview(data))
        if understood:
            header, _ = await stranger.recv(lambda _: None)
            assert header.kind is Kind.LATER
        with pytest.raises(ChannelBroken):
            await stranger.recv(lambda _: None)
        found = await asyncio.gather(*(group.all_reduce(np.ones(1)) for group in groups))
        assert [float(each[0]) for each in found] == [3.0] * 3
        again = await asyncio.gather(*(group.reopen() for group in groups))
        assert [group.epoch for group in again] == [1] * 3
        await asyncio.gather(*(group.close() for group in groups))

    run(body)


def test_those_who_go_on_with_fewer_wait_until_the_others_have_left_the_old_group():
    async def member(host: VirtualHost, rank: int) -> float:
        whole = await Group.open(host, membership(rank), Options(timeout_s=1.0 + rank))
        with pytest.raises(CollectiveError):
            await whole.recv(np.zeros(1), 2)
        await whole.close()
        addresses = whole.addresses[:2]
        async with await Group.open(host, membership(rank, addresses=addresses, epoch=1)) as fewer:
            return float((await fewer.all_reduce(np.ones(1)))[0])

    async def body(first: VirtualHost, second: VirtualHost, silent: VirtualHost) -> list[float]:
        return await asyncio.gather(member(first, 0), member(second, 1))

    assert run(body) == [2.0, 2.0]


def test_the_second_to_claim_a_rank_is_refused():
    async def body(ours: VirtualHost, first: VirtualHost, second: VirtualHost) -> None:
        mesh = await opened(ours, 0)
        _, answer, _ = await call(first, HELLO)
        assert answer.kind is Kind.HELLO
        link = await mesh.link(1)
        _, answer, text = await call(second, HELLO)
        assert (answer.kind, text) == (Kind.ABORT, b"rank 1 is connected already")
        assert mesh.links == {1: link}
        await mesh.close(*GOODBYE)

    run(body)


def test_a_dialler_of_an_old_epoch_is_refused_with_the_reason():
    async def body(one: VirtualHost, other: VirtualHost, _: VirtualHost) -> None:
        meshes = [await opened(one, 0, epoch=4), await opened(other, 1)]
        with pytest.raises(PeerRefused, match="your epoch is 0, ours is 4"):
            await meshes[1].link(0)
        for mesh in meshes:
            await mesh.close(*GOODBYE)

    run(body)


def test_a_dialler_of_a_newer_epoch_calls_until_we_are_there_too():
    async def body(one: VirtualHost, other: VirtualHost, _: VirtualHost) -> None:
        old, new = await opened(one, 0), await opened(other, 1, epoch=4)
        told: list[tuple[int, int]] = []
        old.on_newer = lambda rank, epoch: told.append((rank, epoch))
        opening = asyncio.create_task(new.link(0))
        await asyncio.sleep(1.0)
        assert not opening.done()
        assert set(told) == {(1, 4)}
        assert old.newest_epoch == 4
        await old.close(*GOODBYE)
        caught_up = await opened(one, 0, epoch=4)
        assert (await opening).peer_rank == 0
        for mesh in (caught_up, new):
            await mesh.close(*GOODBYE)

    run(body)


def test_whoever_answers_with_another_rank_is_not_believed():
    async def body(one: VirtualHost, _: VirtualHost, caller: VirtualHost) -> None:
        # At rank 0's address sits one who thinks that it is rank 1.
        impostor = await opened(one, 1, addresses=("mac-2:1000", "mac-1:1000", "mac-3:1000"))
        mesh = await opened(caller, 2)
        with pytest.raises(PeerRefused, match="should be rank 0, but says it is rank 1"):
            await mesh.link(0)
        for each in (impostor, mesh):
            await each.close(*GOODBYE)

    run(body)


_LARGE = msgspec.msgpack.encode(msgspec.structs.replace(HELLO, name="x" * HELLO_LIMIT_BYTES))
STRANGE = {
    "no hello": (Header(3, Kind.DATA), b"abc"),
    "an unreadable hello": (Header(3, Kind.HELLO), b"\xc1\xc1\xc1"),
    "an empty hello": (Header(0, Kind.HELLO), b""),
    "a hello of other fields": (Header(4, Kind.HELLO), msgspec.msgpack.encode({"a": 1})),
    "a hello too large": (Header(len(_LARGE), Kind.HELLO), _LARGE),
}


@pytest.mark.parametrize("what", STRANGE)
def test_a_strange_caller_is_dropped_and_nothing_else_happens(what):
    header, data = STRANGE[what]

    async def body(ours: VirtualHost, stranger: VirtualHost, member: VirtualHost) -> None:
        mesh, theirs = await opened(ours, 0), await opened(member, 2)
        channel = await stranger.connect("mac-1:1000")
        await channel.send(header, memoryview(data))
        with pytest.raises(ChannelBroken):
            await channel.recv(lambda _: None)
        links = await asyncio.gather(mesh.link(2), theirs.link(0))
        assert [link.peer_rank for link in links] == [2, 0]
        for each in (mesh, theirs):
            await each.close(*GOODBYE)

    run(body)


def test_silent_callers_of_one_source_keep_no_member_waiting_and_are_dropped_in_time():
    async def body(ours: VirtualHost, stranger: VirtualHost, member: VirtualHost) -> None:
        mesh, theirs = await opened(ours, 0), await opened(member, 2)
        silent = [await stranger.connect("mac-1:1000") for _ in range(MAX_UNADMITTED)]
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        late, answer, _ = await call(member, msgspec.structs.replace(HELLO, rank=2))
        assert answer.kind is Kind.HELLO  # the oldest of the silent ones was hung up on
        assert loop.time() - began_s < 0.1
        await late.close()
        for channel in silent:
            with pytest.raises(ChannelBroken):
                await channel.recv(lambda _: None)
        for each in (mesh, theirs):
            await each.close(*GOODBYE)

    run(body)


def test_a_rank_that_never_calls_is_given_up():
    async def body(ours: VirtualHost, *_: VirtualHost) -> None:
        mesh = await opened(ours, 0)
        with pytest.raises(DeadlineExceeded, match="rank 1 did not call within 20 s"):
            await mesh.link(1)
        await mesh.close(*GOODBYE)

    run(body)


def test_closing_ends_links_and_those_that_are_being_opened():
    async def body(ours: VirtualHost, other: VirtualHost, _: VirtualHost) -> None:
        mesh, theirs = await opened(ours, 0), await opened(other, 1)
        link, _ = await asyncio.gather(mesh.link(1), theirs.link(0))
        opening = asyncio.create_task(mesh.link(2))
        waiting = link.post((0, 0, 0, 0, 0), None, 0, 3)
        await asyncio.sleep(1.0)
        await mesh.close(*GOODBYE)
        for each in (opening, waiting):
            with pytest.raises(ChannelClosed, match="the test is over"):
                await each
        with pytest.raises(UsageError, match="closed"):
            await mesh.link(2)
        await theirs.close(*GOODBYE)

    run(body)


def test_who_calls_while_a_group_ends_hears_why():
    async def body(host: VirtualHost, caller: VirtualHost, _: VirtualHost) -> None:
        mesh = await opened(host, 0)
        channel = await caller.connect("mac-1:1000")
        await host.clock.sleep(0.01)
        why = CollectiveError("rank 2 is lost")
        ending = host.spawn(mesh.close((Kind.ABORT, str(why)), why), name="end")
        data = msgspec.msgpack.encode(HELLO)
        await channel.send(Header(len(data), Kind.HELLO), memoryview(data))
        header, answer = await channel.recv(lambda header: None)
        assert (header.kind, bytes(answer)) == (Kind.ABORT, b"rank 2 is lost")
        await ending
        with pytest.raises(PeerRefused):
            await caller.connect("mac-1:1000", timeout_s=0.1)

    run(body)


@pytest.mark.parametrize("kind", [Kind.ABORT, Kind.BYE])
@pytest.mark.parametrize("stripes", [1, 2])
def test_who_goes_while_it_is_calling_says_so_to_whoever_has_taken_it_in(stripes, kind):
    """At whatever moment: it may be taken in and not know it yet."""

    def heard_if_it_goes_after(wait_s: float) -> list[str]:
        heard: list[str] = []

        def adopt(link: Link) -> None:
            link.on_abort = lambda header, text: heard.append(f"abort: {text}")
            link.on_failure = lambda link, error: heard.append("bye" if link.leaving else f"lost: {error}")

        async def body(host: VirtualHost, caller: VirtualHost, _: VirtualHost) -> None:
            wire = Wire(connect_timeout_s=20.0, stripes=stripes)
            mesh, theirs = await opened(host, 0, wire=wire), await opened(caller, 1, wire=wire)
            mesh.on_link = adopt
            calling = asyncio.ensure_future(theirs.link(0))
            await caller.clock.sleep(wait_s)
            why = CollectiveError("my dog ate it")
            await theirs.close((kind, str(why)), why)
            await asyncio.gather(calling, return_exceptions=True)
            await host.clock.sleep(1.0)
            assert len(mesh.links) == bool(heard)
            await mesh.close(*GOODBYE)

        run(body, latency_ms=10.0)
        return heard[:1]

    heard = [heard_if_it_goes_after(0.001 + 0.005 * n) for n in range(30)]
    goodbye = ["abort: my dog ate it" if kind is Kind.ABORT else "bye"]
    first = heard.index(goodbye)
    assert heard == [[]] * first + [goodbye] * (30 - first)
    assert 0 < first < 20


def test_a_rank_outside_its_group_is_refused():
    async def body(ours: VirtualHost, *_: VirtualHost) -> None:
        with pytest.raises(UsageError, match="rank 3 does not exist in a group of 3"):
            Mesh(ours, membership(3))

    run(body)


@pytest.mark.parametrize(
    "wire", [{"stripes": 0}, {"segment_bytes": 0}, {"segment_bytes": 2**30}, {"connect_timeout_s": 0}]
)
def test_a_wire_that_cannot_work_is_refused(wire):
    with pytest.raises(UsageError, match="a wire has"):
        Wire(**wire)


def test_a_refusal_is_told_at_once_though_another_peer_keeps_silent():
    async def body(strict: VirtualHost, ours: VirtualHost, _silent: VirtualHost) -> None:
        other = await opened(strict, 0, wire=Wire(segment_bytes=1000))
        async with await Group.open(ours, membership(1)) as group:
            with pytest.raises(CollectiveError, match=r"a link to rank 0 .* refused us: your segment") as caught:
                await group.all_reduce(Phantom(12), algorithm="ring")
        assert caught.value.peer == 0
        assert ours.clock.elapsed() < 2.0
        await other.close(*GOODBYE)

    run(body)


def test_who_gives_up_while_it_opens_a_watched_group_tells_those_who_are_there():
    watched = Options(watch_s=1.0)

    async def body(zero: VirtualHost, one: VirtualHost, _absent: VirtualHost) -> None:
        opening = asyncio.ensure_future(Group.open(zero, membership(0), watched))
        group = await Group.open(one, membership(1), watched)
        await one.clock.sleep(1.0)
        assert group.error is None
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        await one.clock.sleep(1.0)
        assert "rank 0 gave up while it opened the group" in str(group.error)
        with pytest.raises(PeerRefused, match="nobody listens"):
            await one.connect("mac-1:1000", timeout_s=0.1)
        await group.close()

    run(body)


# What was opened is let go.


def test_where_one_stripe_is_refused_the_others_are_let_go():
    striped = msgspec.structs.replace(WIRE, stripes=2)

    async def body(theirs: VirtualHost, ours: VirtualHost, _: VirtualHost) -> None:
        listener = await theirs.listen("mac-1:1000")
        mesh = await opened(ours, 1, wire=striped)
        linking = asyncio.ensure_future(mesh.link(0))
        hello = msgspec.msgpack.encode(msgspec.structs.replace(HELLO, rank=0))
        taken = []
        for kind, data in (Kind.HELLO, hello), (Kind.ABORT, b"no more"):
            channel = await listener.accept()
            await channel.recv(lambda _: None)
            await channel.send(Header(len(data), kind), memoryview(data))
            taken.append(channel)
        with pytest.raises(PeerRefused, match="no more"):
            await linking
        with pytest.raises(ChannelBroken):
            async with asyncio.timeout(1.0):
                await taken[0].recv(lambda _: None)
        for channel in taken:
            await channel.close()
        await listener.close()
        await mesh.close(*GOODBYE)

    run(body)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_who_is_cancelled_while_it_says_goodbye_still_lets_go(addresses, shared_memory):
    """The goodbye waits behind a message for which nobody has asked."""
    large = np.zeros(16 << 20, np.uint8).data

    async def main() -> None:
        us = GroupMembership(0, tuple(addresses(2)))
        named = [RealOptions(name, shared_memory=shared_memory) for name in ("ours", "theirs")]
        async with RealHost(named[0]) as ours, RealHost(named[1]) as theirs:
            meshes = [Mesh(ours, us), Mesh(theirs, msgspec.structs.replace(us, rank=1))]
            for mesh in meshes:
                await mesh.open()
            link, _ = await asyncio.gather(meshes[0].link(1), meshes[1].link(0))
            sending = asyncio.ensure_future(link.send(Header(len(large), total=len(large)), large))
            closing = asyncio.ensure_future(meshes[0].close(*GOODBYE))
            await asyncio.sleep(0.05)
            assert not sending.done()
            closing.cancel()
            assert isinstance((await asyncio.gather(closing, return_exceptions=True))[0], asyncio.CancelledError)
            async with asyncio.timeout(10.0):
                assert isinstance((await asyncio.gather(sending, return_exceptions=True))[0], ChannelClosed)
            await meshes[1].close(*GOODBYE)

    asyncio.run(main())


@pytest.mark.parametrize("again", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("turns", range(1, 8))
def test_wherever_closing_is_cancelled_everything_is_let_go(turns, again):
    """Two links, and one of which only the first of two connections was made."""
    striped = {"wire": msgspec.structs.replace(WIRE, stripes=2), "addresses": tuple(f"mac-{n}:1000" for n in "1234")}

    async def body(*hosts: VirtualHost) -> None:
        mesh, *others = [await opened(host, rank, **striped) for rank, host in enumerate(hosts[:3])]
        await asyncio.gather(mesh.reach((1, 2)), *(other.link(0) for other in others))
        half, _, _ = await call(hosts[3], msgspec.structs.replace(HELLO, world=4, stripes=2, rank=3))
        closing = asyncio.ensure_future(mesh.close(*GOODBYE))
        for cancelled_after in (turns, *(() if again is None else (again,))):
            for _ in range(cancelled_after):
                await asyncio.sleep(0)
            closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        for link in mesh.links.values():
            for channel in link.channels:
                with pytest.raises(ChannelClosed):
                    await channel.send(Header(0))
        await hears_the_end(half, 1.0)
        with pytest.raises(PeerRefused, match="nobody listens"):
            await hosts[3].connect("mac-1:1000", timeout_s=0.1)
        for other in others:
            await other.close(*GOODBYE)

    run(body, 4)


async def says_nothing(ours: Host, theirs: Host, address: str) -> Channel:
    mesh = Mesh(ours, GroupMembership(0, (address, address)))
    await mesh.open()
    caller = await theirs.connect(address)
    await ours.clock.sleep(0.05)  # it is being greeted by now
    await mesh.close(*GOODBYE)
    return caller


async def hears_the_end(caller: Channel, within_s: float) -> None:
    with pytest.raises(ChannelBroken):
        async with asyncio.timeout(within_s):
            await caller.recv(lambda _: None)
    await caller.close()


def test_a_caller_that_says_nothing_is_let_go_also_when_we_have_left():
    async def body(ours: VirtualHost, theirs: VirtualHost, _: VirtualHost) -> None:
        await hears_the_end(await says_nothing(ours, theirs, "mac-1:1000"), 2 * HELLO_TIMEOUT_S)

    run(body)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_caller_that_says_nothing_is_let_go_when_the_host_closes(addresses, shared_memory):
    async def main() -> None:
        named = [RealOptions(name, shared_memory=shared_memory) for name in ("ours", "theirs")]
        async with RealHost(named[1]) as theirs:
            async with RealHost(named[0]) as ours:
                caller = await says_nothing(ours, theirs, addresses(1)[0])
            await hears_the_end(caller, HELLO_TIMEOUT_S / 2)

    asyncio.run(main())


@pytest.mark.parametrize("latency_ms", [1, 20, 150])
@pytest.mark.parametrize("ranks", [3, 5])
def test_a_group_that_failed_is_opened_anew_although_its_callers_are_still_on_their_way(ranks, latency_ms):
    """One that goes on at once calls another that is still closing its old links; it is told to call again."""
    us = GroupMembership(0, tuple(f"mac-{n + 1}:1000" for n in range(ranks)))

    async def member(host: VirtualHost, rank: int) -> None:
        group = await Group.open(host, msgspec.structs.replace(us, rank=rank))
        await group.all_reduce(Phantom(100), algorithm="ring")
        if rank == 1:
            group.fail("for the test")
        with pytest.raises(CollectiveError):
            await group.all_reduce(Phantom(100), algorithm="ring")
        async with await group.reopen() as again:
            await again.all_reduce(Phantom(100), algorithm="ring")

    async def body(*hosts: VirtualHost) -> None:
        await asyncio.gather(*(member(host, rank) for rank, host in enumerate(hosts)))

    run(body, ranks, latency_ms)


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("shared_memory", [True, False])
def test_who_is_in_the_next_epoch_already_may_call_at_any_moment_while_we_leave_the_last(
    addresses, shared_memory, turns
):
    async def main() -> int:
        us = GroupMembership(0, tuple(addresses(3)))
        named = [RealOptions(name, shared_memory=shared_memory) for name in "abc"]
        async with asyncio.timeout(20), RealHost(named[0]) as a, RealHost(named[1]) as b, RealHost(named[2]) as c:
            old = await Group.open(a, us)
            there = await Group.open(c, msgspec.structs.replace(us, rank=2))
            await asyncio.gather(old.send(np.ones(1), 2), there.recv(np.ones(1), 0))
            early = await Group.open(b, msgspec.structs.replace(us, rank=1, epoch=1))

            async def again() -> int:
                old.fail("for the test")
                async with await old.reopen() as new:
                    return int((await new.recv(np.zeros(1), 1))[0])

            reopening = asyncio.ensure_future(again())
            for _ in range(turns):
                await asyncio.sleep(0)
            await early.send(np.full(1, 7.0), 0)
            number = await reopening
            await early.close()
            await there.close()
            return number

    assert asyncio.run(main()) == 7


# Bytes from a real socket.


_TRUNCATED = encode_header(Header(100, Kind.HELLO))
GARBAGE = {
    "another protocol": b"GET / HTTP/1.1\r\nHost: mini\r\n\r\n" + bytes(HEADER_BYTES),
    "zeros": bytes(1000),
    "part of a header": _TRUNCATED[:20],
    "a header without its payload": _TRUNCATED + bytes(30),
    "an announcement of 4 GB": encode_header(Header(2**32 - 1, Kind.HELLO)),
    "nothing": b"",
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_from_a_real_socket_is_dropped_and_members_still_connect(what):
    async def main() -> None:
        async with RealHost(RealOptions("one")) as one, RealHost(RealOptions("other")) as other:
            probe = await one.listen("127.0.0.1:0")
            address = probe.address
            await probe.close()
            # Only rank 0 is called, so rank 1's address is never used.
            meshes = [
                Mesh(host, GroupMembership(rank, (address, "127.0.0.1:0"))) for rank, host in enumerate((one, other))
            ]
            for mesh in meshes:
                await mesh.open()
            reader, writer = await asyncio.open_connection(*address.rsplit(":", 1))
            writer.write(GARBAGE[what])
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
            links = await asyncio.gather(*(mesh.link(1 - rank) for rank, mesh in enumerate(meshes)))
            assert [link.peer_rank for link in links] == [1, 0]
            for mesh in meshes:
                await mesh.close(*GOODBYE)

    async def bounded() -> None:
        async with asyncio.timeout(20.0):
            await main()

    asyncio.run(bounded())


@pytest.mark.slow
def test_a_name_that_nobody_knows_is_told_as_the_reason(monkeypatch, addresses) -> None:
    known = socket.getaddrinfo

    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host == "mini.invalid":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known(host, *args, **kwargs)

    async def main() -> None:
        wire = Wire(connect_timeout_s=1.0)
        async with real_group(1, ["mini.invalid:52416", *addresses(1)], wire=wire) as group:
            with pytest.raises(CollectiveError, match=r"rank 0.*mini\.invalid:52416 did not answer.*Name or"):
                await group.barrier()

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    asyncio.run(main())


def test_a_call_that_is_taken_in_before_the_waiting_for_it_begins_is_found() -> None:
    """A task gets its turn when it does: here the one that waits for the call starts a second late."""

    class Late:
        def __init__(self, host: VirtualHost) -> None:
            self._host = host

        def __getattr__(self, name: str) -> Any:
            return getattr(self._host, name)

        def spawn(self, work: Any, *, name: str) -> asyncio.Task[Any]:
            async def late() -> None:
                await self._host.clock.sleep(1.0)
                await work

            return self._host.spawn(late() if name.startswith("open") else work, name=name)

    async def body(one: VirtualHost, two: VirtualHost, _: VirtualHost) -> float:
        mesh = await opened(Late(one), 0)  # type: ignore[arg-type]
        asking = asyncio.ensure_future(mesh.link(1))
        channel, _header, _data = await call(two, HELLO)
        assert (await asking).peer_rank == 1
        took_s = one.clock.now()
        await channel.close()
        await mesh.close(*GOODBYE)
        return took_s

    assert run(body) < 2.0


def test_who_hangs_up_before_it_has_our_answer_is_still_heard_out():
    async def body() -> None:
        async with RealHost(RealOptions("us")) as host, RealHost(RealOptions("them")) as caller:
            listener = await host.listen("127.0.0.1:0")
            mesh = Mesh(host, GroupMembership(0, (listener.address, "127.0.0.1:1"), wire=WIRE), listener)
            heard: list[str] = []
            failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def adopt(link: Link) -> None:
                link.on_abort = lambda header, text: heard.append(text)
                link.on_failure = lambda link, error: failed.set_result(None)

            mesh.on_link = adopt
            await mesh.open()
            channel = await caller.connect(listener.address)
            data, why = msgspec.msgpack.encode(msgspec.structs.replace(HELLO, world=2)), b"my dog ate it"
            await channel.send(Header(len(data), Kind.HELLO), memoryview(data))
            await channel.send(Header(len(why), Kind.ABORT, sender=1), memoryview(why))
            await channel.close()
            await failed
            assert heard == [why.decode()]
            await mesh.close(*GOODBYE)

    asyncio.run(body())


_OTHER_VERSION = bytearray(encode_header(Header(0, Kind.HELLO)))
_OTHER_VERSION[2] += 1


@pytest.mark.slow
def test_a_caller_of_another_version_is_named_to_who_waits_for_it(addresses):
    async def main() -> tuple[list[str], str]:
        told: list[str] = []
        peers = addresses(2)
        wire = Wire(connect_timeout_s=1.0)
        async with real_group(0, peers, wire=wire, shared_memory=False, on_refused=told.append) as group:
            operation = group.barrier()
            for _ in range(2):  # it calls again and again, and is told of once
                reader, writer = await asyncio.open_connection(*peers[0].rsplit(":", 1))
                writer.write(_OTHER_VERSION)
                assert await reader.read() == b""
                writer.close()
            with pytest.raises(CollectiveError) as late:
                await operation
        return told, str(late.value)

    told, error = asyncio.run(main())
    assert len(told) == 1
    words = r"a caller was refused: 127\.0\.0\.1:\d+ speaks version 2 of the protocol, we speak 1"
    assert re.fullmatch(words, told[0])
    assert re.search(f"rank 1 did not call within 1 s; {words}", error)


def test_who_is_hung_up_on_is_told_what_that_may_mean(addresses):
    async def main() -> None:
        peers = addresses(2)

        async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(HEADER_BYTES)
            writer.close()

        async with (
            await asyncio.start_server(hang_up, *peers[0].rsplit(":", 1)),
            real_group(1, peers, wire=Wire(connect_timeout_s=10.0), shared_memory=False) as group,
        ):
            with pytest.raises(CollectiveError, match=r"rank 0 hung up on our hello: .*another version of hcsim\?"):
                await group.barrier()

    asyncio.run(main())
