"""Frames that are larger than the buffers between two ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from hcsim.config import AnyFault, FlippedBit, Partition, Pause, Reset, Tcp
from hcsim.errors import ChannelBroken, Deadlock
from hcsim.runtime.channel import Phantom
from hcsim.runtime.frame import HEADER_BYTES, Header
from hcsim.virtual.channel import VirtualChannel
from hcsim.virtual.stream import Delays
from hcsim.virtual.world import World
from tests.switches import on_switch
from tests.virtual.faults.arena import connected, until

MIB = 2**20
BUFFERS = Tcp().window_bytes + Tcp().send_buffer_bytes
PLAIN = "slow_start = false, ack_share = 0, headers = false"
"""Buffers, and otherwise latency and bandwidth alone."""
GIGABIT = 125_000_000


def two(*faults: AnyFault, rate: str = "1 Gb/s", latency: str = "0.1 ms", tcp: str = PLAIN) -> World:
    return World(on_switch(("a", "b"), faults, rate=rate, latency=latency, effects="all", tcp=tcp))


def sending(world: World, channel: VirtualChannel, *sizes: int) -> asyncio.Task[None]:
    """The sender is a task of its host, as a component's would be."""

    async def send() -> None:
        for number, size in enumerate(sizes):
            await channel.send(Header(size, operation=number), Phantom(size))

    return world.host("a").spawn(send(), name="sender")


def receiving(world: World, channel: VirtualChannel, count: int = 1) -> asyncio.Task[list[tuple[int, float]]]:
    """Which frames have come, and when."""

    async def receive() -> list[tuple[int, float]]:
        return [((await channel.recv(lambda _: None))[0].operation, world.loop.time()) for _ in range(count)]

    return world.host("b").spawn(receive(), name="receiver")


@pytest.mark.parametrize("latency", ["0 ms", "0.1 ms", "5 ms", "80 ms"])
@pytest.mark.parametrize("rate", ["50 Mb/s", "1 Gb/s", "40 Gb/s"])
@pytest.mark.parametrize("size", [BUFFERS, 9 * MIB, 33 * MIB])
def test_buffers_hold_no_more_of_a_frame_than_they_are_large(size, rate, latency):
    world = two(rate=rate, latency=latency)

    async def main() -> tuple[list[int], Any]:
        near, far = await connected(world)
        out, send = near.streams[0], sending(world, near, size)
        held = []
        for _ in range(40):
            await asyncio.sleep(0.1)
            held.append(out.outstanding + out.queued_bytes)
        assert not send.done()
        frames = await receiving(world, far)
        await send
        assert (out.outstanding, out.queued_bytes) == (0, 0)
        return held, frames

    held, [(number, _)] = world.run(main())
    assert max(held) <= BUFFERS
    assert held[-1] >= Tcp().window_bytes
    assert number == 0


def test_a_deadlock_tells_which_frames_nobody_reads():
    world = two()
    size = 10 * MIB

    async def main() -> None:
        ends = await connected(world)
        senders = [
            host.spawn(end.send(Header(size), Phantom(size)), name="sender")
            for host, end in zip(world.hosts, ends, strict=True)
        ]
        await asyncio.gather(*senders)
        await asyncio.gather(*(end.recv(lambda _: None) for end in ends))

    with pytest.raises(Deadlock) as caught:
        world.run(main())
    for way in "a→b", "b→a":
        assert f"<frame of {size + HEADER_BYTES} bytes over {way}#1 that nobody reads>" in str(caught.value)


def test_what_the_buffers_hold_is_sent_though_nobody_reads():
    world = two()

    async def main() -> list[tuple[int, float]]:
        near, far = await connected(world)
        send = sending(world, near, 6 * MIB)
        await until(2.0)
        assert send.done()
        return await receiving(world, far)

    [(_, at_s)] = world.run(main())
    assert at_s == pytest.approx(2.0 + 2 * MIB / GIGABIT, rel=0.01)  # four had come


@pytest.mark.parametrize("size", [5 * MIB, 8 * MIB, 16 * MIB, 33 * MIB, 60 * MIB])
def test_a_frame_that_is_read_takes_as_long_as_its_bytes_and_its_sender_until_the_rest_fits(size):
    world = two()

    async def main() -> tuple[float, float]:
        near, far = await connected(world)
        await until(1.0)
        receive, send = receiving(world, far), sending(world, near, size)
        await send
        sent_s = world.loop.time()
        [(_, at_s)] = await receive
        return sent_s - 1.0, at_s - 1.0

    sent_s, came_s = world.run(main())
    assert came_s == pytest.approx((size + HEADER_BYTES) / GIGABIT + 1e-4, rel=1e-6)
    assert sent_s == pytest.approx(max(size - Tcp().send_buffer_bytes, 0) / GIGABIT, rel=0.07)


def test_frames_of_all_sizes_follow_each_other_without_a_gap():
    sizes = [9 * MIB, 100, 33 * MIB, 5 * MIB, 0, 8 * MIB, 4 * MIB]
    world = two(latency="20 ms", rate="500 Mb/s")

    async def main() -> list[tuple[int, float]]:
        near, far = await connected(world)
        await until(1.0)
        receive = receiving(world, far, len(sizes))
        await sending(world, near, *sizes)
        return await receive

    came = world.run(main())
    assert [number for number, _ in came] == list(range(len(sizes)))
    sent_bytes = 0
    for size, (_, at_s) in zip(sizes, came, strict=True):
        sent_bytes += HEADER_BYTES + size
        assert at_s == pytest.approx(1.0 + 0.02 + sent_bytes / (GIGABIT / 2), rel=1e-6)


@pytest.mark.parametrize("pumps", [False, True])
def test_a_receiver_that_pauses_in_the_middle_of_a_frame_stops_its_sender(pumps):
    world = two(Pause(at_s=1.05, node="b", duration_s=5.0))
    landed: list[float] = []

    async def take(far: VirtualChannel) -> None:
        def keep(*_: object) -> None:
            landed.append(world.loop.time())

        if pumps:
            await far.pump(lambda _: None, keep)
        else:
            keep(await far.recv(lambda _: None))

    async def main() -> tuple[float, int]:
        near, far = await connected(world)
        take_it = world.host("b").spawn(take(far), name="receiver")
        await until(1.0)
        send = sending(world, near, 60 * MIB)
        await until(5.0)
        assert not send.done()
        held = near.streams[0].outstanding + near.streams[0].queued_bytes
        await send
        sent_s = world.loop.time()
        await until(8.0)
        take_it.cancel()
        return sent_s, held

    sent_s, held = world.run(main())
    assert sent_s > 6.05
    assert held <= BUFFERS + Tcp().window_bytes  # the piece that was leaving leaves
    assert landed == [pytest.approx(6.05 + (60 - 6.25 - held / MIB) * MIB / GIGABIT, abs=0.1)]


def test_a_sender_that_pauses_in_the_middle_of_a_frame_sends_what_its_system_has():
    world = two(Pause(at_s=1.05, node="a", duration_s=5.0))

    async def main() -> float:
        near, far = await connected(world)
        await until(1.0)
        receive, send = receiving(world, far), sending(world, near, 33 * MIB)
        await until(5.0)
        assert not receive.done()
        assert near.streams[0].queued_bytes == 0
        await send
        return (await receive)[0][1]

    assert 6.05 + 24 * MIB / GIGABIT < world.run(main()) < 6.05 + 31 * MIB / GIGABIT


def test_a_reset_in_the_middle_of_a_frame_breaks_it_for_both():
    world = two(Reset(at_s=1.1, between=("a", "b")))

    async def main() -> None:
        near, far = await connected(world)
        await until(1.0)
        receive, send = receiving(world, far), sending(world, near, 33 * MIB)
        for task in (receive, send):
            with pytest.raises(ChannelBroken):
                await task
        assert world.loop.time() < 1.0 + 33 * MIB / GIGABIT

    world.run(main())


def test_a_partition_in_the_middle_of_a_frame_delays_it():
    world = two(Partition(at_s=1.1, sides=(("a",), ("b",)), duration_s=3.0))

    async def main() -> float:
        near, far = await connected(world)
        await until(1.0)
        receive, send = receiving(world, far), sending(world, near, 33 * MIB)
        await send
        return (await receive)[0][1]

    came_s = world.run(main())
    assert came_s == pytest.approx(4.0 + 33 * MIB / GIGABIT, abs=0.3)


def test_a_crash_in_the_middle_of_a_frame_is_found_out_by_its_sender():
    world = two()

    async def main() -> None:
        near, far = await connected(world)
        receiving(world, far)
        send = sending(world, near, 33 * MIB)
        await until(0.1)
        far.vanish()
        with pytest.raises(ChannelBroken):
            await send

    world.run(main())


@pytest.mark.parametrize("size", [100, 33 * MIB])
@pytest.mark.parametrize("end", ["reset", "lose"])
def test_a_frame_that_came_whole_during_a_pause_is_lost_with_its_connection(end, size):
    world = two(Pause(at_s=1.25 if size > MIB else 0.9, node="b", duration_s=2.0))

    async def main() -> None:
        near, far = await connected(world)
        await until(1.0)
        receive, send = receiving(world, far), sending(world, near, size)
        await until(2.0)
        assert send.done()
        near.reset("cut") if end == "reset" else far.lose("gone")
        with pytest.raises(ChannelBroken):
            await receive

    world.run(main())


@pytest.mark.parametrize("size", [100, 33 * MIB])
@pytest.mark.parametrize("pumps", [False, True])
def test_who_says_where_a_frame_goes_may_end_the_channel(pumps, size):
    world = two()

    async def main() -> None:
        near, far = await connected(world)
        send = sending(world, near, size)

        def place(_: Header) -> None:
            far.reset("enough")

        with pytest.raises(ChannelBroken, match="enough"):
            await (far.pump(place, lambda *_: None) if pumps else far.recv(place))
        await asyncio.gather(send, return_exceptions=True)

    world.run(main())


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("then_pumps", [False, True])
@pytest.mark.parametrize("pumps", [False, True])
def test_who_was_cancelled_when_all_had_come_has_lent_its_place_no_longer(pumps, then_pumps):
    world = two(Pause(at_s=1.125, node="b", duration_s=2.0))
    size = 16 * MIB
    ours, theirs = memoryview(bytearray(size)), memoryview(bytearray(size))

    async def taken(far: VirtualChannel, place: memoryview, pumps: bool) -> memoryview:
        if not pumps:
            return (await far.recv(lambda _: place))[1]

        def landed(_: Header, payload: memoryview) -> None:
            raise LookupError(payload)

        with pytest.raises(LookupError) as caught:
            await far.pump(lambda _: place, landed)
        return caught.value.args[0]

    async def one_after_the_other(far: VirtualChannel) -> memoryview:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.13):  # which is over during the pause, as is the frame
                await taken(far, ours, pumps)
        return await taken(far, theirs, then_pumps)

    async def main() -> memoryview:
        near, far = await connected(world)
        await until(1.0)
        receive = world.host("b").spawn(one_after_the_other(far), name="receiver")
        await near.send(Header(size), memoryview(b"7" * size))
        return await receive

    payload = world.run(main())
    assert payload.obj is theirs.obj
    assert theirs == b"7" * size
    assert ours == bytes(size)


def test_senders_keep_their_turns_though_their_host_pauses():
    world = two(Pause(at_s=1.001, node="a", duration_s=0.018))

    async def main() -> list[int]:
        near, far = await connected(world)
        await until(1.0)
        first = sending(world, near, *[MIB] * 4)
        receive = receiving(world, far, 7)
        await asyncio.sleep(1e-6)
        for number, size in enumerate((33 * MIB, 1000, 1000)):
            frame = near.send(Header(size, operation=10 + number), Phantom(size))
            world.host("a").spawn(frame, name=f"sender {number}")
        await first
        return [number for number, _ in await receive]

    assert world.run(main()) == [0, 1, 2, 3, 10, 11, 12]


def test_a_frame_that_ends_in_the_middle_takes_as_much_of_the_window_as_has_come():
    world = two(latency="5 ms")

    async def main() -> int:
        near, _ = await connected(world)
        await until(1.0)
        send = sending(world, near, 33 * MIB)
        await until(1.02)  # the second piece is leaving
        send.cancel()
        await asyncio.sleep(0)
        send.cancel()  # it does not wait for the rest
        await until(2.0)
        return near.streams[0].outstanding

    assert world.run(main()) == Tcp().window_bytes  # and the end of the connection waits behind it


def test_jitter_and_losses_strike_a_frame_once(monkeypatch):
    struck = []
    monkeypatch.setattr(Delays, "draw_s", lambda _, size_bytes, *__: struck.append(size_bytes) or 0.0)
    scenario = on_switch(("a", "b"), effects="all", tcp=PLAIN)
    world = World(replace(scenario, media=(replace(scenario.media[0], loss=0.01),)))

    async def main() -> None:
        near, far = await connected(world)
        struck.clear()
        receive = receiving(world, far, 3)
        await sending(world, near, 33 * MIB, 100, 8 * MIB)
        await receive

    world.run(main())
    assert struck == [HEADER_BYTES + size for size in (33 * MIB, 100, 8 * MIB)]


def test_a_frame_that_is_under_way_is_not_tampered_with_and_the_next_is():
    world = two(FlippedBit(at_s=1.05, between=("a", "b")))
    payload = bytes(9 * MIB)

    async def main() -> list[bytes]:
        near, far = await connected(world)

        async def send() -> None:
            for _ in range(3):
                await near.send(Header(len(payload)), memoryview(payload))

        await until(1.0)
        send_them = world.host("a").spawn(send(), name="sender")
        came = [bytes((await far.recv(lambda _: None))[1]) for _ in range(3)]
        await send_them
        return came

    first, second, third = world.run(main())
    assert first == third == payload
    assert int.from_bytes(second, "little").bit_count() == 1


def test_an_ideal_world_has_buffers_too_between_frames():
    world = World(on_switch(("a", "b")))

    async def main() -> int:
        near, _ = await connected(world)
        send = sending(world, near, *[MIB] * 100)
        await until(20.0)
        assert not send.done()
        return near.streams[0].outstanding + near.streams[0].queued_bytes

    assert BUFFERS <= world.run(main()) <= BUFFERS + 2 * (MIB + HEADER_BYTES)
