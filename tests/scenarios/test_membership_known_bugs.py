"""Membership bugs of other systems that the coordinator answers, each named by its id."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from hcsim.cluster.coordinator import CoordinatorClient, CoordinatorPolicy
from hcsim.collectives.group import Group
from hcsim.collectives.select import Options
from hcsim.config import Crash
from hcsim.errors import ConfigError, WorkerLost
from tests.cluster.coordinator.conftest import run_virtual, staged  # noqa: F401 - a fixture

NAMES = ["hub", "w0", "w1", "w2"]
POLICY = CoordinatorPolicy(workers=3, least=2, heartbeat_s=0.05, silence_s=0.4)


async def everybody(stage, names=NAMES[1:]) -> list[CoordinatorClient]:
    return [await stage.join(name) for name in names]


async def shut(stage, coordinator, *workers: CoordinatorClient) -> None:
    for worker in workers:
        await worker.close()
    await stage.stop(coordinator)


@pytest.mark.slow
def test_no_heartbeats_sent_healthy_workers_stay_and_an_eviction_ends_the_collective():
    """Nobody called Heartbeat, so every worker was evicted; and eviction had no effect on collectives."""

    async def body(stage):
        coordinator = await stage.coordinator(POLICY)
        workers = await everybody(stage)
        rosters = await asyncio.gather(*(worker.ready() for worker in workers))

        async def sums(worker: CoordinatorClient) -> int:
            """Sum until the crash; the collective alone would wait a thousand seconds for the dead rank."""
            done = 0
            us = rosters[0].membership(worker.name)
            async with await Group.open(worker.host, us, Options(timeout_s=1000.0)) as group:

                async def work() -> None:
                    nonlocal done
                    while True:
                        data = np.ones(8, np.float32)
                        await group.all_reduce(data)
                        assert (data == 3.0).all()
                        done += 1
                        await worker.host.clock.sleep(0.01)

                with pytest.raises(WorkerLost, match=r"w1 \(rank 1\) was silent"):
                    await worker.during(rosters[0], work())
            return done

        tasks = [worker.host.spawn(sums(worker), name="sums") for worker in workers]
        counts = await asyncio.gather(tasks[0], tasks[2])
        assert min(counts) > 100  # far longer than the silence that evicts: nobody healthy was
        assert stage.hosts["hub"].clock.elapsed() < 10
        await shut(stage, coordinator, workers[0], workers[2])

    run_virtual(NAMES, body, (Crash(at_s=4.0, node="w1"),))


def test_rank_compaction_ranks_stay_and_a_restarted_worker_gets_none_beyond_the_world(staged):  # noqa: F811
    """After an eviction index and rank parted company; a restarted worker got a rank beyond the world."""

    async def body(stage):
        coordinator = await stage.coordinator(POLICY)
        workers = await everybody(stage)
        await asyncio.gather(*(worker.ready() for worker in workers))
        await workers[0].close()  # rank 0 is gone; everybody's index falls by one
        rosters = await asyncio.gather(*(worker.ready() for worker in workers[1:]))
        assert [(peer.rank, peer.worker) for peer in rosters[0].peers] == [(1, "w1"), (2, "w2")]
        assert [rosters[0].membership(worker.name).rank for worker in workers[1:]] == [0, 1]  # the group has no gap
        again = await stage.join("w0")
        assert again.rank == 0
        assert [worker.rank for worker in workers[1:]] == [1, 2]
        await shut(stage, coordinator, again, *workers[1:])

    staged(NAMES, body)


def test_peers_as_of_registration_all_know_all(staged):  # noqa: F811
    """Workers knew only those that had registered before them."""

    async def body(stage):
        coordinator = await stage.coordinator(POLICY)
        first = await stage.join("w0")
        asked_early = first.host.spawn(first.ready(), name="ready")
        others = await everybody(stage, ["w1", "w2"])
        assert not asked_early.done()
        rosters = await asyncio.gather(asked_early, *(worker.ready() for worker in others))
        assert {tuple(peer.worker for peer in roster.peers) for roster in rosters} == {("w0", "w1", "w2")}
        await shut(stage, coordinator, first, *others)

    staged(NAMES, body)


def test_dead_worker_blocks_neither_round_nor_checkpoint_nor_barrier(staged):  # noqa: F811
    """One dead worker halted the round, the checkpoint or the barrier for ever."""

    async def body(stage):
        coordinator = await stage.coordinator(POLICY)
        workers = await everybody(stage)
        await asyncio.gather(*(worker.ready() for worker in workers))
        await stage.kill("w2")
        ends = await asyncio.gather(workers[0].barrier(), workers[1].checkpoint(1, "d1"), return_exceptions=True)
        assert all(isinstance(end, WorkerLost) and "w2 (rank 2)" in str(end) for end in ends)
        rosters = await asyncio.gather(*(worker.ready() for worker in workers[:2]))
        assert rosters[0].generation == 2

        async def summed(worker: CoordinatorClient) -> float:
            async with await Group.open(worker.host, rosters[0].membership(worker.name)) as group:
                return float((await group.all_reduce(np.ones(3, np.float32)))[0])

        tasks = [worker.host.spawn(summed(worker), name="sum") for worker in workers[:2]]
        assert await asyncio.gather(*tasks) == [2.0, 2.0]
        done = await asyncio.gather(*(worker.checkpoint(1, f"d{worker.rank}") for worker in workers[:2]))
        assert done[0].digests == ((0, "d0"), (1, "d1"))
        await shut(stage, coordinator, *workers[:2])

    staged(NAMES, body)


@pytest.mark.parametrize("key", ["heartbeat_s", "silence_s", "checkpoint_s"])
@pytest.mark.parametrize("value", [0.0, -2.0])
def test_coordinator_zero_timeout_is_refused_by_its_key(key, value):
    """A zero or negative interval in the configuration crashed the coordinator."""
    with pytest.raises(ConfigError, match=key):
        CoordinatorPolicy(workers=2, **{key: value})
