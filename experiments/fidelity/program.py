"""What a rank does, in either world."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from hcsim.collectives.buffers import Data
from hcsim.collectives.group import Group
from hcsim.collectives.plan import Shape, split
from hcsim.collectives.select import Options, choose
from hcsim.runtime.channel import Phantom

FLOAT_BYTES = 4
_PERIOD = 251


class Collectives(msgspec.Struct, frozen=True, tag=True):
    """A collective operation, repeated."""

    operation: str
    algorithm: str
    size_bytes: int
    repeats: int
    together: int = 1
    """So many of them at once."""
    phantom: bool = False


class Laps(msgspec.Struct, frozen=True, tag=True):
    """How it went on one rank."""

    seconds: list[float]
    """Of each repeat, from this rank's exit from a barrier to the end."""
    algorithm: str
    """What `auto` stood for."""
    sha256: str = ""
    """Of this rank's last results."""


def options(hosts: int, algorithm: str) -> Options:
    """The options of the group. Two halves are the homes of a hierarchical operation."""
    half = hosts // 2
    groups = (tuple(range(half)), tuple(range(half, hosts))) if algorithm == "hierarchical" else ()
    return Options(timeout_s=60.0, groups=groups)


async def run_collectives(group: Group, turn: Collectives) -> Laps:
    """Repeat the operation."""
    clock, seconds = group.host.clock, []
    fresh = [_input(turn, group.rank + number) for number in range(turn.together)]
    results: list[Any] = []
    for _ in range(turn.repeats):
        data = [each if isinstance(each, Phantom) else each.copy() for each in fresh]
        await group.barrier()
        began_s = clock.elapsed()
        results = await asyncio.gather(*(_start(group, turn, each, number) for number, each in enumerate(data)))
        seconds.append(clock.elapsed() - began_s)
    return Laps(seconds, _chosen(group, turn), "" if turn.phantom else _digest(results))


def _input(turn: Collectives, number: int) -> Data:
    """Small whole numbers, whose sums are exact."""
    if turn.phantom:
        return Phantom(turn.size_bytes, FLOAT_BYTES)
    return ((np.arange(turn.size_bytes // FLOAT_BYTES) + number) % _PERIOD).astype(np.float32)


def _start(group: Group, turn: Collectives, data: Data, bucket: int) -> Awaitable[Any]:
    match turn.operation:
        case "all_reduce":
            return group.all_reduce(data, algorithm=turn.algorithm, bucket=bucket)
        case "broadcast":
            return group.broadcast(data, algorithm=turn.algorithm, bucket=bucket)
        case "all_gather":
            return group.all_gather(data, algorithm=turn.algorithm, bucket=bucket)
        case _:
            return group.reduce_scatter(data, algorithm=turn.algorithm, bucket=bucket)


def _chosen(group: Group, turn: Collectives) -> str:
    if turn.algorithm != "auto":
        return turn.algorithm
    length = turn.size_bytes // FLOAT_BYTES
    parts = tuple(hi - lo for lo, hi in pairwise(split(length, group.size)))
    counts = (length,) * group.size if turn.operation == "all_gather" else parts
    shape = Shape(world=group.size, length=length, counts=counts)
    return choose(turn.operation, shape, FLOAT_BYTES, group.options.links)


def _digest(results: list[Any]) -> str:
    digest = hashlib.sha256()
    for result in results:
        for part in result if isinstance(result, list) else [result]:
            digest.update(np.ascontiguousarray(part).view(np.uint8).data)
    return digest.hexdigest()
