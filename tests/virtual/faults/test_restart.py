"""A machine that is started again: what it finds, what it draws, and what its peers notice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hcsim.config import Crash, Leave, Partition, Pause, Restart, Throttle
from hcsim.errors import ChannelBroken, Deadlock, HcsimError, UsageError
from hcsim.runtime.frame import Header
from hcsim.runtime.host import Service
from hcsim.virtual.stream import RTO_S
from hcsim.virtual.world import HostCrashed, World
from tests.virtual.faults.arena import LATENCY_S, Watcher, connected, until, world_with

# Programs.


def test_a_restarted_host_runs_its_program_again_and_the_last_result_counts():
    world = world_with(Crash(at_s=1.5, node="a"), Restart(at_s=3.0, node="a"))
    log: list[tuple[float, int]] = []

    async def program(host: Any) -> tuple[str, int]:
        if host.name == "a":
            log.append((world.loop.time(), host.life))
        await host.clock.sleep(2.0)
        return host.name, host.life

    assert world.run_on_all(program) == [("a", 2), ("b", 1), ("c", 1)]
    assert log == [(0.0, 1), (3.0, 2)]
    assert world.loop.time() == pytest.approx(5.0)


def test_a_restart_of_a_host_that_lives_takes_it_down_first():
    world = world_with(Restart(at_s=1.0, node="a", down_s=2.0))

    async def program(host: Any) -> float:
        started_s = world.loop.time()
        await host.clock.sleep(1.5)
        return started_s

    assert world.run_on_all(program) == [3.0, 0.0, 0.0]


def test_a_program_that_had_ended_runs_again_while_others_are_at_work():
    world = world_with(Restart(at_s=1.0, node="a", down_s=0.5))

    async def program(host: Any) -> float:
        await host.clock.sleep(0.2 if host.name == "a" else 5.0)
        return world.loop.time()

    assert world.run_on_all(program) == pytest.approx([1.7, 5.0, 5.0])


def test_who_left_and_comes_back_is_waited_for_when_all_others_have_ended():
    world = world_with(Leave(at_s=1.0, node="a"), Restart(at_s=3.0, node="a"))

    async def program(host: Any) -> tuple[str, int]:
        if host.name == "a" and host.life == 1:
            await host.leaving.wait()
            raise HcsimError("left before there was anything to do")
        return host.name, host.life

    assert world.run_on_all(program) == [("a", 2), ("b", 1), ("c", 1)]
    assert world.loop.time() == pytest.approx(4.0)


def test_a_host_can_die_for_good_after_it_was_restarted():
    world = world_with(Restart(at_s=1.0, node="a"), Crash(at_s=4.0, node="a"))

    async def program(host: Any) -> None:
        await host.clock.sleep(10.0)

    crashed, *_ = world.run_on_all(program)
    assert isinstance(crashed, HostCrashed)


def test_nothing_of_the_old_life_runs_on():
    world = world_with(Restart(at_s=1.0, node="a", down_s=1.0))
    log: list[tuple[float, int]] = []

    async def tick(host: Any, life: int) -> None:
        while True:
            log.append((world.loop.time(), life))
            await host.clock.sleep(0.6)

    async def program(host: Any) -> None:
        if host.name == "a":
            await host.listen("a:1000")  # free again in the next life
            host.spawn(tick(host, host.life), name="tick")
        await host.clock.sleep(4.0 if host.name == "b" else 1.5)

    assert not any(isinstance(result, BaseException) for result in world.run_on_all(program))
    assert [life for _, life in log] == sorted(life for _, life in log)
    assert [at_s for at_s, life in log if life == 1] == pytest.approx([0.0, 0.6])
    assert next(at_s for at_s, life in log if life == 2) == pytest.approx(2.0)


def test_a_host_that_lives_cannot_be_started():
    with pytest.raises(UsageError, match="a is alive"):
        world_with().restart("a", {})


# The store.


def seen_by_lives(*faults: Any) -> list[dict[str, bytes]]:
    """What each life of a finds in its store; each writes its number at once, and at 2.5 s of its own."""
    world = world_with(*faults)
    found: list[dict[str, bytes]] = []

    async def program(host: Any) -> None:
        if host.name != "a":
            await host.clock.sleep(20.0)
            return
        found.append({name: data for name in ("first", "later") if (data := host.store.load(name)) is not None})
        host.store.save("first", b"%d" % host.life)
        await host.clock.sleep(2.5)
        host.store.save("later", b"%d" % host.life)
        await host.clock.sleep(20.0)

    world.run_on_all(program)
    return found


def test_a_kept_store_has_everything():
    assert seen_by_lives(Restart(at_s=4.0, node="a")) == [{}, {"first": b"1", "later": b"1"}]


def test_a_lost_store_is_empty():
    assert seen_by_lives(Restart(at_s=4.0, node="a", state="lost")) == [{}, {}]


def test_a_stale_store_is_that_of_the_last_start_or_of_a_given_time():
    again = Restart(at_s=8.0, node="a", state="stale", down_s=0.0)
    assert seen_by_lives(Restart(at_s=4.0, node="a"), again)[2] == {"first": b"1", "later": b"1"}
    assert seen_by_lives(Restart(at_s=4.0, node="a", state="stale", as_of_s=1.0))[1] == {"first": b"1"}
    old = Restart(at_s=8.0, node="a", state="stale", as_of_s=1.0)
    assert seen_by_lives(Restart(at_s=4.0, node="a"), old)[2] == {"first": b"1"}


def test_a_store_of_a_time_that_has_passed_cannot_be_injected():
    world = world_with()

    async def main() -> None:
        await until(2.0)
        with pytest.raises(UsageError, match="not known any more"):
            world.inject(Restart(at_s=3.0, node="a", state="stale", as_of_s=1.0))

    world.run(main())


# What else is new, and what stays.


def draws(*faults: Any) -> list[tuple[str, int, float]]:
    world = world_with(*faults)
    drawn: list[tuple[str, int, float]] = []

    async def program(host: Any) -> None:
        drawn.append((host.name, host.life, host.rng("dice", 1).random()))
        await host.clock.sleep(5.0)

    world.run_on_all(program)
    return drawn


def test_each_life_draws_other_numbers_and_the_first_life_the_usual_ones():
    with_restarts = draws(Restart(at_s=1.0, node="a"), Restart(at_s=3.0, node="a"))
    assert with_restarts[:3] == draws()
    assert len({number for name, _, number in with_restarts if name == "a"}) == 3


def test_clock_and_heat_are_the_machines_and_a_pause_is_the_processs():
    world = world_with(
        Throttle(at_s=0.5, node="a", factor=0.5, duration_s=100.0),
        Pause(at_s=0.5, node="a", duration_s=100.0),
        Restart(at_s=1.0, node="a", slow=0.5, slow_for_s=2.0),
    )
    world.host("a").clock.offset_s = 7.0
    seen: list[float] = []

    async def program(host: Any) -> None:
        await host.clock.sleep(1.0)
        if host.name == "a":
            seen.extend([host.device.throttle, host.clock.now()])
            await host.clock.sleep(2.0)
            seen.append(host.device.throttle)
        await host.clock.sleep(10.0)

    world.run_on_all(program)
    assert seen == pytest.approx([0.25, 3.0 + 7.0, 0.5])


# What the peers see.


@pytest.mark.parametrize("clean", [True, False])
def test_a_peer_that_only_listens_hears_nothing_unless_the_crash_was_clean(clean):
    world = world_with(Restart(at_s=1.0, node="b", down_s=1.0, clean=clean))

    async def main() -> None:
        near, _ = await connected(world)
        with pytest.raises(ChannelBroken if clean else TimeoutError):
            async with asyncio.timeout(50.0):
                await near.recv(lambda _: None)

    world.run(main())


def test_a_peer_that_sends_to_the_new_life_is_reset_after_a_round_trip():
    world = world_with(Restart(at_s=1.0, node="b", down_s=1.0))

    async def main() -> float:
        near, _ = await connected(world)
        await until(5.0)
        await near.send(Header(0))
        with pytest.raises(ChannelBroken, match="b does not know it any more"):
            await near.recv(lambda _: None)
        with pytest.raises(ChannelBroken):
            await near.send(Header(0))
        return world.loop.time()

    assert world.run(main()) == pytest.approx(5.0 + 2 * LATENCY_S)


def when_reset(*faults: Any, send_at_s: float) -> float:
    world = world_with(*faults)

    async def main() -> float:
        near, _ = await connected(world)
        await until(send_at_s)
        await near.send(Header(0))
        with pytest.raises(ChannelBroken):
            await near.recv(lambda _: None)
        return world.loop.time()

    return world.run(main())


def test_what_was_sent_while_it_was_down_is_sent_again_ever_more_slowly():
    # Sent at 2 s and again 0.2, 0.6, 1.4, 3.0 and 6.2 s later; it is back at 6 s.
    found_s = when_reset(Crash(at_s=1.0, node="b"), Restart(at_s=6.0, node="b"), send_at_s=2.0)
    assert found_s == pytest.approx(2.0 + RTO_S * (2**5 - 1) + 2 * LATENCY_S)


def test_what_was_under_way_when_it_crashed_is_sent_again_too():
    found_s = when_reset(Restart(at_s=1.0005, node="b", down_s=0.1), send_at_s=1.0)
    assert found_s == pytest.approx(1.0005 + RTO_S + 2 * LATENCY_S)


def test_a_reset_waits_for_a_partition_to_heal():
    apart = Partition(at_s=1.5, sides=(("a",), ("b",)), duration_s=10.0)
    found_s = when_reset(Restart(at_s=1.0, node="b", down_s=0.1), apart, send_at_s=2.0)
    assert found_s == pytest.approx(2.0 + RTO_S * (2**6 - 1) + 2 * LATENCY_S)


def test_without_a_restart_the_peer_waits_for_ever_and_the_world_says_so():
    world = world_with(Crash(at_s=1.0, node="b"))

    async def main() -> None:
        near, _ = await connected(world)
        await until(2.0)
        await near.send(Header(0))
        await near.recv(lambda _: None)

    with pytest.raises(Deadlock):
        world.run(main())


def test_who_dials_while_it_is_down_reaches_the_new_life():
    world = world_with(Restart(at_s=1.0, node="b", down_s=2.0))

    async def program(host: Any) -> float:
        if host.name == "b":
            listener = await host.listen("b:1000")
            await listener.accept()
        elif host.name == "a":
            await until(1.5)
            await host.connect("b:1000", timeout_s=10.0)
        return world.loop.time()

    ends_s = world.run_on_all(program)
    assert ends_s[:2] == pytest.approx([3.5, 3.5], abs=0.01)  # the call of 1.5 s is repeated each second


def test_neighbours_still_have_the_old_announcement_and_hear_the_new_one():
    world = world_with(Restart(at_s=3.0, node="a", down_s=1.0))
    watcher = Watcher(world.host("b"))

    async def program(host: Any) -> None:
        if host.name == "a":
            await host.lan.advertise(Service("a", f"a:{host.life}"))
        await host.clock.sleep(5.0)

    world.run_on_all(program)
    assert watcher.seen == [(0.0, "a:1", False), (4.0, "a:2", False)]


# Restarts and the rest of the run.


def digest(*faults: Any) -> str:
    events: list[Any] = []
    world = World(world_with(*faults).scenario, sink=events.extend)

    async def program(host: Any) -> None:
        for _ in range(20):
            await host.clock.sleep(host.rng("wait", host.life).random())

    world.run_on_all(program)
    return world.trace.digest()


def test_a_run_with_restarts_is_the_same_each_time():
    faults = (Restart(at_s=1.0, node="a"), Restart(at_s=2.0, node="b", state="lost", down_s=0.0))
    assert digest(*faults) == digest(*faults) != digest(*faults[:1])
