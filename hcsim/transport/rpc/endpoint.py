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
import inspect
from contextlib import suppress
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, TypeVar, overload

import msgspec

from hcsim.errors import (
    CallRefused,
    ChannelBroken,
    ChannelClosed,
    ChannelError,
    DeadlineExceeded,
    HcsimError,
    RemoteProtocolError,
    UsageError,
)
from hcsim.runtime.channel import Channel, Payload
from hcsim.runtime.frame import Header, Kind
from hcsim.runtime.host import Host
from hcsim.transport.rpc.failures import describe, revive
from hcsim.transport.rpc.inbox import Inbox, Incoming, Key
from hcsim.transport.rpc.messages import (
    MAX_DEPTH,
    OF_CALL,
    OF_RESULT,
    Call,
    Cancel,
    Failure,
    Limits,
    Release,
    Result,
    decode,
)
from hcsim.transport.rpc.outbox import Outbox, Outgoing
from hcsim.transport.rpc.procedures import Procedure, Registry
from hcsim.transport.rpc.refs import Refs, RemoteRef
from hcsim.transport.rpc.values import arrays_bytes, oversized, pack, unlend, unpack

R = TypeVar("R")

FETCH: Procedure[Any] = Procedure("ref.fetch", {"ref": RemoteRef}, Any)
SHORTEST_S = 1e-9


class _Serving:
    """A call that is being answered."""

    def __init__(self, endpoint: Endpoint, call: Call, until_s: float | None) -> None:
        self.endpoint = endpoint
        self.call = call
        self.until_s = until_s
        self.unwanted = False
        self.over = False


class _Pending:
    """A call that waits for its answer."""

    def __init__(self, procedure: Procedure[Any], answer: asyncio.Future[Incoming | Failure]) -> None:
        self.procedure = procedure
        self.answer = answer


_SERVING: ContextVar[_Serving] = ContextVar("serving")


def serving_endpoint() -> Endpoint:
    """Over which endpoint the call came that is being answered; for functions that are called from afar."""
    serving = _SERVING.get(None)
    if serving is None:
        raise UsageError("this is not being called from afar")
    return serving.endpoint


class Endpoint:
    """Our end. It owns the channel from now on."""

    def __init__(
        self, host: Host, channel: Channel, registry: Registry | None = None, limits: Limits | None = None
    ) -> None:
        self.host = host
        self.channel = channel
        self.registry = registry or Registry()
        self.limits = limits or Limits()
        self.ended: asyncio.Future[HcsimError] = asyncio.get_running_loop().create_future()
        """Done, with the reason, once the channel is of no more use."""
        self._refs = Refs(channel.peer, self.limits.max_refs, self._dropped, self._fetch)
        self._inbox = Inbox(channel.peer, self.limits, self._expected)
        self._outbox = Outbox(channel)
        self._slots = asyncio.Semaphore(self.limits.max_calls)
        self._pending: dict[int, _Pending] = {}
        self._asked = 0
        """Our last call's number."""
        self._serving: dict[int, tuple[_Serving, asyncio.Task[None]]] = {}
        self._heard = 0
        """The peer's last call's number."""
        channel.limit(self.limits.max_frame_bytes)
        self._tasks = [
            host.spawn(self._receive(), name=f"receive calls from {channel.peer}"),
            host.spawn(self._send(), name=f"send calls to {channel.peer}"),
        ]

    @property
    def peer(self) -> str:
        """The other end: who it has proved to be, or where it is."""
        return self.channel.identity or self.channel.peer

    @property
    def lent(self) -> int:
        """How many of our values the peer holds references to."""
        return self._refs.lent

    @property
    def busy(self) -> int:
        """How many calls are under way, in both directions."""
        return len(self._pending) + len(self._serving)

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End it. Calls in flight end with an error that says so, here and at the other end."""
        peer = self.channel.peer
        self._end(ChannelClosed(f"we closed the channel to {peer}", peer))
        served = [task for _, task in self._serving.values()]
        here = asyncio.current_task()
        await asyncio.gather(*(task for task in [*self._tasks, *served] if task is not here), return_exceptions=True)
        await self.channel.close()

    # Calling.

    @overload
    async def call(self, procedure: Procedure[R], *args: Any, deadline_s: float | None = None) -> R: ...

    @overload
    async def call(self, procedure: str, *args: Any, deadline_s: float | None = None) -> Any: ...

    async def call(self, procedure: Procedure[Any] | str, *args: Any, deadline_s: float | None = None) -> Any:
        """What the procedure returns at the other end, or the error that it ends with there.

        Arrays among the arguments are not to be changed before the answer is there."""
        known = procedure if isinstance(procedure, Procedure) else _of_any_type(procedure)
        within = _SERVING.get(None)
        if within is not None and within.over:
            within = None
        clock = self.host.clock
        until_s = None if deadline_s is None else clock.elapsed() + deadline_s
        if within is not None and within.until_s is not None:
            until_s = within.until_s if until_s is None else min(until_s, within.until_s)
        allowed_s = None if until_s is None else until_s - clock.elapsed()
        late = f"{known.name} at {self.peer} was not answered within {allowed_s or 0:.3g} s"
        if allowed_s is not None and allowed_s <= 0:
            raise DeadlineExceeded(late)
        try:
            async with clock.timeout(allowed_s):
                if within is not None:
                    return await self._call(known, args, until_s, within.call.depth + 1)
                async with self._slots:
                    return await self._call(known, args, until_s, 0)
        except TimeoutError as error:
            if isinstance(error, HcsimError):
                raise
            raise DeadlineExceeded(late) from None

    async def _call(self, procedure: Procedure[Any], args: tuple[Any, ...], until_s: float | None, depth: int) -> Any:
        if self.ended.done():
            raise self._over(procedure.name)
        packed = pack(args, self._refs, self.limits)
        self._asked = number = self._asked + 1
        left_s = None if until_s is None else max(until_s - self.host.clock.elapsed(), SHORTEST_S)
        outgoing = Outgoing(
            Call(number, procedure.name, packed.parcel, left_s, depth),
            OF_CALL, packed.arrays, self.limits.segment_bytes,
        )  # fmt: skip
        answer: asyncio.Future[Incoming | Failure] = asyncio.get_running_loop().create_future()
        self._pending[number] = _Pending(procedure, answer)
        self._outbox.put(outgoing)
        try:
            answered = await answer
            if isinstance(answered, Failure):
                raise revive(answered.kind, answered.text, procedure.name, self.peer, self.registry.errors)
            try:
                await answered.complete
            except ChannelError:
                raise self._over(procedure.name) from None
            del self._pending[number]
            return self._opened(procedure, answered)
        finally:
            outgoing.dropped = True
            unfinished = self._pending.pop(number, None) is not None
            self._inbox.forget((OF_RESULT, number))
            if not outgoing.begun:
                unlend(packed.parcel.loans, self._refs)
            elif unfinished and not self.ended.done():
                self._outbox.put(Outgoing(Cancel(number)))

    def _opened(self, procedure: Procedure[Any], answered: Incoming) -> Any:
        try:
            return unpack(answered.parcel, answered.arrays, answered.taken, procedure.result)
        except (msgspec.DecodeError, CallRefused, UnicodeDecodeError) as error:
            raise RemoteProtocolError(
                f"{procedure.name} at {self.peer} returned something else than it is known for: {error}", self.peer
            ) from None

    def _over(self, name: str) -> HcsimError:
        reason = self.ended.result()
        kind = type(reason) if isinstance(reason, ChannelError) else ChannelBroken
        return kind(f"{name} at {self.peer} was not answered: {reason}", self.channel.peer)

    async def _fetch(self, ref: RemoteRef[Any], kind: Any, deadline_s: float | None) -> Any:
        return await self.call(Procedure(FETCH.name, {"ref": RemoteRef}, kind), ref, deadline_s=deadline_s)

    # The channel.

    async def _send(self) -> None:
        try:
            await self._outbox.run()
        except ChannelError as error:
            self._end(error)
        except UsageError as error:  # what was given cannot cross this channel
            self._end(ChannelBroken(f"a message to {self.channel.peer} could not be sent: {error}", self.channel.peer))

    async def _receive(self) -> None:
        try:
            while True:
                # Not by name: a payload is part of somebody's array, which must not live on because we wait.
                self._landed(*await self.channel.recv(self._place))
        except ChannelError as error:
            self._end(error)
        except Exception as error:  # no memory for an array, say
            peer = self.channel.peer
            self._end(ChannelBroken(f"what came from {peer} could not be taken: {error!r}", peer))
        finally:
            with suppress(ChannelError):
                await self.channel.close()

    def _place(self, header: Header) -> memoryview | None:
        if header.kind is Kind.DATA:
            return self._inbox.place(header)
        if header.kind is not Kind.CONTROL:
            raise RemoteProtocolError(f"{self.peer} sent a frame of kind {header.kind.name} among calls", self.peer)
        return None

    def _landed(self, header: Header, payload: Payload) -> None:
        if header.kind is Kind.DATA:
            self._inbox.landed(header)
        else:
            self._said(decode(payload, self.channel.peer))

    def _expected(self, key: Key) -> bool:
        step, number = key
        return 0 < number <= (self._heard if step == OF_CALL else self._asked if step == OF_RESULT else 0)

    def _said(self, message: Call | Result | Failure | Cancel | Release) -> None:
        match message:
            case Call():
                self._called(message)
            case Result() | Failure():
                self._answered(message)
            case Cancel(number):
                self._expect(self._expected((OF_CALL, number)), "cancelled a call that it did not make")
                if number in self._serving:
                    serving, task = self._serving[number]
                    serving.unwanted = True
                    task.cancel()
            case Release(number, times):
                self._refs.released(number, times)

    def _answered(self, message: Result | Failure) -> None:
        number = message.number
        self._expect(self._expected((OF_RESULT, number)), "answered a call that we did not make")
        taken = self._refs.take(message.parcel) if isinstance(message, Result) else {}
        pending = self._pending.get(number)
        if pending is None or pending.answer.done():
            return  # we gave up on it
        if isinstance(message, Failure):
            del self._pending[number]
            pending.answer.set_result(message)
            return
        objection = self._too_much(message.parcel)
        if objection:
            del self._pending[number]
            pending.answer.set_result(Failure(number, "CallRefused", f"the result is refused: {objection}"))
        else:
            pending.answer.set_result(self._inbox.announce((OF_RESULT, number), message.parcel, taken))

    def _too_much(self, parcel: Any) -> str:
        objection = oversized(parcel, self.limits)
        if not objection and self._inbox.held_bytes + arrays_bytes(parcel) > self.limits.max_held_bytes:
            return f"more than {self.limits.max_held_bytes} bytes of arrays would be under way"
        return objection

    def _dropped(self, number: int, times: int) -> None:
        """Python has freed a reference of theirs, perhaps in the middle of something."""
        with suppress(RuntimeError):  # the loop has ended, and so has the channel
            asyncio.get_running_loop().call_soon(self._outbox.put, Outgoing(Release(number, times)))

    def _expect(self, right: bool, otherwise: str) -> None:
        if not right:
            raise RemoteProtocolError(f"{self.peer} {otherwise}", self.channel.peer)

    def _end(self, error: HcsimError) -> None:
        if self.ended.done():
            return
        self.ended.set_result(error)
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(self._over(pending.procedure.name))
                pending.answer.exception()  # who waits for it will see it
        self._inbox.close(error)
        for serving, task in self._serving.values():
            serving.unwanted = True
            if task is not asyncio.current_task():
                task.cancel()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._refs.close()

    # Serving.

    def _called(self, call: Call) -> None:
        self._expect(call.number > self._heard, "used the number of a call twice")
        self._heard = call.number
        taken = self._refs.take(call.parcel)
        objection = self._objection(call)
        if objection:
            self._outbox.put(Outgoing(Failure(call.number, "CallRefused", objection)))
            return
        incoming = self._inbox.announce((OF_CALL, call.number), call.parcel, taken)
        until_s = None if call.deadline_s is None else self.host.clock.elapsed() + call.deadline_s
        serving = _Serving(self, call, until_s)
        task = self.host.spawn(self._serve(serving, incoming), name=f"{call.name} for {self.channel.peer}")
        self._serving[call.number] = (serving, task)
        task.add_done_callback(lambda _: self._served(serving))

    def _objection(self, call: Call) -> str:
        if call.name != FETCH.name and self.registry.find(call.name) is None:
            return f"there is no function {call.name!r} to be called here"
        if call.depth > MAX_DEPTH:
            return f"{call.name}: calls within calls, {call.depth} deep"
        if len(self._serving) >= self.limits.max_served:
            return f"{call.name}: {len(self._serving)} calls are under way already"
        objection = self._too_much(call.parcel)
        return f"{call.name}: {objection}" if objection else ""

    async def _serve(self, serving: _Serving, incoming: Incoming) -> None:
        call = serving.call
        _SERVING.set(serving)
        try:
            outgoing = self._result(call, await self._value(call, incoming))
        except asyncio.CancelledError:
            if not serving.unwanted and not self.ended.done():
                self._outbox.put(Outgoing(Failure(call.number, "CancelledError", f"{call.name} was cancelled")))
            raise
        except Exception as error:
            outgoing = Outgoing(Failure(call.number, *describe(error)))
        self._outbox.put(outgoing)

    async def _value(self, call: Call, incoming: Incoming) -> Any:
        try:
            async with self.host.clock.timeout(call.deadline_s):
                await incoming.complete
                found = self.registry.find(call.name)
                procedure, function = found if found is not None else (FETCH, _value_of)
                arguments = self._arguments(procedure, incoming)
                value = function(*arguments)
                return await value if inspect.isawaitable(value) else value
        except TimeoutError as error:
            if isinstance(error, HcsimError):
                raise
            raise DeadlineExceeded(f"{call.name} did not end within {call.deadline_s or 0:.3g} s") from None

    def _arguments(self, procedure: Procedure[Any], incoming: Incoming) -> tuple[Any, ...]:
        try:
            read = unpack(incoming.parcel, incoming.arrays, incoming.taken, procedure.arguments)
        except (msgspec.DecodeError, CallRefused, UnicodeDecodeError, RecursionError) as error:
            raise CallRefused(f"{procedure.name}: wrong arguments: {error}") from None
        return msgspec.structs.astuple(read)

    def _result(self, call: Call, value: Any) -> Outgoing:
        try:
            packed = pack(value, self._refs, self.limits)
        except UsageError as error:
            raise CallRefused(f"what {call.name} returned is not sent: {error}") from None
        size_bytes = arrays_bytes(packed.parcel)
        if self._outbox.results_bytes + size_bytes > self.limits.max_held_bytes:
            unlend(packed.parcel.loans, self._refs)
            raise CallRefused(
                f"what {call.name} returned is not sent: too many bytes of results wait to be read already"
            )
        return Outgoing(Result(call.number, packed.parcel), OF_RESULT, packed.arrays, self.limits.segment_bytes, value)

    def _served(self, serving: _Serving) -> None:
        serving.over = True
        self._serving.pop(serving.call.number, None)
        self._inbox.forget((OF_CALL, serving.call.number))


@lru_cache(1024)
def _of_any_type(name: str) -> Procedure[Any]:
    return Procedure(name, {}, Any)


def _value_of(ref: RemoteRef[Any]) -> Any:
    return ref.value
