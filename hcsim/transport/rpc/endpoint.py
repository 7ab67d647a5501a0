"""One end of a channel over which both sides call each other.

Every call that comes in is a task of its own, and one task receives all along: two ends that wait for each other's
answer, or that call back and forth in answering, never stand in each other's way. A call's deadline travels with it,
as a duration; calls that are made in answering it have no more time than is left. Whoever gives up waiting says so, and
the work at the other end is cancelled.

    caller                                      callee
    Call number, name, arguments, deadline  →   refused, or a task that waits for the arrays and calls
    arrays, piece by piece                  →
                                            ←   Result number, value; its arrays   or   Failure number, kind, text
    Cancel number                           →   the task is cancelled; there is no answer
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, TypeVar, overload

from hcsim.errors import ChannelBroken, ChannelClosed, ChannelError, HcsimError
from hcsim.runtime.channel import Channel, Payload
from hcsim.runtime.frame import Header, Kind
from hcsim.runtime.host import Host
from hcsim.transport.rpc.calling import Calling, of_any_type
from hcsim.transport.rpc.line import Line
from hcsim.transport.rpc.messages import Call, Cancel, Failure, Limits, Release, Result, decode
from hcsim.transport.rpc.procedures import Procedure, Registry
from hcsim.transport.rpc.refs import RemoteRef
from hcsim.transport.rpc.serving import FETCH, Serving

R = TypeVar("R")


class Endpoint:
    """Our end. It owns the channel from now on."""

    def __init__(
        self, host: Host, channel: Channel, registry: Registry | None = None, limits: Limits | None = None
    ) -> None:
        self.channel = channel
        registry = registry or Registry()
        self._line = Line(host, channel, limits or Limits(), self._fetch)
        self._calling = Calling(self._line, registry)
        self._serving = Serving(self, self._line, registry)
        channel.limit(self._line.limits.max_frame_bytes)
        self._tasks = [
            host.spawn(self._receive(), name=f"receive calls from {channel.peer}"),
            host.spawn(self._send(), name=f"send calls to {channel.peer}"),
        ]

    @property
    def peer(self) -> str:
        """The other end: who it has proved to be, or where it is."""
        return self._line.peer

    @property
    def ended(self) -> asyncio.Future[HcsimError]:
        """Done, with the reason, once the channel is of no more use."""
        return self._line.ended

    @property
    def lent(self) -> int:
        """How many of our values the peer holds references to."""
        return self._line.refs.lent

    @property
    def busy(self) -> int:
        """How many calls are under way, in both directions."""
        return len(self._calling.pending) + len(self._serving.under_way)

    @property
    def unread_bytes(self) -> int:
        """Of what we have returned and that has not left yet."""
        return self._line.outbox.results_bytes

    @overload
    async def call(self, procedure: Procedure[R], *args: Any, deadline_s: float | None = None) -> R: ...

    @overload
    async def call(self, procedure: str, *args: Any, deadline_s: float | None = None) -> Any: ...

    async def call(self, procedure: Procedure[Any] | str, *args: Any, deadline_s: float | None = None) -> Any:
        """What the procedure returns at the other end, or the error that it ends with there.

        Arrays among the arguments are not to be changed before the answer is there."""
        known = procedure if isinstance(procedure, Procedure) else of_any_type(procedure)
        return await self._calling.call(known, args, deadline_s)

    async def close(self) -> None:
        """End it. Calls in flight end with an error that says so, here and at the other end."""
        peer = self.channel.peer
        self._end(ChannelClosed(f"we closed the channel to {peer}", peer))
        tasks = [*self._tasks, *(task for _, task in self._serving.under_way.values())]
        here = asyncio.current_task()
        await asyncio.gather(*(task for task in tasks if task is not here), return_exceptions=True)
        await self.channel.close()

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _fetch(self, ref: RemoteRef[Any], kind: Any, deadline_s: float | None) -> Any:
        return await self.call(Procedure(FETCH.name, {"ref": RemoteRef}, kind), ref, deadline_s=deadline_s)

    async def _send(self) -> None:
        peer = self.channel.peer
        try:
            await self._line.outbox.run()
        except ChannelError as error:
            self._end(error)
        except Exception as error:  # what was given cannot cross this channel
            self._end(ChannelBroken(f"a message to {peer} could not be sent: {error}", peer))

    async def _receive(self) -> None:
        peer = self.channel.peer
        try:
            await self.channel.pump(self._place, self._landed)
        except ChannelError as error:
            self._end(error)
        except Exception as error:  # no memory for an array, say
            self._end(ChannelBroken(f"what came from {peer} could not be taken: {error!r}", peer))
        finally:
            with suppress(ChannelError):
                await self.channel.close()

    def _place(self, header: Header) -> memoryview | None:
        if header.kind is Kind.DATA:
            return self._line.inbox.place(header)
        self._line.expect(header.kind is Kind.CONTROL, f"sent a frame of kind {header.kind.name} among calls")
        return None

    def _landed(self, header: Header, payload: Payload) -> None:
        if header.kind is Kind.DATA:
            self._line.inbox.landed(header)
            return
        match decode(payload, self.channel.peer):
            case Call() as call:
                self._serving.called(call)
            case Result() | Failure() as answer:
                self._calling.answered(answer)
            case Cancel(number):
                self._serving.cancelled(number)
            case Release(number, times):
                self._line.refs.released(number, times)

    def _end(self, error: HcsimError) -> None:
        if self.ended.done():
            return
        self.ended.set_result(error)
        self._calling.end()
        self._serving.end()
        here = asyncio.current_task()
        for task in self._tasks:
            if task is not here:
                task.cancel()
        self._line.inbox.close(error)
        self._line.refs.close()
