"""A group's view with another time limit: the same group in everything else."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from hcsim import Group, Options
from hcsim.errors import CollectiveTimeout


def test_operations_through_both_views_are_counted_together(cluster):
    async def program(group: Group) -> list[float]:
        brief = group.within(5.0)
        first = brief if group.rank else group
        second = group if group.rank else brief
        found = [np.array([base + group.rank]) for base in (1.0, 10.0, 100.0)]
        pending = first.all_reduce(found[0]), second.all_reduce(found[1]), first.all_reduce(found[2])
        for each in pending:
            await each
        halves = brief.subgroup([0, 1]), group.subgroup([0, 1])  # the second of its kind on both ranks
        half = np.array([1000.0])
        await halves[1].all_reduce(half)
        return [float(array[0]) for array in (*found, half)]

    assert cluster.run(2, program) == [[3.0, 21.0, 201.0, 2000.0]] * 2


def test_the_limit_holds_for_what_is_started_through_it_and_the_failure_is_the_groups(virtual):
    async def program(group: Group) -> tuple[float, str]:
        loop = asyncio.get_running_loop()
        await group.barrier()
        if group.rank == 0:
            began_s = loop.time()
            with pytest.raises(CollectiveTimeout, match="longer than 3 s"):
                await group.within(3.0).recv(np.zeros(1), 1)
            return loop.time() - began_s, str(group.error)
        await asyncio.sleep(20.0)
        return 0.0, str(group.error)

    (waited_s, reason), (_, told) = virtual.run(2, program, options=Options(timeout_s=60.0))
    assert waited_s == pytest.approx(3.0, abs=0.5)
    assert "longer than 3 s" in reason
    assert reason in told


def test_what_was_measured_through_a_view_is_known_to_the_group_and_to_its_other_views(virtual):
    async def program(group: Group) -> bool:
        earlier = group.within(7.0)
        links = await group.within(30.0).measure()
        assert earlier.options.timeout_s == 7.0
        return group.options.links == earlier.options.links == links and len(group.options.order) == 3

    assert virtual.run(3, program) == [True] * 3


def test_a_view_leaves_the_groups_own_limit_as_it_was(virtual):
    async def program(group: Group) -> tuple[float, float, float]:
        brief = group.within(0.5)
        return group.options.timeout_s, brief.options.timeout_s, brief.within(7.0).options.timeout_s

    assert virtual.run(1, program, options=Options(timeout_s=9.0)) == [(9.0, 0.5, 7.0)]
