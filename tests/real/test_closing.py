"""What the other side still gets, and learns, when one side ends a connection or a group."""

from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import sys
from contextlib import suppress

import numpy as np
import pytest

from hcsim import Group, Options, real_group
from hcsim.errors import ChannelBroken, CollectiveError, CollectiveTimeout, PeerRefused
from hcsim.real import stream
from hcsim.real.host import RealHost, RealOptions
from hcsim.real.shm.stream import SWITCH
from hcsim.runtime.frame import Header

pytestmark = pytest.mark.usefixtures("either_way")
FRAME = 2**16
FRAMES = 40


@pytest.fixture(params=["1", "0"], ids=["shared memory", "tcp"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, request.param)


FORKS_AND_DIES = """
import asyncio, os, signal, sys
from hcsim.real.host import RealHost, RealOptions

async def main():
    async with RealHost(RealOptions("one")) as host:
        channel = await host.connect(sys.argv[1])
        listener = await host.listen("127.0.0.1:0")
        print(listener.address, flush=True)
        if os.fork() == 0:
            os.read(0, 1)  # until our standard input is closed
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.quick_cases(1)
def test_a_process_that_is_killed_is_noticed_though_a_child_that_it_forked_lives_on():
    async def main() -> None:
        async with RealHost(RealOptions("other")) as other:
            listener = await other.listen("127.0.0.1:0")
            command = [sys.executable, "-c", FORKS_AND_DIES, listener.address]
            # asyncio's would close the pipe, and so end the child, as soon as the parent has ended.
            pipe = subprocess.PIPE
            with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as killed:  # noqa: ASYNC220
                far = await listener.accept()
                async with asyncio.timeout(20.0):
                    with pytest.raises(ChannelBroken):
                        await far.recv(lambda _: None)
                await asyncio.to_thread(killed.wait)
                assert killed.stdout is not None
                with pytest.raises(PeerRefused):
                    await other.connect(killed.stdout.readline().strip(), timeout_s=0.1)

    asyncio.run(main())


def test_close_with_unread_bytes_still_delivers_what_was_sent():
    async def main() -> list[int]:
        async with RealHost(RealOptions("one")) as one, RealHost(RealOptions("other")) as other:
            listener = await other.listen("127.0.0.1:0")
            near = await one.connect(listener.address)
            far = await listener.accept()
            await far.send(Header(100), memoryview(bytes(100)))  # nobody reads these
            for number in range(FRAMES // 2):
                await near.send(Header(FRAME, operation=number), memoryview(bytes(FRAME)))
            numbers: list[int] = []

            async def receive() -> None:
                for _ in range(FRAMES):
                    header, _ = await far.recv(lambda _: None)
                    numbers.append(header.operation)
                with pytest.raises(ChannelBroken, match="ended the connection between two frames"):
                    await far.recv(lambda _: None)

            async def send() -> None:
                for number in range(FRAMES // 2, FRAMES):
                    await near.send(Header(FRAME, operation=number), memoryview(bytes(FRAME)))
                await near.close()

            async with asyncio.timeout(20.0):
                await asyncio.gather(send(), receive())
            await listener.close()
            return numbers

    assert asyncio.run(main()) == list(range(FRAMES))


SENDS_AND_ENDS = """
import asyncio, sys, threading
from hcsim.real.host import RealHost, RealOptions
from hcsim.runtime.frame import Header

async def main():
    async with RealHost(RealOptions("one")) as host:
        channel = await host.connect(sys.argv[1])
        for number in range(10):
            await channel.send(Header(50_000, operation=number), memoryview(bytes(50_000)))
        await channel.close()
    print("closed", flush=True)

def leave_it_as_it_stands():
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    asyncio.run_coroutine_threadsafe(main(), loop).result()
    loop.call_soon_threadsafe(loop.stop)

asyncio.run(main()) if sys.argv[2] == "ended" else leave_it_as_it_stands()
"""


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["ended", "left as it stands"])
def test_a_program_that_ends_after_it_closed_delivers_what_it_sent_whatever_the_peer_says(loop):
    async def main() -> list[int]:
        async with RealHost(RealOptions("other")) as other:
            listener = await other.listen("127.0.0.1:0")
            strictly = ["-W", "error", "-X", "dev"] if loop == "ended" else []
            command = [sys.executable, *strictly, "-c", SENDS_AND_ENDS, listener.address, loop]
            pipe = subprocess.PIPE
            with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as child:  # noqa: ASYNC220
                far = await listener.accept()
                assert child.stdout is not None
                assert await asyncio.to_thread(child.stdout.readline) == "closed\n"
                with suppress(subprocess.TimeoutExpired):  # it ends now, if it does not wait
                    await asyncio.to_thread(child.wait, 0.3)
                for _ in range(2):
                    with suppress(ChannelBroken):
                        await far.send(Header(0))
                numbers = [(await far.recv(lambda _: None))[0].operation for _ in range(10)]
                await far.close()
                _, complaints = await asyncio.to_thread(child.communicate)
                assert (child.returncode, complaints) == (0, "")
            return numbers

    assert asyncio.run(main()) == list(range(10))


async def close_on(listening: socket.socket) -> socket.socket:
    """Send much to somebody who reads nothing, and close; the other end."""
    async with RealHost(RealOptions("one")) as host:
        channel = await host.connect(f"127.0.0.1:{listening.getsockname()[1]}")
        other = listening.accept()[0]
        for _ in range(10):
            await channel.send(Header(50_000), memoryview(bytes(50_000)))
        await channel.close()
        return other


def test_what_is_under_way_to_one_that_reads_nothing_is_given_up_when_the_program_ends(monkeypatch):
    monkeypatch.setattr(stream, "STUCK_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server, asyncio.run(close_on(server)):
        assert stream.still_held()
        stream.hold_out()
        assert not stream.still_held()
    gc.collect()  # a socket that was left open would be warned of


def test_no_more_than_some_are_held_and_none_longer_than_need_be_when_its_loop_has_gone(monkeypatch):
    monkeypatch.setattr(stream, "MOST_HELD", 3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        others = [asyncio.run(close_on(server)) for _ in range(5)]
        assert stream.still_held() == 3
        for other in others:
            other.close()  # unread: a reset
        with asyncio.run(close_on(server)):
            assert stream.still_held() == 1
            monkeypatch.setattr(stream, "STUCK_S", 0.0)
            stream.hold_out()


def test_nothing_is_held_where_all_has_arrived():
    async def main() -> int:
        async with RealHost(RealOptions("one")) as one, RealHost(RealOptions("other")) as other:
            listener = await other.listen("127.0.0.1:0")
            near = await one.connect(listener.address)
            far = await listener.accept()
            await near.send(Header(0))
            await far.recv(lambda _: None)
            await near.close()
            held = stream.still_held()
            await far.close()
            await listener.close()
            return held

    assert asyncio.run(main()) == 0


@pytest.mark.parametrize("turns", range(5))
def test_a_listener_that_closes_while_somebody_calls_leaves_no_socket_open(turns):
    def complain(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        complaints.append(context)

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(complain)
        async with RealHost(RealOptions("one")) as host:
            listener = await host.listen("127.0.0.1:0")
            await asyncio.sleep(0.01)  # it waits for callers now
            name, port = listener.address.rsplit(":", 1)
            with socket.create_connection((name, int(port))) as caller:
                for _ in range(turns):  # the loop notices the call after some of them
                    await asyncio.sleep(0)
                await listener.close()
                caller.settimeout(10)
                with suppress(ConnectionResetError):  # where it was still in the queue
                    assert caller.recv(1) == b""

    complaints: list[dict[str, object]] = []
    asyncio.run(main())
    gc.collect()
    assert complaints == []


@pytest.mark.parametrize("turns", range(1, 6))
def test_a_host_that_is_cancelled_while_it_closes_listens_no_more(turns):
    async def main() -> tuple[str, int]:
        host = RealHost(RealOptions("one"))
        listener = await host.listen("127.0.0.1:0")
        name, port = listener.address.rsplit(":", 1)
        with socket.create_connection((name, int(port))) as caller:
            await asyncio.sleep(0.01)
            closing = asyncio.ensure_future(host.close())
            for _ in range(turns):
                await asyncio.sleep(0)
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
            caller.settimeout(10)
            with suppress(ConnectionResetError):
                assert caller.recv(1) == b""
        return name, int(port)

    address = asyncio.run(main())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


def test_what_a_task_opens_while_its_host_closes_is_closed_too(monkeypatch):
    async def main() -> str:
        found = asyncio.Event()

        async def getaddrinfo(name: str, port: int, **_: object) -> list[object]:
            await found.wait()
            return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port))]

        host = RealHost(RealOptions("one"))
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        listening = host.spawn(host.listen("localhost:0"), name="listen")
        await asyncio.sleep(0)
        found.set()
        await host.close()
        return listening.result().address

    name, port = asyncio.run(main()).rsplit(":", 1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((name, int(port)))


@pytest.mark.slow
def test_when_a_deadline_cuts_links_all_ranks_are_told_of_the_deadline(addresses):
    peers = addresses(3)

    async def main() -> list[CollectiveError]:
        over = asyncio.Event()

        async def all_reduce(group: Group) -> CollectiveError:
            with pytest.raises(CollectiveError) as caught:
                await group.all_reduce(np.ones(16 << 20, np.float32), algorithm="ring")
            return caught.value

        async def on_rank(rank: int) -> CollectiveError:
            options = Options(timeout_s=1.0 if rank == 1 else 20.0)
            async with real_group(rank, peers, options=options) as group:
                await group.barrier()
                if rank == 2:  # takes nothing, so that rank 1 gets stuck within a frame
                    await over.wait()
                error = await all_reduce(group)
                if rank == 1:
                    over.set()
                return error

        async with asyncio.timeout(20.0):
            return await asyncio.gather(*map(on_rank, range(3)))

    errors = asyncio.run(main())
    assert isinstance(errors[1], CollectiveTimeout)
    for error in errors:
        assert "took longer than 1 s" in str(error)
        assert "link to rank" not in str(error)
