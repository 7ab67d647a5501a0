"""One end of a channel over which both sides call each other.

Each incoming call runs in a task of its own, and one task always receives. Hence two ends that wait for each
other's answers, or that call back and forth, do not deadlock. A call's deadline is sent with it, as a duration;
nested calls have no more time than is left. A caller that gives up says so, and the work at the other end is
cancelled.

    caller                                  callee
    Call number, name, arguments, deadline  →   refused, or a task that waits for the arrays and calls
    arrays, piece by piece                  →
                                            ←   Result number, value; its arrays, or Failure number, kind, text
    Cancel number                           →   the task is cancelled; there is no answer

Outgoing and incoming calls share a `RpcConnection`.
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
    UNDECODABLE,
    CallRefused,
    ChannelBroken,
    ChannelClosed,
    ChannelError,
    DeadlineExceeded,
    HcsimError,
    RemoteError,
    RemoteProtocolError,
    UsageError,
)
from hcsim.runtime.channel import Channel, Payload
from hcsim.runtime.clock import fail_future, within
from hcsim.runtime.frame import Header, Kind
from hcsim.runtime.host import Host
from hcsim.transport.messages import Requests, describe, revive
from hcsim.transport.rpc.messages import (
    MAX_DEPTH,
    OF_CALL,
    OF_RESULT,
    SCHEMA,
    CallFailure,
    CallRequest,
    CallResult,
    CancelCall,
    EncodedValue,
    Limits,
    ReleaseReference,
)
from hcsim.transport.rpc.references import (
    Fetch,
    Procedure,
    ProcedureRegistry,
    ReferenceTable,
    RemoteRef,
    arrays_bytes,
    oversized,
    pack,
    unlend,
    unpack,
)
from hcsim.transport.rpc.transfers import Inbox, IncomingMessage, Outbox, OutgoingMessage


class RpcConnection:
    """The state of a channel that calls in both directions share: messages in transit and lent values."""

    def __init__(self, host: Host, channel: Channel, limits: Limits, fetch: Fetch) -> None:
        self.host = host
        self.channel = channel
        self.limits = limits
        self.ended: asyncio.Future[HcsimError] = asyncio.get_running_loop().create_future()
        """Done, with the reason, when the channel has ended."""
        self.refs = ReferenceTable(channel.peer, limits.max_refs, self._dropped, fetch)
        self.inbox = Inbox(channel.peer, lambda key: self.known(*key))
        self.outbox = Outbox(channel)
        self.requests: Requests[OutgoingCall] = Requests()
        """The outgoing calls."""
        self.last_call = 0
        """The number of the peer's last call."""

    @property
    def peer(self) -> str:
        """The identity that the peer has proved, or else its address."""
        return self.channel.identity or self.channel.peer

    def known(self, step: int, number: int) -> bool:
        """Return whether there has been a call of that number, from the peer (OF_CALL) or from this end (OF_RESULT)."""
        return self.requests.made(number) if step == OF_RESULT else step == OF_CALL and 0 < number <= self.last_call

    def expect(self, right: bool, otherwise: str) -> None:
        """Raise `RemoteProtocolError` unless the condition holds."""
        if not right:
            raise RemoteProtocolError(f"{self.peer} {otherwise}", self.channel.peer)

    def too_much(self, parcel: EncodedValue) -> str:
        """Return the reason to reject a parcel because of its size, or an empty string."""
        objection = oversized(parcel, self.limits)
        if not objection and self.inbox.held_bytes + arrays_bytes(parcel) > self.limits.max_held_bytes:
            return f"more than {self.limits.max_held_bytes} bytes of arrays would be under way"
        return objection

    def over(self, name: str) -> HcsimError:
        """Return the error of a call that the end of the channel has left unanswered."""
        reason = self.ended.result()
        kind = type(reason) if isinstance(reason, ChannelError) else ChannelBroken
        return kind(f"{name} at {self.peer} was not answered: {reason}", self.channel.peer)

    def _dropped(self, number: int, times: int) -> None:
        """Release a reference of the peer that Python has freed, possibly in the middle of other code."""
        with suppress(RuntimeError):  # the loop has ended, and so has the channel
            asyncio.get_running_loop().call_soon(self.outbox.put, OutgoingMessage(ReleaseReference(number, times)))


SHORTEST_S = 1e-9


class OutgoingCall:
    """A call that waits for its answer."""

    def __init__(self, procedure: Procedure[Any], answer: asyncio.Future[IncomingMessage | CallFailure]) -> None:
        self.procedure = procedure
        self.answer = answer


class CallClient:
    """The outgoing calls over one channel."""

    def __init__(self, line: RpcConnection, registry: ProcedureRegistry) -> None:
        self._line = line
        self._errors = registry.errors
        self._slots = asyncio.Semaphore(line.limits.max_calls)

    async def call(self, procedure: Procedure[Any], args: tuple[Any, ...], deadline_s: float | None) -> Any:
        outer = being_served()
        clock = self._line.host.clock
        until_s = None if deadline_s is None else clock.elapsed() + deadline_s
        if outer is not None and outer.until_s is not None:
            until_s = outer.until_s if until_s is None else min(until_s, outer.until_s)
        allowed_s = None if until_s is None else until_s - clock.elapsed()
        late = f"{procedure.name} at {self._line.peer} was not answered within {allowed_s or 0:.3g} s"
        if allowed_s is not None and allowed_s <= 0:
            raise DeadlineExceeded(late)
        async with within(clock, allowed_s, late):
            if outer is not None:
                return await self._call(procedure, args, until_s, outer.call.depth + 1)
            async with self._slots:
                return await self._call(procedure, args, until_s, 0)

    async def _call(self, procedure: Procedure[Any], args: tuple[Any, ...], until_s: float | None, depth: int) -> Any:
        line = self._line
        if line.ended.done():
            raise line.over(procedure.name)
        packed = pack(args, line.refs, line.limits)
        number = line.requests.number()
        left_s = None if until_s is None else max(until_s - line.host.clock.elapsed(), SHORTEST_S)
        asked = CallRequest(number, procedure.name, packed.parcel, left_s, depth)
        outgoing = OutgoingMessage(asked, OF_CALL, packed.arrays, line.limits.segment_bytes)
        answer: asyncio.Future[IncomingMessage | CallFailure] = asyncio.get_running_loop().create_future()
        line.requests.add(number, OutgoingCall(procedure, answer))
        line.outbox.put(outgoing)
        try:
            return await self._value(number, procedure, answer)
        finally:
            outgoing.dropped = True
            unfinished = line.requests.take(number) is not None
            line.inbox.forget((OF_RESULT, number))
            if not outgoing.begun:
                unlend(packed.parcel.loans, line.refs)
            elif unfinished and not line.ended.done():
                line.outbox.put(OutgoingMessage(CancelCall(number)))

    async def _value(
        self, number: int, procedure: Procedure[Any], answer: asyncio.Future[IncomingMessage | CallFailure]
    ) -> Any:
        line = self._line
        answered = await answer
        if isinstance(answered, CallFailure):
            error = revive(answered.kind, answered.text, self._errors)
            text = f"{procedure.name} failed at {line.peer}: {answered.kind}: {answered.text}"
            raise error or RemoteError(text, answered.kind)
        try:
            await answered.complete
        except ChannelError:
            raise line.over(procedure.name) from None
        line.requests.take(number)  # nothing is left to be cancelled
        try:
            return unpack(answered.parcel, answered.arrays, answered.taken, procedure.result)
        except (*UNDECODABLE, CallRefused) as error:
            raise RemoteProtocolError(
                f"{procedure.name} at {line.peer} returned something else than it is known for: {error}", line.peer
            ) from None

    def answered(self, message: CallResult | CallFailure) -> None:
        """Process an answer; the arrays of a result follow."""
        line, number = self._line, message.number
        line.expect(line.known(OF_RESULT, number), "answered a call that we did not make")
        taken = line.refs.take(message.parcel) if isinstance(message, CallResult) else {}
        pending = line.requests.get(number)
        if pending is None or pending.answer.done():
            return  # we gave up on it
        if isinstance(message, CallResult):
            objection = line.too_much(message.parcel)
            if not objection:
                pending.answer.set_result(line.inbox.announce((OF_RESULT, number), message.parcel, taken))
                return
            message = CallFailure(number, CallRefused.__name__, f"the result is refused: {objection}")
        line.requests.take(number)
        pending.answer.set_result(message)

    def end(self) -> None:
        """Fail all calls: the channel has ended."""
        for pending in self._line.requests.waiting():
            fail_future(pending.answer, self._line.over(pending.procedure.name))


@lru_cache(1024)
def of_any_type(name: str) -> Procedure[Any]:
    return Procedure(name, {}, Any)


FETCH: Procedure[Any] = Procedure("ref.fetch", {"ref": RemoteRef}, Any)


class IncomingCall:
    """An incoming call that is being served."""

    def __init__(self, endpoint: Endpoint, call: CallRequest, until_s: float | None) -> None:
        self.endpoint = endpoint
        self.call = call
        self.until_s = until_s
        self.unwanted = False
        """Whether the caller has cancelled it."""
        self.over = False


_BEING_SERVED: ContextVar[IncomingCall] = ContextVar("being_served")


def being_served() -> IncomingCall | None:
    """Return the call that this task is serving, or None."""
    served = _BEING_SERVED.get(None)
    return None if served is None or served.over else served


def serving_endpoint() -> Endpoint:
    """Return the endpoint of the call that is being served, for use in remotely called functions."""
    served = being_served()
    if served is None:
        raise UsageError("this is not being called from afar")
    return served.endpoint


class CallServer:
    """The incoming calls over one channel."""

    def __init__(self, endpoint: Endpoint, line: RpcConnection, registry: ProcedureRegistry) -> None:
        self._endpoint = endpoint
        self._line = line
        self._registry = registry
        self.under_way: dict[int, tuple[IncomingCall, asyncio.Task[None]]] = {}

    def called(self, call: CallRequest) -> None:
        """Start to serve a call, or reject it."""
        line = self._line
        line.expect(call.number > line.last_call, "used the number of a call twice")
        line.last_call = call.number
        line.expect(line.outbox.answers <= line.limits.max_unread, "calls and calls, and does not read our answers")
        taken = line.refs.take(call.parcel)
        objection = self._objection(call)
        if objection:
            line.outbox.put(OutgoingMessage(CallFailure(call.number, CallRefused.__name__, objection)))
            return
        incoming = line.inbox.announce((OF_CALL, call.number), call.parcel, taken)
        until_s = None if call.deadline_s is None else line.host.clock.elapsed() + call.deadline_s
        served = IncomingCall(self._endpoint, call, until_s)
        task = line.host.spawn(self._serve(served, incoming), name=f"{call.name} for {line.channel.peer}")
        self.under_way[call.number] = (served, task)
        task.add_done_callback(lambda _: self._done(served))

    def cancelled(self, number: int) -> None:
        """Cancel a call whose caller has given up."""
        self._line.expect(self._line.known(OF_CALL, number), "cancelled a call that it did not make")
        if number in self.under_way:
            served, task = self.under_way[number]
            served.unwanted = True
            task.cancel()

    def end(self) -> None:
        """Cancel all calls: the channel has ended."""
        here = asyncio.current_task()
        for served, task in self.under_way.values():
            served.unwanted = True
            if task is not here:
                task.cancel()

    def _objection(self, call: CallRequest) -> str:
        if call.name != FETCH.name and self._registry.find(call.name) is None:
            return f"there is no function {call.name!r} to be called here"
        if call.depth > MAX_DEPTH:
            return f"{call.name}: calls within calls, {call.depth} deep"
        if len(self.under_way) >= self._line.limits.max_served:
            return f"{call.name}: {len(self.under_way)} calls are under way already"
        objection = self._line.too_much(call.parcel)
        return f"{call.name}: {objection}" if objection else ""

    async def _serve(self, served: IncomingCall, incoming: IncomingMessage) -> None:
        call, outbox = served.call, self._line.outbox
        _BEING_SERVED.set(served)
        try:
            outgoing = self._result(call, await self._value(call, incoming))
        except asyncio.CancelledError:
            if not served.unwanted and not self._line.ended.done():
                outbox.put(OutgoingMessage(CallFailure(call.number, "CancelledError", f"{call.name} was cancelled")))
            raise
        except Exception as error:
            outgoing = OutgoingMessage(CallFailure(call.number, *describe(error)))
        outbox.put(outgoing)

    async def _value(self, call: CallRequest, incoming: IncomingMessage) -> Any:
        late = f"{call.name} did not end within {call.deadline_s or 0:.3g} s"
        async with within(self._line.host.clock, call.deadline_s, late):
            await incoming.complete
            found = self._registry.find(call.name)
            procedure, function = found if found is not None else (FETCH, _value_of)
            value = function(*_arguments(procedure, incoming))
            return await value if inspect.isawaitable(value) else value

    def _result(self, call: CallRequest, value: Any) -> OutgoingMessage:
        line = self._line
        try:
            packed = pack(value, line.refs, line.limits)
        except UsageError as error:
            raise CallRefused(f"what {call.name} returned is not sent: {error}") from None
        if line.outbox.results_bytes + arrays_bytes(packed.parcel) > line.limits.max_held_bytes:
            unlend(packed.parcel.loans, line.refs)
            raise CallRefused(f"what {call.name} returned is not sent: too much of what we returned waits to be read")
        result = CallResult(call.number, packed.parcel)
        return OutgoingMessage(result, OF_RESULT, packed.arrays, line.limits.segment_bytes, value)

    def _done(self, served: IncomingCall) -> None:
        served.over = True
        self.under_way.pop(served.call.number, None)
        self._line.inbox.forget((OF_CALL, served.call.number))


def _arguments(procedure: Procedure[Any], incoming: IncomingMessage) -> tuple[Any, ...]:
    try:
        read = unpack(incoming.parcel, incoming.arrays, incoming.taken, procedure.arguments)
    except (*UNDECODABLE, CallRefused) as error:
        raise CallRefused(f"{procedure.name}: wrong arguments: {error}") from None
    return msgspec.structs.astuple(read)


def _value_of(ref: RemoteRef[Any]) -> Any:
    return ref.value


R = TypeVar("R")


class Endpoint:
    """One end of a channel, which it owns, for calls in both directions."""

    def __init__(
        self, host: Host, channel: Channel, registry: ProcedureRegistry | None = None, limits: Limits | None = None
    ) -> None:
        self.channel = channel
        registry = registry or ProcedureRegistry()
        self._line = RpcConnection(host, channel, limits or Limits(), self._fetch)
        self._calling = CallClient(self._line, registry)
        self._serving = CallServer(self, self._line, registry)
        channel.limit(self._line.limits.max_frame_bytes)
        self._tasks = [
            host.spawn(self._receive(), name=f"receive calls from {channel.peer}"),
            host.spawn(self._send(), name=f"send calls to {channel.peer}"),
        ]

    @property
    def peer(self) -> str:
        """The identity that the peer has proved, or else its address."""
        return self._line.peer

    @property
    def ended(self) -> asyncio.Future[HcsimError]:
        """Done, with the reason, when the channel has ended."""
        return self._line.ended

    @property
    def lent(self) -> int:
        """The number of this end's values to which the peer holds references."""
        return self._line.refs.lent

    @property
    def busy(self) -> int:
        """The number of calls in progress, in both directions."""
        return len(self._line.requests) + len(self._serving.under_way)

    @property
    def unread_bytes(self) -> int:
        """The bytes of results that have not been sent yet."""
        return self._line.outbox.results_bytes

    @overload
    async def call(self, procedure: Procedure[R], *args: Any, deadline_s: float | None = None) -> R: ...

    @overload
    async def call(self, procedure: str, *args: Any, deadline_s: float | None = None) -> Any: ...

    async def call(self, procedure: Procedure[Any] | str, *args: Any, deadline_s: float | None = None) -> Any:
        """Call a procedure of the peer and return its result. Raises the error with which it ends there.

        Arrays among the arguments must not be changed before the call returns."""
        known = procedure if isinstance(procedure, Procedure) else of_any_type(procedure)
        return await self._calling.call(known, args, deadline_s)

    async def close(self) -> None:
        """Close the channel. Calls in progress fail with `ChannelClosed` here, and with a channel error at the other
        end."""
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
        match SCHEMA.framed(header, payload, self.channel.peer):
            case CallRequest() as call:
                self._serving.called(call)
            case CallResult() | CallFailure() as answer:
                self._calling.answered(answer)
            case CancelCall(number):
                self._serving.cancelled(number)
            case ReleaseReference(number, times):
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
