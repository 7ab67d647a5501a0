"""Calls of the peer's that are being answered, each in a task of its own."""

from __future__ import annotations

import asyncio
import inspect
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import msgspec

from hcsim.errors import UNDECODABLE, CallRefused, UsageError
from hcsim.runtime.waiting import within
from hcsim.transport.rpc.failures import describe
from hcsim.transport.rpc.inbox import Incoming
from hcsim.transport.rpc.line import Line
from hcsim.transport.rpc.messages import MAX_DEPTH, OF_CALL, OF_RESULT, Call, Failure, Result
from hcsim.transport.rpc.outbox import Outgoing
from hcsim.transport.rpc.procedures import Procedure, Registry
from hcsim.transport.rpc.refs import RemoteRef
from hcsim.transport.rpc.values import arrays_bytes, pack, unlend, unpack

if TYPE_CHECKING:
    from hcsim.transport.rpc.endpoint import Endpoint

FETCH: Procedure[Any] = Procedure("ref.fetch", {"ref": RemoteRef}, Any)


class Served:
    """A call that is being answered."""

    def __init__(self, endpoint: Endpoint, call: Call, until_s: float | None) -> None:
        self.endpoint = endpoint
        self.call = call
        self.until_s = until_s
        self.unwanted = False
        """Whether the caller has given it up."""
        self.over = False


_BEING_SERVED: ContextVar[Served] = ContextVar("being_served")


def being_served() -> Served | None:
    """The call that this task is answering, if it is answering one."""
    served = _BEING_SERVED.get(None)
    return None if served is None or served.over else served


def serving_endpoint() -> Endpoint:
    """Over which endpoint the call came that is being answered; for functions that are called from afar."""
    served = being_served()
    if served is None:
        raise UsageError("this is not being called from afar")
    return served.endpoint


class Serving:
    """The peer's calls over one channel."""

    def __init__(self, endpoint: Endpoint, line: Line, registry: Registry) -> None:
        self._endpoint = endpoint
        self._line = line
        self._registry = registry
        self.under_way: dict[int, tuple[Served, asyncio.Task[None]]] = {}

    def called(self, call: Call) -> None:
        """Answer a call, or refuse it."""
        line = self._line
        line.expect(call.number > line.last[OF_CALL], "used the number of a call twice")
        line.last[OF_CALL] = call.number
        line.expect(line.outbox.answers <= line.limits.max_unread, "calls and calls, and does not read our answers")
        taken = line.refs.take(call.parcel)
        objection = self._objection(call)
        if objection:
            line.outbox.put(Outgoing(Failure(call.number, CallRefused.__name__, objection)))
            return
        incoming = line.inbox.announce((OF_CALL, call.number), call.parcel, taken)
        until_s = None if call.deadline_s is None else line.host.clock.elapsed() + call.deadline_s
        served = Served(self._endpoint, call, until_s)
        task = line.host.spawn(self._serve(served, incoming), name=f"{call.name} for {line.channel.peer}")
        self.under_way[call.number] = (served, task)
        task.add_done_callback(lambda _: self._done(served))

    def cancelled(self, number: int) -> None:
        """The caller does not want the answer any more."""
        self._line.expect(self._line.known(OF_CALL, number), "cancelled a call that it did not make")
        if number in self.under_way:
            served, task = self.under_way[number]
            served.unwanted = True
            task.cancel()

    def end(self) -> None:
        """The channel has ended: nobody can be answered."""
        here = asyncio.current_task()
        for served, task in self.under_way.values():
            served.unwanted = True
            if task is not here:
                task.cancel()

    def _objection(self, call: Call) -> str:
        if call.name != FETCH.name and self._registry.find(call.name) is None:
            return f"there is no function {call.name!r} to be called here"
        if call.depth > MAX_DEPTH:
            return f"{call.name}: calls within calls, {call.depth} deep"
        if len(self.under_way) >= self._line.limits.max_served:
            return f"{call.name}: {len(self.under_way)} calls are under way already"
        objection = self._line.too_much(call.parcel)
        return f"{call.name}: {objection}" if objection else ""

    async def _serve(self, served: Served, incoming: Incoming) -> None:
        call, outbox = served.call, self._line.outbox
        _BEING_SERVED.set(served)
        try:
            outgoing = self._result(call, await self._value(call, incoming))
        except asyncio.CancelledError:
            if not served.unwanted and not self._line.ended.done():
                outbox.put(Outgoing(Failure(call.number, "CancelledError", f"{call.name} was cancelled")))
            raise
        except Exception as error:
            outgoing = Outgoing(Failure(call.number, *describe(error)))
        outbox.put(outgoing)

    async def _value(self, call: Call, incoming: Incoming) -> Any:
        late = f"{call.name} did not end within {call.deadline_s or 0:.3g} s"
        async with within(self._line.host.clock, call.deadline_s, late):
            await incoming.complete
            found = self._registry.find(call.name)
            procedure, function = found if found is not None else (FETCH, _value_of)
            value = function(*_arguments(procedure, incoming))
            return await value if inspect.isawaitable(value) else value

    def _result(self, call: Call, value: Any) -> Outgoing:
        line = self._line
        try:
            packed = pack(value, line.refs, line.limits)
        except UsageError as error:
            raise CallRefused(f"what {call.name} returned is not sent: {error}") from None
        if line.outbox.results_bytes + arrays_bytes(packed.parcel) > line.limits.max_held_bytes:
            unlend(packed.parcel.loans, line.refs)
            raise CallRefused(f"what {call.name} returned is not sent: too much of what we returned waits to be read")
        result = Result(call.number, packed.parcel)
        return Outgoing(result, OF_RESULT, packed.arrays, line.limits.segment_bytes, value)

    def _done(self, served: Served) -> None:
        served.over = True
        self.under_way.pop(served.call.number, None)
        self._line.inbox.forget((OF_CALL, served.call.number))


def _arguments(procedure: Procedure[Any], incoming: Incoming) -> tuple[Any, ...]:
    try:
        read = unpack(incoming.parcel, incoming.arrays, incoming.taken, procedure.arguments)
    except (*UNDECODABLE, CallRefused) as error:
        raise CallRefused(f"{procedure.name}: wrong arguments: {error}") from None
    return msgspec.structs.astuple(read)


def _value_of(ref: RemoteRef[Any]) -> Any:
    return ref.value
