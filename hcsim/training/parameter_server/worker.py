"""A worker: it pulls the model, computes a gradient and pushes it, until training is over.

The worker repeats lost requests on a new connection: a request has the same answer however often it is
repeated, and a push counts once. Every wait is bounded. Connecting is retried with growing pauses for at most
`patience_s`; a connection may not be silent for longer than the policy allows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from hcsim.compressors.base import CompressorStateDict
from hcsim.compressors.feedback import ErrorFeedback
from hcsim.errors import (
    ChannelError,
    CompressionError,
    DeadlineExceeded,
    GradientsRefused,
    HcsimError,
    PeerRefused,
    RemoteProtocolError,
)
from hcsim.runtime.channel import Payload, Phantom
from hcsim.training.learner import Learner
from hcsim.training.parameter_server.gradients import WHOLE, GradientCodec
from hcsim.training.parameter_server.messages import (
    ANSWERS,
    QUESTIONS,
    UNKNOWN,
    AwaitEnd,
    Join,
    JoinReply,
    KeepAlive,
    LeaveRequest,
    MessageConnection,
    ModelReply,
    Pull,
    Push,
    PushAccepted,
    PushStale,
    PushVerdict,
    RequestRefused,
    ServerReply,
    TrainingDone,
    WorkerRequest,
)
from hcsim.training.parameter_server.rounds import ServerPolicy
from hcsim.training.task import Indices

FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 1.0
MAX_ATTEMPTS = 10
"""Attempts at one request: a server that closes the connection every time will not answer it."""
MAX_REFUSALS = 3
"""Refusals in a row: invalid gradients are a persistent fault."""
MAX_SPOILED = 4
"""Gradients in a row that cannot be encoded: faults of a machine may follow each other, while a model that has
diverged gives the same each time."""


class Worker:
    """One worker, from its first pull to the final model."""

    def __init__(
        self, learner: Learner, gradients: GradientCodec, policy: ServerPolicy, *, name: str, job: str
    ) -> None:
        self.name = name
        self.version = UNKNOWN
        """The version of the model in place."""
        self.accepted = 0
        """The number of this worker's pushes that have counted."""
        self.done: TrainingDone | None = None
        self.retiring = False
        """Once it is set, the worker leaves after the push in flight, or after one more if it has a residual."""
        self.reachable = asyncio.Event()
        """Set while there is a server to connect to; see `redirect`."""
        self.reachable.set()
        self.connect_timeout_s = policy.patience_s
        self.learner = learner
        self.gradients = gradients
        self._host = learner.host
        self._policy = policy
        self._draw = self._host.rng("parameter server", name, repr(self._host.clock.now()))
        self._join = Join(job, name, self._draw.getrandbits(62), learner.task.fingerprint)
        self._sequence = 0
        self._under_way: int | None = None
        """The version of the push that has no answer yet."""
        self._history = 0
        self._address = ""
        self._line: MessageConnection[WorkerRequest, ServerReply] | None = None
        self._failures: list[Exception] = []
        """Failures of the present server to answer the current request."""
        self._sent_bytes = 0

    async def run(
        self,
        address: str,
        batch: Callable[[int, int], Indices | None],
        counted: Callable[[int, float], Awaitable[None]],
    ) -> TrainingDone | None:
        """Work for the server at that address, to the end; return None if the worker has retired before.

        `batch` returns the samples for a version and a number of accepted pushes, or None when there are no more.
        `counted` is called with the version that each accepted push led to, and its loss."""
        self._address = self._address or address
        try:
            done = await self._work(batch, counted)
            if done is None:
                return None
            if self.version != done.version:
                await self._pull()
            await self._leave("done")
        except HcsimError as error:
            await self._leave(str(error)[:200])
            raise
        finally:
            await self._hang_up()
        return done

    async def redirect(self, address: str) -> None:
        """Use the server at that address from now on; an empty address means that there is none, and the worker
        waits."""
        self._address = address
        self._failures.clear()
        if address:
            self.reachable.set()
        else:
            self.reachable.clear()
        if self._line is not None:
            await self._line.close()  # what we asked there is asked again

    @property
    def sent_bytes(self) -> int:
        """Headers included."""
        return self._sent_bytes + (self._line.sent_bytes if self._line is not None else 0)

    async def _work(
        self, batch: Callable[[int, int], Indices | None], counted: Callable[[int, float], Awaitable[None]]
    ) -> TrainingDone | None:
        refusals = spoiled = 0
        while True:
            await self._pull()
            if self.done is not None:
                return self.done
            owing = self.gradients.owing if self.retiring else None
            if self.retiring and owing is None:
                return None
            samples = batch(self.version, self.accepted)
            if samples is None:
                self._join = Join(self._join.job, self.name, self._join.life, self._join.model, contributes=False)
                await self._leave("all data used")
                ended = await self._ask(AwaitEnd)
                assert isinstance(ended, TrainingDone)  # the only answer to this
                return ended
            loss = await self.learner.gradients(samples)
            try:
                verdict = await self._push(len(samples), owing)
            except CompressionError:
                spoiled += 1
                if spoiled == MAX_SPOILED:
                    raise
                continue
            spoiled = 0
            match verdict:
                case PushAccepted(_, version):
                    self.accepted, refusals = self.accepted + 1, 0
                    await counted(version, loss)
                    if owing is not None:
                        return None
                case RequestRefused(_, reason):
                    refusals += 1
                    if refusals == MAX_REFUSALS:
                        raise GradientsRefused(f"the parameter server refused {refusals} gradients in a row: {reason}")

    async def _pull(self) -> None:
        with self.learner.ledger.spent_on("exchange"):
            await self._ask(lambda: Pull(self.version))

    async def _push(self, samples: int, owing: ErrorFeedback | None) -> ServerReply:
        """Push the gradients in place, and with `owing` the whole residual; return the answer.

        The new residual is kept only if the push counted."""
        compressor, version, gradients = self.gradients.compressor, self.version, self.learner.replica.gradients
        pack = partial(self.gradients.pack, gradients, samples, version)
        if owing is not None:
            pack = partial(self.gradients.pack_whole, owing, gradients, samples, version)
        try:
            with self.learner.ledger.spent_on("encode"):
                sizes, packed = await self._host.device.run(self.gradients.encode_work, pack)
        except CompressionError:
            compressor.abandon(version)
            raise
        payload = packed if isinstance(packed, Phantom) else packed.data
        self._sequence += 1
        spec = compressor.spec if owing is None else WHOLE
        counts, self._under_way = False, version
        try:
            with self.learner.ledger.spent_on("exchange"):
                verdict = await self._ask(lambda: Push(self._sequence, version, samples, spec, sizes), payload)
            counts = isinstance(verdict, PushAccepted)
        finally:
            self._under_way = None
            compressor.commit(version) if counts else compressor.abandon(version)
        return verdict

    def state(self, verdict: PushVerdict | None) -> CompressorStateDict:
        """Return the compressor's state, given the server's answer to the last push, which may not have arrived yet."""
        if isinstance(verdict, PushAccepted) and verdict.sequence == self._sequence and self._under_way is not None:
            self.gradients.compressor.commit(self._under_way)
        return self.gradients.compressor.state()

    # Asking, until there is an answer.

    async def _ask(self, question: Callable[[], WorkerRequest], payload: Payload | None = None) -> ServerReply:
        """Return the answer to a request. The request is built anew at every attempt: the worker's state may have
        changed with the connection.

        Of several failures, a protocol violation by this server is the reported reason."""
        self._failures.clear()
        while len(self._failures) < MAX_ATTEMPTS:
            line = self._line or await self._call()
            asked = question()
            try:
                await line.send(asked, payload)
                heard = await self._answer(line, asked)
            except (ChannelError, DeadlineExceeded) as error:
                self._failures.append(error)
                await self._hang_up()
                continue
            if isinstance(heard, TrainingDone) and heard.error:
                raise PeerRefused(f"the parameter server gave up: {heard.error}", line.peer)
            return heard
        violations = [failure for failure in self._failures if isinstance(failure, RemoteProtocolError)]
        reason = (violations or self._failures)[-1]
        text = f"the parameter server at {self._address} failed us {MAX_ATTEMPTS} times: {reason}"
        raise DeadlineExceeded(text) from reason

    async def _answer(
        self, line: MessageConnection[WorkerRequest, ServerReply], question: WorkerRequest
    ) -> ServerReply:
        while True:
            heard = await line.recv(self._policy.silence_s)
            match question, heard:
                case _, KeepAlive():
                    continue
                case _, TrainingDone(_, error):
                    self.done = heard
                    if error or isinstance(question, AwaitEnd):
                        return heard  # otherwise the answer comes as well
                case Pull(), ModelReply():
                    await self._take(line, heard)
                    return heard
                case Push(sequence), (PushAccepted() | PushStale() | RequestRefused()) if heard.sequence == sequence:
                    return heard
                case _, (PushAccepted() | PushStale() | RequestRefused()) if heard.sequence <= self._sequence:
                    continue  # said twice, since we asked twice
                case _:
                    raise RemoteProtocolError(f"{line.peer} answered {question} with {heard}", line.peer)

    async def _take(self, line: MessageConnection[WorkerRequest, ServerReply], model: ModelReply) -> None:
        """Receive the model in place."""
        parameters = self.learner.replica.parameters
        if model.size_bytes not in (0, parameters.nbytes) or (not model.size_bytes and model.version != self.version):
            raise RemoteProtocolError(f"{line.peer} sent {model} for a model of {parameters.nbytes} bytes", line.peer)
        if model.size_bytes:
            self.version = UNKNOWN  # half of one and half of another, if the connection breaks now
            into = None if isinstance(parameters, Phantom) else parameters.data.cast("B")
            await line.recv_payload(model.size_bytes, into)
        self.version = model.version

    async def _call(self) -> MessageConnection[WorkerRequest, ServerReply]:
        """Connect and join, with retries until the policy's patience ends."""
        await self.reachable.wait()
        called, failure = self._address, next(reversed(self._failures), None)
        try:
            async with self._host.clock.timeout(self._policy.patience_s):
                backoff_s = FIRST_BACKOFF_S
                while True:
                    try:
                        line = await self._connect()
                        welcome = await self._introduce(line)
                    except (ChannelError, DeadlineExceeded) as error:
                        failure = error
                    else:
                        break
                    await self._host.clock.sleep(backoff_s * (0.5 + self._draw.random()))
                    backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
        except TimeoutError:
            if called != self._address:
                return await self._call()
            raise DeadlineExceeded(
                f"the parameter server at {self._address} was not reached in {self._policy.patience_s:g} s: {failure}"
            ) from None
        if isinstance(welcome, RequestRefused):
            await line.close()
            raise PeerRefused(f"the parameter server at {self._address} refused us: {welcome.reason}", line.peer)
        self._line = line
        if welcome.sequence > self._sequence:
            # That was an earlier life of ours, also where we have begun anew with a server that knew nothing of it.
            self._sequence, self.accepted = welcome.sequence, welcome.accepted
            if self._under_way is not None:
                self._sequence += 1
        if welcome.history != self._history:
            self._history, self.version = welcome.history, UNKNOWN
        return line

    async def _connect(self) -> MessageConnection[WorkerRequest, ServerReply]:
        while not (address := self._address):  # it may be gone again by the time that we wake up
            await self.reachable.wait()
        channel = await self._host.connect(address, timeout_s=self.connect_timeout_s)
        return MessageConnection(channel, self._host.clock, QUESTIONS, ANSWERS, silence_s=self._policy.silence_s)

    async def _introduce(self, line: MessageConnection[WorkerRequest, ServerReply]) -> JoinReply | RequestRefused:
        try:
            await line.send(self._join)
            heard = await line.recv(self._policy.silence_s)
            if not isinstance(heard, JoinReply | RequestRefused):
                raise RemoteProtocolError(f"{line.peer} greeted us with {heard}", line.peer)
        except BaseException:
            await line.close()
            raise
        return heard

    async def _leave(self, why: str) -> None:
        """Send `LeaveRequest` if connected; otherwise the end of the connection tells the server."""
        if self._line is not None:
            with suppress(ChannelError, DeadlineExceeded):
                await self._line.send(LeaveRequest(why))

    async def _hang_up(self) -> None:
        if self._line is not None:
            line, self._line = self._line, None
            self._sent_bytes += line.sent_bytes
            await line.close()
