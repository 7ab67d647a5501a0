"""Bugs of other systems' remote calls, each named by its id; and what is left of a call when the network breaks."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from hcsim.config import Crash, Partition, Reset
from hcsim.errors import ChannelError, DeadlineExceeded
from hcsim.transport.rpc import Endpoint, ProcedureRegistry, serving_endpoint
from hcsim.virtual.world import World
from tests.contracts.conftest import arena  # noqa: F401 - a fixture
from tests.switches import on_switch


def test_rpc_deadlock_callers_that_wait_for_each_other_are_both_answered(arena):  # noqa: F811
    """Two callers waited for each other's reply, since neither served while it called."""

    async def relay(hops: int) -> int:
        """Calls back the caller, who calls back us, and so on; all of them wait at once."""
        return 0 if hops == 0 else 1 + await serving_endpoint().call("relay", hops - 1)

    async def body(left, right):
        registry = ProcedureRegistry()
        registry.add(relay)
        client, server = await arena.channels(left, right)
        async with Endpoint(left, client, registry) as near, Endpoint(right, server, registry) as far:
            calls = [end.call("relay", hops) for hops in range(8) for end in (near, far)]
            assert await asyncio.gather(*calls) == [hops for hops in range(8) for _ in range(2)]

    arena.run(body)


@pytest.mark.parametrize(
    "fault",
    [
        Reset(at_s=0.02, between=("a", "b")),
        Reset(at_s=0.05, between=("a", "b"), mid_frame=False),
        Crash(at_s=0.03, node="b", clean=True),
        Crash(at_s=0.03, node="b"),
        Partition(at_s=0.03, sides=(("a",), ("b",)), duration_s=1000.0),
    ],
    ids=lambda fault: f"{type(fault).__name__}",
)
def test_every_call_ends_whatever_happens_to_the_connection(fault):
    async def doubled(array: np.ndarray) -> np.ndarray:
        return 2 * array

    world = World(on_switch(["a", "b"], [fault]))

    async def serve():
        registry = ProcedureRegistry()
        registry.add(doubled)
        Endpoint(world.host("b"), await (await world.host("b").listen("b:1")).accept(), registry)

    async def main():
        world.host("b").spawn(serve(), name="serve")
        near = Endpoint(world.host("a"), await world.host("a").connect("b:1"))
        array = np.ones(100_000, np.float32)
        calls = [near.call("doubled", array * n, deadline_s=5.0) for n in range(40)]
        ends = await asyncio.gather(*calls, return_exceptions=True)
        for n, end in enumerate(ends):
            if isinstance(end, np.ndarray):
                assert (end == 2 * n).all()
            else:
                assert isinstance(end, ChannelError | DeadlineExceeded)
        assert any(not isinstance(end, np.ndarray) for end in ends)
        assert near.busy == 0
        assert world.loop.time() < 10
        await near.close()

    world.run(main())
