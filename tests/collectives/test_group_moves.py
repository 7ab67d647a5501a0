"""Every operation that moves data without changing it: from any root, in equal and unequal parts, in every dtype."""

from __future__ import annotations

import asyncio
from itertools import product
from typing import Any

import numpy as np
import pytest

from hcsim import Group, Wire
from hcsim.collectives.algorithms import algorithms
from hcsim.collectives.arithmetic import DTYPES
from hcsim.errors import UsageError

Array = np.ndarray[Any, np.dtype[Any]]
WORLDS = range(1, 10)
TINY = Wire(segment_bytes=64)


def part(sender: int, length: int, dtype: np.dtype[Any] | type = np.int32, *, to: int = 0) -> Array:
    """Bytes that name their sender, their receiver and their place, and are odd in every dtype."""
    size_bytes = length * np.dtype(dtype).itemsize
    return ((np.arange(size_bytes) * 5 + sender * 31 + to * 17) % 251).astype(np.uint8).view(dtype)


def is_part(found: Array, sender: int, length: int, dtype: np.dtype[Any] | type = np.int32, *, to: int = 0) -> bool:
    return found.dtype == dtype and found.tobytes() == part(sender, length, dtype, to=to).tobytes()


def lengths(world: int) -> tuple[int, ...]:
    return (0, 1, max(0, world - 1), 20 * world + 3)


def wrong_cases(results: list[list[str]]) -> list[str]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [f"rank {rank}: {case}" for rank, cases in enumerate(results) for case in cases]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("world", WORLDS)
def test_broadcast_from_every_root(virtual, world):
    async def program(group: Group) -> list[str]:
        wrong = []
        for algorithm, root, length in product(algorithms("broadcast"), range(world), lengths(world)):
            data = part(group.rank, length)
            result = await group.broadcast(data, root, algorithm=algorithm)
            if result is not data or not is_part(data, root, length):
                wrong.append(f"{algorithm} root {root} length {length}")
        return wrong

    assert wrong_cases(virtual.run(world, program, wire=TINY)) == []


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("world", WORLDS)
def test_gather_to_every_root_in_equal_and_unequal_parts(virtual, world):
    uneven = [(5 * rank) % 7 * 6 for rank in range(world)]

    async def program(group: Group) -> list[str]:
        wrong = []
        for algorithm, root in product(algorithms("gather"), range(world)):
            for counts in (None, uneven):
                sizes = counts or [23] * world
                data = part(group.rank, sizes[group.rank])
                result = await group.gather(data, root, counts, algorithm=algorithm)
                if group.rank != root:
                    right = result is None
                else:
                    right = len(result) == world and all(is_part(result[r], r, sizes[r]) for r in range(world))
                if not right or not is_part(data, group.rank, sizes[group.rank]):
                    wrong.append(f"{algorithm} root {root} counts {counts}")
        return wrong

    assert wrong_cases(virtual.run(world, program, wire=TINY)) == []


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("world", WORLDS)
def test_scatter_from_every_root(virtual, world):
    async def program(group: Group) -> list[str]:
        wrong = []
        for algorithm, root, length in product(algorithms("scatter"), range(world), (0, 1, 23)):
            parts = [part(root, length, to=rank) for rank in range(world)] if group.rank == root else None
            into = np.zeros(length, np.int32)
            result = await group.scatter(parts, into, root, algorithm=algorithm)
            if result is not into or not is_part(into, root, length, to=group.rank):
                wrong.append(f"{algorithm} root {root} length {length}")
        return wrong

    assert wrong_cases(virtual.run(world, program, wire=TINY)) == []


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("world", WORLDS)
def test_all_gather_in_equal_and_unequal_parts(virtual, world):
    uneven = [(5 * rank) % 7 * 6 for rank in range(world)]
    alone = [0] * (world - 1) + [50]

    async def program(group: Group) -> list[str]:
        wrong = []
        for algorithm, counts in product(algorithms("all_gather"), [None, uneven, alone, [0] * world]):
            sizes = counts or [23] * world
            result = await group.all_gather(part(group.rank, sizes[group.rank]), counts, algorithm=algorithm)
            if len(result) != world or not all(is_part(result[r], r, sizes[r]) for r in range(world)):
                wrong.append(f"{algorithm} counts {counts}")
        return wrong

    assert wrong_cases(virtual.run(world, program, wire=TINY)) == []


@pytest.mark.parametrize("world", [2, 3])
def test_what_is_only_sent_may_be_read_only_however_long_it_is(virtual, real, world):
    async def program(group: Group) -> list[float]:
        given = [np.full(100_000, 10 * group.rank + to, np.float32) for to in range(world)]
        for array in given:
            array.flags.writeable = False
        return [float(array.max()) for array in await group.all_to_all(given)]

    expected = [[10.0 * sender + rank for sender in range(world)] for rank in range(world)]
    assert virtual.run(world, program) == real.run(world, program) == expected


@pytest.mark.parametrize("world", WORLDS)
def test_all_to_all_in_equal_and_unequal_parts(virtual, world):
    def even(sender: int, receiver: int) -> int:
        return 23

    def uneven(sender: int, receiver: int) -> int:
        return (3 * sender + 5 * receiver) % 7 * 6

    async def program(group: Group) -> list[str]:
        wrong = []
        for size in (even, uneven):
            data = [part(group.rank, size(group.rank, to), to=to) for to in range(world)]
            received = None if size is even else [size(sender, group.rank) for sender in range(world)]
            result = await group.all_to_all(data, received)
            wrong += [
                f"{size.__name__} from {sender}"
                for sender in range(world)
                if not is_part(result[sender], sender, size(sender, group.rank), to=group.rank)
            ]
        return wrong

    assert wrong_cases(virtual.run(world, program, wire=TINY)) == []


@pytest.mark.parametrize("world", [2, 5])
def test_every_dtype_is_moved_bit_by_bit(virtual, world):
    async def program(group: Group) -> list[str]:
        wrong, last = [], world - 1
        for dtype in DTYPES:
            mine = part(group.rank, 21, dtype)
            gathered = await group.all_gather(mine)
            exchanged = await group.all_to_all([part(group.rank, 21, dtype, to=to) for to in range(world)])
            collected = await group.gather(mine, last)
            parts = [part(last, 21, dtype, to=to) for to in range(world)] if group.rank == last else None
            dealt = await group.scatter(parts, np.zeros(21, dtype), last)
            told = await group.broadcast(part(group.rank, 21, dtype), last)
            around = np.zeros(21, dtype)
            await group.sendrecv(mine, (group.rank + 1) % world, around, (group.rank - 1) % world)
            right = {
                "all_gather": all(is_part(gathered[r], r, 21, dtype) for r in range(world)),
                "all_to_all": all(is_part(exchanged[r], r, 21, dtype, to=group.rank) for r in range(world)),
                "gather": group.rank != last or all(is_part(collected[r], r, 21, dtype) for r in range(world)),
                "scatter": is_part(dealt, last, 21, dtype, to=group.rank),
                "broadcast": is_part(told, last, 21, dtype),
                "sendrecv": is_part(around, (group.rank - 1) % world, 21, dtype),
            }
            wrong += [f"{name} {dtype}" for name, is_right in right.items() if not is_right]
        return wrong

    assert wrong_cases(virtual.run(world, program, wire=TINY)) == []


@pytest.mark.parametrize("world", [2, 3, 5, 9])
def test_nobody_leaves_a_barrier_before_the_last_has_come(virtual, world):
    async def program(group: Group) -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        await asyncio.sleep((group.rank * 7) % world)
        came_s = loop.time()
        await group.barrier()
        return came_s, loop.time()

    times = virtual.run(world, program)
    assert min(left_s for _, left_s in times) >= max(came_s for came_s, _ in times)


@pytest.mark.parametrize("length", [0, 1, 1000])
def test_messages_between_two_ranks_keep_the_order_of_their_tag(cluster, length):
    async def program(group: Group) -> bool:
        peer = 1 - group.rank
        sends = [group.send(part(group.rank, length, to=n), peer, tag=n % 2) for n in range(4)]
        found = {n: np.zeros(length, np.int32) for n in (1, 0, 3, 2)}
        receipts = [group.recv(into, peer, tag=n % 2) for n, into in found.items()]
        for pending in (*sends, *receipts):
            await pending
        return all(is_part(found[n], peer, length, to=n) for n in range(4))

    assert cluster.run(2, program) == [True, True]


def test_messages_of_any_tag_of_32_bits_are_told_apart(cluster):
    tags = (0, 1, 1 << 16, (1 << 16) + 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)

    async def program(group: Group) -> list[int]:
        if group.rank == 0:
            for tag in tags:
                await group.send(np.array([tag]), 1, tag=tag)
            return []
        found = {tag: np.zeros(1, np.int64) for tag in reversed(tags)}
        for pending in [group.recv(into, 0, tag=tag) for tag, into in found.items()]:
            await pending
        return [int(found[tag][0]) for tag in tags]

    assert cluster.run(2, program) == [[], list(tags)]


def test_sendrecv_around_a_ring(cluster):
    async def program(group: Group) -> bool:
        into = np.zeros(5000, np.int32)
        before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size
        await group.sendrecv(part(group.rank, 5000), after, into, before)
        return is_part(into, before, 5000)

    assert cluster.run(5, program) == [True] * 5


def test_sendrecv_starts_when_it_is_called(cluster):
    async def program(group: Group) -> tuple[int, int]:
        into, total = np.zeros(1, np.int32), np.ones(1, np.int32)
        exchange = group.sendrecv(part(group.rank, 1), 1 - group.rank, into, 1 - group.rank)
        if group.rank == 0:  # the other one awaits it first
            await group.all_reduce(total)
        assert await exchange is into
        if group.rank == 1:
            await group.all_reduce(total)
        return int(is_part(into, 1 - group.rank, 1)), int(total[0])

    assert cluster.run(2, program) == [(1, 2), (1, 2)]


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_a_sendrecv_that_is_cancelled_leaves_nothing_behind(virtual, turns):
    async def program(group: Group) -> bool:
        into = np.zeros(5000)
        exchange = group.sendrecv(np.ones(5000), 1 - group.rank, into, 1 - group.rank)
        for _ in range(turns):
            await asyncio.sleep(0)
        exchange.cancel()
        with pytest.raises(asyncio.CancelledError):
            await exchange
        before = into.copy()
        await group.host.clock.sleep(1.0)
        return group.error is not None and bool((into == before).all())

    assert virtual.run(2, program) == [True, True]


def test_a_sendrecv_that_is_refused_has_sent_nothing(cluster):
    async def program(group: Group) -> float:
        into = np.zeros(1)
        if group.rank == 0:
            with pytest.raises(UsageError, match="read-only"):
                group.sendrecv(np.array([111.0]), 1, np.frombuffer(bytes(8)), 1)
        await group.sendrecv(np.array([222.0]), 1 - group.rank, into, 1 - group.rank)
        return float(into[0])

    assert cluster.run(2, program) == [222.0, 222.0]


def test_a_gathered_array_has_the_shape_of_its_part(cluster):
    async def program(group: Group) -> list[tuple[int, ...]]:
        return [found.shape for found in await group.all_gather(np.ones((2, 3)))]

    assert cluster.run(2, program) == [[(2, 3), (2, 3)]] * 2
