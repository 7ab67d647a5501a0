"""A lid that is closed, clocks that drift, numbers that are none."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from hcsim import simulate
from hcsim.collectives.group import Group
from hcsim.config import (
    AnyFault,
    ClockDrift,
    ClockJump,
    Crash,
    Lid,
    NanGradient,
    Partition,
    Pause,
    Restart,
    Throttle,
    parse_scenario,
)
from hcsim.errors import ChannelBroken, DeadlineExceeded
from hcsim.runtime.channel import Phantom
from hcsim.runtime.frame import Header
from hcsim.runtime.host import Work
from hcsim.training.learner import Learner
from hcsim.training.optimizer import Sgd
from hcsim.training.tasks import task
from hcsim.virtual.stream import RTO_S
from hcsim.virtual.world import World
from tests.switches import on_switch
from tests.virtual.faults.arena import LATENCY_S, SECOND, Watcher, announced, connected, until, world_with

# The lid.


def test_a_sleeping_machine_does_nothing_and_its_clock_is_ahead_when_it_wakes():
    world = world_with(Lid(at_s=1.5, node="a", duration_s=60.0))

    async def program(host: Any) -> list[tuple[float, float, float]]:
        seen = []
        for _ in range(3):
            await host.clock.sleep(1.0)
            seen.append((world.loop.time(), host.clock.now(), host.clock.elapsed()))
        return seen

    slept, other, _ = (np.array(seen) for seen in world.run_on_all(program))
    # It wakes up at 61.5 s, and no time has passed for its stopwatch, nor for what waits.
    assert slept == pytest.approx(np.array([(1.0, 1.0, 1.0), (62.0, 62.0, 2.0), (63.0, 63.0, 3.0)]))
    assert other == pytest.approx(np.array([(1.0, 1.0, 1.0), (2.0, 2.0, 2.0), (3.0, 3.0, 3.0)]))


def test_sleeps_that_overlap_count_once_and_a_stopwatch_never_runs_backwards():
    world = world_with(
        Lid(at_s=1.0, node="a", duration_s=10.0),
        Lid(at_s=6.0, node="a", duration_s=10.0),
        Pause(at_s=12.0, node="a", duration_s=8.0),
    )

    async def program(host: Any) -> tuple[float, float, float]:
        await host.clock.sleep(2.0)
        return world.loop.time(), host.clock.elapsed(), host.clock.asleep()

    assert world.run_on_all(program)[0] == pytest.approx((20.0, 5.0, 15.0))


@pytest.mark.parametrize("connections", ["kept", "dead"])
def test_connections_outlive_a_sleep_or_are_gone_for_the_sleeper_at_once_and_for_its_peer_when_it_sends(connections):
    world = world_with(Lid(at_s=1.0, node="a", duration_s=5.0, connections=connections))

    async def main() -> None:
        near, far = await connected(world)
        await until(7.0)
        if connections == "kept":
            await far.send(Header(0, step=3))
            assert (await near.recv(lambda _: None))[0].step == 3
            return
        with pytest.raises(ChannelBroken, match="a was asleep"):
            await near.recv(lambda _: None)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3.0):
                await far.recv(lambda _: None)
        await far.send(Header(0))
        with pytest.raises(ChannelBroken, match="a does not know it"):
            await far.recv(lambda _: None)
        assert world.loop.time() == pytest.approx(10.0 + 2 * LATENCY_S)

    world.run(main())


def test_nobody_reaches_a_machine_that_sleeps_and_it_sends_nothing():
    world = world_with(Lid(at_s=1.0, node="b", duration_s=100.0))

    async def main() -> float:
        near, far = await connected(world, "b", "a")
        await world.host("b").listen("b:1")
        await until(0.9)
        await near.send(Header(SECOND), Phantom(SECOND))
        await until(5.0)
        with pytest.raises(DeadlineExceeded):
            await world.host("a").connect("b:1", timeout_s=10.0)
        await far.recv(lambda _: None)
        return world.loop.time()

    # A tenth of a second of it had left before; the rest goes on when it wakes up.
    assert world.run(main()) == pytest.approx(101.0 + 0.9 + RTO_S, abs=0.01)


@pytest.mark.parametrize(
    "faults",
    [
        (Lid(at_s=1.0, node="b", duration_s=60.0), Restart(at_s=2.0, node="b", down_s=1.0)),
        (Crash(at_s=1.0, node="b"), Lid(at_s=2.0, node="b", duration_s=60.0), Restart(at_s=3.0, node="b")),
    ],
    ids=["asleep", "down"],
)
def test_a_machine_that_is_started_again_is_awake(faults):
    world = world_with(*faults)

    async def main() -> float:
        await until(5.0)
        await world.host("b").listen("b:1")
        await world.host("a").connect("b:1", timeout_s=10.0)
        return world.loop.time()

    assert world.run(main()) < 6.5


def test_a_stopwatch_does_not_run_while_the_machine_sleeps_however_its_clock_runs():
    world = world_with(
        Lid(at_s=1.0, node="a", duration_s=10.0), ClockDrift(at_s=6.0, node="a", rate=1.5, duration_s=100.0)
    )

    async def main() -> tuple[float, float]:
        await until(0.5)
        before_s = world.host("a").clock.elapsed()
        await until(13.0)
        return before_s, world.host("a").clock.elapsed()

    assert world.run(main()) == pytest.approx((0.5, 1.0 + 2.0 * 1.5))


def test_what_a_sleeping_machine_has_to_announce_it_announces_when_it_is_awake():
    # The first announcement is lost; the one after a second would fall into the sleep.
    world = world_with(
        Partition(at_s=0.5, sides=(("a",), ("b", "c")), duration_s=0.5), Lid(at_s=1.2, node="a", duration_s=10.0)
    )
    seen = Watcher(world.host("b"))
    world.run(announced(world, "a", 0.6, 20.0))
    assert [at_s > 11.2 for at_s, *_ in seen.seen] == [True]


def test_nothing_happens_on_a_machine_that_is_down():
    events: list[Any] = []
    faults = (Throttle(at_s=0.5, node="a", factor=0.5, duration_s=3.0), Crash(at_s=1.0, node="a"))
    scenario = parse_scenario(f'name = "one"\nnode = [{{ name = "a", machine = {MACHINE} }}]', "one")
    world = World(msgspec.structs.replace(scenario, faults=faults), sink=events.extend)

    async def main() -> None:
        host = world.host("a")
        host.spawn(host.device.run(TEN_SECONDS, lambda: None), name="work")
        await until(100.0)

    world.run(main())
    world.trace.digest()
    assert [event[0] / 1e9 for event in events if event[1] == "timer"] == [100.0]


# Work.

TEN_SECONDS = Work(flops=1e10)
MACHINE = '{ name = "slow", peak = "1 GFLOPS", memory = "1 GB/s", efficiency_compute = 1.0, overhead = "0 s" }'


@pytest.mark.parametrize(
    ("faults", "lasts_s"),
    [
        ((), 10.0),
        ((Pause(at_s=2.0, node="a", duration_s=6.0),), 16.0),
        ((Lid(at_s=2.0, node="a", duration_s=6.0),), 16.0),
        ((Throttle(at_s=1.0, node="a", factor=0.1, duration_s=100.0),), 1.0 + 90.0),
        ((Throttle(at_s=0.0, node="a", factor=0.5, duration_s=4.0),), 4.0 + 8.0),
        ((Throttle(at_s=1.0, node="a", factor=0.5, duration_s=100.0), Pause(at_s=3.0, node="a", duration_s=7.0)), 26.0),
        (
            (
                Throttle(at_s=1.0, node="a", factor=0.4, duration_s=2.0),
                Throttle(at_s=2.0, node="a", factor=0.8, duration_s=2.0),
            ),
            4.0 + 10.0 - (1.0 + 0.4 + 0.32 + 0.8),
        ),
        ((ClockDrift(at_s=1.0, node="a", rate=2.0, duration_s=100.0),), 10.0),
        ((ClockDrift(at_s=0.0, node="a", rate=0.5, duration_s=100.0),), 10.0),
    ],
    ids=[
        "nothing",
        "pause",
        "lid",
        "slow",
        "slow at first",
        "slow and pause",
        "slow twice",
        "fast clock",
        "slow clock",
    ],
)
def test_work_goes_on_as_the_machine_does(faults: tuple[AnyFault, ...], lasts_s: float):
    scenario = parse_scenario(f'name = "one"\nnode = [{{ name = "a", machine = {MACHINE} }}]', "one")
    world = World(msgspec.structs.replace(scenario, faults=faults))

    async def program(host: Any) -> float:
        await host.device.run(TEN_SECONDS, lambda: None)
        return world.loop.time()

    assert world.run_on_all(program) == [pytest.approx(lasts_s)]


# Clocks.


def test_a_clock_that_drifts_gains_or_loses_and_does_not_leap():
    world = world_with(
        ClockJump(at_s=0.5, node="a", by_s=100.0), ClockDrift(at_s=10.0, node="a", rate=1.25, duration_s=8.0)
    )

    async def program(host: Any) -> list[float]:
        shown = []
        for at_s in (9.999, 10.001, 17.999, 18.001, 30.0):
            await until(at_s)
            shown += [host.clock.now(), host.clock.elapsed()]
        return shown

    drifting, true, _ = world.run_on_all(program)
    expected = [
        (t + (t - 10) * 0.25 if t < 18 else t + 2.0) if t > 10 else t for t in (9.999, 10.001, 17.999, 18.001, 30)
    ]
    assert drifting[1::2] == pytest.approx(expected)
    assert drifting[0::2] == pytest.approx([t + 100 for t in expected])
    assert true == pytest.approx([t for t in (9.999, 10.001, 17.999, 18.001, 30.0) for _ in range(2)])


def test_a_fast_clock_has_short_seconds_in_the_next_life_too():
    world = world_with(ClockDrift(at_s=0.0, node="a", rate=2.0), Restart(at_s=1.0, node="a"))

    async def program(host: Any) -> tuple[float, float]:
        await until(5.0)
        started_s, shown_s = world.loop.time(), host.clock.elapsed()
        await host.clock.sleep(4.0)
        return world.loop.time() - started_s, host.clock.elapsed() - shown_s

    fast, right, _ = world.run_on_all(program)
    assert fast == pytest.approx((2.0, 4.0))
    assert right == pytest.approx((4.0, 4.0))


# Gradients.


def gradients_of_steps(*faults: Any) -> list[list[np.ndarray]]:
    """By rank and step: the gradients that a learner computes, a step a second."""

    async def program(group: Group) -> list[np.ndarray]:
        learner = Learner(group.host, task("convex"), Sgd(lr=0.1), seed=1)
        found = []
        for step in range(4):
            await until(1.0 + step)
            await learner.gradients(np.arange(8))
            found.append(np.array(learner.replica.gradients))
        return found

    return simulate(on_switch(("a", "b"), faults), program).values()


def test_one_number_of_one_block_of_gradients_is_none():
    clean = gradients_of_steps()
    [ours, theirs] = gradients_of_steps(NanGradient(at_s=1.5, node="a", nth=2))
    blocks = len(task("convex").blocks)
    struck = 1 + (2 - 1) // blocks  # steps after 1.5 s begin with the second
    assert [int(np.isnan(gradients).sum()) for gradients in ours] == [int(step == struck) for step in range(4)]
    assert all(np.array_equal(one, other) for one, other in zip(theirs, clean[1], strict=True))
    sound = ~np.isnan(ours[struck])
    assert np.array_equal(ours[struck][sound], clean[0][struck][sound])
    assert math.isfinite(float(np.sum(ours[struck][sound])))
