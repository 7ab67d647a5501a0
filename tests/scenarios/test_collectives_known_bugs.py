"""What went wrong in other systems' collectives, and does not here: one test each."""

from __future__ import annotations

import asyncio
from itertools import product
from typing import Any

import numpy as np
import pytest

from hcsim import Group, Options, Phantom, Wire
from hcsim.collectives.algorithms import algorithms
from hcsim.config import Pause, Reset
from hcsim.errors import CollectiveError
from hcsim.transport.groups import MAX_FRAME_BYTES

Array = np.ndarray[Any, np.dtype[Any]]
FAST = Wire(segment_bytes=256)
SHORT = Options(timeout_s=1.0)


def mine(rank: int, length: int) -> Array:
    return np.arange(length, dtype=np.int64) * (rank + 1) + 100 * rank


def total(world: int, length: int) -> Array:
    return sum((mine(rank, length) for rank in range(world)), np.zeros(length, np.int64))


@pytest.mark.parametrize("size", range(2, 10))
def test_ring_gather_index(virtual, size):
    """Ranks that agree can all be wrong: the ring's result is compared with the exact sum."""

    async def program(group: Group) -> list[bool]:
        lengths = (0, 1, size - 1, size, size + 1, 7 * size + 3)
        results = [await group.all_reduce(mine(group.rank, length), algorithm="ring") for length in lengths]
        return [np.array_equal(result, total(size, len(result))) for result in results]

    assert virtual.run(size, program, wire=FAST) == [[True] * 6] * size


def test_tree_missing(virtual):
    """A tree moves data along its edges alone: an inner rank speaks to its parent and its children."""

    async def program(group: Group) -> tuple[bool, int]:
        result = await group.all_reduce(mine(group.rank, 1000), algorithm="tree")
        return np.array_equal(result, total(7, 1000)), group.bytes_sent

    whole = 8000
    sent = [2 * whole, *[3 * whole] * 2, *[whole] * 4]  # the root, two inner ranks, four leaves
    assert virtual.run(7, program) == [(True, bytes_sent) for bytes_sent in sent]


def test_ring_unused(cluster):
    """Large tensors really go around the ring when nobody asks for anything: no rank carries more than the others."""

    async def program(group: Group) -> int:
        await group.all_reduce(np.zeros(2**20, np.uint8))
        return group.bytes_sent

    assert cluster.run(4, program) == [2 * 3 * 2**20 // 4] * 4


def test_untagged_overlap(cluster):
    """Two buckets of one size in flight keep their bytes apart, whatever the order in which ranks start them."""

    async def program(group: Group) -> list[int]:
        wrong = []
        for trial in range(30):
            one, other = np.full(500, 1 + trial), np.full(500, 1000 + trial)
            buckets = ((one, 0), (other, 1)) if (trial + group.rank) % 2 else ((other, 1), (one, 0))
            pending = [group.all_reduce(array, bucket=bucket) for array, bucket in buckets]
            for each in pending:
                await each
            if not ((one == 3 + 3 * trial).all() and (other == 3000 + 3 * trial).all()):
                wrong.append(trial)
        return wrong

    assert cluster.run(3, program, wire=FAST) == [[], [], []]


def test_stale_session(cluster):
    """A fast rank's next step does not join the step that others are still in."""

    async def program(group: Group) -> tuple[float, float]:
        first = group.all_reduce(np.full(100, (1.0, 3.0)[group.rank]), "mean", algorithm="centralized")
        if group.rank == 0:
            await first
        second = group.all_reduce(np.full(100, 100.0), "mean", algorithm="centralized")
        return float((await first)[0]), float((await second)[0])

    assert cluster.run(2, program) == [(2.0, 100.0), (2.0, 100.0)]


def test_double_submit(virtual):
    """A retry after a failure counts every rank once; a missing or shorter tensor is an error and no smaller sum."""

    async def program(group: Group) -> float:
        data = np.full(2_000_000, group.rank + 1.0)
        with pytest.raises(CollectiveError):
            await group.all_reduce(data.copy(), "mean")
        async with await group.reopen() as again:
            retried = await again.all_reduce(data, "mean")
            with pytest.raises(CollectiveError, match=r"another operation|gave up"):
                await again.all_reduce(np.ones(10 if group.rank else 9))
            return float(retried[-1])

    reset = Reset(at_s=0.05, between=("mac-0", "mac-1"))
    assert virtual.outcome(3, program, faults=[reset]).results == [2.0, 2.0, 2.0]


def test_barrier_after_timeout(virtual):
    """A barrier that timed out leaves nothing behind: the next one waits for everybody again."""

    async def program(group: Group) -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        if group.rank == 2:
            await asyncio.sleep(1.2)
        with pytest.raises(CollectiveError):
            await group.barrier()
        async with await group.reopen() as again:
            if group.rank == 2:
                await asyncio.sleep(0.5)
            came_s = loop.time()
            await again.barrier()
            return came_s, loop.time()

    times = virtual.run(3, program, options=SHORT)
    assert min(left_s for _, left_s in times) >= max(came_s for came_s, _ in times) > 1.7


def test_broadcast_single_key(cluster):
    """Every broadcast brings its own tensor, several at once and of one size too."""

    async def program(group: Group) -> list[list[int]]:
        tensors = [np.full(50, 10 * n + group.rank) for n in range(6)]
        pending = [group.broadcast(tensor, root=n % 3) for n, tensor in enumerate(tensors)]
        for each in pending:
            await each
        return [[int(tensor.min()), int(tensor.max())] for tensor in tensors]

    assert cluster.run(3, program) == [[[10 * n + n % 3] * 2 for n in range(6)]] * 3


def test_hierarchical_mean_of_means(virtual):
    """Groups of unlike size: the mean is over ranks. Leaders need not be the lowest, and everybody gets it."""

    async def program(group: Group) -> float:
        data = np.full(64, (1.0, 2.0, 3.0, 4.0, 90.0)[group.rank])
        return float((await group.all_reduce(data, "mean", algorithm="hierarchical"))[0])

    options = Options(groups=((3, 0, 1, 2), (4,)))
    assert virtual.run(5, program, options=options) == [20.0] * 5


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("size_bytes", [MAX_FRAME_BYTES + 1, 3 * MAX_FRAME_BYTES + 5])
def test_message_cap_with_data(cluster, size_bytes):
    """A tensor larger than any frame arrives whole."""

    whole = np.resize(np.arange(251, dtype=np.uint8), size_bytes)

    async def program(group: Group) -> bool:
        data = whole.copy() if group.rank == 1 else np.zeros_like(whole)
        await group.broadcast(data, 1)
        return np.array_equal(data, whole)

    assert cluster.run(2, program) == [True, True]


def test_message_cap_with_gibibytes(virtual):
    async def program(group: Group) -> int:
        await group.all_reduce(Phantom(4 << 30), algorithm="tree")
        return group.bytes_sent

    assert virtual.run(2, program, wire=Wire(segment_bytes=MAX_FRAME_BYTES)) == [4 << 30] * 2


def test_partial_frame_resync(cluster):
    """Given up in the middle of a transfer, the stream is not used again: the group is reopened, and is right."""

    async def program(group: Group) -> float:
        await group.barrier()
        pending = group.all_reduce(np.ones(4_000_000), algorithm="ring")
        if group.rank == 0:
            await asyncio.sleep(0.001)
            pending.cancel()
        with pytest.raises((CollectiveError, asyncio.CancelledError)):
            await pending
        async with await group.reopen() as again:
            result = await again.all_reduce(np.full(1000, 1.0 + group.rank))
            await again.barrier()
            return float(result.sum())

    assert cluster.run(3, program) == [6000.0] * 3


def test_partial_frame_resync_after_a_pause(virtual):
    """The same, where a rank hangs in the middle of its frames until all others have given up."""

    async def program(group: Group) -> float:
        with pytest.raises(CollectiveError):
            await group.all_reduce(Phantom(1 << 30), algorithm="ring")
        async with await group.reopen() as again:
            return float((await again.all_reduce(np.full(10, 1.0)))[0])

    pause = Pause(at_s=0.5, node="mac-1", duration_s=1.2)
    assert virtual.outcome(3, program, options=Options(timeout_s=1.0), faults=[pause]).results == [3.0] * 3


@pytest.mark.parametrize("size", [3, 4, 7])
def test_nonzero_root(virtual, size):
    """Broadcast and reduce with every root and algorithm; all_to_all; a subgroup without rank 0."""

    async def program(group: Group) -> list[str]:
        wrong = []
        for root in range(size):
            for algorithm in algorithms("broadcast"):
                found = await group.broadcast(mine(group.rank, 33), root, algorithm=algorithm)
                if not np.array_equal(found, mine(root, 33)):
                    wrong.append(f"broadcast {algorithm} {root}")
            for algorithm in algorithms("reduce"):
                found = await group.reduce(mine(group.rank, 33), root, algorithm=algorithm)
                if group.rank == root and not np.array_equal(found, total(size, 33)):
                    wrong.append(f"reduce {algorithm} {root}")
        parts = await group.all_to_all([mine(group.rank, to + 1) for to in range(size)], [group.rank + 1] * size)
        if not all(np.array_equal(part, mine(peer, group.rank + 1)) for peer, part in enumerate(parts)):
            wrong.append("all_to_all")
        if group.rank:
            rest = group.subgroup(range(1, size))
            if not np.array_equal(await rest.broadcast(mine(group.rank, 9), size - 2), mine(size - 1, 9)):
                wrong.append("subgroup")
        return wrong

    assert virtual.run(size, program, wire=FAST) == [[]] * size


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_not_divisible(virtual, size):
    """Sharding and unsharding a tensor whose size the world does not divide, prime lengths and tiny ones."""

    async def program(group: Group) -> list[str]:
        wrong = []
        for algorithm, length in product(algorithms("reduce_scatter"), (1, size - 1, size + 1, 997)):
            shard = await group.reduce_scatter(mine(group.rank, length), algorithm=algorithm)
            counts = [length // size + (rank < length % size) for rank in range(size)]
            whole = np.concatenate(await group.all_gather(shard, counts))
            if not np.array_equal(whole, total(size, length)):
                wrong.append(f"{algorithm} {length}")
        return wrong

    assert virtual.run(size, program, wire=FAST) == [[]] * size
