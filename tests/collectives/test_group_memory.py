"""What an operation takes beside its data and what an idle rank holds: never more than the data itself."""

from __future__ import annotations

import numpy as np
import pytest

from hcsim import Group, Options
from hcsim.collectives import failure_domain
from hcsim.collectives.algorithms import algorithms
from hcsim.collectives.buffers import KEPT_BYTES, RESERVE_BYTES, ScratchPool

SIZES_BYTES = [64 << 10, 192 << 10, 1 << 20, 5 << 20, 16 << 20]
"""Up to a segment all goes in order, beyond it in lanes; one that is just too long for a segment is the hardest."""


class CountingPool(ScratchPool):
    """Counts what it holds: rooms in use, and those that are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.used_bytes = self.most_bytes = 0

    def take(self, size_bytes: int) -> memoryview:
        room = super().take(size_bytes)
        self.used_bytes += room.nbytes
        self.most_bytes = max(self.most_bytes, self.used_bytes + self.kept_bytes)
        return room

    def give_back(self, room: memoryview) -> None:
        self.used_bytes -= room.nbytes
        super().give_back(room)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("world", [2, 3, 4, 7])
@pytest.mark.parametrize("algorithm", algorithms("all_reduce"))
def test_an_all_reduce_takes_at_most_twice_its_tensor_whatever_was_reduced_before(
    virtual, monkeypatch, algorithm, world
):
    pools: list[CountingPool] = []

    def of_another_rank() -> CountingPool:
        pools.append(CountingPool())
        return pools[-1]

    monkeypatch.setattr(failure_domain, "ScratchPool", of_another_rank)

    async def program(group: Group) -> list[float]:
        shares = []
        for size_bytes in SIZES_BYTES:
            array = np.full(size_bytes // 4, group.rank, np.float32)
            await group.all_reduce(array, algorithm=algorithm)
            assert (array == world * (world - 1) / 2).all()
            await group.barrier()
            assert len(pools) == world
            assert all(pool.used_bytes == 0 for pool in pools)
            shares.append((max(pool.most_bytes for pool in pools) - RESERVE_BYTES) / size_bytes)
            await group.barrier()
        return shares

    groups = (tuple(range(world // 2)), tuple(range(world // 2, world)))
    shares = virtual.run(world, program, options=Options(groups=groups))
    assert all(share <= 1 for of_rank in shares for share in of_rank), shares
    assert max(max(of_rank) for of_rank in shares) > 0


def test_a_pool_uses_what_it_has_before_it_takes_more():
    pool = CountingPool()
    large = pool.take(1 << 20)
    pool.give_back(large)
    assert pool.take(1 << 18) is large
    pool.give_back(large)
    pool.give_back(pool.take(1 << 21))
    assert pool.most_bytes == 1 << 21


def test_a_pool_keeps_only_so_much():
    pool = CountingPool()
    rooms = [pool.take(KEPT_BYTES // 4) for _ in range(8)]
    for room in rooms:
        pool.give_back(room)
    assert pool.kept_bytes == KEPT_BYTES
