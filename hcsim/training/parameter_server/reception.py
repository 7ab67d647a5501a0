"""Where workers call: connections, what may be asked over them, and the checking of pushes.

Each connection has a task that receives and one that answers, so a slow worker holds up nobody. A caller that has
not said who it is may send little, within a deadline, and only so many may be at that stage. What a known
worker announces is compared with the model before a byte is allocated for it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from functools import partial
from hmac import compare_digest
from typing import Any, TypeAlias

import numpy as np

from hcsim.compressors.base import Bytes
from hcsim.errors import ChannelError, CompressionError, DeadlineExceeded, PeerRefused, RemoteProtocolError
from hcsim.runtime.channel import Channel, Listener, Payload, Phantom
from hcsim.training.learner import Learner
from hcsim.training.parameter_server.gradients import Gradients, Received
from hcsim.training.parameter_server.messages import (
    ANSWERS,
    QUESTIONS,
    Answer,
    Await,
    Join,
    Leave,
    Line,
    Pull,
    Push,
    Question,
    Refused,
)
from hcsim.training.parameter_server.rounds import Effect, Rounds
from hcsim.transport.callers import Callers
from hcsim.transport.messages import expect

HELLO_TIMEOUT_S = 5.0
"""Callers that have not said who they are."""
MAX_WORKERS = 4096
MAX_UNREAD = 16
"""Answers that a worker may leave unread: an honest one asks one thing at a time."""
MAX_VIOLATIONS = 3
"""Connections in a row on which a worker breaks the protocol, with no whole push between them: one may be an accident.
"""

Event: TypeAlias = Callable[[float], list[Effect]]
Happening: TypeAlias = tuple[Event, asyncio.Future[None]]
"""An event, and who waits until its effects are done."""


class Caller:
    """A connected worker."""

    def __init__(self, worker: str, line: Line[Answer, Question]) -> None:
        self.worker = worker
        self.line = line
        self.unread: asyncio.Queue[tuple[Answer, Payload | None]] = asyncio.Queue(MAX_UNREAD)
        self.answering = False
        self.objection = ""
        """Why it is not let in."""


class Reception:
    """Turns what workers say into events, and carries answers to them."""

    def __init__(self, learner: Learner, gradients: Gradients, rounds: Rounds, *, job: str) -> None:
        self.members_only = False
        """Whether workers that were not expected are sent away."""
        self.guests: Collection[str] | None = None
        """The only workers that may come in. On others the server hangs up, and says nothing: they follow another view,
        whose server may be at this very address soon, or was."""
        self.on_violations: Callable[[str, RemoteProtocolError], None] | None = None
        """Told of a worker that breaks the protocol again and again, and how."""
        self.events: asyncio.Queue[Happening] = asyncio.Queue()
        self._learner = learner
        self._host = learner.host
        self._gradients = gradients
        self._rounds = rounds
        self._job = job
        self._callers: dict[str, Caller] = {}
        self._sent_bytes: dict[str, int] = {}
        """Over connections that have ended."""
        self._violations: Counter[str] = Counter()
        """By worker, since its last whole push."""
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._strangers = Callers(self._host)

    def open(self, listener: Listener) -> None:
        """Take calls from now on."""
        self._start(self._strangers.accept(listener, self._called_by), "accept workers")

    async def close(self) -> None:
        """Hang up on everybody."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._strangers.close()

    @property
    def answering(self) -> bool:
        """Whether answers are still on their way."""
        return any(caller.answering or not caller.unread.empty() for caller in self._callers.values())

    def sent_bytes(self, *, without: str = "") -> int:
        """To all workers, or all but one, headers included."""
        current = {name: caller.line.sent_bytes for name, caller in self._callers.items()}
        return sum(sent for each in (self._sent_bytes, current) for name, sent in each.items() if name != without)

    def tell(self, worker: str, answer: Answer, payload: Payload | None = None) -> None:
        """Answer a worker, if it is connected. The payload is not to change any more."""
        caller = self._callers.get(worker)
        if caller is None:
            return
        try:
            caller.unread.put_nowait((answer, payload))
        except asyncio.QueueFull:
            self._start(caller.line.close(), f"hang up on {worker}, who does not listen")

    async def _happened(self, event: Event) -> None:
        """Have an event handled; returns when its effects are done, so that a worker has one at a time."""
        handled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.events.put_nowait((event, handled))
        await handled

    # Connections.

    def _called_by(self, channel: Channel, number: int) -> None:
        self._start(self._receive(channel), f"caller {number}")

    async def _receive(self, channel: Channel) -> None:
        """Hear who calls; serve it until the connection ends, or say why not."""
        line = Line(channel, self._host.clock, ANSWERS, QUESTIONS, silence_s=self._rounds.policy.silence_s)
        try:
            try:
                join = expect(await line.recv(HELLO_TIMEOUT_S), Join, line.peer)
            finally:
                self._strangers.known(channel)
            if self.guests is not None and join.worker not in self.guests:
                raise PeerRefused(f"{join.worker} is not in our view", line.peer)
            await self._serve(Caller(join.worker, line), join)
        except (ChannelError, DeadlineExceeded) as error:
            self._host.trace("parameter server", "hung up", str(error))
        finally:
            await line.close()

    def _objection(self, join: Join) -> str:
        if not compare_digest(join.job.encode(), self._job.encode()):
            return f"this is another job than {join.job!r}"  # whose name may be what keeps strangers out
        if join.model != self._learner.task.fingerprint:
            return "we train another model, or with other data"
        unknown = join.worker not in self._rounds.members
        if unknown and (self.members_only or len(self._rounds.members) >= MAX_WORKERS):
            return f"no worker called {join.worker} is expected here"
        return self._rounds.objection(join)

    async def _serve(self, caller: Caller, join: Join) -> None:
        answering = self._start(self._answer(caller), f"answer {caller.worker}")
        try:
            await self._happened(partial(self._joined, caller, join))
            if caller.objection:
                await caller.line.send(Refused(0, caller.objection))
                return
            caller.line.trust(len(self._gradients.tensors))
            while True:
                await self._handle(caller, await caller.line.recv(None))
        except RemoteProtocolError as error:
            self._violations[caller.worker] += 1
            if self._violations[caller.worker] >= MAX_VIOLATIONS and self.on_violations is not None:
                self.on_violations(caller.worker, error)
            raise
        finally:
            answering.cancel()
            if self._callers.get(caller.worker) is caller:
                self._forget(caller)
                self._start(self._happened(partial(self._lost, caller.worker)), f"{caller.worker} is lost")

    def _joined(self, caller: Caller, join: Join, now: float) -> list[Effect]:
        caller.objection = self._objection(join)
        if caller.objection:
            return []
        if (before := self._callers.get(caller.worker)) is not None:
            self._forget(before)
            self._start(before.line.close(), f"hang up on {caller.worker}, who calls again")
        self._callers[caller.worker] = caller
        return self._rounds.joined(join, now)

    def _lost(self, worker: str, now: float) -> list[Effect]:
        return [] if worker in self._callers else self._rounds.lost(worker, now)

    def _forget(self, caller: Caller) -> None:
        del self._callers[caller.worker]
        self._sent_bytes[caller.worker] = self._sent_bytes.get(caller.worker, 0) + caller.line.sent_bytes

    async def _answer(self, caller: Caller) -> None:
        try:
            while True:
                answer, payload = await caller.unread.get()
                caller.answering = True
                await caller.line.send(answer, payload)
                caller.answering = False
                if payload is not None:
                    await self._happened(lambda _: [])  # whether all have the final model is to be asked anew
        except (ChannelError, DeadlineExceeded):
            await caller.line.close()

    # Questions.

    async def _handle(self, caller: Caller, asked: Question) -> None:
        worker, rounds = caller.worker, self._rounds
        event: Event
        match asked:
            case Push():
                gradient, fault = await self._heard(caller, asked)
                self._violations.pop(worker, None)
                event = partial(rounds.pushed, worker, asked, gradient, fault)
            case Pull() | Await():
                event = partial(rounds.asked, worker, asked)
            case Leave():
                event = partial(rounds.left, worker)
            case Join():
                raise RemoteProtocolError(f"{caller.line.peer} joined twice", caller.line.peer)
        # A worker that called again meanwhile, perhaps in another life, speaks there.
        await self._happened(lambda now: event(now) if self._callers.get(worker) is caller else [])

    async def _heard(self, caller: Caller, push: Push) -> tuple[Received | None, str]:
        """The gradient in a push, if it is wanted and valid; and what is wrong with it."""
        line, size_bytes = caller.line, push.size_bytes
        if size_bytes > self._gradients.most_bytes:
            raise RemoteProtocolError(f"{line.peer} announced a gradient of {size_bytes} bytes", line.peer)
        fault = self._gradients.objection(push)
        if fault or not self._rounds.wants(caller.worker, push):
            await line.recv_payload(size_bytes, None)
            return None, fault
        data: Bytes | Phantom = Phantom(size_bytes)
        if isinstance(self._learner.replica.gradients, Phantom):
            await line.recv_payload(size_bytes, None)
        else:
            data = np.empty(size_bytes, np.uint8)
            await line.recv_payload(size_bytes, data.data)
        try:
            return Received(push, data, await self._gradients.decoded(push, data, self._learner)), ""
        except CompressionError as error:
            return None, str(error)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self._host.spawn(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task
