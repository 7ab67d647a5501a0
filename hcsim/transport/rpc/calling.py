"""Calls of ours that wait for their answers."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from typing import Any

from hcsim.errors import UNDECODABLE, CallRefused, ChannelError, DeadlineExceeded, RemoteProtocolError
from hcsim.runtime import waiting
from hcsim.transport.rpc.failures import revive
from hcsim.transport.rpc.inbox import Incoming
from hcsim.transport.rpc.line import Line
from hcsim.transport.rpc.messages import OF_CALL, OF_RESULT, Call, Cancel, Failure, Result
from hcsim.transport.rpc.outbox import Outgoing
from hcsim.transport.rpc.procedures import Procedure, Registry
from hcsim.transport.rpc.serving import being_served
from hcsim.transport.rpc.values import pack, unlend, unpack

SHORTEST_S = 1e-9


class Pending:
    """A call that waits for its answer."""

    def __init__(self, procedure: Procedure[Any], answer: asyncio.Future[Incoming | Failure]) -> None:
        self.procedure = procedure
        self.answer = answer


class Calling:
    """Our calls over one channel."""

    def __init__(self, line: Line, registry: Registry) -> None:
        self._line = line
        self._errors = registry.errors
        self._slots = asyncio.Semaphore(line.limits.max_calls)
        self.pending: dict[int, Pending] = {}

    async def call(self, procedure: Procedure[Any], args: tuple[Any, ...], deadline_s: float | None) -> Any:
        """See `Endpoint.call`."""
        within = being_served()
        clock = self._line.host.clock
        until_s = None if deadline_s is None else clock.elapsed() + deadline_s
        if within is not None and within.until_s is not None:
            until_s = within.until_s if until_s is None else min(until_s, within.until_s)
        allowed_s = None if until_s is None else until_s - clock.elapsed()
        late = f"{procedure.name} at {self._line.peer} was not answered within {allowed_s or 0:.3g} s"
        if allowed_s is not None and allowed_s <= 0:
            raise DeadlineExceeded(late)
        async with waiting.within(clock, allowed_s, late):
            if within is not None:
                return await self._call(procedure, args, until_s, within.call.depth + 1)
            async with self._slots:
                return await self._call(procedure, args, until_s, 0)

    async def _call(self, procedure: Procedure[Any], args: tuple[Any, ...], until_s: float | None, depth: int) -> Any:
        line = self._line
        if line.ended.done():
            raise line.over(procedure.name)
        packed = pack(args, line.refs, line.limits)
        number = line.last[OF_RESULT] = line.last[OF_RESULT] + 1
        left_s = None if until_s is None else max(until_s - line.host.clock.elapsed(), SHORTEST_S)
        asked = Call(number, procedure.name, packed.parcel, left_s, depth)
        outgoing = Outgoing(asked, OF_CALL, packed.arrays, line.limits.segment_bytes)
        answer: asyncio.Future[Incoming | Failure] = asyncio.get_running_loop().create_future()
        self.pending[number] = Pending(procedure, answer)
        line.outbox.put(outgoing)
        try:
            return await self._value(number, procedure, answer)
        finally:
            outgoing.dropped = True
            unfinished = self.pending.pop(number, None) is not None
            line.inbox.forget((OF_RESULT, number))
            if not outgoing.begun:
                unlend(packed.parcel.loans, line.refs)
            elif unfinished and not line.ended.done():
                line.outbox.put(Outgoing(Cancel(number)))

    async def _value(self, number: int, procedure: Procedure[Any], answer: asyncio.Future[Incoming | Failure]) -> Any:
        line = self._line
        answered = await answer
        if isinstance(answered, Failure):
            raise revive(answered.kind, answered.text, procedure.name, line.peer, self._errors)
        try:
            await answered.complete
        except ChannelError:
            raise line.over(procedure.name) from None
        del self.pending[number]  # nothing is left to be cancelled
        try:
            return unpack(answered.parcel, answered.arrays, answered.taken, procedure.result)
        except (*UNDECODABLE, CallRefused) as error:
            raise RemoteProtocolError(
                f"{procedure.name} at {line.peer} returned something else than it is known for: {error}", line.peer
            ) from None

    def answered(self, message: Result | Failure) -> None:
        """An answer has come; the arrays of a result follow."""
        line, number = self._line, message.number
        line.expect(line.known(OF_RESULT, number), "answered a call that we did not make")
        taken = line.refs.take(message.parcel) if isinstance(message, Result) else {}
        pending = self.pending.get(number)
        if pending is None or pending.answer.done():
            return  # we gave up on it
        if isinstance(message, Result):
            objection = line.too_much(message.parcel)
            if not objection:
                pending.answer.set_result(line.inbox.announce((OF_RESULT, number), message.parcel, taken))
                return
            message = Failure(number, CallRefused.__name__, f"the result is refused: {objection}")
        del self.pending[number]
        pending.answer.set_result(message)

    def end(self) -> None:
        """The channel has ended, and with it every call."""
        for pending in self.pending.values():
            waiting.disappoint(pending.answer, self._line.over(pending.procedure.name))


@lru_cache(1024)
def of_any_type(name: str) -> Procedure[Any]:
    """A procedure of which only the name is known."""
    return Procedure(name, {}, Any)
