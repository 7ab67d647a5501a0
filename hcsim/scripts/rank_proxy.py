"""The simulator's side of one rank: it receives the rank's messages, charges the time, and answers.

It reads a message only when the host's virtual time has come that far. While it waits for the rank's next
message, virtual time stands still. Other ranks go on computing until they need an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from hcsim.calls import perform
from hcsim.errors import HcsimError
from hcsim.runtime.host import Work
from hcsim.scripts.groups import RankGroups
from hcsim.scripts.ipc import (
    Awaited,
    CallFinished,
    Closed,
    Computed,
    Grown,
    IpcClosed,
    Left,
    Opened,
    Printed,
    RankMessage,
    SimulatorReply,
    Slept,
    Started,
    Stepped,
    Stored,
    failure_of,
)
from hcsim.scripts.processes import RankProcess
from hcsim.scripts.store import LINGER_S, StoreClient
from hcsim.virtual.host import VirtualHost

Say = Callable[[int, str], None]
"""Called with (stream, text) for the script's output."""


class RankStats(msgspec.Struct):
    """Statistics of a rank."""

    rank: int
    host: str
    began_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    """Time in which the script was blocked: in a call, the store or sleep."""
    flops: float = 0.0
    calls: int = 0
    sent_bytes: int = 0
    """Bytes sent for its calls, headers included."""
    steps_s: list[float] = []
    """Virtual times at which its optimizers completed each step."""
    ended_s: float | None = None
    code: int | None = None
    """The exit status; None after a crash of the machine."""
    error: str = ""


class RankProxy:
    """Serves one rank from start to end."""

    def __init__(
        self, host: VirtualHost, process: RankProcess, groups: RankGroups, store: StoreClient, record: RankStats
    ) -> None:
        self._host = host
        self._process = process
        self._groups = groups
        self._store = store
        self._record = record
        self._flops_per_byte = flops_per_byte(host)
        self._under_way: dict[int, asyncio.Task[int]] = {}
        self._finished: list[CallFinished] = []

    async def attend(self, say: Say) -> Left | None:
        """Serve the rank until its script ends. Return None if the process ended without a `Left` message."""
        conversation = self._process.conversation
        while True:
            try:
                message = conversation.hear()
            except IpcClosed:
                return None
            match message:
                case Computed():
                    await self._charge(message)
                case Printed(stream, text):
                    say(stream, text)
                case Stepped():
                    self._record.steps_s.append(self._host.loop.time())
                    self._host.trace("step", self._record.rank, len(self._record.steps_s))
                case Grown():
                    self._process.arena.map(message)
                case Started():
                    self._start(message)
                case Left():
                    return message
                case _:
                    answer = await self._answered(message)
                    try:
                        conversation.say(answer)
                    except IpcClosed:
                        return None
                    await self._instant_end()

    def peer_failed(self, rank: int, reason: str) -> None:
        self._groups.peer_failed(rank, reason)
        self._store.hurry(reason, LINGER_S)

    def peer_began_anew(self, rank: int) -> None:
        """Handle the restart of another rank's machine, and of its script."""
        self._groups.peer_began_anew(rank)
        if not self._groups.failed:
            self._store.take_time()

    async def end(self, reason: str) -> None:
        """Leave the groups. Send `reason` to the other ranks, if it is not empty."""
        await self._groups.end(reason)
        await self._store.close()

    async def _charge(self, done: Computed) -> None:
        """Charge the computation. Memory traffic counts as the arithmetic that the machine could have done in that
        time."""
        began_s = self._host.loop.time()
        self._record.flops += done.flops
        flops = done.flops + done.moved_bytes * self._flops_per_byte
        await self._host.device.run(Work(flops=flops, kernels=done.kernels), lambda: None)
        self._record.compute_s += self._host.loop.time() - began_s
        if done.seconds:
            await self._host.clock.sleep(done.seconds)

    def _start(self, started: Started) -> None:
        self._record.calls += 1
        task = self._host.spawn(self._perform(started), name=f"{started.call.operation} {started.number}")
        self._under_way[started.number] = task
        self._groups.started(started.line, task)

    async def _perform(self, started: Started) -> int:
        """Perform the call. It never raises: the outcome or error is kept for the next answer."""
        failure, result = None, 0
        try:
            arrays = [self._process.arena.at(slot) for slot in started.slots]
            result = await perform(self._groups.group(started.line), started.call, arrays)
        except Exception as error:
            failure = failure_of(error)
        self._finished.append(CallFinished(started.number, result, failure))
        del self._under_way[started.number]
        return result

    async def _answered(self, asked: RankMessage) -> SimulatorReply:
        began_s = self._host.loop.time()
        answer: dict[str, Any] = {}
        try:
            answer = await self._done(asked)
        except HcsimError as error:
            answer = {"failure": failure_of(error)}
        self._record.wait_s += self._host.loop.time() - began_s
        finished, self._finished = tuple(self._finished), []
        clock = self._host.clock
        return SimulatorReply(clock.now(), clock.elapsed(), finished, **answer)

    async def _done(self, asked: RankMessage) -> dict[str, Any]:
        match asked:
            case Awaited(number, timeout_s):
                await self._over(number, timeout_s)
            case Slept(seconds):
                if seconds > 0:
                    await self._host.clock.sleep(seconds)
            case Stored():
                reply = await self._store.do(asked)
                return {"number": reply.number, "values": reply.values}
            case Opened():
                return {"number": await self._groups.open(asked)}
            case Closed(line, in_order):
                await self._groups.close(line, in_order=in_order)
            case unknown:
                raise AssertionError(unknown)
        return {}

    async def _over(self, number: int, timeout_s: float | None) -> None:
        task = self._under_way.get(number)
        if task is not None:
            try:
                async with self._host.clock.timeout(timeout_s):
                    await asyncio.shield(task)
            except TimeoutError:
                pass  # the rank sees that the call is not among the finished ones

    async def _instant_end(self) -> None:
        """Let all other events of this instant run before waiting for the rank: they may unblock other ranks."""
        over: asyncio.Future[None] = self._host.loop.create_future()
        self._host.loop.env.call_at_instant_end(partial(_mark, over))
        await over


def _mark(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)


def flops_per_byte(host: VirtualHost) -> float:
    """Return the machine's balance: FLOPs in the time of moving one byte. An ideal machine does both in no
    time."""
    machine = host.machine
    balance = machine.efficiency_compute * machine.peak_flops / (machine.efficiency_memory * machine.memory_Bps)
    return balance if 0 < balance < float("inf") else 1.0
