"""The simulator's side of one rank: it receives the rank's messages, charges the time, and answers; with the
rank's groups, and the state that the ranks share.

It reads a message only when the host's virtual time has come that far. While it waits for the rank's next
message, virtual time stands still. Other ranks go on computing until they need an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from hcsim.calls import perform
from hcsim.collectives.group import Group
from hcsim.collectives.naming import naming
from hcsim.collectives.select import Options
from hcsim.errors import CollectiveError, HcsimError, UsageError
from hcsim.launch import DEFAULT_PORT
from hcsim.runtime.host import Work
from hcsim.scripts.environment import Grouping
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
from hcsim.transport.groups import GroupMembership, Wire
from hcsim.virtual.host import VirtualHost


class GroupDirectory:
    """The address of each group on each rank, and each rank's incarnation. Shared by all ranks."""

    def __init__(self, hosts: Sequence[str], wire: Wire) -> None:
        self.hosts = tuple(hosts)
        self.wire = wire
        self._ports: dict[str, int] = {}
        self._opened: dict[tuple[str, int], int] = {}

    def membership(self, opened: Opened, world_rank: int) -> GroupMembership:
        """Return this rank's membership of a group that is not a subgroup."""
        members = opened.ranks or tuple(range(opened.size))
        if len(members) != opened.size or max(members) >= len(self.hosts) or members[opened.rank] != world_rank:
            raise UsageError(
                f"rank {opened.rank} of {opened.size} cannot be here: this is rank {world_rank} of {len(self.hosts)}, "
                "as RANK and WORLD_SIZE say"
            )
        port = self._ports.setdefault(opened.name, DEFAULT_PORT + len(self._ports))
        epoch = self._opened[opened.name, world_rank] = self._opened.get((opened.name, world_rank), -1) + 1
        addresses = tuple(f"{self.hosts[member]}:{port}" for member in members)
        # A rank that computes for long is late, and not lost before a call would be.
        wire = msgspec.structs.replace(self.wire, connect_timeout_s=opened.timeout_s)
        return GroupMembership(opened.rank, addresses, f"script {opened.name}", epoch, wire)


class RankGroups:
    """One rank's groups."""

    def __init__(self, host: VirtualHost, world_rank: int, directory: GroupDirectory) -> None:
        self._host = host
        self._world_rank = world_rank
        self._directory = directory
        self._groups: dict[int, tuple[Group, int | None]] = {}
        """Each group, with the number of its parent group."""
        self._members: dict[int, tuple[int, ...]] = {}
        """The program's ranks in each group that is not a subgroup."""
        self.failed: dict[int, str] = {}
        """The reason of each rank whose script has failed."""
        self._opened = 0
        self._under_way: dict[int, list[asyncio.Task[Any]]] = {}

    async def open(self, opened: Opened) -> int:
        """Join a group; return the group's number."""
        options = Options(timeout_s=opened.timeout_s)
        if opened.parent is not None:
            group = self.group(opened.parent).subgroup(opened.ranks, options)
        else:
            us = self._directory.membership(opened, self._world_rank)
            group = await Group.open(self._host, us, options)
            self._members[self._opened + 1] = opened.ranks or tuple(range(opened.size))
        self._opened += 1
        self._groups[self._opened] = group, opened.parent
        for world_rank, reason in self.failed.items():
            self._fail(self._opened, world_rank, reason)
        return self._opened

    def group(self, number: int) -> Group:
        if number not in self._groups:
            raise UsageError("the group has been destroyed")
        return self._groups[number][0]

    def names(self, number: int) -> tuple[str, ...]:
        """Return the machines of a group, by rank; of a subgroup, whose errors say more about its ranks, nothing."""
        return tuple(self._directory.hosts[member] for member in self._members.get(number, ()))

    def started(self, number: int, task: asyncio.Task[Any]) -> None:
        waiting = [other for other in self._under_way.get(number, ()) if not other.done()]
        self._under_way[number] = [*waiting, task]

    async def close(self, number: int, *, in_order: bool) -> None:
        """Leave the group; `in_order`: only after all its calls. Its parent group stays open."""
        if number not in self._groups:
            return
        group, parent = self._groups.pop(number)
        if in_order:
            await asyncio.gather(*self._under_way.pop(number, ()), return_exceptions=True)
        if parent is None:
            if not in_order:
                group.fail(f"rank {self._world_rank} has given up", group.rank)
            await group.close()

    def peer_failed(self, world_rank: int, reason: str) -> None:
        """Handle the failure of a rank's script: fail the groups that the rank is in, and those opened later."""
        self.failed[world_rank] = reason
        for number in self._groups:
            self._fail(number, world_rank, reason)

    def peer_began_anew(self, world_rank: int) -> None:
        """Handle the restart of another rank's machine, and of its script."""
        self.failed.pop(world_rank, None)

    def _fail(self, number: int, world_rank: int, reason: str) -> None:
        members = self._members.get(number, ())
        if world_rank in members:
            self._groups[number][0].fail(reason, members.index(world_rank))

    async def end(self, reason: str) -> None:
        """Leave all groups when the script ends. Send `reason` to the other members, if it is not empty."""
        for group, parent in self._groups.values():
            if parent is None:
                if reason:
                    group.fail(reason, group.rank)
                await group.close()
        self._groups.clear()


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
        connection = self._process.connection
        await self._instant_end()  # so that ranks that start at once load their libraries side by side
        while True:
            try:
                message = connection.receive()
            except IpcClosed:
                return None
            match message:
                case Computed():
                    await self._charge(message)
                case Printed(stream, text):
                    say(stream, text)
                case Stepped():
                    if self._host.machine.step_s:
                        await self._host.device.run(Work(kernels=0, steps=1), lambda: None)
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
                        connection.send(answer)
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
        work = Work(flops=flops, kernels=done.kernels, groups=done.groups)
        with self._host.interval("compute", "", work.figures):
            await self._host.device.run(work, lambda: None)
        self._record.compute_s += self._host.loop.time() - began_s
        if done.seconds:
            await self._host.clock.sleep(done.seconds)

    def _start(self, started: Started) -> None:
        self._record.calls += 1
        task = self._host.spawn(self._perform(started), name=f"{started.call.operation} {started.number}")
        self._under_way[started.number] = task
        self._groups.started(started.group, task)

    async def _perform(self, started: Started) -> int:
        """Perform the call. It never raises: the outcome or error is kept for the next answer."""
        failure, result = None, 0
        try:
            arrays = [self._process.arena.at(slot) for slot in started.slots]
            result = await perform(self._groups.group(started.group), started.call, arrays)
        except Exception as error:
            names = self._groups.names(started.group)
            failure = failure_of(naming(error, names) if isinstance(error, CollectiveError) else error)
        self._finished.append(CallFinished(started.number, result, failure))
        del self._under_way[started.number]
        return result

    async def _answered(self, asked: RankMessage) -> SimulatorReply:
        began_s = self._host.loop.time()
        answer: dict[str, Any] = {}
        try:
            with self._host.interval("exchange", type(asked).__name__):
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
            case Closed(group, in_order):
                await self._groups.close(group, in_order=in_order)
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


def grouping(host: VirtualHost) -> Grouping | None:
    """Return how the kernels of the host's script are told apart."""
    if not host.machine.kernels:
        return None
    return "signature" if any(curve.signature for curve in host.machine.kernels) else "kind"


def flops_per_byte(host: VirtualHost) -> float:
    """Return the machine's balance: FLOPs in the time of moving one byte. An ideal machine does both in no
    time."""
    machine = host.machine
    balance = machine.efficiency_compute * machine.peak_flops / (machine.efficiency_memory * machine.memory_Bps)
    return balance if 0 < balance < float("inf") else 1.0
