"""Every collective by every algorithm, against a closed form and, bit for bit, against the simulated world."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hcsim.collectives.algorithms import PLANNERS
from hcsim.collectives.group import Group
from hcsim.collectives.plan import split
from hcsim.collectives.select import Options
from hcsim.errors import HcsimError
from hcsim.runtime.host import Host
from hcsim.selftest.arena import Arena, VirtualArena
from hcsim.selftest.contracts import ContractBroken, require
from hcsim.transport.groups import GroupMembership, Wire

Array = npt.NDArray[Any]
WORLDS = (3, 4)
LENGTH = 10_007
"""Elements of a buffer; no multiple of anything, and with `SEGMENT_BYTES` several segments for each rank."""
SEGMENT_BYTES = 4096
_TIMEOUT_S = 20.0
Digests = dict[str, str]
"""By operation and algorithm, of what a rank ended with."""


def whole_numbers(rank: int) -> Array:
    """Return numbers of which all sums are exact."""
    return ((np.arange(LENGTH) * 7 + rank * 3) % 101).astype(np.float32)


def floats(rank: int) -> Array:
    """Return numbers whose sum depends on the order."""
    return np.random.default_rng(rank).standard_normal(LENGTH).astype(np.float32)


async def every_collective(group: Group) -> Digests:
    """Do all operations by all algorithms. Results that have a closed form are compared with it; digests of sums
    whose last bits depend on the order are returned."""
    digests: Digests = {}
    for operation, planners in PLANNERS.items():
        for algorithm in planners:
            if (operation, algorithm) == ("all_reduce", "hierarchical") and group.size < 4:
                continue
            name = f"{operation} by {algorithm}"
            try:
                found = await _OPERATIONS[operation](group, algorithm)
            except ContractBroken:
                raise
            except HcsimError as error:
                raise ContractBroken(f"{name}, rank {group.rank} of {group.size}: {error}") from error
            digests[name] = hashlib.sha256(b"".join(np.ascontiguousarray(each).tobytes() for each in found)).hexdigest()
    return digests


async def _all_reduce(group: Group, algorithm: str) -> list[Array]:
    exact = await group.all_reduce(whole_numbers(group.rank), algorithm=algorithm)
    _equal(group, "all_reduce", algorithm, exact, _sum(group))
    rounded = await group.all_reduce(floats(group.rank), "mean", algorithm=algorithm)
    right = np.mean([floats(rank).astype(np.float64) for rank in range(group.size)], axis=0)
    require(np.allclose(rounded, right, atol=1e-5), f"all_reduce by {algorithm}: the mean is that of all ranks")
    return [rounded]


async def _reduce(group: Group, algorithm: str) -> list[Array]:
    root = group.size - 1
    exact = await group.reduce(whole_numbers(group.rank), root, algorithm=algorithm)
    rounded = await group.reduce(floats(group.rank), root, algorithm=algorithm)
    if group.rank != root:
        return []
    _equal(group, "reduce", algorithm, exact, _sum(group))
    return [np.asarray(rounded)]


async def _broadcast(group: Group, algorithm: str) -> list[Array]:
    root = group.size - 1
    came = await group.broadcast(floats(group.rank), root, algorithm=algorithm)
    _equal(group, "broadcast", algorithm, came, floats(root))
    return []


async def _all_gather(group: Group, algorithm: str) -> list[Array]:
    parts = await group.all_gather(floats(group.rank), algorithm=algorithm)
    _equal_parts(group, "all_gather", algorithm, parts, [floats(rank) for rank in range(group.size)])
    counts = [1000 * rank for rank in range(group.size)]
    parts = await group.all_gather(floats(group.rank)[: counts[group.rank]], counts, algorithm=algorithm)
    uneven = [floats(rank)[:count] for rank, count in enumerate(counts)]
    _equal_parts(group, "all_gather in unequal parts", algorithm, parts, uneven)
    return []


async def _gather(group: Group, algorithm: str) -> list[Array]:
    parts = await group.gather(floats(group.rank), 0, algorithm=algorithm)
    if group.rank == 0:
        _equal_parts(group, "gather", algorithm, parts, [floats(rank) for rank in range(group.size)])
    return []


async def _scatter(group: Group, algorithm: str) -> list[Array]:
    parts = [floats(rank) for rank in range(group.size)] if group.rank == 0 else None
    came = await group.scatter(parts, np.zeros(LENGTH, np.float32), 0, algorithm=algorithm)
    _equal(group, "scatter", algorithm, came, floats(group.rank))
    return []


async def _reduce_scatter(group: Group, algorithm: str) -> list[Array]:
    lo, hi = [*pairwise(split(LENGTH, group.size))][group.rank]
    exact = await group.reduce_scatter(whole_numbers(group.rank), algorithm=algorithm)
    _equal(group, "reduce_scatter", algorithm, exact, _sum(group)[lo:hi])
    return [np.asarray(await group.reduce_scatter(floats(group.rank), algorithm=algorithm))]


async def _all_to_all(group: Group, algorithm: str) -> list[Array]:
    given = [np.full(100 + rank, 10.0 * group.rank + rank, np.float32) for rank in range(group.size)]
    came = await group.all_to_all(given, [100 + group.rank] * group.size, algorithm=algorithm)
    ours = [np.full(100 + group.rank, 10.0 * rank + group.rank, np.float32) for rank in range(group.size)]
    _equal_parts(group, "all_to_all", algorithm, came, ours)
    return []


async def _barrier(group: Group, algorithm: str) -> list[Array]:
    await group.barrier()
    return []


_OPERATIONS: dict[str, Callable[[Group, str], Any]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
}


def digests_of(arena: Arena, world: int) -> list[Digests]:
    """Do every collective among the hosts of the arena; the digests by rank."""

    async def body(*hosts: Host) -> list[Digests]:
        listeners = [await host.listen(arena.address(host)) for host in hosts]
        addresses = tuple(listener.address for listener in listeners)
        halves = (tuple(range(world // 2)), tuple(range(world // 2, world)))
        options = Options(timeout_s=_TIMEOUT_S, groups=halves if world >= 4 else ())

        async def on_rank(rank: int) -> Digests:
            us = GroupMembership(rank, addresses, wire=Wire(segment_bytes=SEGMENT_BYTES))
            async with await Group.open(hosts[rank], us, options, listeners[rank]) as group:
                if world > 1:
                    await group.barrier()
                    require(set(group.carriers) <= {arena.carrier}, f"it goes by {group.carriers}")
                return await every_collective(group)

        async with asyncio.TaskGroup() as tasks:
            ranks = [tasks.create_task(on_rank(rank)) for rank in range(world)]
        return [task.result() for task in ranks]

    try:
        return arena.run(body)  # type: ignore[no-any-return]
    except* ContractBroken as errors:
        raise _first(errors) from None


def check_collectives(arena_of: Callable[[Sequence[str]], Arena], worlds: Sequence[int] = WORLDS) -> int:
    """Compare every collective in that arena with the simulated world; return how many were compared."""
    count = 0
    for world in worlds:
        names = [f"rank{rank}" for rank in range(world)]
        arena = arena_of(names)
        ours, theirs = digests_of(arena, world), digests_of(VirtualArena(names), world)
        for rank, (found, expected) in enumerate(zip(ours, theirs, strict=True)):
            for name, digest in expected.items():
                same = found[name] == digest
                require(same, f"{name}, rank {rank} of {world}: over {arena.carrier} the same bits as simulated")
        count += len(ours[0])
    return count


def _sum(group: Group) -> Array:
    return np.asarray(sum(whole_numbers(rank) for rank in range(group.size)), np.float32)


def _equal(group: Group, operation: str, algorithm: str, found: Any, expected: Array) -> None:
    if not np.array_equal(found, expected):
        wrong = int(np.sum(np.asarray(found) != expected)) if np.shape(found) == expected.shape else len(expected)
        where = f"{operation} by {algorithm}, rank {group.rank} of {group.size}"
        raise ContractBroken(f"{where}: {wrong} of {len(expected)} elements are wrong")


def _equal_parts(group: Group, operation: str, algorithm: str, found: Any, expected: Sequence[Array]) -> None:
    require(len(found) == len(expected), f"{operation} by {algorithm}: one part for each rank")
    for part, right in zip(found, expected, strict=True):
        _equal(group, operation, algorithm, part, right)


def _first(errors: BaseExceptionGroup[ContractBroken]) -> ContractBroken:
    first: BaseException = errors
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return ContractBroken(str(first))
