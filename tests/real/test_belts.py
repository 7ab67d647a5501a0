"""What a link passes on through shared memory, and what becomes of it when something else gets in the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import numpy as np
import pytest

from hcsim.errors import ChannelBroken, ChannelClosed, CollectiveError
from hcsim.real.host import RealHost, RealOptions
from hcsim.real.shm.stream import rings
from hcsim.real.stream_channel import StreamChannel
from hcsim.runtime.channel import Leg
from hcsim.runtime.frame import HEADER_BYTES, Header, Kind, encode_header
from hcsim.transport.link import Link

pytestmark = pytest.mark.skipif(rings is None, reason="there was no C compiler when hcsim was installed")
FLOATS = 50_000
EPOCH = 3


class Row(NamedTuple):
    """Rank 0 sends to us over one link, and we send to rank 2 over another."""

    before: StreamChannel
    source: Link
    to: Link
    after: StreamChannel


@asynccontextmanager
async def row() -> AsyncIterator[Row]:
    async with asyncio.timeout(20), RealHost(RealOptions(name="belts")) as host:
        listener = await host.listen("127.0.0.1:0")
        channels = []
        for _ in range(2):
            dialling = asyncio.create_task(host.connect(listener.address))
            channels += [await listener.accept(), await dialling]
        for channel in channels:
            channel.limit(2**24)
        ours, before, onward, after = channels
        source, to = Link(host, 0, EPOCH, [ours], []), Link(host, 2, EPOCH, [onward], [])
        try:
            yield Row(before, source, to, after)
        finally:
            for link in (source, to):
                await link.close(ChannelClosed("the test is over"))
            for channel in (before, after):
                await channel.close()
            await listener.close()


async def all_has_been_read() -> None:
    """What was written before is there at once: the event loop reads it within a few turns, if anybody is to."""
    for _ in range(20):
        await asyncio.sleep(0.001)


async def until(so: Callable[[], object]) -> None:
    for _ in range(2000):
        if so():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came so far")


def header(step: int, *, sender: int = 0, operation: int = 1) -> Header:
    size_bytes = 4 * FLOATS
    return Header(size_bytes, sender=sender, epoch=EPOCH, operation=operation, step=step, signature=7, total=size_bytes)


def legs_of(*places: np.ndarray) -> list[Leg]:
    """Each is added to and goes on."""
    return [
        Leg(header(step), header(step + 1, sender=1), place.view(np.uint8).data, "f", stays=False)
        for step, place in enumerate(places)
    ]


def ones() -> np.ndarray:
    return np.ones(FLOATS, np.float32)


def filled(value: float) -> memoryview:
    return np.full(FLOATS, value, np.float32).view(np.uint8).data


async def moved_until_over(row: Row, legs: list[Leg]) -> int:
    done = 0

    def moved(number: int) -> None:
        nonlocal done
        done = number

    await row.source.forward(legs, row.to, moved)
    return done


async def is_left_to_be_posted(row: Row) -> None:
    """The first frame, in the usual way."""
    assert await row.source.post((0, 1, 0, 0, 0), None, 7, 4 * FLOATS) == ones().tobytes()


async def came(channel: StreamChannel) -> tuple[int, float]:
    got, payload = await channel.recv(lambda _: None)
    values = np.frombuffer(payload, np.float32)
    assert values.min() == values.max()
    return got.step, float(values[0])


def test_both_links_count_what_is_passed_on():
    async def body() -> None:
        async with row() as r:
            passing = asyncio.create_task(moved_until_over(r, legs_of(ones(), 2 * ones())))
            for step in range(2):
                await r.before.send(header(step), filled(1))
            assert [await came(r.after) for _ in range(2)] == [(1, 2.0), (2, 3.0)]
            assert await passing == 2
            assert (r.source.received_frames, r.source.received_bytes) == (2, 8 * FLOATS)
            assert (r.to.sent_frames, r.to.sent_bytes) == (2, 8 * FLOATS)

    asyncio.run(body())


def test_what_was_taken_in_before_its_belt_is_left_to_be_posted():
    async def body() -> None:
        async with row() as r:
            r.source.attend(True)
            await r.before.send(header(0), filled(1))
            await until(lambda: r.source.received_frames)
            assert await moved_until_over(r, legs_of(ones())) == 0
            await is_left_to_be_posted(r)

    asyncio.run(body())


@pytest.mark.parametrize("first", ["the belt", "the rest"])
def test_what_is_being_taken_in_when_its_belt_begins_ends_the_belt(first):
    async def body() -> None:
        async with row() as r:
            r.source.attend(True)
            frame = encode_header(header(0)) + ones().tobytes()
            assert r.before.stream.write([frame[:1000]]) == 1000
            await all_has_been_read()
            r.source.attend(False)
            place = ones()
            if first == "the belt":
                passing = asyncio.create_task(moved_until_over(r, legs_of(place)))
                await asyncio.sleep(0)
            assert r.before.stream.write([frame[1000:]]) == len(frame) - 1000
            if first == "the rest":
                passing = asyncio.create_task(moved_until_over(r, legs_of(place)))
            assert await passing == 0
            assert place.sum() == FLOATS
            await is_left_to_be_posted(r)

    asyncio.run(body())


def test_a_header_that_was_read_before_its_belt_began_is_the_belts():
    """Nobody waited for anything, so the rest of the frame stayed where it was."""

    async def body() -> None:
        async with row() as r:
            await r.before.send(header(0), filled(1))
            await all_has_been_read()
            assert await moved_until_over(r, legs_of(ones())) == 1
            assert await came(r.after) == (1, 2.0)

    asyncio.run(body())


def test_a_frame_of_another_operation_that_comes_first_is_taken_in():
    async def body() -> None:
        async with row() as r:
            passing = asyncio.create_task(moved_until_over(r, legs_of(ones())))
            await r.before.send(header(0, operation=2), filled(5))
            await r.before.send(header(0), filled(1))
            assert await passing == 1
            other = await r.source.post((0, 2, 0, 0, 0), None, 7, 4 * FLOATS)
            assert np.frombuffer(other, np.float32).max() == 5

    asyncio.run(body())


def test_two_belts_over_the_same_links_take_each_its_own():
    async def body() -> None:
        async with row() as r:
            other = [
                leg._replace(comes=header(step, operation=2), goes=header(step + 1, sender=1, operation=2))
                for step, leg in enumerate(legs_of(ones(), ones(), ones()))
            ]
            passing = [
                asyncio.create_task(moved_until_over(r, legs)) for legs in (legs_of(ones(), ones(), ones()), other)
            ]
            await asyncio.sleep(0)
            for operation, step in ((2, 0), (1, 0), (1, 1), (2, 1), (2, 2), (1, 2)):
                await r.before.send(header(step, operation=operation), filled(operation))
                assert await came(r.after) == (step + 1, operation + 1.0)
            assert await asyncio.gather(*passing) == [3, 3]

    asyncio.run(body())


def test_who_asks_for_a_belt_while_the_peer_gives_up_hears_of_it():
    async def body() -> None:
        async with row() as r:
            r.source.on_abort = lambda _, text: r.source.fail(CollectiveError(f"rank 0 gave up: {text}"))
            await all_has_been_read()
            assert r.before.stream.write([encode_header(Header(3, Kind.ABORT)), b"why"]) == HEADER_BYTES + 3
            with pytest.raises(CollectiveError, match="why"):
                await moved_until_over(r, legs_of(ones()))

    asyncio.run(body())


def test_a_frame_that_was_looked_out_for_is_whole_though_a_belt_gets_stuck_meanwhile():
    """Its header has been read, and waits for a place."""

    async def body() -> None:
        async with row() as r:
            passing = asyncio.create_task(moved_until_over(r, legs_of(ones(), ones())))
            await until(lambda: r.source.outlet.is_busy)
            tag, shown = (9, 5, 0, 0, 0), asyncio.Event()
            r.source.look_out(tag, shown.set)
            message = Header(1000, epoch=EPOCH, group=9, operation=5, total=1000)
            frames = [encode_header(header(0)), filled(1), encode_header(message), b"x" * 1000]
            assert r.before.stream.write(frames) == 2 * HEADER_BYTES + 4 * FLOATS + 1000
            await shown.wait()
            long = asyncio.create_task(r.to.send(Header(2**23, epoch=EPOCH), memoryview(bytes(2**23))))
            await all_has_been_read()
            assert await r.source.post(tag, None, 0, 1000) == b"x" * 1000
            assert await passing == 1
            assert await came(r.after) == (1, 2.0)
            assert (await r.after.recv(lambda _: None))[0].length == 2**23
            await long

    asyncio.run(body())


def test_what_came_before_the_peer_left_is_still_there():
    async def body() -> None:
        async with row() as r:
            r.source.attend(True)
            await r.before.send(header(0), filled(1))
            await r.before.send(Header(0, Kind.BYE, epoch=EPOCH))
            await r.before.close()
            await until(lambda: r.source.error is not None)
            assert await moved_until_over(r, legs_of(ones())) == 0
            await is_left_to_be_posted(r)

    asyncio.run(body())


def test_nothing_goes_on_over_a_link_that_has_failed():
    """Sending raises, as it does for anybody else."""

    async def body() -> None:
        async with row() as r:
            r.to.fail(ChannelBroken("somebody was wrong"))
            await r.before.send(header(0), filled(1))
            assert await moved_until_over(r, legs_of(ones())) == 0
            with pytest.raises(ChannelBroken):
                await r.to.send(header(1), filled(1))

    asyncio.run(body())


@pytest.mark.parametrize("which", ["source", "to"])
def test_who_waits_for_a_belt_learns_that_a_link_has_failed(which):
    async def body() -> None:
        async with row() as r:
            passing = asyncio.create_task(moved_until_over(r, legs_of(ones(), ones())))
            await r.before.send(header(0), filled(1))
            assert await came(r.after) == (1, 2.0)
            if which == "source":
                await r.before.close()
                with pytest.raises(ChannelBroken):
                    await passing
                with pytest.raises(ChannelBroken):
                    await moved_until_over(r, legs_of(ones()))
            else:  # the frame that comes next is received in the usual way, and its sender will hear of it
                await r.after.close()
                await asyncio.sleep(0.05)
                await r.before.send(header(1), filled(1))
                assert await passing == 1

    asyncio.run(body())


def test_nothing_is_written_once_who_waited_has_given_up():
    async def body() -> None:
        async with row() as r:
            place = ones()
            passing = asyncio.create_task(moved_until_over(r, legs_of(place)))
            await asyncio.sleep(0.01)
            passing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await passing
            await r.before.send(header(0), filled(1))
            await is_left_to_be_posted(r)
            assert place.sum() == FLOATS
            assert r.source.outlet is not None
            assert not r.source.outlet.is_busy

    asyncio.run(body())
