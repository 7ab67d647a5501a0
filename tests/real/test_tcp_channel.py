"""What only a real connection can do to a channel: arbitrary bytes, torn frames, resets."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hcsim.errors import ChannelBroken, ChannelClosed, ChannelError, ConfigError, RemoteProtocolError, UsageError
from hcsim.real import stream_channel, tcp
from hcsim.real.stream_channel import StreamChannel
from hcsim.real.tcp import TcpStream, tune
from hcsim.runtime.address import join_address, split_address
from hcsim.runtime.channel import Fold, Phantom
from hcsim.runtime.frame import HEADER_BYTES, Header, encode_header
from tests.real.descriptors import descriptor_to

MIB = 2**20
Body = Callable[[StreamChannel, socket.socket], Awaitable[None]]


def allocate(header: Header) -> None:
    return None


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    tune(ours)
    return ours, theirs


def against_raw_socket(body: Body) -> None:
    """Run a body with a channel whose peer is a plain blocking socket."""

    async def main() -> None:
        ours, theirs = connected()
        channel = StreamChannel(TcpStream(ours), "raw")
        with theirs:
            try:
                async with asyncio.timeout(20):
                    await body(channel, theirs)
            finally:
                await channel.close()

    asyncio.run(main())


@pytest.mark.slow
@settings(max_examples=300)
@given(st.binary(max_size=300), st.integers(1, 50))
def test_arbitrary_bytes_end_in_a_clear_error_and_never_in_a_frame(garbage: bytes, chunk_bytes: int) -> None:
    async def body(channel: StreamChannel, raw: socket.socket) -> None:
        for start in range(0, len(garbage), chunk_bytes):
            raw.sendall(garbage[start : start + chunk_bytes])
        raw.shutdown(socket.SHUT_WR)
        with pytest.raises((RemoteProtocolError, ChannelBroken)):
            await channel.recv(allocate)
        with pytest.raises(ChannelError):
            await channel.send(Header(0))

    against_raw_socket(body)


@pytest.mark.slow
@settings(max_examples=200)
@given(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_a_damaged_header_is_the_peers_fault(position: int, flip: int) -> None:
    async def body(channel: StreamChannel, raw: socket.socket) -> None:
        header = bytearray(encode_header(Header(4)))
        header[position] ^= flip
        raw.sendall(header + b"data")
        with pytest.raises(RemoteProtocolError) as caught:
            await channel.recv(allocate)
        assert caught.value.peer == "raw"

    against_raw_socket(body)


@settings(max_examples=100)
@given(st.integers(0, 2 * HEADER_BYTES + 8 - 1))
def test_a_stream_that_ends_says_whether_a_frame_was_cut(cut: int) -> None:
    frame = encode_header(Header(4)) + b"data"
    stream = (frame + frame)[:cut]

    async def body(channel: StreamChannel, raw: socket.socket) -> None:
        raw.sendall(stream)
        raw.shutdown(socket.SHUT_WR)
        for _ in range(cut // len(frame)):
            assert (await channel.recv(allocate))[1] == b"data"
        where = "between two frames" if cut % len(frame) == 0 else "in the middle of a frame"
        with pytest.raises(ChannelBroken, match=where):
            await channel.recv(allocate)

    against_raw_socket(body)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 6000), min_size=1, max_size=8), st.integers(50, 5000))
def test_frames_are_found_however_the_stream_is_chopped(sizes: list[int], chunk_bytes: int) -> None:
    stream = b"".join(encode_header(Header(size, step=n)) + bytes([n]) * size for n, size in enumerate(sizes))

    async def body(channel: StreamChannel, raw: socket.socket) -> None:
        async def chop() -> None:
            for start in range(0, len(stream), chunk_bytes):
                raw.sendall(stream[start : start + chunk_bytes])
                await asyncio.sleep(0)

        chopping = asyncio.create_task(chop())
        for number, size in enumerate(sizes):
            header, payload = await channel.recv(allocate)
            assert (header.step, bytes(payload)) == (number, bytes([number]) * size)
        await chopping

    against_raw_socket(body)


def folding(values: npt.NDArray[np.float32]) -> Fold:
    return Fold(values.view(np.uint8).data, memoryview(bytearray(values.nbytes)), values.dtype.char)


@settings(max_examples=40)
@given(st.integers(1, 100_000), st.integers(1000, 300_000))
def test_a_sum_is_right_however_the_stream_is_chopped(floats: int, chunk_bytes: int) -> None:
    ours, theirs = np.arange(floats, dtype=np.float32), np.arange(floats, 0, -1, dtype=np.float32)
    stream = encode_header(Header(theirs.nbytes)) + theirs.tobytes() + encode_header(Header(4)) + b"next"

    async def body(channel: StreamChannel, raw: socket.socket) -> None:
        channel.limit(MIB)
        raw.setblocking(False)

        async def chop() -> None:
            for start in range(0, len(stream), chunk_bytes):
                await asyncio.get_running_loop().sock_sendall(raw, stream[start : start + chunk_bytes])

        chopping = asyncio.create_task(chop())
        fold = folding(ours)
        _, payload = await channel.recv(lambda _: fold)
        received = ours if payload is fold.into else ours + np.frombuffer(fold.room, np.float32)
        np.testing.assert_array_equal(received, np.full(floats, floats, np.float32))
        assert (await channel.recv(allocate))[1] == b"next"
        await chopping

    against_raw_socket(body)


@pytest.mark.parametrize("arrived_bytes", [1, 100_000, 399_999])
def test_a_sum_that_is_cut_breaks_the_channel_and_touches_only_its_place(arrived_bytes: int) -> None:
    around = np.zeros(100_002, np.float32)

    async def body(channel: StreamChannel, raw: socket.socket) -> None:
        channel.limit(MIB)
        raw.sendall(encode_header(Header(400_000)) + np.ones(100_000, np.float32).tobytes()[:arrived_bytes])
        raw.shutdown(socket.SHUT_WR)
        with pytest.raises(ChannelBroken, match="in the middle of a frame"):
            await channel.recv(lambda _: folding(around[1:-1]))
        assert (around[0], around[-1]) == (0, 0)

    against_raw_socket(body)


def test_a_sum_cancelled_in_the_middle_breaks_the_channel() -> None:
    async def body(channel: StreamChannel, raw: socket.socket) -> None:
        channel.limit(MIB)
        raw.sendall(encode_header(Header(400_000)) + bytes(200_000))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await channel.recv(lambda _: folding(np.zeros(100_000, np.float32)))
        with pytest.raises(ChannelBroken, match="cancelled"):
            await channel.recv(allocate)

    against_raw_socket(body)


def test_without_a_compiler_a_sum_is_received_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "receive_sum", None)
    ours = np.zeros(50_000, np.float32)

    async def body(channel: StreamChannel, raw: socket.socket) -> None:
        channel.limit(MIB)
        fold = folding(ours)
        raw.sendall(encode_header(Header(200_000)) + np.ones(50_000, np.float32).tobytes())
        assert (await channel.recv(lambda _: fold))[1] is fold.room
        assert not ours.any()
        np.testing.assert_array_equal(np.frombuffer(fold.room, np.float32), np.ones(50_000, np.float32))

    against_raw_socket(body)


def test_an_unknown_peer_may_not_announce_much() -> None:
    async def body(channel: StreamChannel, raw: socket.socket) -> None:
        raw.sendall(encode_header(Header(2**31)))
        with pytest.raises(RemoteProtocolError, match="2147483648"):
            await channel.recv(allocate)
        assert raw.recv(1) == b""

    against_raw_socket(body)


def test_cancelled_in_the_middle_of_a_header_nothing_is_lost() -> None:
    async def body(channel: StreamChannel, raw: socket.socket) -> None:
        frame = encode_header(Header(4)) + b"data"
        raw.sendall(frame[:20])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await channel.recv(allocate)
        raw.sendall(frame[20:])
        assert (await channel.recv(allocate))[1] == b"data"

    against_raw_socket(body)


def test_a_receive_cancelled_in_the_middle_of_a_payload_breaks_the_channel() -> None:
    async def body(channel: StreamChannel, raw: socket.socket) -> None:
        raw.sendall(encode_header(Header(4)) + b"da")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await channel.recv(allocate)
        with pytest.raises(ChannelBroken, match="cancelled"):
            await channel.recv(allocate)
        with pytest.raises(ChannelBroken, match="cancelled"):
            await channel.send(Header(0))
        assert raw.recv(1) == b""

    against_raw_socket(body)


def test_a_send_cancelled_in_the_middle_of_a_frame_breaks_the_channel() -> None:
    async def body(channel: StreamChannel, raw: socket.socket) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await channel.send(Header(64 * MIB), memoryview(bytearray(64 * MIB)))
        with pytest.raises(ChannelBroken, match="cancelled"):
            await channel.send(Header(0))

    against_raw_socket(body)


def test_a_send_cancelled_in_the_middle_of_a_frame_that_the_peer_takes_leaves_the_channel_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_channel, "REST_S", 30.0)  # however busy this machine is

    async def body(channel: StreamChannel, raw: socket.socket) -> None:
        big = memoryview(bytearray(64 * MIB))
        sending = asyncio.create_task(channel.send(Header(len(big), step=1), big))
        await asyncio.sleep(0.05)
        reading = asyncio.create_task(asyncio.to_thread(_read_exactly, raw, len(big) + 2 * HEADER_BYTES))
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await channel.send(Header(0, step=2))
        assert (await reading)[-HEADER_BYTES:] == encode_header(Header(0, step=2))

    against_raw_socket(body)


def test_a_send_cancelled_before_its_first_byte_sends_nothing() -> None:
    async def body(channel: StreamChannel, raw: socket.socket) -> None:
        big = memoryview(bytearray(64 * MIB))
        first = asyncio.create_task(channel.send(Header(len(big), step=1), big))
        await asyncio.sleep(0)
        second = asyncio.create_task(channel.send(Header(0, step=2)))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        third = asyncio.create_task(channel.send(Header(0, step=3)))
        stream = await asyncio.to_thread(_read_exactly, raw, len(big) + 2 * HEADER_BYTES)
        await asyncio.gather(first, third)
        assert stream[:HEADER_BYTES] == encode_header(Header(len(big), step=1))
        assert stream[-HEADER_BYTES:] == encode_header(Header(0, step=3))

    against_raw_socket(body)


def test_what_a_peer_said_before_it_went_can_be_read_after_a_send_has_failed() -> None:
    async def body(channel: StreamChannel, raw: socket.socket) -> None:
        raw.sendall(encode_header(Header(4)) + b"last")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raw.close()  # with a reset
        with pytest.raises(ChannelBroken, match="reset"):
            await channel.send(Header(0))
        assert (await channel.recv(allocate))[1] == b"last"
        with pytest.raises(ChannelBroken):
            await channel.recv(allocate)

    against_raw_socket(body)


def test_a_place_that_fails_leaves_the_frame_unread() -> None:
    async def body(channel: StreamChannel, raw: socket.socket) -> None:
        raw.sendall(encode_header(Header(4)) + b"data")
        for wrong in (memoryview(bytearray(3)), memoryview(b"read")):
            with pytest.raises(UsageError):
                await channel.recv(lambda _, wrong=wrong: wrong)
        assert (await channel.recv(allocate))[1] == b"data"

    against_raw_socket(body)


def test_a_phantom_crosses_a_real_network_as_zeros() -> None:
    async def body(channel: StreamChannel, raw: socket.socket) -> None:
        await channel.send(Header(4), Phantom(4))
        expected = encode_header(Header(4)) + bytes(4)
        assert raw.recv(len(expected), socket.MSG_WAITALL) == expected
        with pytest.raises(UsageError, match="announces 4 bytes, the payload has 5"):
            await channel.send(Header(4), Phantom(5))

    against_raw_socket(body)


def test_a_frame_that_fits_leaves_without_waiting() -> None:
    async def body(channel: StreamChannel, raw: socket.socket) -> None:
        sending = channel.send(Header(4), memoryview(b"data"))
        with pytest.raises(StopIteration):
            sending.send(None)
        assert _read_exactly(raw, HEADER_BYTES + 4).endswith(b"data")

    against_raw_socket(body)


def test_a_busy_channel_lets_others_have_their_turn() -> None:
    frame = encode_header(Header(2000)) + bytes(2000)
    count = 400

    async def main() -> int:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MIB)
        channel = StreamChannel(TcpStream(ours), "raw")
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        with theirs:
            theirs.setblocking(False)
            assert theirs.send(frame * count) == len(frame) * count  # all is there before we read
            counting = asyncio.create_task(count_turns())
            for _ in range(count):
                await channel.recv(allocate)
            counting.cancel()
            await channel.close()
        return turns

    assert asyncio.run(main()) >= 10


def test_an_idle_channel_with_unread_data_does_not_keep_the_loop_busy() -> None:
    async def body(channel: StreamChannel, raw: socket.socket) -> None:
        frame = encode_header(Header(60_000)) + bytes(60_000)
        receiving = asyncio.create_task(channel.recv(allocate))
        await asyncio.sleep(0)
        raw.sendall(frame * 3)
        await receiving
        for _ in range(5):
            await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        assert not loop.remove_reader(descriptor_to(join_address(raw.getsockname())))
        assert (await channel.recv(allocate))[0].length == 60_000

    against_raw_socket(body)


def test_closing_is_final() -> None:
    async def body(channel: StreamChannel, raw: socket.socket) -> None:
        receiving = asyncio.create_task(channel.recv(allocate))
        await asyncio.sleep(0)
        await channel.close()
        with pytest.raises(ChannelClosed):
            await receiving
        assert raw.recv(1) == b""

    against_raw_socket(body)


@pytest.mark.parametrize(
    ("text", "parts"),
    [("mini:52416", ("mini", 52416)), ("127.0.0.1:0", ("127.0.0.1", 0)), ("[::1]:80", ("::1", 80))],
)
def test_an_address_is_a_host_and_a_port(text: str, parts: tuple[str, int]) -> None:
    assert split_address(text) == parts
    assert join_address(parts) == text


@pytest.mark.parametrize(
    "text", ["", "mini", "mini:", ":80", "mini:http", "mini:65536", "::1:80", "mini:-1", "mini:" + 5000 * "1"]
)
def test_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        split_address(text)


def _read_exactly(sock: socket.socket, size_bytes: int) -> bytes:
    chunks = []
    while size_bytes:
        chunk = sock.recv(min(size_bytes, MIB))
        if not chunk:
            raise EOFError
        chunks.append(chunk)
        size_bytes -= len(chunk)
    return b"".join(chunks)
