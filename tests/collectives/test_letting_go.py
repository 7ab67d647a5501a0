"""A group holds nothing of an operation that is over."""

from __future__ import annotations

import asyncio
import weakref

import numpy as np

from hcsim import Group
from hcsim.collectives.scheduler import IN_FLIGHT
from tests.conftest import Cluster


def test_a_result_can_be_freed_before_the_next_operation(cluster: Cluster) -> None:
    async def program(group: Group) -> bool:
        parts = await group.all_gather(np.ones(5000, np.float32))
        held = weakref.ref(parts[0] if parts[0].base is None else parts[0].base)
        del parts
        await group.host.clock.sleep(0.01)
        return held() is None

    assert cluster.run(3, program) == [True] * 3


def test_what_an_operation_had_can_be_freed_while_the_next_in_line_goes_on(cluster: Cluster) -> None:
    async def program(group: Group) -> bool:
        data = [np.ones(5000, np.float32) for _ in range(IN_FLIGHT)]
        held = weakref.ref(data[-1])  # of the one that starts first
        pending = [group.reduce_scatter(data.pop()) for _ in range(IN_FLIGHT)]
        last = group.reduce_scatter(np.ones(5000, np.float32)) if group.rank == 0 else None
        await asyncio.gather(*pending)
        pending.clear()
        await group.host.clock.sleep(0.01)
        is_free = held() is None
        await (last or group.reduce_scatter(np.ones(5000, np.float32)))
        return is_free

    assert cluster.run(2, program) == [True] * 2
