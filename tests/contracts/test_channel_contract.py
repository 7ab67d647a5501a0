"""What a channel promises, in both worlds."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

from hcsim.errors import ChannelBroken, ChannelClosed, RemoteProtocolError, UsageError
from hcsim.real import message_channel, stream_channel
from hcsim.runtime.channel import Leg
from hcsim.runtime.frame import Header, Kind
from hcsim.selftest import contracts
from hcsim.selftest.contracts import BEYOND_BUFFERS, KIB, MIB, allocate, pattern, send_numbered


@pytest.mark.quick_cases(14)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("floats", [1, 500, 16 * KIB, 32 * KIB - 1, 32 * KIB, 32 * KIB + 1, 1_000_003])
def test_floats_are_added_on_the_way_or_left_beside_to_be_added(arena, dtype, floats):
    arena.run(partial(contracts.floats_are_added_on_the_way, arena, dtype=dtype, floats=floats))


def test_long_frames_of_several_senders_do_not_mix(arena):
    arena.run(partial(contracts.senders_take_turns, arena, count=3, size_bytes=9 * MIB))


def test_both_ends_tell_the_same_two_addresses_which_are_those_of_interfaces(arena):
    async def body(left, right):
        client, server = await arena.channels(left, right)
        assert client.ends == server.ends[::-1]
        known = ["", *(address for host in (left, right) for i in host.interfaces() for address in i.addresses)]
        assert {*client.ends} <= {*known}

    arena.run(body)


def test_every_field_of_the_header_arrives(arena):
    async def body(left, right):
        client, server = await arena.channels(left, right)
        sent = Header(3, Kind.CONTROL, 65535, 4, 2**32 - 1, 6, 2**64 - 1, 8, 9, 2**40, 2**41)
        await client.send(sent, pattern(3))
        assert (await server.recv(allocate))[0] == sent

    arena.run(body)


def test_33_mib_arrive_as_many_frames(arena):
    async def body(left, right):
        client, server = await arena.channels(left, right)
        whole = pattern(33 * MIB)
        arrived = memoryview(bytearray(33 * MIB))

        async def send_segments():
            for start in range(0, len(whole), 768 * KIB):
                segment = whole[start : start + 768 * KIB]
                await client.send(Header(len(segment), offset=start, total=len(whole)), segment)

        sending = left.spawn(send_segments(), name="sender")
        received_bytes = 0
        while received_bytes < len(whole):
            header, _ = await server.recv(lambda h: arrived[h.offset : h.offset + h.length])
            received_bytes += header.length
        await sending
        assert np.array_equal(arrived, whole)

    arena.run(body)


@pytest.mark.slow
def test_a_sender_that_nobody_reads_stops_and_goes_on_when_reading_resumes(arena):
    count, size_bytes = 512, MIB

    async def body(left, right):
        client, server = await arena.channels(left, right)
        sent = 0

        async def flood():
            nonlocal sent
            payload = pattern(size_bytes)
            for step in range(count):
                await client.send(Header(size_bytes, step=step), payload)
                sent += 1

        flooding = left.spawn(flood(), name="flood")
        before = -1
        while sent != before:  # until nothing moves any more
            before = sent
            await left.clock.sleep(0.2)
        assert sent < count // 4

        buffer = memoryview(bytearray(size_bytes))
        for step in range(count):
            header, _ = await server.recv(lambda _: buffer)
            assert header.step == step
        await flooding
        assert sent == count

    arena.run(body)


@pytest.mark.parametrize("pumps", [False, True])
def test_who_sends_more_than_buffers_hold_waits_until_it_has_a_place(arena, pumps):
    async def body(left, right):
        client, server = await arena.channels(left, right)
        payload, tensor = pattern(BEYOND_BUFFERS), memoryview(bytearray(BEYOND_BUFFERS))
        known, landed = asyncio.get_running_loop().create_future(), asyncio.get_running_loop().create_future()
        asked = []

        def place(header):
            asked.append(known.done())
            return tensor if known.done() else known

        async def receive():
            if pumps:
                await server.pump(place, lambda *frame: landed.set_result(frame))
            else:
                landed.set_result(await server.recv(place))

        sending = left.spawn(client.send(Header(len(payload), step=3), payload), name="sender")
        receiving = right.spawn(receive(), name="receiver")
        await left.clock.sleep(0.5)
        assert asked == [False]
        assert not sending.done()
        known.set_result(None)
        header, arrived = await landed
        await sending
        assert (header.step, asked) == (3, [False, True])
        assert arrived is tensor or arrived.obj is tensor.obj
        assert np.array_equal(tensor, payload)
        receiving.cancel()

    arena.run(body)


def test_a_frame_that_nobody_reads_and_whose_sender_gives_up_breaks_the_channel(arena):
    async def body(left, right):
        client, server = await arena.channels(left, right)
        sending = left.spawn(client.send(Header(BEYOND_BUFFERS), pattern(BEYOND_BUFFERS)), name="sender")
        await left.clock.sleep(0.5)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        assert sending.cancelled()
        with pytest.raises(ChannelBroken, match="half-way"):
            await client.send(Header(0))
        with pytest.raises(ChannelBroken):
            await server.recv(allocate)

    arena.run(body)


def test_a_frame_that_is_read_leaves_whole_though_its_sender_gives_up(arena, monkeypatch):
    for module in message_channel, stream_channel:
        monkeypatch.setattr(module, "REST_S", 30.0)  # however busy this machine is

    async def body(left, right):
        client, server = await arena.channels(left, right)
        asked = asyncio.Event()
        receiving = right.spawn(server.recv(lambda _: asked.set()), name="receiver")
        sending = left.spawn(client.send(Header(BEYOND_BUFFERS), pattern(BEYOND_BUFFERS)), name="sender")
        await asked.wait()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        assert np.array_equal((await receiving)[1], pattern(BEYOND_BUFFERS))
        await client.send(Header(3, step=7), pattern(3))
        assert (await server.recv(allocate))[0].step == 7

    arena.run(body)


@pytest.mark.parametrize("pumps", [False, True])
def test_a_channel_that_is_closed_in_the_middle_of_a_frame_ends_for_both(arena, pumps):
    async def body(left, right):
        client, server = await arena.channels(left, right)
        asked, came = asyncio.Event(), []
        taking = server.pump(lambda _: asked.set(), lambda *_: came.append(1)) if pumps else server.recv(allocate)
        sending = left.spawn(client.send(Header(BEYOND_BUFFERS), pattern(BEYOND_BUFFERS)), name="sender")
        await left.clock.sleep(0.5)  # nobody reads
        receiving = right.spawn(taking, name="receiver")
        await client.close()
        with pytest.raises(ChannelClosed):
            await client.send(Header(0))
        with pytest.raises(ChannelClosed):
            await sending
        with pytest.raises(ChannelBroken):
            await receiving
        assert not came

    arena.run(body)


def test_a_frame_that_comes_has_one_receiver(arena):
    async def body(left, right):
        client, server = await arena.channels(left, right)
        asked = asyncio.Event()
        sending = left.spawn(client.send(Header(BEYOND_BUFFERS), pattern(BEYOND_BUFFERS)), name="sender")
        first = right.spawn(server.recv(lambda _: asked.set()), name="first receiver")
        await asked.wait()
        for second in (server.recv(allocate), server.pump(allocate, lambda *_: None)):
            with pytest.raises(UsageError, match="at once"):
                await second
        assert np.array_equal((await first)[1], pattern(BEYOND_BUFFERS))
        await sending

    arena.run(body)


def test_the_payload_lands_in_the_given_place(arena):
    async def body(left, right):
        client, server = await arena.channels(left, right)
        await client.send(Header(4, step=1), memoryview(b"data"))
        tensor = bytearray(b"..........")
        header, payload = await server.recv(lambda h: memoryview(tensor)[3 : 3 + h.length])
        assert bytes(tensor) == b"...data..."
        assert payload == b"data"
        assert header.step == 1

    arena.run(body)


def test_a_payload_waits_until_its_place_is_known(arena):
    async def body(left, right):
        client, server = await arena.channels(left, right)
        await client.send(Header(4, step=1), memoryview(b"data"))
        await client.send(Header(4, step=2), memoryview(b"next"))
        known: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        tensor = bytearray(4)

        def place(header):
            return memoryview(tensor) if known.done() else known

        receiving = right.spawn(server.recv(place), name="receive")
        await right.clock.sleep(0.01)
        assert not receiving.done()
        receiving.cancel()  # nothing of it has been read, so nothing is lost
        await asyncio.gather(receiving, return_exceptions=True)
        receiving = right.spawn(server.recv(place), name="receive again")
        await right.clock.sleep(0.01)
        known.set_result(None)
        header, _ = await receiving
        assert (header.step, bytes(tensor)) == (1, b"data")
        assert bytes((await server.recv(lambda _: None))[1]) == b"next"

    arena.run(body)


FLOATS = 50_001
OTHERS_STEP = 77


class Middle:
    """Pumps what comes over one channel, and conveys what of it goes on over another."""

    def __init__(self, host, incoming, onward):
        self.landed, self.others, self.begun = asyncio.Queue(), [], asyncio.Event()
        self.incoming, self.onward = incoming, onward
        host.spawn(incoming.pump(lambda _: None, self._land), name="pump")

    def _land(self, header, payload):
        if header.step == OTHERS_STEP:
            self.others.append(bytes(payload))
        else:
            self.landed.put_nowait((header, payload))

    async def pass_on(self, legs):
        """As whoever passes frames on does: what its channels do not do by themselves is received and sent."""
        done = 0

        def moved(number):
            nonlocal done
            done = number
            self.begun.set()

        ours, theirs = self.incoming.outlet, self.onward.outlet
        if ours is not None and theirs is not None:
            await ours.forward(legs, theirs, moved)
        by_itself = done
        for leg in legs[done:]:
            mine = np.frombuffer(leg.into, np.float32)
            if leg.comes is not None:
                header, payload = await self.landed.get()
                assert header == leg.comes
                came = np.frombuffer(payload, np.float32)
                mine[:] = mine + came if leg.numbers else came
            if leg.goes is not None:
                await self.onward.send(leg.goes, leg.into)
            self.begun.set()
        return by_itself


async def row(arena, left, right):
    """A channel to the one in the middle, the middle, and the end of the channel that it sends over."""
    client, server = await arena.channels(left, right)
    there, onward = await arena.channels(left, right)
    for channel in (client, server, there, onward):
        channel.limit(MIB)
    return client, Middle(right, server, onward), there


def legs_of(arrays, adds, stays):
    """We begin, pass on what comes, and keep what comes last."""
    size_bytes, last = arrays[0].nbytes, len(arrays) - 1
    return [
        Leg(
            Header(size_bytes, step=number) if number else None,
            Header(size_bytes, step=100 + number) if number < last else None,
            array.view(np.uint8).data,
            "f" if adds and number else "",
            stays or not number,
        )
        for number, array in enumerate(arrays)
    ]


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("stays", [True, False])
def test_what_is_passed_on_is_what_would_have_been_received_and_sent(arena, adds, stays):
    async def body(left, right):
        client, middle, there = await row(arena, left, right)
        ours = [np.full(FLOATS, 0.5 + number, np.float32) for number in range(5)]
        sent = [np.arange(FLOATS, dtype=np.float32) * number for number in range(5)]

        async def send():
            for number in range(1, 5):
                if number == 3:
                    await client.send(Header(4, step=OTHERS_STEP), memoryview(b"say!"))
                await client.send(Header(sent[number].nbytes, step=number), sent[number].view(np.uint8).data)

        sending = left.spawn(send(), name="sender")
        passing = right.spawn(middle.pass_on(legs_of(ours, adds, stays)), name="middle")
        for number in range(4):
            header, payload = await there.recv(lambda _: None)
            expected = sent[number] + np.float32(0.5 + number) if adds or not number else sent[number]
            assert header.step == 100 + number
            np.testing.assert_array_equal(np.frombuffer(payload, np.float32), expected)
            if stays:
                np.testing.assert_array_equal(ours[number], expected)
        await sending
        assert await passing == (5 if middle.onward.outlet is not None else 0)
        assert middle.others == [b"say!"]
        np.testing.assert_array_equal(ours[4], sent[4] + np.float32(4.5) if adds else sent[4])

    arena.run(body)


def test_what_cannot_be_passed_on_now_is_received_and_sent(arena):
    """Another frame is on its way out."""

    async def body(left, right):
        client, middle, there = await row(arena, left, right)
        ours = [np.full(FLOATS, value, np.float32) for value in (1, 2, 3)]
        first = right.spawn(middle.onward.send(Header(8 * MIB), memoryview(bytes(8 * MIB))), name="a long frame")
        await asyncio.sleep(0)
        passing = right.spawn(middle.pass_on(legs_of(ours, adds=True, stays=False)), name="middle")
        there.limit(8 * MIB)
        assert (await there.recv(lambda _: None))[0].length == 8 * MIB
        await first
        for number in (1, 2):
            await client.send(Header(ours[0].nbytes, step=number), ours[0].view(np.uint8).data)
        for value in (1, 3):
            _, payload = await there.recv(lambda _: None)
            assert np.frombuffer(payload, np.float32).tolist() == [value] * FLOATS
        assert await passing == 0
        assert ours[2].tolist() == [4] * FLOATS

    arena.run(body)


def test_who_gives_up_passing_on_gets_no_more_and_the_channels_are_as_before(arena):
    async def body(left, right):
        client, middle, there = await row(arena, left, right)
        ours = [np.full(FLOATS, value, np.float32) for value in (1, 2, 3)]
        passing = right.spawn(middle.pass_on(legs_of(ours, adds=True, stays=True)), name="middle")
        await there.recv(lambda _: None)
        await middle.begun.wait()
        passing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await passing
        await client.send(Header(ours[0].nbytes, step=1), ours[0].view(np.uint8).data)
        header, payload = await middle.landed.get()
        assert header.step == 1
        assert np.frombuffer(payload, np.float32).tolist() == [1] * FLOATS
        assert ours[1].tolist() == [2] * FLOATS
        await middle.onward.send(Header(2, step=5), memoryview(b"on"))
        assert bytes((await there.recv(lambda _: None))[1]) == b"on"

    arena.run(body)


def test_place_is_asked_once_per_frame_even_for_an_empty_one(arena):
    async def body(left, right):
        client, server = await arena.channels(left, right)
        asked = []
        for size_bytes in (0, 5):
            await client.send(Header(size_bytes), pattern(size_bytes))
            await server.recv(lambda h: asked.append(h.length))
        assert asked == [0, 5]

    arena.run(body)


@pytest.mark.parametrize("size_bytes", [3, 5])
def test_a_place_of_the_wrong_size_is_the_callers_mistake(arena, size_bytes):
    async def body(left, right):
        client, server = await arena.channels(left, right)
        await client.send(Header(4), memoryview(b"data"))
        with pytest.raises(UsageError, match="4"):
            await server.recv(lambda _: memoryview(bytearray(size_bytes)))
        assert (await server.recv(allocate))[1] == b"data"  # which stayed where it was
        await server.send(Header(2), memoryview(b"on"))
        assert (await client.recv(allocate))[1] == b"on"

    arena.run(body)


@pytest.mark.parametrize("pumps", [False, True])
def test_a_read_only_place_is_the_callers_mistake(arena, pumps):
    async def body(left, right):
        client, server = await arena.channels(left, right)
        await client.send(Header(4), memoryview(b"data"))
        room = memoryview(bytes(4))
        with pytest.raises(UsageError, match="read-only"):
            await (server.pump(lambda _: room, lambda *_: None) if pumps else server.recv(lambda _: room))
        assert (await server.recv(allocate))[1] == b"data"
        assert bytes(room) == bytes(4)

    arena.run(body)


@pytest.mark.parametrize("pumps", [False, True])
def test_a_segment_beyond_its_message_is_the_peers_fault_and_ends_the_channel(arena, pumps):
    async def body(left, right):
        client, server = await arena.channels(left, right)
        await client.send(Header(4, offset=8, total=12), memoryview(b"last"))
        await client.send(Header(4, offset=10, total=12), memoryview(b"more"))
        assert (await server.recv(allocate))[1] == b"last"
        with pytest.raises(RemoteProtocolError, match="ends at byte 14 of a message of 12"):
            await (server.pump(allocate, lambda *_: None) if pumps else server.recv(allocate))
        with pytest.raises(RemoteProtocolError):
            await server.recv(allocate)
        with pytest.raises(ChannelBroken):
            await client.recv(allocate)

    arena.run(body)


def test_a_header_that_does_not_match_its_payload_is_the_callers_mistake(arena):
    async def body(left, right):
        client, server = await arena.channels(left, right)
        with pytest.raises(UsageError):
            await client.send(Header(5), memoryview(b"data"))
        await client.send(Header(4), memoryview(b"good"))
        assert (await server.recv(allocate))[1] == b"good"

    arena.run(body)


def test_the_sender_may_reuse_its_buffer_at_once(arena):
    async def body(left, right):
        client, server = await arena.channels(left, right)
        buffer = memoryview(bytearray(1000))
        for step in range(50):
            buffer[:] = pattern(1000, step)
            await client.send(Header(1000, step=step), buffer)
        buffer[:] = bytes(1000)
        for step in range(50):
            assert (await server.recv(allocate))[1] == pattern(1000, step)

    arena.run(body)


@pytest.mark.slow
def test_both_directions_flow_at_once(arena):
    count, size_bytes = 40, MIB  # more than any buffer between them

    async def body(left, right):
        async def exchange(channel):
            async def receive():
                return [(await channel.recv(allocate))[1] == pattern(size_bytes, step) for step in range(count)]

            async with asyncio.TaskGroup() as group:
                received = group.create_task(receive())
                group.create_task(send_numbered(channel, count, size_bytes))
            return received.result()

        client, server = await arena.channels(left, right)
        theirs = right.spawn(exchange(server), name="theirs")
        assert all(await exchange(client))
        assert all(await theirs)

    arena.run(body)


def test_a_channel_that_we_closed_says_so(arena):
    async def body(left, right):
        client, _ = await arena.channels(left, right)
        await client.close()
        await client.close()
        with pytest.raises(ChannelClosed) as caught:
            await client.send(Header(0))
        assert caught.value.peer == client.peer
        with pytest.raises(ChannelClosed):
            await client.recv(allocate)

    arena.run(body)


def test_closing_wakes_our_own_tasks(arena):
    async def body(left, right):
        client, _ = await arena.channels(left, right)

        async def flood():
            payload = pattern(MIB)
            while True:
                await client.send(Header(MIB), payload)

        receiving = left.spawn(client.recv(allocate), name="receiver")
        flooding = left.spawn(flood(), name="flood")
        await left.clock.sleep(0.2)
        await client.close()
        with pytest.raises(ChannelClosed):  # though there is no room
            await client.send(Header(0))
        for task in (receiving, flooding):
            with pytest.raises(ChannelClosed):
                await task

    arena.run(body)


def test_what_was_sent_before_a_close_arrives_though_the_peer_says_something_more(arena):
    async def body(left, right):
        client, server = await arena.channels(left, right)
        sent = []

        async def send_what_fits_under_way():
            for step in range(20):
                await client.send(Header(50_000, step=step), pattern(50_000, step))
                sent.append(step)

        sending = left.spawn(send_what_fits_under_way(), name="sender")
        await left.clock.sleep(0.5)
        await client.close()
        with suppress(ChannelClosed):
            await sending
        await left.clock.sleep(0.5)
        for _ in range(2):
            with suppress(ChannelBroken):
                await server.send(Header(0))
        for step in sent:
            header, payload = await server.recv(allocate)
            assert header.step == step
            assert payload == pattern(50_000, step)

    arena.run(body)


def test_a_sender_finds_out_that_its_peer_has_gone(arena):
    async def body(left, right):
        client, server = await arena.channels(left, right)
        await server.close()
        payload = pattern(MIB)
        with pytest.raises(ChannelBroken):  # noqa: PT012 - which of the sends finds out is not promised
            for _ in range(1000):
                await client.send(Header(MIB), payload)
                await left.clock.sleep(0.001)

    arena.run(body)


def test_a_cancelled_receiver_leaves_later_frames_to_the_next(arena):
    async def body(left, right):
        client, server = await arena.channels(left, right)
        first = right.spawn(server.recv(allocate), name="first receiver")
        await right.clock.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert first.cancelled()
        await client.send(Header(4), memoryview(b"data"))
        assert (await server.recv(allocate))[1] == b"data"

    arena.run(body)


@pytest.mark.parametrize("pumps", [False, True])
def test_who_is_cancelled_in_the_middle_of_a_frame_breaks_the_channel_for_both(arena, pumps):
    async def body(left, right):
        client, server = await arena.channels(left, right)
        await server.send(Header(3, step=5), pattern(3))
        asked = asyncio.Event()
        taking = server.pump(lambda _: asked.set(), lambda *_: None) if pumps else server.recv(lambda _: asked.set())
        receiving = right.spawn(taking, name="receive")
        sending = left.spawn(send_numbered(client, 100, 33 * MIB), name="sender")
        await asked.wait()
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        assert receiving.cancelled()
        for _ in range(2):
            with pytest.raises(ChannelBroken, match="half-way"):
                await server.recv(allocate)
        with pytest.raises(ChannelBroken):
            await server.send(Header(0))
        with pytest.raises(ChannelBroken):
            await sending

    arena.run(body)


@pytest.mark.parametrize("turns", range(8))
def test_a_receiver_that_is_cancelled_while_a_frame_comes_has_it_or_leaves_it_to_the_next(arena, turns):
    async def body(left, right):
        client, server = await arena.channels(left, right)
        for step in range(20):
            receiving = right.spawn(server.recv(allocate), name="receive")
            await right.clock.sleep(1e-3)
            await client.send(Header(100, step=step), pattern(100))
            for _ in range(turns):
                await asyncio.sleep(0)
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
            header, _ = await server.recv(allocate) if receiving.cancelled() else receiving.result()
            assert header.step == step

    arena.run(body)


def test_there_is_one_receiver(arena):
    async def body(left, right):
        client, server = await arena.channels(left, right)
        first = right.spawn(server.recv(allocate), name="first receiver")
        await right.clock.sleep(0.01)
        with pytest.raises(UsageError):
            await server.recv(allocate)
        await client.send(Header(4), memoryview(b"data"))
        assert (await first)[1] == b"data"

    arena.run(body)


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("size_bytes", [0, 100, 300 * KIB])
def test_a_pump_takes_frame_after_frame_in_order_until_the_channel_ends(arena, size_bytes):
    async def body(left, right):
        client, server = await arena.channels(left, right)
        server.limit(MIB)
        came = []

        async def send_all():
            await send_numbered(client, 40, size_bytes)
            await client.close()

        sending = left.spawn(send_all(), name="sender")
        with pytest.raises(ChannelBroken):
            await server.pump(allocate, lambda header, payload: came.append((header.step, payload)))
        await sending
        assert [step for step, _ in came] == list(range(40))
        assert all(payload == pattern(size_bytes, step) for step, payload in came)

    arena.run(body)


def test_what_a_pump_cannot_place_or_hand_over_ends_the_pump_alone(arena):
    """Who has no place for a frame leaves it unread; who refuses one has had it."""

    async def body(left, right):
        client, server = await arena.channels(left, right)
        await send_numbered(client, 4, 100)

        def place(header):
            if header.step == 1 and not refused:
                raise KeyError("no place")

        def landed(header, payload):
            if header.step == 2:
                raise LookupError("not wanted")
            steps.append(header.step)

        steps = []
        refused = False
        with pytest.raises(KeyError, match="no place"):
            await server.pump(place, landed)
        refused = True
        with pytest.raises(LookupError, match="not wanted"):
            await server.pump(place, landed)
        assert steps == [0, 1]
        header, payload = await server.recv(allocate)
        assert header.step == 3
        assert payload == pattern(100, 3)

    arena.run(body)


def test_a_pump_waits_for_the_place_of_a_frame_and_goes_on(arena):
    async def body(left, right):
        client, server = await arena.channels(left, right)
        known = asyncio.get_running_loop().create_future()
        steps, asked = [], []

        def place(header):
            asked.append(header.step)
            return known if header.step == 1 and not known.done() else None

        pumping = right.spawn(server.pump(place, lambda header, payload: steps.append(header.step)), name="pump")
        await send_numbered(client, 3, 100)
        await right.clock.sleep(0.1)
        assert (steps, asked) == ([0], [0, 1])
        known.set_result(None)
        await right.clock.sleep(0.1)
        assert (steps, asked) == ([0, 1, 2], [0, 1, 1, 2])
        pumping.cancel()

    arena.run(body)


def test_a_cancelled_pump_leaves_later_frames_to_the_next(arena):
    async def body(left, right):
        client, server = await arena.channels(left, right)
        steps = []
        pumping = right.spawn(server.pump(allocate, lambda header, payload: steps.append(header.step)), name="pump")
        await send_numbered(client, 2, 100)
        await right.clock.sleep(0.1)
        with pytest.raises(UsageError, match="at once"):
            await server.recv(allocate)
        pumping.cancel()
        await asyncio.gather(pumping, return_exceptions=True)
        await client.send(Header(5, step=2), pattern(5))
        assert (await server.recv(allocate))[0].step == 2
        assert steps == [0, 1]

    arena.run(body)


def test_a_frame_that_waited_for_its_place_goes_to_the_next_when_its_pump_is_cancelled(arena):
    async def body(left, right):
        client, server = await arena.channels(left, right)
        never = asyncio.get_running_loop().create_future()
        landed = []
        pumping = right.spawn(server.pump(lambda _: never, lambda *frame: landed.append(frame)), name="pump")
        await send_numbered(client, 2, 100)
        await right.clock.sleep(0.1)
        pumping.cancel()
        await asyncio.gather(pumping, return_exceptions=True)
        assert [(await server.recv(allocate))[0].step for _ in range(2)] == [0, 1]
        assert not landed

    arena.run(body)


def test_a_second_pump_is_refused_and_gets_none_of_the_firsts_frames(arena):
    async def body(left, right):
        client, server = await arena.channels(left, right)
        first, second = [], []
        pumping = right.spawn(server.pump(allocate, lambda header, payload: first.append(header.step)), name="pump")
        await right.clock.sleep(0.01)
        with pytest.raises(UsageError, match="at once"):
            await server.pump(allocate, lambda header, payload: second.append(header.step))
        await send_numbered(client, 2, 100)
        await right.clock.sleep(0.1)
        assert (first, second) == ([0, 1], [])
        pumping.cancel()

    arena.run(body)


def test_a_pump_whose_place_has_the_wrong_size_is_told_so(arena):
    async def body(left, right):
        client, server = await arena.channels(left, right)
        pumping = right.spawn(server.pump(lambda _: memoryview(bytearray(3)), lambda *_: None), name="pump")
        await right.clock.sleep(0.01)
        await client.send(Header(4), memoryview(b"data"))
        with pytest.raises(UsageError, match=r"a place of 3|a writable buffer of 3"):
            await pumping
        assert (await server.recv(allocate))[1] == b"data"

    arena.run(body)


def test_a_channel_tells_how_many_segments_it_has_sent_or_nothing(arena):
    async def body(left, right):
        client, server = await arena.channels(left, right)
        before = client.segments
        server.limit(1 << 20)
        await client.send(Header(1 << 20), pattern(1 << 20))
        await server.recv(allocate)
        after = client.segments
        if before is None:
            assert after is None
        else:
            assert after.sent - before.sent >= (1 << 20) >> 16
            assert after.lost == before.lost == 0

    arena.run(body)


def test_a_frame_over_the_limit_is_the_peers_fault_and_ends_the_channel(arena):
    async def body(left, right):
        client, server = await arena.channels(left, right)
        server.limit(1000)
        await client.send(Header(1000), pattern(1000))
        await client.send(Header(1001), pattern(1001))
        assert (await server.recv(allocate))[0].length == 1000
        with pytest.raises(RemoteProtocolError, match="1001") as caught:
            await server.recv(allocate)
        assert caught.value.peer == server.peer
        with pytest.raises(RemoteProtocolError):
            await server.recv(allocate)
        with pytest.raises(ChannelBroken):
            await client.recv(allocate)

    arena.run(body)


def test_fifty_channels_between_two_hosts_keep_apart(arena):
    async def body(left, right):
        pairs = [await arena.channels(left, right) for _ in range(50)]
        for number, (client, _) in enumerate(pairs):
            left.spawn(send_numbered(client, 5, 2000, sender=number), name=f"sender {number}")
        for number, (_, server) in reversed(list(enumerate(pairs))):
            for step in range(5):
                header, payload = await server.recv(allocate)
                assert (header.sender, header.step) == (number, step)
                assert payload == pattern(2000, number + step)

    arena.run(body)
