"""The virtual world: programs on all hosts, how they end, deadlocks, the neighbourhood, SimPy beside it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest

from hcsim.config import Restart, parse_scenario
from hcsim.errors import ConfigError, Deadlock, PeerRefused, UsageError
from hcsim.runtime.frame import Header
from hcsim.runtime.host import Medium, Service, Sighting
from hcsim.units import Seconds
from hcsim.virtual.world import World
from tests.switches import on_switch

HOMES = """
name = "homes"
tcp = { slow_start = false }
[[medium]]
kind = "ethernet"
name = "switch"
home = "anna"
rate = "1 Gb/s"
[[medium]]
kind = "wifi"
name = "air"
home = "anna"
gate = false
jitter = "0 ms"
loss = 0
[[medium]]
kind = "ethernet"
name = "far"
home = "ben"
rate = "1 Gb/s"
[[medium]]
kind = "thunderbolt"
name = "desk"
[[medium.cable]]
between = ["studio", "mini"]
forward = "16 Gb/s"
backward = "8 Gb/s"
[[wan]]
home = "anna"
up = "40 Mb/s"
down = "100 Mb/s"
latency = "10 ms"
[[wan]]
home = "ben"
up = "40 Mb/s"
down = "100 Mb/s"
latency = "10 ms"
[[node]]
name = "studio"
machine = "ideal"
links = ["switch"]
[[node]]
name = "mini"
machine = "ideal"
links = ["switch"]
[[node]]
name = "laptop"
machine = "ideal"
links = ["air"]
[[node]]
name = "away"
machine = "ideal"
links = ["far"]
"""


@pytest.fixture
def world() -> World:
    return World(parse_scenario(HOMES, "homes"))


def test_a_program_runs_on_every_host_in_the_order_of_the_scenario(world):
    async def program(host: Any) -> str:
        await host.clock.sleep(1.0)
        return host.name

    assert world.run_on_all(program) == ["studio", "mini", "laptop", "away"]
    assert world.loop.time() == 1.0


def test_an_error_ends_one_program_and_not_the_others(world):
    async def program(host: Any) -> str:
        await host.clock.sleep(1.0)
        if host.name == "mini":
            raise ValueError("no luck")
        return host.name

    results = world.run_on_all(program)
    assert repr(results[1]) == "ValueError('no luck')"
    assert [results[0], *results[2:]] == ["studio", "laptop", "away"]


def test_only_the_error_of_the_last_life_is_told(caplog):
    lives: dict[str, int] = {}

    async def program(host: Any) -> None:
        lives[host.name] = lives.get(host.name, 0) + 1
        if host.name == "a":
            raise UsageError(f"life {lives['a']}")
        await host.clock.sleep(5)

    faults = [Restart(Seconds(at_s), node="a", down_s=Seconds(0.5)) for at_s in (1.0, 2.0, 3.0)]
    results = World(on_switch(["a", "b"], faults)).run_on_all(program)
    gc.collect()
    assert str(results[0]) == f"life {lives['a']}"
    assert lives["a"] > 2
    assert not caplog.records


def test_a_deadlock_names_every_task_and_what_it_waits_for(world):
    async def program(host: Any) -> None:
        listener = await host.listen(f"{host.name}:1000")
        await listener.accept()

    with pytest.raises(Deadlock) as caught:
        world.run_on_all(program)
    text = str(caught.value)
    for name in ("studio", "mini", "laptop", "away"):
        assert f"{name}: main" in text
        assert f"<listener {name}:1000>" in text


def test_two_worlds_stop_with_the_same_words():
    def words() -> str:
        async def program(host: Any) -> None:
            await asyncio.Event().wait()

        with pytest.raises(Deadlock) as caught:
            World(parse_scenario(HOMES, "homes")).run_on_all(program)
        return str(caught.value)

    assert words() == words()


def test_the_end_of_the_run_ends_what_hosts_still_do(world):
    ended: list[str] = []

    async def forever(host: Any) -> None:
        try:
            await host.clock.sleep(1e9)
        finally:
            ended.append(host.name)

    async def main() -> None:
        for host in world.hosts:
            host.spawn(forever(host), name="forever")
        await asyncio.sleep(1.0)

    world.run(main())
    assert ended == ["studio", "mini", "laptop", "away"]


def test_an_unknown_host_is_named_with_those_that_exist(world):
    with pytest.raises(ConfigError, match=r"'mega'.*studio, mini, laptop, away"):
        world.host("mega")


def test_a_host_listens_under_its_own_name_and_once_per_port(world):
    async def main() -> None:
        mini = world.host("mini")
        await mini.listen("mini:1000")
        with pytest.raises(ConfigError, match="port 1000 already"):
            await mini.listen("mini:1000")
        with pytest.raises(UsageError, match="not its name"):
            await mini.listen("studio:1001")

    world.run(main())


def test_a_host_shows_what_it_is_attached_to(world):
    found = {host.name: [interface.medium for interface in host.interfaces()] for host in world.hosts}
    assert found == {
        "studio": [Medium.THUNDERBOLT, Medium.ETHERNET],
        "mini": [Medium.THUNDERBOLT, Medium.ETHERNET],
        "laptop": [Medium.WIFI],
        "away": [Medium.ETHERNET],
    }


@pytest.mark.parametrize(
    ("source", "target", "latency_s"),
    [
        ("studio", "mini", 0.2e-3),  # over the cable, the faster of two ways
        ("studio", "laptop", 0.05e-3 + 0.6e-3),  # through the router, half of each medium's
        ("studio", "away", 0.05e-3 + 10e-3 + 10e-3 + 0.05e-3),  # out and in again
        ("away", "away", 10e-6),
    ],
)
def test_a_message_takes_the_best_way(world, source, target, latency_s):
    async def main() -> float:
        listener = await world.host(target).listen(f"{target}:1000")
        near = await world.host(source).connect(listener.address)
        far = await listener.accept()
        started_s = world.loop.time()
        await near.send(Header(0))
        await far.recv(lambda _: None)
        return world.loop.time() - started_s

    assert world.run(main()) == pytest.approx(latency_s, abs=30e-6)


# The neighbourhood.


async def taken(sightings: AsyncIterator[Sighting], count: int) -> list[tuple[str, bool]]:
    return [(seen.service.name, seen.gone) for seen in [await anext(sightings) for _ in range(count)]]


def test_announcements_reach_the_home_and_not_the_neighbours(world):
    async def program(host: Any) -> list[tuple[str, bool]]:
        await host.lan.advertise(Service(host.name, f"{host.name}:1000"))
        await host.clock.sleep(5.0)
        sightings = host.lan.browse()
        found = await taken(sightings, 1 if host.name == "away" else 3)
        with pytest.raises(TimeoutError):
            async with host.clock.timeout(5.0):
                await anext(sightings)
        return sorted(found)

    at_home = [("laptop", False), ("mini", False), ("studio", False)]
    assert world.run_on_all(program) == [at_home, at_home, at_home, [("away", False)]]


def test_who_comes_late_still_hears_of_those_before_and_of_every_change(world):
    async def main() -> list[tuple[str, bool]]:
        mini, laptop = world.host("mini"), world.host("laptop")
        await mini.lan.advertise(Service("printer", "mini:1"))
        await mini.lan.advertise(Service("disk", "mini:2"))
        await asyncio.sleep(10.0)
        sightings = laptop.lan.browse()
        found = await taken(sightings, 2)
        await mini.lan.advertise(Service("printer", "mini:3"))
        found += await taken(sightings, 1)
        await mini.lan.withdraw("disk")
        found += await taken(sightings, 1)
        await sightings.aclose()
        return found

    assert world.run(main()) == [("printer", False), ("disk", False), ("printer", False), ("disk", True)]


def test_a_plain_simpy_process_runs_beside_the_hosts(world):
    log: list[tuple[str, float]] = []

    def weather(env: Any) -> Any:
        for _ in range(3):
            yield env.timeout(1_000_000_000)
            log.append(("rain", env.now / 1e9))

    async def program(host: Any) -> None:
        for _ in range(3):
            await host.clock.sleep(1.5)
            if host.name == "mini":
                log.append(("step", world.loop.time()))

    world.loop.env.process(weather(world.loop.env))
    world.run_on_all(program)
    assert log == [("rain", 1.0), ("step", 1.5), ("rain", 2.0), ("step", 3.0), ("rain", 3.0), ("step", 4.5)]


def test_the_trace_has_packets_outside_of_connections_too():
    events: list[Any] = []
    world = World(on_switch(("a", "b")), sink=events.extend)

    async def main() -> None:
        a, b = world.hosts
        listener = await b.listen("b:1")
        await b.lan.advertise(Service("b", "b:1"))
        near = await a.connect("b:1")
        await listener.close()
        with pytest.raises(PeerRefused):
            await a.connect("b:2", timeout_s=0.01)
        await near.close()

    world.run(main())
    world.trace.digest()
    packets = {event[1:] for event in events if len(event) == 4}
    for way, what in (("b→a", "announcement"), ("a→b", "call"), ("b→a", "answer"), ("b→a", "refusal")):
        assert {("send", way, what), ("deliver", way, what)} <= packets
