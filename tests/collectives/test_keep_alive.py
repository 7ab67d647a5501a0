"""What waits for a rank that shows that it computes does not time out; what waits for a silent one does."""

from __future__ import annotations

import pytest

from hcsim import Group, Options, Phantom
from hcsim.config import Pause
from hcsim.errors import CollectiveTimeout
from hcsim.units import Seconds

TIMEOUT_S = 2.0
PATIENT = Options(timeout_s=TIMEOUT_S)


def elapsed_s(group: Group) -> float:
    return group.host.clock.elapsed()


def test_ranks_wait_for_one_that_computes_for_many_time_limits(cluster):
    limit_s = 0.4

    async def program(group: Group) -> float:
        await group.barrier()
        if group.rank == 2:
            group.keep_alive(lambda: True)
            await group.host.clock.sleep(5 * limit_s)
        await group.all_reduce(Phantom(64), algorithm="ring")
        return elapsed_s(group)

    assert all(isinstance(found, float) for found in cluster.run(3, program, options=Options(timeout_s=limit_s)))


def test_notices_reach_ranks_that_have_no_link_to_the_one_that_computes(virtual):
    """They wait for a rank that waits for it: rank 3 forwards what rank 0 sends to rank 4, and so on."""

    async def program(group: Group) -> float:
        await group.all_reduce(Phantom(64), algorithm="ring")  # links to the neighbours only
        if group.rank == 0:
            group.keep_alive(lambda: True)
            await group.host.clock.sleep(10 * TIMEOUT_S)
        await group.all_reduce(Phantom(64), algorithm="ring")
        return elapsed_s(group)

    assert all(ended_s >= 10 * TIMEOUT_S for ended_s in virtual.run(8, program, options=PATIENT))


def test_a_rank_waits_for_the_call_of_one_that_computes(virtual):
    """Rank 3 has yet to call rank 0, which would wait for that for 30 s."""

    async def program(group: Group) -> float:
        await group.all_reduce(Phantom(64), algorithm="tree")
        assert 3 not in group.ends or group.rank != 0
        if group.rank == 3:
            group.keep_alive(lambda: True)
            await group.host.clock.sleep(100.0)
        await group.all_reduce(Phantom(64), algorithm="direct")
        return elapsed_s(group)

    assert all(ended_s >= 100.0 for ended_s in virtual.run(4, program, options=PATIENT))


@pytest.mark.parametrize("shown_s", [0.0, 5.0])
def test_a_rank_that_no_longer_shows_that_it_computes_is_given_up_after_one_time_limit(virtual, shown_s):
    async def program(group: Group) -> float:
        await group.barrier()
        clock = group.host.clock
        if group.rank == 1:
            group.keep_alive(lambda: clock.elapsed() <= shown_s)
            await clock.sleep(50.0)
            return 0.0
        with pytest.raises(CollectiveTimeout) as caught:
            await group.all_reduce(Phantom(64))
        assert caught.value.peer == 1
        return elapsed_s(group)

    ended_s = virtual.run(2, program, options=PATIENT)[0]
    assert shown_s + TIMEOUT_S - 0.6 <= ended_s <= shown_s + TIMEOUT_S + 0.6


def test_a_machine_that_stands_still_shows_nothing(virtual):
    async def program(group: Group) -> float:
        await group.barrier()
        if group.rank == 1:
            group.keep_alive(lambda: True)
            await group.host.clock.sleep(50.0)
            return 0.0
        with pytest.raises(CollectiveTimeout):
            await group.all_reduce(Phantom(64))
        return elapsed_s(group)

    lid = Pause(at_s=Seconds(10.0), node="mac-1", duration_s=Seconds(30.0))
    ended_s = virtual.outcome(2, program, options=PATIENT, faults=[lid]).results[0]
    assert ended_s == pytest.approx(10.0 + TIMEOUT_S, abs=0.6)
