"""Channels through memory that processes share: who gets one, and what a bad guest can do."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hcsim.collectives.arithmetic import BFLOAT16
from hcsim.errors import ChannelBroken, ChannelError
from hcsim.real.host import RealHost, RealOptions
from hcsim.real.shm import rendezvous, stream
from hcsim.real.shm.stream import ForwardState
from hcsim.runtime.channel import Channel, Fold, Listener
from hcsim.runtime.frame import Header
from tests.real.squatting import met_by_a_squatter

rings = pytest.importorskip("hcsim.real.shm.rings", reason="there was no C compiler when hcsim was installed")

CAPACITY = 4224 * 2**10
_COUNTERS_BYTES, _LAP_AT = 2 * 3 * 128, 16
"""Where the memory's first ring begins, and where its writer says how long a lap is; see ring.h."""
LIMIT_S = 60.0


def run(body: Awaitable[None]) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S):
            await body

    asyncio.run(main())


async def between(
    left: RealOptions, right: RealOptions, address: str = "127.0.0.1:0", *, dialled: str = ""
) -> set[str]:
    """What goes by at both ends of a new channel, over which a frame has gone each way."""
    async with RealHost(left) as near, RealHost(right) as far:
        listener = await far.listen(address)
        port = listener.address.rpartition(":")[2]
        ours = await near.connect(f"{dialled}:{port}" if dialled else listener.address)
        theirs = await listener.accept()
        for one, other in ((ours, theirs), (theirs, ours)):
            await one.send(Header(4, step=7), memoryview(b"data"))
            header, payload = await other.recv(lambda _: None)
            assert (header.step, payload) == (7, b"data")
        kinds = {ours.carrier, theirs.carrier}
        for channel in (ours, theirs):
            await channel.close()
        return kinds


# -- who gets one


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:0", "localhost:0"])
def test_processes_of_one_machine_share_memory(address: str) -> None:
    async def body() -> None:
        assert await between(RealOptions("left"), RealOptions("right"), address) == {"shared memory"}

    run(body())


@pytest.mark.parametrize(
    ("address", "dialled"), [("0.0.0.0:0", "127.0.0.1"), ("[::]:0", "127.0.0.1"), ("[::]:0", "[::1]")]
)
def test_also_with_who_listens_everywhere(address: str, dialled: str) -> None:
    async def body() -> None:
        options = RealOptions("left"), RealOptions("right", insecure=True)
        assert await between(*options, address, dialled=dialled) == {"shared memory"}

    run(body())


def test_who_listens_everywhere_in_ipv4_is_not_taken_for_who_listens_in_ipv6() -> None:
    async def body() -> None:
        everywhere, without_a_door = RealOptions("one", insecure=True), RealOptions("other", shared_memory=False)
        async with RealHost(everywhere) as one, RealHost(without_a_door) as other, RealHost(RealOptions("who")) as who:
            wrong = await one.listen("0.0.0.0:0")
            right = await other.listen(f"[::1]:{wrong.address.rpartition(':')[2]}")
            dialled = await who.connect(right.address)
            accepted = await right.accept()
            await dialled.close()
            await accepted.close()

    run(body())


@pytest.mark.parametrize(("left", "right"), [(True, False), (False, True), (False, False)])
def test_who_does_not_want_to_gets_tcp(left: bool, right: bool) -> None:
    async def body() -> None:
        options = RealOptions("left", shared_memory=left), RealOptions("right", shared_memory=right)
        assert await between(*options) == {"TCP"}

    run(body())


def test_the_environment_can_forbid_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(stream.SWITCH, "0")

    async def body() -> None:
        assert await between(RealOptions("left"), RealOptions("right")) == {"TCP"}

    run(body())


def test_without_a_compiler_it_is_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "rings", None)

    async def body() -> None:
        assert await between(RealOptions("left"), RealOptions("right")) == {"TCP"}

    run(body())


def test_an_address_that_is_not_the_loopback_is_a_network_even_if_it_is_ours() -> None:
    """Links that are shaped, filtered or measured stay what they are."""

    async def body() -> None:
        async with RealHost(RealOptions("asking")) as host:
            addresses = [a for i in host.interfaces() for a in i.addresses if ":" not in a and not a.startswith("127.")]
        if not addresses:
            pytest.skip("this machine has no address besides the loopback")
        options = RealOptions("left", insecure=True), RealOptions("right", insecure=True)
        assert await between(*options, f"{addresses[0]}:0") == {"TCP"}

    run(body())


@pytest.fixture
def temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The system's folder for temporary files, where names of sockets are files. Its path is short, as pytest's is not
    always."""
    with tempfile.TemporaryDirectory(prefix="hcsim-", dir="/tmp") as folder:
        monkeypatch.setattr(rendezvous, "ABSTRACT", False)
        monkeypatch.setattr(rendezvous.tempfile, "gettempdir", lambda: folder)
        yield Path(folder)


def test_where_names_are_files_the_door_is_one_that_only_we_can_open(temporary_folder: Path) -> None:

    async def body() -> None:
        async with RealHost(RealOptions("right")) as host:
            listener = await host.listen("127.0.0.1:0")
            (door,) = temporary_folder.glob("hcsim-*/*")  # noqa: ASYNC240
            assert door.parent.stat().st_mode & 0o777 == 0o700
            port = int(listener.address.rpartition(":")[2])
        assert not door.exists()
        with socket.socket(socket.AF_UNIX) as killed:  # one that left its door behind
            killed.bind(str(door))
        assert await between(RealOptions("left"), RealOptions("right"), f"127.0.0.1:{port}") == {"shared memory"}
        assert not door.exists()

    run(body())


@pytest.mark.parametrize("length", [50, 90])
def test_a_temporary_folder_may_have_a_longer_path_than_a_socket(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, length: int
) -> None:
    """macOS's is 49 characters long."""
    folder = tmp_path / ("x" * max(1, length - len(str(tmp_path)) - 1))
    folder.mkdir()
    monkeypatch.setattr(rendezvous, "ABSTRACT", False)
    monkeypatch.setattr(rendezvous.tempfile, "gettempdir", lambda: str(folder))

    async def body() -> None:
        assert await between(RealOptions("left"), RealOptions("right"), "[::1]:0") == {"shared memory"}

    run(body())


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives folders away")
def test_a_folder_that_another_user_made_first_is_not_used(temporary_folder: Path) -> None:
    squatted = temporary_folder / f"hcsim-{os.getuid()}"
    squatted.mkdir(mode=0o777)
    os.chown(squatted, NOBODY, NOBODY)

    async def body() -> None:
        assert await between(RealOptions("left"), RealOptions("right")) == {"TCP"}
        assert not [*squatted.iterdir()]

    run(body())


NOBODY = 65534
KNOCKS = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
with socket.socket(socket.AF_UNIX) as sock:
    sock.connect("\\0" + sys.argv[1])
    sock.settimeout(20)
    try:
        sys.exit(len(sock.recv(1)))
    except ConnectionResetError:
        sys.exit(0)
"""


@pytest.mark.skipif(os.getuid() != 0 or sys.platform != "linux", reason="only root can be somebody else")
def test_another_user_does_not_get_in_and_is_not_trusted_with_ours() -> None:
    async def body() -> None:
        async with RealHost(RealOptions("right"), on_refused=refused.append) as host:
            listener = await host.listen("127.0.0.1:0")
            door = f"hcsim-4-{listener.address}"
            knocking = await asyncio.create_subprocess_exec(sys.executable, "-c", KNOCKS, door, str(NOBODY))
            assert await knocking.wait() == 0
        assert ["another user's" in str(error) for error in refused] == [True]

    refused: list[ChannelError] = []
    run(body())


SQUATS = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
with socket.socket(socket.AF_UNIX) as sock:
    sock.bind("\\0" + sys.argv[1])
    sock.listen()
    print("here", flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(os.getuid() != 0 or sys.platform != "linux", reason="only root can be somebody else")
def test_a_door_of_another_user_is_passed_by() -> None:
    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", SQUATS, f"hcsim-4-{address}", str(NOBODY)]
        with subprocess.Popen(command, stdin=pipe, stdout=pipe) as squatter:  # noqa: ASYNC220
            assert squatter.stdout is not None
            squatter.stdout.readline()
            assert await between(RealOptions("left"), RealOptions("right"), address) == {"TCP"}
            squatter.communicate(b"")

    run(body())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="knows Linux's names")
@pytest.mark.parametrize(("answer", "timeout_s"), [(None, 20.0), (None, 0.9), (b"?", 20.0), (b"", 20.0)])
def test_where_nobody_takes_the_memory_it_is_tcp(answer: bytes | None, timeout_s: float) -> None:
    """None: it does not answer at all, as a process that is busy or stopped. Also who has little time gets through."""

    async def body() -> None:
        async with RealHost(RealOptions("left")) as near, RealHost(RealOptions("right", shared_memory=False)) as far:
            listener = await far.listen("127.0.0.1:0")
            async with met_by_a_squatter(near, listener.address, timeout_s=timeout_s) as (dialling, guest):
                if answer is not None:
                    guest.send(answer)
                    guest.shutdown(socket.SHUT_WR)
                ours = await dialling
            assert ours.carrier == "TCP"
            theirs = await listener.accept()
            await ours.close()
            await theirs.close()

    run(body())
    assert no_memory_left()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="knows Linux's names")
def test_a_process_that_is_busy_for_a_moment_takes_the_memory_all_the_same() -> None:
    async def body() -> None:
        async with RealHost(RealOptions("left")) as near, RealHost(RealOptions("right", shared_memory=False)) as far:
            listener = await far.listen("127.0.0.1:0")
            async with met_by_a_squatter(near, listener.address, timeout_s=20.0) as (dialling, guest):
                await asyncio.sleep(2.0)
                guest.send(b"!")
                ours = await dialling
                assert ours.carrier == "shared memory"
                await ours.close()

    run(body())
    assert no_memory_left()


@pytest.mark.skipif(sys.platform != "linux", reason="knows Linux's names")
def test_who_brings_memory_and_goes_again_was_never_there() -> None:
    """It calls by TCP then: whoever accepts must not get a dead channel first."""

    async def body() -> None:
        async with RealHost(RealOptions("left", shared_memory=False)) as near, RealHost(RealOptions("right")) as far:
            listener = await far.listen("127.0.0.1:0")
            with knocking(listener) as sock:
                memory = sealed_memory()
                socket.send_fds(sock, [b"127.0.0.1"], [memory])
                os.close(memory)
                assert await asyncio.to_thread(sock.recv, 1) == b"!"
            ours = await near.connect(listener.address)
            theirs = await listener.accept()
            assert theirs.carrier == "TCP"
            await ours.close()
            await theirs.close()

    run(body())
    assert no_memory_left()


# -- bad guests


def sealed_memory() -> int:
    return rings.memory()


def unsealed_memory() -> int:
    memory = os.memfd_create("plain", os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, 2 * CAPACITY + 2**16)
    return memory


def small_memory() -> int:
    memory = os.memfd_create("small", os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, 4096)
    return memory


@contextmanager
def knocking(listener: Listener) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(f"\0hcsim-4-{listener.address}")
        yield sock


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="knows Linux's names and seals")
@pytest.mark.parametrize(
    ("greeting", "memory"),
    [
        (b"127.0.0.1", None),
        (b"127.0.0.1", unsealed_memory),
        (b"127.0.0.1", small_memory),
        (b"127.0.0.1", lambda: os.open(os.devnull, os.O_RDWR)),
        (b"8.8.8.8", sealed_memory),
        (b"\xff\xfe", sealed_memory),
        (b"", None),
    ],
)
def test_a_guest_that_brings_something_else_is_sent_away_and_others_are_served(
    greeting: bytes, memory: Callable[[], int] | None
) -> None:
    async def body() -> None:
        async with RealHost(RealOptions("right", handshake_timeout_s=1.0), on_refused=refused.append) as host:
            listener = await host.listen("127.0.0.1:0")
            with knocking(listener) as sock:
                brought = [] if memory is None else [memory()]
                if greeting:  # else it says nothing at all
                    socket.send_fds(sock, [greeting], brought)
                for fd in brought:
                    os.close(fd)
                with suppress(ConnectionResetError):
                    assert await asyncio.to_thread(sock.recv, 1) == b""
            async with RealHost(RealOptions("left")) as other:
                channel = await other.connect(listener.address)
                accepted = await listener.accept()
                await channel.send(Header(2), memoryview(b"hi"))
                assert (await accepted.recv(lambda _: None))[1] == b"hi"
                await channel.close()
                await accepted.close()
        assert len(refused) == 1

    refused: list[ChannelError] = []
    run(body())
    assert no_memory_left()


def no_memory_left() -> bool:
    gc.collect()
    return not memory_is_mapped()


def memory_is_mapped() -> bool:
    return "memfd:hcsim" in Path("/proc/self/maps").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="knows Linux's names")
@pytest.mark.parametrize("value", [0, 1, CAPACITY + 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("counter", range(0, 1024, 128))
def test_a_guest_that_writes_nonsense_into_the_counters_breaks_its_own_channel_at_most(
    value: int, counter: int
) -> None:
    """Every counter of the layout starts one of these lines."""

    async def body() -> None:
        async with RealHost(RealOptions("right")) as host:
            listener = await host.listen("127.0.0.1:0")
            with knocking(listener) as sock:
                memory = sealed_memory()
                socket.send_fds(sock, [b"127.0.0.1"], [memory])
                assert await asyncio.to_thread(sock.recv, 1) == b"!"
                sock.send(b".")
                with mmap.mmap(memory, 2 * CAPACITY) as brought:
                    brought[counter : counter + 16] = struct.pack("=2Q", value, value)
                os.close(memory)
                channel = await listener.accept()
                for _ in range(3):
                    with suppress(ChannelError, TimeoutError):
                        async with asyncio.timeout(0.01):
                            await channel.send(Header(4), memoryview(b"data"))
                    with suppress(ChannelError, TimeoutError):
                        async with asyncio.timeout(0.01):
                            await channel.recv(lambda _: None)
                await channel.close()

    run(body())


# -- the rings themselves


@contextmanager
def two_ends() -> Iterator[tuple[rings.Rings, rings.Rings, socket.socket, socket.socket]]:
    bells = socket.socketpair()
    memory = rings.memory()
    try:
        for bell in bells:
            bell.setblocking(False)
        yield (*(rings.Rings(memory, bells[i].fileno(), i == 0) for i in range(2)), *bells)
    finally:
        os.close(memory)
        for bell in bells:
            bell.close()


@contextmanager
def memory_of_two_ends() -> Iterator[tuple[mmap.mmap, rings.Rings, rings.Rings]]:
    memory, bells = rings.memory(), socket.socketpair()
    try:
        with mmap.mmap(memory, 0) as seen:
            yield (seen, *(rings.Rings(memory, bells[i].fileno(), i == 0) for i in range(2)))
    finally:
        os.close(memory)
        for bell in bells:
            bell.close()


SIZES = st.one_of(
    st.integers(1, 300), st.integers(CAPACITY // 3, CAPACITY + 5), st.sampled_from([CAPACITY, CAPACITY - 1])
)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(st.tuples(st.booleans(), SIZES), max_size=40), st.integers(0, 2**32 - 1))
def test_bytes_come_out_as_they_went_in(moves: list[tuple[bool, int]], seed: int) -> None:
    draw = random.Random(seed)
    flowing = b""
    with two_ends() as (ours, theirs, _, _):
        for writes, size in moves:
            if writes:
                given_bytes = draw.randbytes(size)
                with suppress(BlockingIOError):
                    flowing += given_bytes[: ours.write([given_bytes[:5], memoryview(given_bytes)[5:]])]
                assert len(flowing) <= CAPACITY
            else:
                into = memoryview(bytearray(size))
                try:
                    count = theirs.read(into)
                except BlockingIOError:
                    assert not flowing
                    continue
                assert count == min(size, len(flowing))
                assert into[:count] == flowing[:count]
                flowing = flowing[count:]


SUMS = {"e": np.dtype(np.float16), "E": BFLOAT16, "f": np.dtype(np.float32), "d": np.dtype(np.float64)}
SUMS |= {code: np.dtype(code) for code in "BHIQ"}
"""By what a channel adds them as."""


@pytest.mark.slow
@settings(max_examples=200)
@given(
    st.sampled_from(sorted(SUMS)),
    st.integers(CAPACITY - 250, CAPACITY - 1),
    st.lists(st.integers(1, 240), min_size=1, max_size=8),
    st.integers(1, 200),
)
def test_numbers_are_added_wherever_the_ring_ends(numbers: str, before: int, cuts: list[int], most: int) -> None:
    """They begin at any byte, come in pieces of any size, and lie across the end of the memory."""
    sent = np.arange(1, 31).astype(SUMS[numbers])
    raw = sent.tobytes()
    sum_now = np.full(30, 5, sent.dtype)
    with two_ends() as (writer, reader, _, _):
        assert writer.write([bytes(before)]) == before
        assert reader.read(memoryview(bytearray(before - 1))) == before - 1
        start = writer.write([raw[: cuts[0]]])  # behind what is left: the ring does not start anew
        assert reader.read(memoryview(bytearray(1))) == 1
        have = 0
        for cut in [*cuts[1:], len(raw)]:
            while have < start and (
                count := reader.add(sum_now.view(np.uint8).data, numbers, have, most)
            ):  # a number that has come in part stays where it is
                have += count
            assert have == start // sent.itemsize * sent.itemsize
            if start < len(raw):
                start += writer.write([raw[start : start + cut]])
        while have < len(raw):
            have += reader.add(sum_now.view(np.uint8).data, numbers, have, most)
        np.testing.assert_array_equal(sum_now, sent + sent.dtype.type(5))


HEAD = bytes(range(56))
NEXT = HEAD[::-1]
NONE = b""
_ENDS = [0, 8, 56, CAPACITY // 2, CAPACITY - 112, CAPACITY - 64, CAPACITY - 56 - 8, CAPACITY - 8]


def put_at(at: int, writer: rings.Rings, reader: rings.Rings, data: bytes) -> None:
    """So that it begins at that place of the ring's memory."""
    if at:
        assert writer.write([bytes(at)]) == at
        assert reader.read(memoryview(bytearray(at))[1:]) == at - 1
    assert writer.write([data]) == len(data)
    if at:  # not before: an empty ring would start anew
        assert reader.read(memoryview(bytearray(1))) == 1


@pytest.mark.slow
@settings(max_examples=150)
@given(
    st.sampled_from(["", *SUMS]),
    st.integers(2, 40_000),
    st.sampled_from(_ENDS),
    st.sampled_from(_ENDS),
    st.booleans(),
    st.integers(0, len(HEAD)),
    st.sampled_from([1, 2, 7, 512]),
)
def test_what_is_passed_on_lies_in_the_next_ring_wherever_both_end(
    numbers: str, count: int, in_at: int, out_at: int, stays: bool, known: int, divisor: int
) -> None:
    dtype = SUMS.get(numbers, np.dtype(np.uint8))
    divisor = 1 if numbers in ("", *"BHIQ") else divisor
    sent = (np.arange(count) % 100).astype(dtype)
    ours = np.full(count, 3, dtype)
    with two_ends() as (writer, reader, _, _), two_ends() as (to, last, _, _):
        put_at(in_at, writer, reader, HEAD + sent.tobytes())
        begun = memoryview(bytearray(known))
        assert not known or reader.read(begun) == known  # some of the header may have been read
        put_at(out_at, to, last, b"before!!")
        belt = reader.belt(to, [(HEAD, NEXT, ours.view(np.uint8).data, numbers, stays, divisor)])
        assert belt.run(bytes(begun)) == ForwardState.COMPLETE
        assert belt.done == 1
        assert belt.took
        assert last.read(memoryview(bytearray(8))) == 8
        into = memoryview(bytearray(len(NEXT) + sent.nbytes))
        assert last.read(into) == len(into)
        three = dtype.type(3)
        passed = sent if not numbers else sent + three if divisor == 1 else (sent + three) / dtype.type(divisor)
        assert into[: len(NEXT)] == NEXT
        assert into[len(NEXT) :] == passed.tobytes()
        np.testing.assert_array_equal(ours, passed if stays or divisor != 1 else np.full(count, 3, dtype))
        with pytest.raises(BlockingIOError):
            reader.read(memoryview(bytearray(1)))  # all of it is gone


def test_a_belt_sends_what_we_have_passes_on_what_comes_and_keeps_what_comes_last() -> None:
    """Leg by leg: it goes on where it was."""
    first, second, third = (np.full(1000, value, np.float32) for value in (1, 2, 3))
    with two_ends() as (writer, reader, _, readers_bell), two_ends() as (to, last, _, _):
        legs = [
            (NONE, b"1" * 56, first.view(np.uint8).data, "", False, 1),
            (b"2" * 56, b"3" * 56, second.view(np.uint8).data, "f", False, 1),
            (b"4" * 56, NONE, third.view(np.uint8).data, "f", False, 1),
        ]
        belt = reader.belt(to, legs)
        assert belt.run(NONE) == ForwardState.WAITS
        assert (belt.done, belt.took) == (1, 0)
        assert reader.let_reader_sleep()
        came = np.full(1000, 10, np.float32)
        writer.write([b"2" * 56, came.tobytes(), b"4" * 56])
        assert has_rung(readers_bell)
        reader.rung(False)
        assert belt.run(NONE) == ForwardState.WAITS
        assert (belt.done, belt.took) == (2, 1)
        writer.write([came.tobytes()[:-1]])
        assert not has_rung(readers_bell)  # not before it is whole
        writer.write([came.tobytes()[-1:]])
        assert has_rung(readers_bell)
        assert belt.run(NONE) == ForwardState.COMPLETE
        out = memoryview(bytearray(2 * (56 + 4000)))
        assert last.read(out) == len(out)
        assert out == b"1" * 56 + first.tobytes() + b"3" * 56 + (came + 2).tobytes()
        assert (second == 2).all()
        assert (third == 13).all()
        assert belt.run(NONE) == ForwardState.COMPLETE


def test_a_frame_of_others_is_left_where_it_is_even_if_it_begins_alike() -> None:
    ours = memoryview(bytearray(100_000))
    other = HEAD[:40] + b"!" + HEAD[41:]
    with two_ends() as (writer, reader, _, readers_bell), two_ends() as (to, last, _, _):
        belt = reader.belt(to, [(HEAD, NEXT, ours, "", False, 1)])
        assert belt.run(NONE) == ForwardState.WAITS
        writer.write([other[:39]])
        assert not has_rung(readers_bell)
        assert belt.run(NONE) == ForwardState.WAITS  # it may still be ours
        writer.write([other[39:], b"what others say"])
        assert has_rung(readers_bell)  # though it is much shorter than ours would be
        assert belt.run(NONE) == ForwardState.OTHERS
        begun = memoryview(bytearray(40))
        reader.read(begun)
        assert belt.run(bytes(begun)) == ForwardState.OTHERS
        assert belt.run(b"@") == ForwardState.OTHERS
        assert belt.run(HEAD + b"more") == ForwardState.OTHERS
        rest = memoryview(bytearray(16 + 15))
        assert reader.read(rest) == len(rest)
        writer.write([HEAD, bytes(100_000)])
        assert belt.run(NONE) == ForwardState.COMPLETE
        assert last.read(memoryview(bytearray(200_000))) == 100_056


def test_what_has_not_come_whole_waits_and_who_writes_it_rings_once_it_has() -> None:
    ours = memoryview(bytearray(100_000))
    with two_ends() as (writer, reader, _, readers_bell), two_ends() as (to, last, _, _):
        belt = reader.belt(to, [(HEAD, NEXT, ours, "", False, 1)])
        writer.write([HEAD, bytes(99_999)])
        assert belt.run(NONE) == ForwardState.WAITS
        assert reader.let_reader_sleep()
        with pytest.raises(BlockingIOError):
            last.read(memoryview(bytearray(1)))
        writer.write([b"!"])
        assert readers_bell.recv(10) == b"\0"
        reader.rung(False)
        assert belt.run(NONE) == ForwardState.COMPLETE
        assert not has_rung(readers_bell)
        assert reader.let_reader_sleep()


def has_rung(bell: socket.socket) -> bool:
    try:
        return bool(bell.recv(10))
    except BlockingIOError:
        return False


def test_a_frame_that_a_full_ring_cut_off_comes_whole() -> None:
    """Its writer sleeps for room, and is woken before anybody waits for the rest."""
    before, payload = CAPACITY - rings.MOST_BYTES, bytes(range(256)) * (rings.MOST_BYTES // 256)
    ours = memoryview(bytearray(len(payload)))
    with two_ends() as (writer, reader, writers_bell, _), two_ends() as (to, last, _, _):
        belt = reader.belt(to, [(HEAD, NEXT, ours, "", True, 1)])
        frame = HEAD + payload
        written = writer.write([bytes(before), frame]) - before
        assert written < len(frame)
        with pytest.raises(BlockingIOError):
            writer.write([frame[written:]])
        assert reader.read(memoryview(bytearray(before))) == before
        assert belt.run(NONE) == ForwardState.WAITS
        assert has_rung(writers_bell)
        assert writer.write([frame[written:]]) == len(frame) - written
        assert belt.run(NONE) == ForwardState.COMPLETE
        assert ours == payload
        assert last.read(memoryview(bytearray(CAPACITY))) == len(frame)


def test_what_cannot_be_passed_on_is_left_to_be_read() -> None:
    ours = memoryview(bytearray(8000))
    frame = HEAD + bytes(range(250)) * 32
    with two_ends() as (writer, reader, _, _), two_ends() as (to, last, _, _):
        writer.write([frame])

        def refused(place: memoryview = ours, numbers: str = "") -> bool:
            return reader.belt(to, [(HEAD, NEXT, place, numbers, True, 1)]).run(NONE) == ForwardState.STUCK

        to.write([bytes(CAPACITY - 8001)])  # no room for the header
        assert refused()
        last.read(memoryview(bytearray(CAPACITY - 8002)))
        assert refused(numbers="d")  # a number would lie across the ring's end
        assert refused(memoryview(bytearray(rings.MOST_BYTES + 1)))  # and is not waited for
        reader.rung(True)
        longer = reader.belt(to, [(HEAD, NEXT, memoryview(bytearray(8001)), "", True, 1)])
        assert longer.run(NONE) == ForwardState.OTHERS  # nobody will write the rest: who reads it will say so
        to.rung(True)
        assert refused()  # nobody reads it
        to.close()
        assert refused()
        into = memoryview(bytearray(len(frame)))
        assert reader.read(into) == len(frame)
        assert into == frame
        for place, numbers in ((ours[:7], "f"), (ours[:7], "e"), (ours, "x"), (ours, "ff")):
            with pytest.raises(ValueError, match="fit"):
                reader.belt(to, [(HEAD, NEXT, place, numbers, True, 1)])
        for numbers, divisor in (("f", 0), ("", 2), ("Q", 2)):
            with pytest.raises(ValueError, match="fit"):
                reader.belt(to, [(HEAD, NEXT, ours, numbers, True, divisor)])
        for comes, goes in ((NONE, NONE), (bytes(257), HEAD), (HEAD, bytes(257))):
            with pytest.raises(ValueError, match="fit"):
                reader.belt(to, [(comes, goes, ours, "", True, 1)])
        assert reader.belt(to, [(NONE, NEXT, b"read-only", "", True, 1)])  # it only goes
        for legs in ([(HEAD, NEXT, b"read-only", "", True, 1)], [None], None):
            with pytest.raises((TypeError, BufferError)):
                reader.belt(to, legs)
        with pytest.raises(TypeError):
            reader.belt(None, [])


def test_who_has_taken_what_it_slept_for_is_awake() -> None:
    """Though nobody has rung: who wrote it has not looked yet whether anybody sleeps, and will find nothing to read."""
    ours = memoryview(bytearray(1000))
    with two_ends() as (writer, reader, _, readers_bell), two_ends() as (to, _, _, _):
        belt = reader.belt(to, [(HEAD, NONE, ours, "", True, 1)])
        assert belt.run(NONE) == ForwardState.WAITS
        assert reader.let_reader_sleep()
        writer.write([HEAD, bytes(1000)])
        assert belt.run(NONE) == ForwardState.COMPLETE
        assert has_rung(readers_bell)
        assert reader.let_reader_sleep()  # anew, for the next byte
        writer.write([b"!"])
        assert has_rung(readers_bell)


def test_who_waits_for_a_belt_does_not_sleep_when_another_belt_has_got_stuck() -> None:
    """Whoever wrote has not looked yet whether anybody sleeps, and finds that all of a frame is awaited, not a byte."""
    with memory_of_two_ends() as (seen, writer, reader):
        waiting = reader.belt(reader, [(HEAD, NONE, memoryview(bytearray(1000)), "", True, 1)])
        stuck = reader.belt(reader, [(NEXT, NONE, memoryview(bytearray(600 * 1024)), "", True, 1)])
        assert waiting.run(NONE) == ForwardState.WAITS
        assert reader.let_reader_sleep()
        writer.write([NEXT, bytes(1000)])
        struct.pack_into("@Q", seen, _LAP_AT, 1088 * 1024)
        assert stuck.run(NONE) == ForwardState.STUCK
        assert not reader.let_reader_sleep()


def test_a_belt_lets_others_have_their_turn_and_lets_go_of_what_it_held() -> None:
    places = [bytearray(2**19) for _ in range(10)]
    with two_ends() as (writer, reader, _, _), two_ends() as (to, last, _, _):
        belt = reader.belt(
            to, [(*((HEAD, NONE), (NONE, NEXT))[n > 7], place, "", True, 1) for n, place in enumerate(places)]
        )
        assert writer.write([b"".join(HEAD + bytes([number]) * 2**19 for number in range(8))]) == 8 * (56 + 2**19)
        assert belt.run(NONE) == ForwardState.TURN_OVER
        assert belt.done == 9
        assert belt.run(NONE) == ForwardState.COMPLETE
        assert places[:8] == [bytes([number]) * 2**19 for number in range(8)]
        assert last.read(memoryview(bytearray(CAPACITY))) == 2 * (56 + 2**19)
        with pytest.raises(BufferError):
            places[0].clear()
        del belt
        for place in places:
            place.clear()  # nobody refers to its memory


def test_who_sleeps_is_woken_once_and_only_for_enough() -> None:
    with two_ends() as (writer, reader, writers_bell, readers_bell):
        with pytest.raises(BlockingIOError):
            reader.read(memoryview(bytearray(100)))
        assert reader.let_reader_sleep()
        writer.write([bytes(99)])
        with pytest.raises(BlockingIOError):
            readers_bell.recv(10)
        writer.write([bytes(1)])
        writer.write([bytes(1)])
        assert readers_bell.recv(10) == b"\0"
        writer.write([bytes(2 * CAPACITY)])
        with pytest.raises(BlockingIOError):
            writer.write([b"more"])
        reader.read(memoryview(bytearray(CAPACITY // 4)))
        with pytest.raises(BlockingIOError):
            writers_bell.recv(10)
        reader.read(memoryview(bytearray(CAPACITY // 4)))
        reader.read(memoryview(bytearray(CAPACITY // 4)))
        assert writers_bell.recv(10) == b"\0"
        reader.rung(False)
        assert not reader.let_reader_sleep()


def test_a_belt_of_short_frames_uses_little_of_the_ring_and_so_does_what_is_sent_after_it() -> None:
    """Though there is always something unread: each page that is used is the process's."""
    with memory_of_two_ends() as (seen, writer, reader):
        places = [bytes([number]) * 2**17 for number in range(60)]
        frame = memoryview(bytearray(56 + 2**17))
        for number, place in enumerate(places):
            assert writer.belt(writer, [(NONE, HEAD, place, "", True, 1)]).run(NONE) == ForwardState.COMPLETE
            if number:
                assert reader.read(frame) == len(frame)
                assert frame[56:] == places[number - 1]
        short = 1088 * 1024
        assert not any(seen[_COUNTERS_BYTES + short : _COUNTERS_BYTES + CAPACITY])
        assert writer.write([bytes(CAPACITY)]) == short - len(frame)  # which is still unread
        assert reader.read(memoryview(bytearray(short))) == short
        assert writer.write([bytes(10)]) == 10  # now that it is empty
        assert writer.write([bytes(CAPACITY)]) == short - 10
        assert not any(seen[_COUNTERS_BYTES + short : _COUNTERS_BYTES + CAPACITY])


@pytest.mark.parametrize("lap", [0, 4096, 1088 * 1024 + 8, CAPACITY + 4096, 2**63])
def test_a_lap_that_cannot_be_breaks_the_stream_and_nothing_else(lap: int) -> None:
    with memory_of_two_ends() as (seen, writer, reader):
        place = memoryview(bytearray(1000))
        belt = reader.belt(reader, [(HEAD, NONE, place, "", True, 1)])
        writer.write([HEAD, bytes(1000)])
        struct.pack_into("@Q", seen, _LAP_AT, lap)
        assert belt.run(NONE) == ForwardState.OTHERS
        with pytest.raises(OSError, match="rotocol"):
            reader.read(place)
        with pytest.raises(OSError, match="rotocol"):
            writer.write([b"more"])


def test_what_was_written_can_be_read_after_the_end_and_nothing_can_be_written() -> None:
    with two_ends() as (writer, reader, _, _):
        writer.write([b"last"])
        reader.rung(True)
        into = memoryview(bytearray(10))
        assert reader.read(into) == 4
        assert reader.read(into) == 0
        with pytest.raises(EOFError):
            reader.add(into[:8], "d", 0, 8)
        with pytest.raises(BrokenPipeError):
            reader.write([b"to nobody"])


@pytest.mark.parametrize(
    ("size_bytes", "numbers", "have"),
    [
        (8, "", 0),
        (8, "x", 0),
        (8, "ff", 0),
        (7, "e", 0),
        (7, "f", 0),
        (8, "f", 8),
        (8, "f", -4),
        (8, "f", 2),
        (8, "E", 1),
    ],
)
def test_sizes_that_do_not_fit_each_other_are_refused(size_bytes: int, numbers: str, have: int) -> None:
    with two_ends() as (writer, reader, _, _):
        writer.write([bytes(64)])
        with pytest.raises(ValueError, match="fit"):
            reader.add(memoryview(bytearray(size_bytes)), numbers, have, 64)


def test_the_memory_is_let_go_with_the_channels() -> None:
    async def body() -> None:
        await between(RealOptions("left"), RealOptions("right"))

    run(body())
    assert no_memory_left()


# -- the end


@asynccontextmanager
async def two_channels(*, shared_memory: bool = True) -> AsyncIterator[tuple[Channel, Channel]]:
    options = RealOptions("either", shared_memory=shared_memory)
    async with RealHost(options) as near, RealHost(options) as far:
        listener = await far.listen("127.0.0.1:0")
        ours = await near.connect(listener.address)
        theirs = await listener.accept()
        try:
            yield ours, theirs
        finally:
            await ours.close()
            await theirs.close()


def test_a_sum_that_is_cut_ends_for_who_adds_it_up_after_the_end() -> None:
    """Its beginning is still there when the other end has gone already, and no bell will ring for the rest."""

    async def body() -> None:
        async with two_channels() as (ours, theirs):
            theirs.limit(4 * CAPACITY)
            sending = asyncio.create_task(ours.send(Header(2 * CAPACITY), memoryview(bytes(2 * CAPACITY))))
            await asyncio.sleep(0)  # as much as there is room for
            sending.cancel()
            with suppress(ChannelBroken):
                while True:  # until it has noticed
                    await theirs.send(Header(0))
                    await asyncio.sleep(0)
            into = memoryview(bytearray(2 * CAPACITY))
            with pytest.raises(ChannelBroken, match="in the middle of a frame"):
                await theirs.recv(lambda _: Fold(into, into, "f"))

    run(body())


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is mapped")
def test_the_memory_is_let_go_when_a_channel_ends_though_somebody_keeps_it() -> None:
    async def body() -> None:
        async with two_channels() as (ours, theirs):
            assert memory_is_mapped()
            await ours.close()
            with pytest.raises(ChannelBroken):
                await theirs.recv(lambda _: None)
            assert not memory_is_mapped()

    assert no_memory_left()
    run(body())


def test_a_forked_child_does_not_speak_for_its_parent() -> None:
    async def send_and_exit(channel: Channel) -> None:
        try:
            await channel.send(Header(0, step=1))
            os._exit(1)
        except ChannelError:
            os._exit(0)
        finally:
            os._exit(2)

    async def body() -> None:
        async with two_channels() as (ours, theirs):
            child = os.fork()
            if child == 0:
                await send_and_exit(ours)
            assert os.waitpid(child, 0)[1] == 0  # noqa: ASYNC222
            await ours.send(Header(0, step=2))
            assert (await theirs.recv(lambda _: None))[0].step == 2

    run(body())


FORKS_WHILE_IT_DIALS = """
import asyncio, os, signal, sys
from hcsim.real.host import RealHost, RealOptions

def fork_and_die():
    if os.fork() == 0:
        os.read(0, 1)  # until our standard input is closed
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)

async def main():
    async with RealHost(RealOptions("one")) as host:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, fork_and_die)
        await host.connect(sys.argv[1], timeout_s=60.0)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="knows Linux's names")
def test_a_caller_that_is_killed_before_it_was_let_in_is_noticed_though_its_child_lives_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as door:
        address = f"127.0.0.1:{tcp.getsockname()[1]}"
        door.bind(f"\0hcsim-4-{address}")
        door.listen()
        door.settimeout(LIMIT_S)
        command, pipe = [sys.executable, "-c", FORKS_WHILE_IT_DIALS, address], subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe) as caller, door.accept()[0] as bell:
            bell.settimeout(LIMIT_S)
            assert bell.recv(64).rstrip() == b"127.0.0.1"
            caller.send_signal(signal.SIGUSR1)
            assert bell.recv(1) == b""
            caller.communicate(b"")


@pytest.mark.parametrize("use", [lambda r, b: r.read(b), lambda r, b: r.write([b]), lambda r, b: r.add(b, "d", 0, 8)])
def test_rings_that_were_let_go_are_not_touched_any_more(use: Callable[[rings.Rings, memoryview], int]) -> None:
    with two_ends() as (ours, _, _, _):
        for _ in range(2):
            ours.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            use(ours, memoryview(bytearray(8)))


@pytest.mark.parametrize("shared_memory", [True, False])
def test_who_sends_to_a_peer_with_room_for_all_of_it_lets_other_tasks_run(shared_memory: bool) -> None:
    async def body() -> None:
        async with two_channels(shared_memory=shared_memory) as (ours, theirs):
            other = asyncio.create_task(asyncio.sleep(0))
            sent = 0
            while not other.done() and sent < 1000:
                await ours.send(Header(0, step=sent))
                sent += 1
            assert other.done()
            for step in range(sent):
                assert (await theirs.recv(lambda _: None))[0].step == step

    run(body())


# -- two processes at once

ANSWERS = """
import random, sys
from hcsim.real.shm.rings import Rings

draw, rings = random.Random(1).randrange, Rings(int(sys.argv[1]), int(sys.argv[2]), False)
one = memoryview(bytearray(1))
for _ in range(int(sys.argv[3])):
    while True:
        try:
            rings.read(one)
            break
        except BlockingIOError:
            pass
    for _ in range(draw(60)):
        pass
    rings.write([b"!"])
"""
TAKES = """
import random, sys
from hcsim.real.shm.rings import Rings

draw, rings, left = random.Random(1).randrange, Rings(int(sys.argv[1]), int(sys.argv[2]), False), int(sys.argv[3])
into = memoryview(bytearray(2**20))
while left:
    for _ in range(draw(60)):
        pass
    try:
        left -= rings.read(into[: 1 + draw(len(into))])
    except BlockingIOError:
        pass
"""


@contextmanager
def another_process(code: str, count: int) -> Iterator[tuple[rings.Rings, socket.socket]]:
    """Our end of rings whose other end that process has, wide awake."""
    with two_ends() as (_, _, ours, theirs):
        memory = rings.memory()
        command = [sys.executable, "-c", code, *map(str, (memory, theirs.fileno(), count))]
        with subprocess.Popen(command, pass_fds=(memory, theirs.fileno())) as process:
            try:
                yield rings.Rings(memory, ours.fileno(), True), ours
            finally:
                process.kill()
                os.close(memory)


def sleep(bell: socket.socket) -> None:
    assert select.select([bell], [], [], LIMIT_S)[0], "nobody woke us"
    bell.recv(64)


@pytest.mark.slow
def test_who_falls_asleep_while_something_comes_is_woken() -> None:
    """The answer comes in that very moment, sooner or later: dropping the second look is found within some thousand."""
    draw, one, rounds = random.Random(2).randrange, memoryview(bytearray(1)), 30_000
    with another_process(ANSWERS, rounds) as (end, bell):
        for _ in range(rounds):
            end.write([b"?"])
            for _ in range(draw(250)):
                pass
            while True:
                try:
                    end.read(one)
                    break
                except BlockingIOError:
                    sleep(bell)


@pytest.mark.slow
def test_who_falls_asleep_while_room_is_made_is_woken() -> None:
    left = 2_000 * 2**20
    data = memoryview(bytes(2**20))
    with another_process(TAKES, left) as (end, bell):
        while left:
            try:
                left -= end.write([data[: min(left, len(data))]])
            except BlockingIOError:
                sleep(bell)


GIVES = """
import sys
import tempfile
from hcsim.real.shm.rings import Rings

rings, left, data = Rings(int(sys.argv[1]), int(sys.argv[2]), False), int(sys.argv[3]), memoryview(bytes(2**20))
while left:
    try:
        left -= rings.write([data[:left]])
    except BlockingIOError:
        pass
"""


@pytest.mark.slow
def test_one_call_moves_no_more_than_the_memory_holds_however_fast_the_other_end_is() -> None:
    """It would keep all other tasks from running for as long as the frame is large."""
    size_bytes, most_bytes = 256 * 2**20, 0
    data = memoryview(bytearray(size_bytes))
    for other in (TAKES, GIVES):
        done = 0
        with another_process(other, size_bytes) as (end, _):
            while done < size_bytes:
                with suppress(BlockingIOError):
                    count = end.write([data[done:]]) if other is TAKES else end.read(data[done:])
                    done += count
                    most_bytes = max(most_bytes, count)
    assert most_bytes == CAPACITY


SENDS_AND_RECEIVES = """
import asyncio, hashlib, random, sys
from hcsim.real.host import RealHost, RealOptions
from hcsim.runtime.frame import Header

async def exchange(channel, seed, frames):
    assert channel.carrier == "shared memory"
    channel.limit(2**24)
    draw, sent, came = random.Random(seed), hashlib.sha256(), hashlib.sha256()

    async def send():
        for step in range(frames):
            size = draw.choice((0, 1, 100, 5_000, 70_001, 900_000, 3_000_001)[: 4 + 3 * (step % 10 == 0)])
            data = draw.randbytes(size)
            sent.update(data)
            await channel.send(Header(size, step=step), memoryview(data))

    async def receive():
        for step in range(frames):
            header, payload = await channel.recv(lambda _: None)
            assert header.step == step
            came.update(payload)

    await asyncio.gather(send(), receive())
    return sent.hexdigest(), came.hexdigest()

async def main(address, seed, frames):
    async with RealHost(RealOptions("there")) as host:
        channel = await host.connect(address)
        print(*await exchange(channel, seed, frames), flush=True)
        await channel.close()

if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
"""


@pytest.mark.slow
def test_two_processes_that_write_and_read_at_once_lose_nothing(tmp_path: Path) -> None:
    """Both run at the same time, on memory that no lock guards."""
    script = tmp_path / "exchange.py"
    script.write_text(SENDS_AND_RECEIVES)
    there: dict[str, object] = {"__name__": "there"}
    exec(compile(SENDS_AND_RECEIVES, "exchange", "exec"), there)
    frames = 3000

    async def body() -> None:
        async with RealHost(RealOptions("here")) as host:
            listener = await host.listen("127.0.0.1:0")
            other = await asyncio.create_subprocess_exec(
                sys.executable, script, listener.address, "2", str(frames), stdout=subprocess.PIPE
            )
            channel = await listener.accept()
            sent, came = await there["exchange"](channel, 1, frames)  # type: ignore[operator]
            told, _ = await other.communicate()
            assert told.decode().split() == [came, sent]
            await channel.close()

    run(body())
