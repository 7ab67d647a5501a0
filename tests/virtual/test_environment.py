"""The virtual world is a SimPy environment: what SimPy documents works, and everything passes through its queue."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any

import pytest
import simpy
from msgspec.structs import replace
from simpy.core import EmptySchedule

from hcsim.collectives.group import Group
from hcsim.config import Crash, Pause, Scenario, Training, load_scenario
from hcsim.errors import HcsimError
from hcsim.launch.virtual import simulate_training
from hcsim.training.run import Report
from hcsim.training.trainer import train
from hcsim.transport.groups import GroupMembership
from hcsim.units import PositiveSeconds, Seconds
from hcsim.virtual.host import VirtualHost
from hcsim.virtual.loop import VirtualLoop
from hcsim.virtual.world import World
from tests.switches import on_switch

SETTINGS = Training(task="digits", steps=3)


def training_on(scenario: Scenario) -> Any:
    names = [node.name for node in scenario.nodes]
    addresses = tuple(f"{name}:4000" for name in names)

    async def program(host: VirtualHost) -> Report:
        async with await Group.open(host, GroupMembership(names.index(host.name), addresses)) as group:
            return await train(group, SETTINGS, scenario.seed)

    return program


def begun(scenario: Scenario) -> tuple[World, dict[str, asyncio.Future[Report]]]:
    world = World(scenario)
    return world, world.begin(training_on(scenario))


@pytest.mark.slow
def test_peek_and_step_move_a_whole_training() -> None:
    scenario = load_scenario("four-macs-1gbe")
    world, reports = begun(scenario)
    env = world.env
    steps = 0
    while not all(report.done() for report in reports.values()):
        before_ns, next_ns = env.now, env.peek()
        env.step()
        assert env.now in (before_ns, next_ns)
        steps += 1
    expected = simulate_training(scenario, SETTINGS)
    assert [report.result().sha256 for report in reports.values()] == [each.sha256 for each in expected.values()]
    assert env.now / 1e9 == pytest.approx(expected.seconds)
    assert steps > world.trace.count


def test_run_until_a_time_and_until_an_event_are_simpys_own() -> None:
    world, reports = begun(load_scenario("four-macs-1gbe"))
    env = world.env
    env.run(until=1_000)
    assert env.now == 1_000
    assert not any(report.done() for report in reports.values())
    ended = env.event()
    asyncio.gather(*reports.values()).add_done_callback(lambda done: ended.succeed(len(done.result())))
    assert env.run(until=ended) == 4


def test_where_nothing_is_left_to_do_step_says_so_as_simpy_does() -> None:
    loop = VirtualLoop()
    with pytest.raises(EmptySchedule):
        loop.env.step()
    assert loop.env.peek() == float("inf")


def run(main: Coroutine[Any, Any, Any], loop: VirtualLoop) -> Any:
    return loop.run_to_end(main)


def test_a_resource_of_simpys_stands_between_two_components() -> None:
    loop = VirtualLoop()
    env = loop.env
    charger = simpy.Resource(env, capacity=1)
    log: list[tuple[str, int]] = []

    async def laptop(name: str, charging_s: float) -> None:
        request = charger.request()
        await loop.event(request)
        log.append((name, env.now))
        await asyncio.sleep(charging_s)
        charger.release(request)

    def phone() -> Generator[simpy.Event, Any, None]:
        yield env.timeout(1)
        with charger.request() as request:
            yield request
            log.append(("phone", env.now))
            yield env.timeout(5)

    async def main() -> None:
        calling = env.process(phone())
        await asyncio.gather(laptop("a", 10e-9), laptop("b", 20e-9), loop.event(calling))

    run(main(), loop)
    assert log == [("a", 0), ("b", 10), ("phone", 30)]


def test_a_process_waits_for_a_component_and_a_component_for_a_process() -> None:
    loop = VirtualLoop()
    env = loop.env
    log: list[tuple[str, int]] = []

    def walk(arrived: simpy.Event) -> Generator[simpy.Event, Any, str]:
        yield arrived
        log.append(("the component has arrived", env.now))
        yield env.timeout(5)
        return "and gone"

    async def main() -> str:
        arrived = env.event()
        walking = env.process(walk(arrived))
        await asyncio.sleep(3e-9)
        arrived.succeed()
        said: str = await loop.event(walking)
        log.append(("the process has ended", env.now))
        return said

    assert run(main(), loop) == "and gone"
    assert log == [("the component has arrived", 3), ("the process has ended", 8)]


def test_a_process_of_ones_own_lets_faults_happen_and_waits_for_them() -> None:
    world = World(on_switch(["a", "b"]))
    env, log = world.env, dict[str, list[float]]()
    napping = Pause(at_s=Seconds(1.2), node="b", duration_s=PositiveSeconds(2.0))

    def naps() -> Generator[simpy.Event, Any, None]:
        yield env.timeout(1_100_000_000)
        world.inject(napping)
        yield env.timeout(5_000_000_000)
        world.inject(replace(napping, at_s=Seconds(env.now / 1e9 + 0.1)))

    async def program(host: VirtualHost) -> None:
        log[host.name] = []
        for seconds in (0.5, 0.5, 0.5, 5.0):
            await host.clock.sleep(seconds)
            log[host.name].append(env.now / 1e9)

    env.process(naps())
    world.run_on_all(program)
    assert log == {"a": [0.5, 1.0, 1.5, 6.5], "b": [0.5, 1.0, 3.2, 8.2]}


def run_process(world: World, process: Generator[simpy.Event, Any, None]) -> None:
    async def main() -> None:
        await world.loop.event(world.env.process(process))

    world.run(main())


def test_traffic_beside_the_program_takes_its_part_of_the_line_and_a_process_waits_for_it() -> None:
    size_bytes = 12_500_000  # a tenth of a second on a line of 1 Gb/s
    alone, shared = World(on_switch(["a", "b", "c"])), World(on_switch(["a", "b", "c"]))
    arrived: dict[World, list[float]] = {alone: [], shared: []}

    def copies(world: World, sources: str) -> Generator[simpy.Event, Any, None]:
        transfers = [world.transfer(source, "c", size_bytes) for source in sources]
        for transfer in transfers:
            yield transfer
            arrived[world].append(world.env.now / 1e9)

    for world, sources in ((alone, "a"), (shared, "ab")):
        run_process(world, copies(world, sources))
    assert arrived[alone] == [pytest.approx(0.1, rel=0.15)]
    assert arrived[shared] == [pytest.approx(0.2, rel=0.15)] * 2


def test_traffic_from_a_machine_that_goes_down_fails_and_what_waits_for_it_hears_so() -> None:
    world = World(on_switch(["a", "b"]))
    world.inject(Crash(at_s=Seconds(0.05), node="a"))
    heard: list[str] = []

    def copies() -> Generator[simpy.Event, Any, None]:
        for _ in range(2):
            try:
                yield world.transfer("a", "b", 12_500_000)
            except HcsimError as error:
                heard.append(str(error))

    run_process(world, copies())
    assert heard == ["the transfer from a to b was broken off", "a is down: nothing is transferred"]
