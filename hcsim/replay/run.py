"""Runs a program on one rank: each node as soon as what it depends on is over.

Computations take the time that the trace has (`recorded`), or what the machine's profile says of their FLOPs and bytes
(`modelled`); one that has no time is always modelled. They run one after the other on the rank's device, in the order
in which they become ready; those of the processor (`is_cpu_op`) take their time beside it. Exchanges are the group's
own collectives and messages, with phantoms for data.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

from hcsim.collectives.buffers import array_of
from hcsim.collectives.group import Group
from hcsim.collectives.operation import BUCKET_BITS, TAG_BITS
from hcsim.collectives.plan import split
from hcsim.replay.program import CollectiveCall, Computation, MessageCall, Program, ProgramNode
from hcsim.runtime.channel import Phantom
from hcsim.runtime.host import Host, Work
from hcsim.telemetry.chakra import CollectiveType

TimeSource: TypeAlias = Literal["recorded", "modelled"]
_GFLOP = 1e9
_PRECISE = 1e-6


class ReplayRepeat(msgspec.Struct, frozen=True):
    """One repeat of a program."""

    number: int
    seconds: float
    """On the slowest rank."""


async def replay(group: Group, program: Program, times: TimeSource, repeats: int) -> list[ReplayRepeat]:
    """Run this rank's part of the program so many times."""
    groups = [group.subgroup(members) if group.rank in members else None for members in program.groups]
    rank = _Replay(group, groups, program.ranks[group.rank], times)
    clock = group.host.clock
    laps = []
    for number in range(1, repeats + 1):
        await group.barrier()
        began_s = clock.elapsed()
        with group.host.interval("repeat", number):
            await rank.run()
        lasted_s = np.array([clock.elapsed() - began_s])
        slowest_s = max(float(array_of(each)[0]) for each in await group.all_gather(lasted_s))
        laps.append(ReplayRepeat(number, slowest_s))
    return laps


class _Replay:
    """One rank's part of a program."""

    def __init__(
        self, group: Group, groups: Sequence[Group | None], nodes: Sequence[ProgramNode], times: TimeSource
    ) -> None:
        self._group = group
        self._groups = groups
        self._nodes = nodes
        self._device = _ReplayDevice(group.host, times)
        self._waits: list[int] = []
        self._left = 0
        self._over: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Return when all nodes are over."""
        self._waits = [node.waits for node in self._nodes]
        self._left = len(self._nodes)
        if not self._left:
            return
        self._over = asyncio.get_running_loop().create_future()
        for place, node in enumerate(self._nodes):
            if not node.waits:
                self._start(place)
        await self._over

    def _start(self, place: int) -> None:
        node = self._nodes[place]
        self._group.host.spawn(self._perform(node), name=node.name, over=partial(self._ended, place))

    def _ended(self, place: int, task: asyncio.Task[Any]) -> None:
        assert self._over is not None
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            if not self._over.done():
                self._over.set_exception(error or asyncio.CancelledError())
            return
        self._left -= 1
        for dependent in self._nodes[place].dependents:
            self._waits[dependent] -= 1
            if not self._waits[dependent]:
                self._start(dependent)
        if not self._left and not self._over.done():
            self._over.set_result(None)

    async def _perform(self, node: ProgramNode) -> None:
        action = node.action
        if isinstance(action, Computation):
            await self._device.compute(node.name, action)
        elif isinstance(action, CollectiveCall):
            group = self._groups[action.group]
            assert group is not None  # the program was checked
            await _collective(group, action)
        elif isinstance(action, MessageCall):
            payload, tag = Phantom(action.size_bytes), action.number % (1 << TAG_BITS)
            exchange = self._group.send if action.sends else self._group.recv
            await exchange(payload, action.peer, tag=tag)


class _ReplayDevice:
    """Takes the time of computations."""

    def __init__(self, host: Host, times: TimeSource) -> None:
        self._host = host
        self._times = times
        self._turn = asyncio.Lock()
        self._flops_ps = _flops_ps(host)

    async def compute(self, name: str, what: Computation) -> None:
        if what.is_on_cpu and what.seconds and self._times == "recorded":
            await self._host.clock.sleep(what.seconds)
            return
        work = Work(float(what.flops), float(what.moved_bytes))
        with self._host.interval("compute", name, work.figures):
            if self._times == "modelled" or not what.seconds:
                await self._host.device.run(work, lambda: None)
            elif self._flops_ps is not None:
                same = Work(what.seconds * self._flops_ps, kernels=0)
                await self._host.device.run(same, lambda: None)
            else:
                async with self._turn:
                    await self._host.clock.sleep(what.seconds)


def _flops_ps(host: Host) -> float | None:
    """Return how many FLOPs the host's device does in a second, if time is in proportion to them. Work of so many takes
    as long as recorded, or longer under a fault that slows the device down."""
    one_s, two_s = (host.device.predict_s(Work(flops, kernels=0)) for flops in (_GFLOP, 2 * _GFLOP))
    if not one_s or not two_s or abs(two_s / one_s - 2) > _PRECISE:
        return None
    return _GFLOP / one_s


async def _collective(group: Group, call: CollectiveCall) -> None:
    """Perform a collective. Each has a bucket of its own, so that those of one group may run in any order."""
    ours, bucket = call.sizes[group.rank], call.number % (1 << BUCKET_BITS)
    data = Phantom(ours)
    match call.type:
        case CollectiveType.ALL_REDUCE:
            await group.all_reduce(data, bucket=bucket)
        case CollectiveType.REDUCE:
            await group.reduce(data, call.root, bucket=bucket)
        case CollectiveType.ALL_GATHER:
            await group.all_gather(data, call.sizes, bucket=bucket)
        case CollectiveType.GATHER:
            await group.gather(data, call.root, call.sizes, bucket=bucket)
        case CollectiveType.SCATTER:
            part = Phantom(ours // group.size)
            parts = [part] * group.size if group.rank == call.root else None
            await group.scatter(parts, part, call.root, bucket=bucket)
        case CollectiveType.BROADCAST:
            await group.broadcast(data, call.root, bucket=bucket)
        case CollectiveType.ALL_TO_ALL:
            sent = [Phantom(size) for size in _parts(ours, group.size)]
            received = [_parts(size, group.size)[group.rank] for size in call.sizes]
            await group.all_to_all(sent, received, bucket=bucket)
        case CollectiveType.REDUCE_SCATTER | CollectiveType.REDUCE_SCATTER_BLOCK:
            await group.reduce_scatter(data, bucket=bucket)
        case CollectiveType.BARRIER:
            await group.barrier(bucket=bucket)


def _parts(size_bytes: int, parts: int) -> list[int]:
    return [hi - lo for lo, hi in pairwise(split(size_bytes, parts))]
