"""A coordinated run with calls, references and a crash leaves one trace, whatever the order in which Python hashes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GUARD_S = 60

_RUN = """
import asyncio
import numpy as np
from hcsim.cluster.coordinator import Coordinator, CoordinatorClient, CoordinatorPolicy
from hcsim.collectives.group import Group
from hcsim.collectives.select import Options
from hcsim.config import Crash
from hcsim.errors import CollectiveError, WorkerLost
from hcsim.transport.rpc import Endpoint, Procedure, ProcedureRegistry, RemoteRef
from hcsim.virtual.world import World
from tests.switches import on_switch

NAMES = ["hub", "north", "south", "east", "west"]
world = World(on_switch(NAMES, [Crash(at_s=2.0, node="south")], effects="all"))

async def lend(size: int) -> RemoteRef[np.ndarray]:
    return RemoteRef.lend(np.ones(size, np.float32))

async def calls() -> float:
    registry = ProcedureRegistry()
    registry.add(lend)
    listener = await world.host("east").listen("east:7")
    near = Endpoint(world.host("west"), await world.host("west").connect("east:7"))
    far = Endpoint(world.host("east"), await listener.accept(), registry)
    refs = await asyncio.gather(*(near.call(Procedure.of(lend), 1000 * n) for n in range(1, 9)))
    total = sum([float((await ref.fetch()).sum()) for ref in refs])
    del refs
    await near.close()
    await far.close()
    return total

async def work(worker):
    for _ in range(10):
        roster = await worker.ready()
        try:
            async with await Group.open(worker.host, roster.membership(worker.name), Options(timeout_s=30.0)) as group:
                async def sums():
                    while worker.host.clock.elapsed() < 4.0:
                        await group.all_reduce(np.ones(1000, np.float32))
                        await worker.host.clock.sleep(0.05)
                await worker.during(roster, sums())
            return roster.generation
        except (WorkerLost, CollectiveError):
            continue

async def main():
    coordinator = Coordinator(world.host("hub"), CoordinatorPolicy(workers=4, least=2, heartbeat_s=0.1, silence_s=0.5))
    coordinator.open(await world.host("hub").listen("hub:1"))
    workers = await asyncio.gather(*(CoordinatorClient.join(world.host(n), "hub:1", n, f"{n}:2") for n in NAMES[1:]))
    tasks = [worker.host.spawn(work(worker), name="work") for worker in workers]
    total = await calls()
    generations = await asyncio.gather(*(t for t, w in zip(tasks, workers) if w.name != "south"))
    return total, generations

print(world.run(main()), world.trace.count, world.trace.digest())
"""


def run(hash_seed: int) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    done = subprocess.run(
        [sys.executable, "-c", _RUN],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=GUARD_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_coordinated_run_has_one_trace():
    once, again = run(1), run(2)
    assert once == again
    assert once.startswith("(36000.0, [2, 2, 2])")
