"""Ports of this machine, with servers as members have them, and callers that say what is nearly right.

A caller says its input, waits a little for an answer, and hangs up its side; the server must hang up too, without an
error in its event loop and without a traceback in its log.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias

import msgspec

from experiments.hostile import mutations
from experiments.hostile.parsers import RPC, Finding, Parse, Parser
from hcsim.cluster.coordinator import Coordinator, CoordinatorPolicy
from hcsim.errors import ChannelError, HcsimError
from hcsim.real.host import RealHost, RealOptions
from hcsim.real.http import serving_metrics
from hcsim.runtime.address import split_address
from hcsim.runtime.channel import Channel, Listener
from hcsim.runtime.frame import Header, Kind, encode_header
from hcsim.telemetry.metrics import HostMetrics
from hcsim.transport.admission import FIRST_LIMIT_BYTES

PATIENCE_S = 20.0
"""How long a server may take to hang up."""
ANSWER_S = 0.01
"""How long a caller waits for an answer."""
SHARE = 1
Call: TypeAlias = Callable[[bytes], Awaitable[bytes]]
"""Says an input, and returns the answer."""


def port_parsers() -> Iterator[Parser]:
    """One for each server."""
    for name, valid, server, mutation in (
        ("metrics port", _REQUESTS, _metrics, mutations.bytewise),
        ("WebSocket port", _WEBSOCKETS, _websockets, mutations.bytewise),
        ("coordinator port", [_framed(msgspec.msgpack.encode(each)) for each in RPC], _coordinator, _frames),
        ("gRPC port", [_framed(b"hello"), _framed(b"")], _grpc, mutations.bytewise),
    ):
        yield Parser(name, valid, partial(_open, server), mutation, SHARE)


@contextmanager
def _open(server: Callable[[], AbstractAsyncContextManager[Call]]) -> Iterator[Parse]:
    faults: list[str] = []
    log = _Tracebacks(faults)
    with asyncio.Runner() as runner:
        loop, stack = runner.get_loop(), AsyncExitStack()
        loop.set_exception_handler(lambda _, fault: faults.append(f"{fault['message']}: {fault.get('exception')!r}"))
        call = runner.run(stack.enter_async_context(server()))
        logging.getLogger().addHandler(log)

        def parse(data: bytes) -> None:
            answer = runner.run(_answered(call, data))
            if faults:
                text = faults[0]
                faults.clear()
                raise Finding(f"{text} (after this input or one shortly before)")
            if not answer or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")):
                raise HcsimError("not taken")

        try:
            yield parse
        finally:
            logging.getLogger().removeHandler(log)
            runner.run(stack.aclose())


class _Tracebacks(logging.Handler):
    """Notes what is logged with one."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__()
        self._faults = faults

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is not None:
            self._faults.append(f"a traceback in the log: {record.getMessage()}")


async def _answered(call: Call, data: bytes) -> bytes:
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await call(data)
    except TimeoutError:
        raise Finding(f"the server did not hang up within {PATIENCE_S:g} s") from None


async def _say(address: str, data: bytes) -> bytes:
    answer = b""
    with suppress(ConnectionError):
        reader, writer = await asyncio.open_connection(*split_address(address))
        try:
            writer.write(data)
            with suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):  # a server need not answer who has hung up
                    answer = await reader.read(1 << 16)
            with suppress(OSError):  # the server has hung up before
                writer.write_eof()
            while piece := await reader.read(1 << 16):
                answer = answer or piece
        finally:
            writer.close()
    return answer


# The servers.

_REQUESTS = [
    b"GET /metrics HTTP/1.1\r\nHost: mini:9100\r\nAccept: application/openmetrics-text;version=1.0.0,*/*;q=0.1\r\n\r\n",
    b"POST /metrics HTTP/1.1\r\nHost: mini\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"GET /other?x=%00 HTTP/1.0\r\nContent-Length: 3\r\n\r\nabc",
]


@asynccontextmanager
async def _metrics() -> AsyncIterator[Call]:
    async with serving_metrics(HostMetrics(), "127.0.0.1:0") as address:
        yield partial(_say, address)


def _framed(payload: bytes, kind: Kind = Kind.CONTROL) -> bytes:
    return encode_header(Header(len(payload), kind)) + payload


def _frames(draw: random.Random, valid: Sequence[bytes]) -> bytes:
    """Every second time the content of right frames."""
    if draw.random() < 0.5:
        return mutations.bytewise(draw, valid)
    said = [msgspec.msgpack.encode(each) for each in RPC]
    return b"".join(_framed(mutations.msgpack(draw, said)) for _ in range(draw.randint(1, 3)))


def _masked(payload: bytes) -> bytes:
    """A binary message of a WebSocket's client, with the mask zero."""
    size = bytes([0x80 | len(payload)]) if len(payload) < 126 else b"\xfe" + len(payload).to_bytes(2, "big")
    return b"\x82" + size + bytes(4) + payload


_UPGRADE = (
    b"GET /home HTTP/1.1\r\nHost: mini\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
_WEBSOCKETS = [
    _UPGRADE + _masked(_framed(b"hello", Kind.HELLO)) + _masked(_framed(b"x" * 300)),
    _UPGRADE + _masked(encode_header(Header(8, Kind.DATA, total=8)) + b"abcd") + _masked(b"efgh"),
    _UPGRADE + b"\x89\x80" + bytes(4) + b"\x88\x82" + bytes(4) + b"\x03\xe8",
]


@asynccontextmanager
async def _listening(host: RealHost, address: str) -> AsyncIterator[Listener]:
    """A listener whose channels are read to their end."""
    listener = await host.listen(address)
    accepting = asyncio.create_task(_accept(listener))
    try:
        yield listener
    finally:
        accepting.cancel()
        await asyncio.gather(accepting, return_exceptions=True)
        await listener.close()


async def _accept(listener: Listener) -> None:
    async with asyncio.TaskGroup() as reading:
        while True:
            reading.create_task(_read(await listener.accept()))


async def _read(channel: Channel) -> None:
    channel.limit(FIRST_LIMIT_BYTES)
    try:
        with suppress(ChannelError):
            while True:
                header, payload = await channel.recv(lambda header: None)
                await channel.send(header, payload)
    finally:
        await channel.close()


@asynccontextmanager
async def _websockets() -> AsyncIterator[Call]:
    async with RealHost(RealOptions("host")) as host, _listening(host, "ws://127.0.0.1:0/home") as listener:
        yield partial(_say, listener.address.removeprefix("ws://").partition("/")[0])


@asynccontextmanager
async def _coordinator() -> AsyncIterator[Call]:
    async with RealHost(RealOptions("host", shared_memory=False)) as host:
        listener = await host.listen("127.0.0.1:0")
        coordinator = Coordinator(host, CoordinatorPolicy(workers=2))
        coordinator.open(listener)
        try:
            yield partial(_say, listener.address)
        finally:
            await coordinator.close()
            await listener.close()


@asynccontextmanager
async def _grpc() -> AsyncIterator[Call]:
    from grpc import aio

    async def say(data: bytes) -> bytes:
        """In pieces, as messages of a stream."""
        answer: Any = b""
        with suppress(aio.AioRpcError, asyncio.InvalidStateError):
            call = channel.stream_stream("/hcsim.Channel/Open")()
            for at in range(0, len(data), 64):
                await call.write(data[at : at + 64])
            await call.done_writing()
            while (piece := await call.read()) is not aio.EOF:
                answer = answer or piece
        return bytes(answer)

    async with RealHost(RealOptions("host")) as host, _listening(host, "grpc://127.0.0.1:0") as listener:
        channel = aio.insecure_channel(listener.address.removeprefix("grpc://"))
        try:
            yield say
        finally:
            await channel.close()
