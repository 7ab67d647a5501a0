"""A group holds nothing of an operation that is over."""

from __future__ import annotations

import weakref

import numpy as np

from hcsim import Group
from tests.conftest import Cluster


def test_a_result_can_be_freed_before_the_next_operation(cluster: Cluster) -> None:
    async def program(group: Group) -> bool:
        parts = await group.all_gather(np.ones(5000, np.float32))
        held = weakref.ref(parts[0] if parts[0].base is None else parts[0].base)
        del parts
        await group.host.clock.sleep(0.01)
        return held() is None

    assert cluster.run(3, program) == [True] * 3
