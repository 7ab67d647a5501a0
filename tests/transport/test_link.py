"""A link: messages find their places by tag, early ones wait up to a limit, and a failure reaches all who wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from hcsim.config import parse_scenario
from hcsim.errors import ChannelBroken, ChannelClosed, RemoteProtocolError
from hcsim.runtime.channel import Channel, Payload, Phantom
from hcsim.runtime.frame import Header, Kind
from hcsim.transport.link import Link
from hcsim.virtual.world import World

OUR_EPOCH = 3
GAVE_UP = ChannelClosed("we gave up")


def with_link(body: Callable[[Link, list[Channel]], Awaitable[Any]], stripes: int = 1) -> Any:
    """Run a body with our link to rank 1, and with the other ends of its channels, which rank 1 holds."""
    scenario = parse_scenario(
        """
        name = "pair"
        effects = "ideal"
        medium = [{ kind = "ethernet", name = "switch", rate = "10 Gb/s" }]
        node = [{ name = "mac", count = 2, machine = "ideal", links = ["switch"] }]
        """,
        "pair",
    )
    world = World(scenario)
    us, them = world.hosts

    async def main() -> Any:
        listener = await us.listen(f"{us.name}:1000")
        theirs = [await them.connect(listener.address) for _ in range(stripes)]
        ours = [await listener.accept() for _ in range(stripes)]
        link = Link(us, 1, OUR_EPOCH, ours, [])
        try:
            return await body(link, theirs)
        finally:
            await link.close(GAVE_UP)

    return world.run(main())


def header(
    length: int, step: int = 0, *, operation: int = 0, bucket: int = 0, epoch: int = OUR_EPOCH, signature: int = 7
) -> Header:
    return Header(
        length, Kind.DATA, sender=1, epoch=epoch, operation=operation, bucket=bucket, step=step, signature=signature,
        total=length,
    )  # fmt: skip


def post(
    link: Link, into: memoryview | None, step: int = 0, *, operation: int = 0, bucket: int = 0, total: int | None = None
) -> asyncio.Future[Payload]:
    size = len(into) if into is not None else 0
    return link.post((0, operation, bucket, step, 0), into, 7, size if total is None else total)


def room(size: int) -> memoryview:
    return memoryview(bytearray(size))


def test_a_payload_lands_in_the_place_of_its_tag_whatever_the_order():
    async def body(link: Link, theirs: list[Channel]) -> None:
        tags = [(step, operation, bucket) for step in (0, 1) for operation in (0, 1) for bucket in (0, 1)]
        places = {tag: room(3) for tag in tags}
        waits = {tag: post(link, places[tag], tag[0], operation=tag[1], bucket=tag[2]) for tag in tags[::2]}
        for step, operation, bucket in reversed(tags):
            text = f"{step}{operation}{bucket}".encode()
            await theirs[0].send(header(3, step, operation=operation, bucket=bucket), memoryview(text))
        await asyncio.sleep(1.0)  # the other half comes before anybody asked for it
        waits |= {tag: post(link, places[tag], tag[0], operation=tag[1], bucket=tag[2]) for tag in tags[1::2]}
        for tag in tags:
            assert await waits[tag] == places[tag]
            assert bytes(places[tag]).decode() == "".join(map(str, tag))

    with_link(body)


def test_frames_that_nobody_waits_for_stay_with_the_system():
    size, count = 1 << 20, 32

    async def body(link: Link, theirs: list[Channel]) -> None:
        async def send_all() -> None:
            for step in range(count):
                await theirs[0].send(header(size, step), Phantom(size))

        sending = asyncio.create_task(send_all())
        await asyncio.sleep(60.0)
        assert link.received_bytes == 0
        for step in range(count):
            assert (await post(link, None, step, total=size)).nbytes == size
        await sending
        assert link.received_bytes == count * size

    with_link(body)


def test_what_is_waited_for_is_found_behind_what_is_not():
    size, count = 1 << 20, 32

    async def body(link: Link, theirs: list[Channel]) -> None:
        async def send_all(stripe: int) -> None:
            for step in range(stripe, count, 3):
                await theirs[stripe].send(header(size, step), Phantom(size))

        sending = [asyncio.create_task(send_all(stripe)) for stripe in range(3)]
        async with asyncio.timeout(60.0):
            for step in reversed(range(count)):
                await post(link, None, step, total=size)
            await asyncio.gather(*sending)

    with_link(body, stripes=3)


def test_what_is_looked_out_for_is_announced_once_and_stays_with_the_system_until_it_has_a_place():
    async def body(link: Link, theirs: list[Channel]) -> None:
        shown: list[int] = []
        await theirs[0].send(header(3, 1), memoryview(b"abc"))
        await asyncio.sleep(1.0)
        assert not link.look_out((0, 0, 0, 1, 0), lambda: shown.append(1))
        assert not link.look_out((0, 0, 0, 2, 0), lambda: shown.append(2))
        assert shown == []
        await asyncio.sleep(1.0)
        assert shown == [1]
        assert link.received_frames == 0
        place = room(3)
        assert await post(link, place, 1) is place
        link.look_away((0, 0, 0, 2, 0))
        await theirs[0].send(header(3, 2), memoryview(b"def"))
        await asyncio.sleep(1.0)
        assert shown == [1]
        assert link.received_frames == 1

    with_link(body)


def test_what_is_looked_out_for_is_found_behind_what_is_not_and_known_if_it_was_taken_in():
    async def body(link: Link, theirs: list[Channel]) -> None:
        shown: list[int] = []
        for step in (1, 2, 3):
            await theirs[0].send(header(3, step), memoryview(b"abc"))
        assert not link.look_out((0, 0, 0, 3, 0), lambda: shown.append(3))
        await asyncio.sleep(1.0)
        assert shown == [3]
        assert link.look_out((0, 0, 0, 1, 0), lambda: shown.append(1))
        assert link.look_out((0, 0, 0, 2, 0), lambda: shown.append(2))
        for step in (2, 3, 1):
            assert bytes(await post(link, room(3), step)) == b"abc"
        assert shown == [3]

    with_link(body)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (header(3, signature=8), "another operation"),
        (header(4), "4 bytes, we expect 3"),
        (header(0), "0 bytes, we expect 3"),
    ],
    ids=["signature", "longer", "empty"],
)
def test_a_message_that_is_not_what_we_expect_is_refused_and_not_written(sent, says, early):
    async def body(link: Link, theirs: list[Channel]) -> None:
        into = room(3)
        waiting = None if early else post(link, into)
        await theirs[0].send(sent, memoryview(b"x" * sent.length))
        await asyncio.sleep(1.0)
        with pytest.raises(RemoteProtocolError, match=says):
            await (waiting or post(link, into))
        if sent.length != 3:
            assert bytes(into) == bytes(3)

    with_link(body)


BAD_FRAMES = {
    "another epoch": [header(3, epoch=OUR_EPOCH - 1)],
    "the same twice": [header(3), header(3)],
    "another rank's": [msgspec.structs.replace(header(3), sender=2)],
    "another rank's abort": [Header(3, Kind.ABORT, sender=2)],
    "a second hello": [Header(3, Kind.HELLO, sender=1)],
    "a later": [Header(3, Kind.LATER, sender=1)],
    "a message of another component": [Header(3, Kind.CONTROL, sender=1)],
}


@pytest.mark.parametrize("what", BAD_FRAMES)
def test_a_frame_that_no_correct_peer_sends_ends_the_link(what):
    async def body(link: Link, theirs: list[Channel]) -> None:
        failures = []
        link.on_failure = lambda failed, error: failures.append(error)
        waiting = post(link, room(3), step=5)
        for frame in BAD_FRAMES[what]:
            await theirs[0].send(frame, memoryview(b"abc"))
        with pytest.raises(RemoteProtocolError, match="rank 1 sent"):
            await waiting
        assert len(failures) == 1

    with_link(body)


@pytest.mark.parametrize("length", [0, 1000])
def test_a_peer_cannot_fill_our_memory_with_frames_that_nobody_asked_for(monkeypatch, length):
    monkeypatch.setattr("hcsim.transport.link.EARLY_MOST_BYTES", 150 * (length + 1024))

    async def body(link: Link, theirs: list[Channel]) -> None:
        waiting = post(link, room(3), step=500)
        for turn in range(2):  # what is asked for after all makes room again
            steps = range(turn * 100, (turn + 1) * 100)
            for step in steps:
                await theirs[0].send(header(length, step), memoryview(bytes(length)))
            await asyncio.sleep(1.0)
            for step in steps:
                await post(link, room(length), step)
        for step in range(200, 400):
            await theirs[0].send(header(length, step), memoryview(bytes(length)))
        with pytest.raises(RemoteProtocolError, match=r"rank 1 sent \d+ frames that nobody asked for"):
            await waiting

    with_link(body)


def test_a_broken_channel_reaches_all_who_wait_and_all_who_ask_later():
    async def body(link: Link, theirs: list[Channel]) -> None:
        waiting = [post(link, room(3), step) for step in range(3)]
        await theirs[0].send(header(3, 9), memoryview(b"abc"))
        await theirs[0].close()
        for each in waiting:
            with pytest.raises(ChannelBroken):
                await each
        with pytest.raises(ChannelBroken):
            await post(link, room(3), 4)
        with pytest.raises(ChannelBroken):
            await link.send(header(0), memoryview(b""))
        assert bytes(await post(link, room(3), 9)) == b"abc"  # what came before still counts

    with_link(body)


@pytest.mark.parametrize("stripes", [1, 3])
def test_who_said_goodbye_has_left_after_all_it_sent_has_come(stripes):
    async def body(link: Link, theirs: list[Channel]) -> None:
        size = 50 << 20
        waiting, never = post(link, None, 0, total=size), post(link, room(3), 1)
        await theirs[-1].send(header(size), Phantom(size))
        for channel in theirs:
            await channel.send(Header(0, Kind.BYE, sender=1))
            await channel.close()
        assert (await waiting).nbytes == size
        with pytest.raises(ChannelBroken, match="rank 1 has left the group"):
            await never
        assert link.leaving

    with_link(body, stripes)


def test_an_abort_is_handed_on_with_its_reason():
    async def body(link: Link, theirs: list[Channel]) -> None:
        heard = asyncio.get_running_loop().create_future()
        link.on_abort = lambda header, text: heard.set_result((header.operation, text))
        text = b"no \x1b[31mtime\x07"  # which a terminal would obey
        await theirs[0].send(Header(len(text), Kind.ABORT, sender=1, operation=4), memoryview(text))
        assert await heard == (4, "no ?[31mtime?")

    with_link(body)


def test_stripes_take_turns():
    async def body(link: Link, theirs: list[Channel]) -> None:
        for step in range(6):
            await link.send(header(3, step), memoryview(b"abc"))
        found = [(await channel.recv(lambda _: None))[0].step for channel in theirs for _ in range(2)]
        assert sorted(found) == list(range(6))

    with_link(body, stripes=3)
