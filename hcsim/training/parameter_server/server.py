"""The server: it holds the model, receives from its workers, and carries out the effects of the state machine.

Each connection has a task that receives and one that answers, so that a slow worker delays no other. A
connection that has not identified itself may send little, within a deadline, and the number of such connections
is limited. The server compares what a known worker announces with the model before it allocates memory for it.

One task handles all events, one after the other, each with its effects. So the model, its version and the given
answers are consistent between any two events.

The server's records of its workers between two updates are sufficient for a restart without a visible effect.
They lack the pushes of an unfinished round: their workers have no answer yet and send them again. They contain
the answers: a worker that missed its answer asks again and gets the same one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from functools import partial
from hmac import compare_digest
from typing import Any, TypeAlias

import msgspec
import numpy as np

from hcsim.compressors.base import ByteArray
from hcsim.errors import ChannelError, CompressionError, DeadlineExceeded, PeerRefused, RemoteProtocolError
from hcsim.runtime.channel import Channel, Listener, Payload, Phantom
from hcsim.training.learner import Learner
from hcsim.training.parameter_server.gradients import GradientCodec, ReceivedPush, average
from hcsim.training.parameter_server.messages import (
    ANSWERS,
    QUESTIONS,
    AwaitEnd,
    Join,
    LeaveRequest,
    MessageConnection,
    ModelReply,
    Pull,
    Push,
    PushVerdict,
    RequestRefused,
    ServerReply,
    TrainingDone,
    WorkerRequest,
)
from hcsim.training.parameter_server.rounds import (
    ApplyUpdate,
    SendModel,
    SendReply,
    ServerEffect,
    ServerRounds,
    WorkerState,
)
from hcsim.transport.admission_queue import AdmissionQueue
from hcsim.transport.messages import expect

HELLO_TIMEOUT_S = 5.0
"""The deadline of connections that have not identified themselves."""
MAX_WORKERS = 4096
MAX_UNREAD = 16
"""The answers that a worker may leave unread; a correct worker makes one request at a time."""
MAX_VIOLATIONS = 3
"""Connections in a row on which a worker may break the protocol, with no whole push between them: one may be an
accident."""

ServerEvent: TypeAlias = Callable[[float], list[ServerEffect]]
PendingEvent: TypeAlias = tuple[ServerEvent, asyncio.Future[None]]
"""An event, and a future that is done once its effects are."""


class WorkerConnection:
    """A connected worker."""

    def __init__(self, worker: str, line: MessageConnection[ServerReply, WorkerRequest]) -> None:
        self.worker = worker
        self.line = line
        self.unread: asyncio.Queue[tuple[ServerReply, Payload | None]] = asyncio.Queue(MAX_UNREAD)
        self.answering = False
        self.objection = ""
        """Why the worker is rejected."""


class WorkerConnections:
    """Turns messages of workers into events, and sends the answers."""

    def __init__(self, learner: Learner, gradients: GradientCodec, rounds: ServerRounds, *, job: str) -> None:
        self.members_only = False
        """Whether unexpected workers are rejected."""
        self.guests: Collection[str] | None = None
        """The only workers to accept. The server closes other connections without an answer: those workers follow
        another view, whose server may be at this address soon, or was."""
        self.on_violations: Callable[[str, RemoteProtocolError], None] | None = None
        """Called with a worker that breaks the protocol repeatedly, and the error."""
        self.events: asyncio.Queue[PendingEvent] = asyncio.Queue()
        self._learner = learner
        self._host = learner.host
        self._gradients = gradients
        self._rounds = rounds
        self._job = job
        self._callers: dict[str, WorkerConnection] = {}
        self._sent_bytes: dict[str, int] = {}
        """Over connections that have ended."""
        self._violations: Counter[str] = Counter()
        """By worker, since its last whole push."""
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._admission = AdmissionQueue(self._host)

    def open(self, listener: Listener) -> None:
        """Accept connections from now on."""
        self._start(self._admission.accept(listener, self._called_by), "accept workers")

    async def close(self) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._admission.close()

    @property
    def answering(self) -> bool:
        """Whether answers are in flight."""
        return any(caller.answering or not caller.unread.empty() for caller in self._callers.values())

    def sent_bytes(self, *, without: str = "") -> int:
        """Return the bytes sent to all workers, or to all but one, headers included."""
        current = {name: caller.line.sent_bytes for name, caller in self._callers.items()}
        return sum(sent for each in (self._sent_bytes, current) for name, sent in each.items() if name != without)

    def tell(self, worker: str, answer: ServerReply, payload: Payload | None = None) -> None:
        """Answer a worker, if it is connected. The payload must not change afterwards."""
        caller = self._callers.get(worker)
        if caller is None:
            return
        try:
            caller.unread.put_nowait((answer, payload))
        except asyncio.QueueFull:
            self._start(caller.line.close(), f"hang up on {worker}, who does not listen")

    async def _happened(self, event: ServerEvent) -> None:
        """Have an event handled; return when its effects are done, so that a worker has one event at a time."""
        handled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.events.put_nowait((event, handled))
        await handled

    # Connections.

    def _called_by(self, channel: Channel, number: int) -> None:
        self._start(self._receive(channel), f"caller {number}")

    async def _receive(self, channel: Channel) -> None:
        """Identify a connecting worker and serve it until the connection ends, or tell it why it is rejected."""
        line = MessageConnection(channel, self._host.clock, ANSWERS, QUESTIONS, silence_s=self._rounds.policy.silence_s)
        try:
            try:
                join = expect(await line.recv(HELLO_TIMEOUT_S), Join, line.peer)
            finally:
                self._admission.known(channel)
            if self.guests is not None and join.worker not in self.guests:
                raise PeerRefused(f"{join.worker} is not in our view", line.peer)
            await self._serve(WorkerConnection(join.worker, line), join)
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

    async def _serve(self, caller: WorkerConnection, join: Join) -> None:
        answering = self._start(self._answer(caller), f"answer {caller.worker}")
        try:
            await self._happened(partial(self._joined, caller, join))
            if caller.objection:
                await caller.line.send(RequestRefused(0, caller.objection))
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

    def _joined(self, caller: WorkerConnection, join: Join, now: float) -> list[ServerEffect]:
        caller.objection = self._objection(join)
        if caller.objection:
            return []
        if (before := self._callers.get(caller.worker)) is not None:
            self._forget(before)
            self._start(before.line.close(), f"hang up on {caller.worker}, who calls again")
        self._callers[caller.worker] = caller
        return self._rounds.joined(join, now)

    def _lost(self, worker: str, now: float) -> list[ServerEffect]:
        return [] if worker in self._callers else self._rounds.lost(worker, now)

    def _forget(self, caller: WorkerConnection) -> None:
        del self._callers[caller.worker]
        self._sent_bytes[caller.worker] = self._sent_bytes.get(caller.worker, 0) + caller.line.sent_bytes

    async def _answer(self, caller: WorkerConnection) -> None:
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

    async def _handle(self, caller: WorkerConnection, asked: WorkerRequest) -> None:
        worker, rounds = caller.worker, self._rounds
        event: ServerEvent
        match asked:
            case Push():
                gradient, fault = await self._heard(caller, asked)
                self._violations.pop(worker, None)
                event = partial(rounds.pushed, worker, asked, gradient, fault)
            case Pull() | AwaitEnd():
                event = partial(rounds.asked, worker, asked)
            case LeaveRequest():
                event = partial(rounds.left, worker)
            case Join():
                raise RemoteProtocolError(f"{caller.line.peer} joined twice", caller.line.peer)
        # A worker that called again meanwhile, perhaps in another life, speaks there.
        await self._happened(lambda now: event(now) if self._callers.get(worker) is caller else [])

    async def _heard(self, caller: WorkerConnection, push: Push) -> tuple[ReceivedPush | None, str]:
        """Return the gradient in a push, if it is wanted and valid, and what is wrong with it."""
        line, size_bytes = caller.line, push.size_bytes
        if size_bytes > self._gradients.most_bytes:
            raise RemoteProtocolError(f"{line.peer} announced a gradient of {size_bytes} bytes", line.peer)
        fault = self._gradients.objection(push)
        if fault or not self._rounds.wants(caller.worker, push):
            await line.recv_payload(size_bytes, None)
            return None, fault
        data: ByteArray | Phantom = Phantom(size_bytes)
        if isinstance(self._learner.replica.gradients, Phantom):
            await line.recv_payload(size_bytes, None)
        else:
            data = np.empty(size_bytes, np.uint8)
            await line.recv_payload(size_bytes, data.data)
        try:
            return ReceivedPush(push, data, await self._gradients.decoded(push, data, self._learner)), ""
        except CompressionError as error:
            return None, str(error)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self._host.spawn(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task


class WorkerRecord(msgspec.Struct, frozen=True):
    """The saved record of a worker."""

    answered: int
    verdict: PushVerdict | None
    accepted: int
    samples: int | None
    contributes: bool
    answered_life: int | None = None


def records(rounds: ServerRounds) -> dict[str, WorkerRecord]:
    return {
        name: WorkerRecord(m.answered, m.verdict, m.accepted, m.samples, m.contributes, m.answered_life)
        for name, m in rounds.members.items()
    }


def recall(workers: Mapping[str, WorkerRecord], rounds: ServerRounds, now: float) -> None:
    """Restore the records."""
    for name, record in workers.items():
        # As if we had heard it just now: if all is done, it may still want the final model.
        rounds.members[name] = WorkerState(lost_s=now, heard_s=now, **msgspec.structs.asdict(record))


SHORTEST_WAIT_S = 1e-6
"""A shorter wait may be below a clock's resolution, so that time would not pass."""


class Server:
    """Serves until training is over."""

    def __init__(
        self,
        learner: Learner,
        gradients: GradientCodec,
        rounds: ServerRounds,
        update: Callable[[int, float], Awaitable[None]],
        *,
        job: str,
    ) -> None:
        self.rounds = rounds
        self.reception = WorkerConnections(learner, gradients, rounds, job=job)
        self.before_telling: Callable[[list[ReceivedPush]], Awaitable[None]] | None = None
        """Called after every update, before any worker is told of it, with the pushes that it was made of; the
        averaged gradients are still in place. A state saved in this call is final."""
        self.has_successor = False
        """Whether another server goes on from this one's state if this one gives up: then workers are told nothing,
        and ask the other one."""
        self._stopping = False
        self._learner = learner
        self._host = learner.host
        self._update = update
        """Applies the gradients in place as the update of that number (from 0), with a share of its learning rate."""
        self._snapshot: Payload | None = None
        """The model as it is sent; it does not change while it is in flight."""
        rounds.history = self._host.rng("parameter server", "history", repr(self._now())).getrandbits(62)

    async def run(self, listener: Listener) -> TrainingDone:
        """Serve until training is over and all workers know. A failure is sent to all dependent workers, and raised."""
        self.reception.open(listener)
        try:
            ended = await self._decide()
        finally:
            await self.reception.close()
            await listener.close()
        if ended.error:
            raise DeadlineExceeded(f"the parameter server gave up at version {ended.version}: {ended.error}")
        return ended

    def stop(self) -> None:
        """End between two events. Workers are told nothing: another server will go on from this one's state."""
        self._stopping = True
        self.reception.events.put_nowait((lambda _: [], asyncio.get_running_loop().create_future()))

    async def _decide(self) -> TrainingDone:
        while True:
            now = self._now()
            effects = self.rounds.tick(now)
            if self.has_successor and self.rounds.ended is not None and self.rounds.ended.error:
                return self.rounds.ended
            await self._do(effects)
            if self.rounds.ended is not None and self.rounds.over(now) and not self.reception.answering:
                return self.rounds.ended
            try:
                async with self._host.clock.timeout(max(self.rounds.due_s(now) - now, SHORTEST_WAIT_S)):
                    event, handled = await self.reception.events.get()
            except TimeoutError:
                continue
            await self._do(event(self._now()))
            if not handled.done():
                handled.set_result(None)
            if self._stopping:
                return TrainingDone(self.rounds.version)

    def _now(self) -> float:
        """Return the server's own elapsed time, which changes of the wall clock do not affect."""
        return self._host.clock.elapsed()

    async def _do(self, effects: list[ServerEffect]) -> None:
        for effect in effects:
            match effect:
                case ApplyUpdate():
                    await self._apply(effect)
                case SendReply(worker, answer):
                    self.reception.tell(worker, answer)
                case SendModel(worker, version, known):
                    payload = None if known else await self._model()
                    self.reception.tell(
                        worker, ModelReply(version, payload.nbytes if payload is not None else 0), payload
                    )

    async def _apply(self, effect: ApplyUpdate) -> None:
        await average(self._learner, [contribution.gradient for contribution in effect.contributions])
        await self._update(self.rounds.version - 1, effect.share)
        self._snapshot = None
        self._host.trace("parameter server", "version", self.rounds.version)
        if self.before_telling is not None:
            await self.before_telling([contribution.gradient for contribution in effect.contributions])

    async def _model(self) -> Payload:
        parameters = self._learner.replica.parameters
        if self._snapshot is None:
            await self._host.device.touch(2 * parameters.nbytes)
            self._snapshot = parameters if isinstance(parameters, Phantom) else memoryview(parameters.tobytes())
        return self._snapshot
