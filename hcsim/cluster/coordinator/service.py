"""The coordinator's server: passes calls to the state machine and executes its effects."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from hcsim.cluster.coordinator import messages
from hcsim.cluster.coordinator.messages import (
    CommittedCheckpoint,
    CoordinatorPolicy,
    GenerationRoster,
    GenerationStatus,
    Register,
    Registered,
)
from hcsim.cluster.coordinator.rounds import (
    CoordinatorEffect,
    LogMessage,
    NotifyWorker,
    PersistedState,
    PersistState,
    ResolveCall,
)
from hcsim.cluster.coordinator.state import CoordinatorState
from hcsim.cluster.diagnosis import Findings
from hcsim.errors import CallRefused, ConfigError, HcsimError
from hcsim.runtime.channel import Channel, Listener
from hcsim.runtime.clock import BroadcastEvent
from hcsim.runtime.host import Host, keep, kept
from hcsim.transport.admission_queue import AdmissionQueue
from hcsim.transport.messages import Requests
from hcsim.transport.rpc import Endpoint, Limits, ProcedureRegistry, serving_endpoint

HELLO_TIMEOUT_S = 5.0
LIMITS = Limits(max_calls=16, max_body_bytes=1 << 22, max_arrays=1, max_array_bytes=1, max_refs=1)
FIRST_LIMIT_BYTES = 64 * 1024
"""The largest frame that a caller may send before it has registered."""
SHORTEST_WAIT_S = 1e-6
RECORD = "coordinator"


class Coordinator:
    """Serves workers until it is closed."""

    def __init__(
        self,
        host: Host,
        policy: CoordinatorPolicy,
        *,
        cluster: str = "hcsim",
        note: Callable[[str], object] | None = None,
    ) -> None:
        self._host = host
        self._record = f"{RECORD}-{cluster}"
        before = kept(host.store, self._record, PersistedState) or PersistedState()
        now = host.clock.elapsed()
        self.state = CoordinatorState(
            policy, cluster, before, now, f"{host.rng('coordinator', repr(now)).getrandbits(32):08x}"
        )
        self._note = note
        self._who: dict[Endpoint, Register] = {}
        self._lines: dict[str, Endpoint] = {}
        self._questions: Requests[asyncio.Future[Any]] = Requests()
        self._undone: deque[CoordinatorEffect] = deque()
        self._unsaved = ""
        """Why the persistent state cannot be saved; empty if it can."""
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._news = BroadcastEvent()
        self._admission = AdmissionQueue(host)
        self._registry = self._served()

    def open(self, listener: Listener) -> None:
        self._start(self._admission.accept(listener, self._called_by), "accept workers")
        self._start(self._keep_time(), "evict silent workers")

    @property
    def held_up(self) -> int:
        """Return the number of effects that wait until the persistent state can be saved."""
        return len(self._undone)

    async def deserted(self) -> None:
        """Return once no worker is registered."""
        while self.state.workers:
            await self._news.next()

    async def close(self) -> None:
        """Close all connections. The workers look for a coordinator at the same address."""
        here = asyncio.current_task()
        tasks = tuple(task for task in self._tasks if task is not here)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._admission.close()

    # Connections.

    def _called_by(self, channel: Channel, number: int) -> None:
        self._start(self._attend(channel), f"caller {number}")

    async def _attend(self, channel: Channel) -> None:
        endpoint = Endpoint(self._host, channel, self._registry, LIMITS)
        channel.limit(FIRST_LIMIT_BYTES)
        endpoint.ended.add_done_callback(lambda _: self._news.tell())
        try:
            try:
                async with self._host.clock.timeout(HELLO_TIMEOUT_S):
                    while endpoint not in self._who and not endpoint.ended.done():
                        await self._news.next()
            except TimeoutError:
                return
            finally:
                self._admission.known(channel)
            await asyncio.shield(endpoint.ended)
        finally:
            who = self._who.pop(endpoint, None)
            if who is not None and self._lines.get(who.worker) is endpoint:
                del self._lines[who.worker]
                self.state.lost(who)
            await endpoint.close()

    def _served(self) -> ProcedureRegistry:
        registry = ProcedureRegistry()
        registry.serve(messages.REGISTER, self._register)
        registry.serve(messages.HEARTBEAT, self._heartbeat)
        registry.serve(messages.READY, self._ready)
        registry.serve(messages.LEAVE, self._leave)
        registry.serve(messages.BARRIER, self._barrier)
        registry.serve(messages.BEGIN, self._begin)
        registry.serve(messages.REPORT, self._report)
        registry.serve(messages.COMMITTED, self._committed)
        return registry

    # What workers call.

    async def _register(self, who: Register) -> Registered:
        endpoint = serving_endpoint()
        registered, effects = self.state.register(who, self._now(), endpoint.channel.identity)
        self._who[endpoint] = who
        endpoint.channel.limit(LIMITS.max_frame_bytes)
        before = self._lines.get(who.worker)
        self._lines[who.worker] = endpoint
        self._do(effects)
        if before is not None and before is not endpoint:
            self._start(before.close(), f"hang up on {who.worker}, who calls again")
        if self._unsaved:
            raise CallRefused(f"the coordinator cannot remember anybody now: {self._unsaved}")
        return registered

    async def _heartbeat(self, generation: int) -> GenerationStatus:
        notice, effects = self.state.heartbeat(self._caller(), generation, self._now())
        self._do(effects)
        return notice

    async def _ready(self, after: int, why: str, outcome: str, found: tuple[Findings, ...]) -> GenerationRoster:
        who = self._caller()
        return await self._answered(  # type: ignore[no-any-return]
            lambda question, now: self.state.ready(who, after, question, now, why, outcome, found)
        )

    async def _leave(self, orderly: bool, outcome: str) -> None:
        who = self._caller()
        await self._answered(lambda question, now: self.state.leave(who, question, now, outcome, orderly=orderly))

    async def _barrier(self, generation: int, name: str) -> None:
        who = self._caller()
        await self._answered(lambda question, now: self.state.barrier(who, generation, name, question, now))

    async def _begin(self, generation: int, step: int) -> None:
        self._do(self.state.begin(self._caller(), generation, step, self._now()))

    async def _report(self, generation: int, step: int, digest: str) -> CommittedCheckpoint:
        who = self._caller()
        return await self._answered(  # type: ignore[no-any-return]
            lambda question, now: self.state.report(who, generation, step, digest, question)
        )

    async def _committed(self) -> tuple[CommittedCheckpoint, ...]:
        committed = self.state.rounds.committed
        answer = () if committed is None else (committed,)
        return await self._answered(lambda question, now: [ResolveCall(question, answer)])  # type: ignore[no-any-return]

    def _caller(self) -> Register:
        who = self._who.get(serving_endpoint())
        if who is None:
            raise CallRefused("register first")
        return who

    async def _answered(self, event: Callable[[int, float], list[CoordinatorEffect]]) -> Any:
        question = self._questions.number()
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._questions.add(question, answer)
        try:
            self._do(event(question, self._now()))
            return await answer
        finally:
            self._questions.take(question)
            self._undone = deque(
                effect
                for effect in self._undone
                if not (isinstance(effect, ResolveCall) and effect.question == question)
            )
            if answer.cancelled():
                self.state.gave_up(question)

    # Effects and time.

    def _do(self, effects: list[CoordinatorEffect]) -> None:
        """Execute the effects in order, after earlier ones: nothing is sent before the state that precedes it is
        saved."""
        self._undone.extend(effects)
        while self._undone:
            if isinstance(self._undone[0], PersistState) and not self._save():
                break  # the next tick tries again
            match self._undone.popleft():  # before it is done: one that fails must not hold up the others for ever
                case LogMessage(text):
                    self._tell_people(text)
                case NotifyWorker(worker, notice):
                    if worker in self._lines:
                        self._start(self._tell(self._lines[worker], notice), f"tell {worker}")
                case ResolveCall(question, value, error):
                    answer = self._questions.get(question)
                    if answer is not None and not answer.done():
                        if error is None:
                            answer.set_result(value)
                        else:
                            answer.set_exception(error)
        self._news.tell()

    def _save(self) -> bool:
        """Save the persistent state; on failure, log it once."""
        try:
            keep(self._host.store, self._record, self.state.kept())
        except ConfigError as error:
            if not self._unsaved:
                self._tell_people(f"{error}; nobody is answered until that can be done")
            self._unsaved = str(error)
            return False
        self._unsaved = ""
        return True

    def _tell_people(self, text: str) -> None:
        self._host.trace("coordinator", text)
        if self._note is not None:
            with suppress(OSError):  # nobody reads it any more: that is no worker's matter
                self._note(text)

    async def _tell(self, line: Endpoint, notice: GenerationStatus) -> None:
        try:
            await line.call(messages.NOTICE, notice, deadline_s=self.state.policy.silence_s)
        except HcsimError as error:  # its next heartbeat will tell it
            self._host.trace("coordinator", "not told", str(error))

    async def _keep_time(self) -> None:
        while True:
            now = self._now()
            self._do(self.state.tick(now))
            try:
                async with self._host.clock.timeout(max(self.state.due_s(now) - now, SHORTEST_WAIT_S)):
                    await self._news.next()
            except TimeoutError:
                continue

    def _now(self) -> float:
        return self._host.clock.elapsed()

    def _start(self, work: Coroutine[Any, Any, Any], name: str) -> None:
        task = self._host.spawn(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
