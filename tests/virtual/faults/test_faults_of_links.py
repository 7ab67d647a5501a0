"""What goes wrong between machines: connections that are clogged, half open, unplugged, moved, or behind a router."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from hcsim.config import (
    AnyFault,
    CablePulled,
    Clog,
    Crash,
    HalfOpen,
    InterfaceChange,
    Lid,
    LinkChange,
    Partition,
    Reset,
    Restart,
    RouterReboot,
    WifiGate,
    parse_scenario,
    write_faults,
)
from hcsim.errors import ChannelBroken, DeadlineExceeded
from hcsim.runtime.channel import Phantom
from hcsim.runtime.frame import HEADER_BYTES, Header
from hcsim.runtime.host import Medium, Service
from hcsim.virtual.channel import VirtualChannel
from hcsim.virtual.stream import RTO_S
from hcsim.virtual.world import World
from tests.switches import on_switch
from tests.virtual.faults.arena import (
    LATENCY_S,
    SECOND,
    Watcher,
    announced,
    connected,
    home,
    is_silent,
    until,
    world_with,
)

about = partial(pytest.approx, abs=2e-6)
"""Ideal links still take a moment for a header."""


def home_with(*faults: AnyFault) -> World:
    world = World(home())
    for fault in faults:
        world.inject(fault)
    return world


async def echo_s(world: World, near: VirtualChannel, far: VirtualChannel) -> float:
    """How long a message without content takes."""
    started_s = world.loop.time()
    await near.send(Header(0))
    await far.recv(lambda _: None)
    return world.loop.time() - started_s


# Clog.


def test_what_is_sent_into_a_clog_is_taken_and_arrives_at_its_end_in_order():
    world = world_with(Clog(at_s=1.0005, between=("a", "b"), duration_s=4.0))

    async def main() -> list[tuple[int, float]]:
        near, far = await connected(world)
        for step, at_s in enumerate((1.0, 1.0003, 1.0007, 2.0, 3.0)):  # two of them are under way when it starts
            await until(at_s)
            await near.send(Header(0, step=step))
        assert world.loop.time() == 3.0  # nobody had to wait to send
        return [((await far.recv(lambda _: None))[0].step, world.loop.time()) for _ in range(5)]

    arrived = world.run(main())
    assert [step for step, _ in arrived] == [0, 1, 2, 3, 4]
    assert [at_s for _, at_s in arrived] == pytest.approx([5.0005] * 5)


def test_a_clog_concerns_calls_and_announcements_too_and_nobody_else():
    world = world_with(Clog(at_s=1.0, between=("a", "b"), duration_s=4.0))
    watchers = {name: Watcher(world.host(name)) for name in ("b", "c")}

    async def main() -> None:
        await until(2.0)
        await world.host("a").lan.advertise(Service("printer", "a:1"))
        near, far = await connected(world, "a", "c")
        assert await echo_s(world, near, far) == about(LATENCY_S)
        await connected(world, "a", "b")
        assert world.loop.time() == about(5.0 + LATENCY_S)  # called at once, answered after the clog

    world.run(main())
    assert {name: watcher.seen[0][0] for name, watcher in watchers.items()} == {"b": 5.0, "c": 2.0}


def test_a_call_that_is_repeated_in_a_clog_makes_one_connection():
    world = world_with(Clog(at_s=1.0, between=("a", "b"), duration_s=4.5))

    async def main() -> None:
        listener = await world.host("b").listen("b:1000")
        await until(1.5)
        near = await world.host("a").connect("b:1000", timeout_s=10.0)
        assert world.loop.time() == about(5.5 + LATENCY_S)
        far = await listener.accept()
        assert await echo_s(world, near, far) == about(LATENCY_S)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10.0):
                await listener.accept()

    world.run(main())


# Half open.


def test_a_half_open_connection_is_broken_for_one_and_silent_for_the_other_until_it_sends():
    world = world_with(HalfOpen(at_s=1.0, between=("a", "b")))

    async def main() -> None:
        near, far = await connected(world)
        other, third = await connected(world, "a", "c")
        with pytest.raises(ChannelBroken, match="a lost it"):
            await near.recv(lambda _: None)
        assert world.loop.time() == about(1.0)
        assert await is_silent(far, 20.0)
        await far.send(Header(0))
        with pytest.raises(ChannelBroken, match="a does not know it any more"):
            await far.recv(lambda _: None)
        assert world.loop.time() == about(21.0 + 2 * LATENCY_S)
        assert await echo_s(world, other, third) == about(LATENCY_S)

    world.run(main())


def test_who_was_sending_into_a_half_open_connection_learns_it_at_once():
    world = world_with(HalfOpen(at_s=1.5, between=("b", "a")))

    async def main() -> float:
        near, _ = await connected(world)
        await until(1.0)
        await near.send(Header(SECOND), Phantom(SECOND))
        with pytest.raises(ChannelBroken, match="b does not know it"):
            await near.recv(lambda _: None)
        return world.loop.time()

    assert world.run(main()) == pytest.approx(1.5 + 2 * LATENCY_S)


# Wi-Fi.


def test_a_gate_holds_the_air_for_its_time_and_no_wire():
    # 0.1 GB/s of PHY rate; from station to station a byte crosses the air twice.
    size = 50_000_000 - HEADER_BYTES
    world = home_with(
        InterfaceChange(at_s=0.0, node="mini", medium="switch", to="air"),
        InterfaceChange(at_s=0.0, node="laptop", medium="switch", to="air"),
        WifiGate(at_s=1.5, medium="air", duration_s=0.25),
    )

    async def main() -> tuple[float, float]:
        await until(0.1)
        near, far = await connected(world, "mini", "laptop")
        wired, end = await connected(world, "studio", "pro")
        await until(1.0)
        await near.send(Header(size), Phantom(size))
        await far.recv(lambda _: None)
        air_s = world.loop.time()
        return air_s, await echo_s(world, wired, end)

    air_s, wire_s = world.run(main())
    assert air_s == about(1.0 + 1.0 + 0.25 + 0.005)
    assert wire_s == about(0.2e-3)  # over Thunderbolt


# Cables.


def test_a_connection_stalls_while_its_cable_is_pulled_and_new_ones_go_another_way():
    world = home_with(CablePulled(at_s=1.0, node="laptop", medium="switch", duration_s=5.0))

    async def main() -> None:
        near, far = await connected(world, "laptop", "pro")
        assert await echo_s(world, near, far) == about(1e-3)
        await until(2.0)
        assert [interface.medium for interface in world.host("laptop").interfaces()] == [Medium.WIFI]
        new, end = await connected(world, "laptop", "pro")
        assert await echo_s(world, new, end) == about(3e-3)  # half of each medium's latency
        await until(3.0)
        assert 3.0 + await echo_s(world, near, far) == about(6.0 + RTO_S + 1e-3)
        assert await echo_s(world, new, end) == about(3e-3)  # it keeps its way
        newest, end = await connected(world, "laptop", "pro")
        assert await echo_s(world, newest, end) == about(1e-3)

    world.run(main())


def test_without_another_way_nobody_is_reached_or_heard_until_the_cable_is_back():
    world = world_with(CablePulled(at_s=1.0, node="b", medium="switch", duration_s=8.0))
    watcher = Watcher(world.host("a"))

    async def main() -> None:
        listener = await world.host("b").listen("b:1000")
        await until(2.0)
        await world.host("b").lan.advertise(Service("printer", "b:1"))
        with pytest.raises(DeadlineExceeded):
            await world.host("a").connect(listener.address, timeout_s=3.0)
        await world.host("a").connect(listener.address, timeout_s=10.0)
        assert 9.0 < world.loop.time() < 10.1

    world.run(main())
    assert watcher.seen == []


def test_a_pulled_thunderbolt_cable_leaves_the_way_round():
    world = home_with(CablePulled(at_s=1.0, node="studio", medium="desk", to="mini", duration_s=5.0))

    async def main() -> None:
        latencies_s = []
        for at_s in (0.5, 2.0, 7.0):
            await until(at_s)
            near, far = await connected(world, "studio", "mini")
            latencies_s.append(await echo_s(world, near, far))
        assert latencies_s == about([0.2e-3, 0.4e-3, 0.2e-3])

    world.run(main())


def test_without_any_thunderbolt_cable_the_switch_is_left():
    world = home_with(CablePulled(at_s=1.0, node="studio", medium="desk", duration_s=5.0))

    async def main() -> None:
        await until(2.0)
        near, far = await connected(world, "studio", "mini")
        assert await echo_s(world, near, far) == about(1e-3)
        assert [interface.name for interface in world.host("studio").interfaces()] == ["switch"]

    world.run(main())


def test_a_connection_keeps_its_interfaces_when_another_way_becomes_faster():
    world = home_with(LinkChange(at_s=1.0, medium="desk", rate_bps=1e6))

    async def main() -> None:
        near, far = await connected(world, "studio", "mini")
        await until(2.0)
        assert near.streams[0].interfaces == ("desk", "desk")
        assert await echo_s(world, near, far) == about(0.2e-3 + HEADER_BYTES * 8 / 1e6)
        new, _ = await connected(world, "studio", "mini")
        assert new.streams[0].interfaces == ("switch", "switch")

    world.run(main())


# Other figures for links.


def lossy_home(*faults: AnyFault, links: str = '"switch"') -> World:
    """Two hosts on a lossless gigabit switch, whose TCP takes notice of losses and of nothing else."""
    nodes = ", ".join(f'{{ name = "{name}", machine = "ideal", links = [{links}] }}' for name in "ab")
    return World(
        parse_scenario(
            f"""
            name = "lossy"
            tcp = {{ slow_start = false, ack_share = 0, headers = false, window = "1 TB" }}
            medium = [{{ kind = "ethernet", name = "switch", rate = "1 Gb/s", latency = "1 ms" }}]
            node = [{nodes}]
            {write_faults(faults)}
            """,
            "lossy",
        )
    )


async def rate_bps(world: World, at_s: float) -> float:
    """What a new connection has for itself at that time."""
    await until(at_s)
    near, _ = await connected(world)
    await near.send(Header(SECOND), Phantom(SECOND))
    await asyncio.sleep(1e-3)
    flow = near.streams[0].flow
    near.reset("it has told its rate")
    assert flow is not None
    return flow.rate * 8


def test_a_loss_on_one_hosts_link_is_half_of_one_on_the_whole_way():
    # Each end of a wire has its half of the loss: of 0.75, the square root of 0.25 gets through.
    mine = LinkChange(at_s=1.0, medium="switch", node="a", loss=0.75, duration_s=2.0)
    everybodys = LinkChange(at_s=4.0, medium="switch", loss=0.75, duration_s=2.0)
    world = lossy_home(mine, everybodys)

    async def main() -> list[float]:
        return [await rate_bps(world, at_s) for at_s in (0.0, 1.5, 3.5, 4.5, 6.5)]

    assert world.run(main()) == pytest.approx([1e9, 0.5e9, 1e9, 0.25e9, 1e9])


def test_a_change_of_a_medium_holds_for_links_with_figures_of_their_own():
    own = '{ medium = "switch", rate = "500 Mb/s", latency = "2 ms", loss = 0.5 }'
    change = LinkChange(at_s=1.0, medium="switch", rate_bps=1e8, latency_s=10e-3, loss=0.75, duration_s=2.0)
    world = lossy_home(change, links=own)

    async def main() -> list[tuple[float, float, float]]:
        found = []
        for at_s in (0.5, 1.5, 3.5):
            await until(at_s)
            path = world.topology.path("a", "b")
            found.append((path.rate_bytes_ps * 8, path.latency_s, path.loss))
        return found

    before, during, after = world.run(main())
    assert before == after == pytest.approx((5e8, 2e-3, 0.5))
    assert during == pytest.approx((1e8, 10e-3, 0.75))


def test_a_change_of_a_hosts_thunderbolt_is_one_of_its_cables():
    world = home_with(LinkChange(at_s=1.0, medium="desk", node="pro", rate_bps=2e9, latency_s=5e-3, duration_s=2.0))

    async def main() -> None:
        for at_s, changed in ((0.5, False), (1.5, True), (3.5, False)):
            await until(at_s)
            mine = [world.topology.path(*ends) for ends in (("pro", "studio"), ("studio", "pro"))]
            theirs = world.topology.path("studio", "mini")
            assert [path.medium for path in (*mine, theirs)] == ["desk"] * 3
            assert {path.rate_bytes_ps * 8 for path in mine} == {2e9 if changed else 10e9}
            assert {path.latency_s for path in mine} == {5e-3 if changed else 0.2e-3}
            assert (theirs.rate_bytes_ps * 8, theirs.latency_s) == (10e9, 0.2e-3)

    world.run(main())


LINE_MB_PS, LINE_LATENCY_S = 12.5, 21e-3
"""From home to ben's: 100 Mb/s, and 0.5, 10, 10 and 0.5 ms."""


def line_transfer_s(*changes: LinkChange) -> float:
    """How long two seconds' worth takes from studio to ben, sent at 1 s."""
    world = home_with(*changes)

    async def main() -> float:
        near, far = await connected(world, "studio", "ben")
        await until(1.0)
        size = round(2e6 * LINE_MB_PS) - HEADER_BYTES
        await near.send(Header(size), Phantom(size))
        await far.recv(lambda _: None)
        return world.loop.time() - 1.0

    return world.run(main())


@pytest.mark.parametrize("line", ["home.wan", "ben.wan", "home.wan.up", "ben.wan.down"])
def test_a_line_that_gets_slower_slows_what_is_under_way(line: str):
    # In the first second 12.5 MB have gone. The other 12.5 MB go at 6.25 MB/s: all of them, or for a second.
    change = LinkChange(at_s=2.0, medium=line, rate_bps=50e6)
    assert line_transfer_s(change) == pytest.approx(1.0 + 12.5 / 6.25 + LINE_LATENCY_S)
    briefly = replace(change, duration_s=1.0)
    assert line_transfer_s(briefly) == pytest.approx(1.0 + 1.0 + (12.5 - 6.25) / LINE_MB_PS + LINE_LATENCY_S)


@pytest.mark.parametrize("line", ["home.wan.down", "ben.wan.up"])
def test_the_other_direction_of_a_line_has_a_rate_of_its_own(line: str):
    assert line_transfer_s(LinkChange(at_s=2.0, medium=line, rate_bps=1e6)) == pytest.approx(2.0 + LINE_LATENCY_S)


def test_two_lines_that_get_faster_carry_more():
    faster = [LinkChange(at_s=2.0, medium=line, rate_bps=200e6) for line in ("home.wan.up", "ben.wan.down")]
    assert line_transfer_s(faster[0]) == pytest.approx(2.0 + LINE_LATENCY_S)  # the other one is as slow as ever
    assert line_transfer_s(*faster) == pytest.approx(1.0 + 12.5 / 25 + LINE_LATENCY_S)


def test_a_line_can_get_longer_and_lose_packets_for_a_while():
    longer = LinkChange(at_s=2.0, medium="ben.wan", latency_s=0.1)
    assert line_transfer_s(longer) == pytest.approx(2.0 + LINE_LATENCY_S + 0.09)
    world = home_with(LinkChange(at_s=1.0, medium="ben.wan", latency_s=0.1, loss=0.25, duration_s=2.0))

    async def main() -> None:
        for at_s, changed in ((0.5, False), (1.5, True), (3.5, False)):
            await until(at_s)
            for ends in (("studio", "ben"), ("ben", "studio")):
                path = world.topology.path(*ends)
                assert (path.loss, path.latency_s) == pytest.approx((0.25, 0.111) if changed else (0.0, 0.021))
            assert world.topology.path("studio", "pro").loss == 0.0

    world.run(main())


# Interfaces.


def test_a_host_that_moves_to_another_medium_loses_its_connections_and_its_peers_hear_nothing():
    world = home_with(InterfaceChange(at_s=1.0, node="pro", medium="switch", to="air", duration_s=10.0))

    async def main() -> None:
        near, far = await connected(world, "pro", "laptop")
        cabled, end = await connected(world, "pro", "studio")
        with pytest.raises(ChannelBroken, match="pro has left switch"):
            await near.recv(lambda _: None)
        assert world.loop.time() == about(1.0)
        await far.send(Header(0))
        assert await is_silent(far, 5.0)
        assert await echo_s(world, cabled, end) == about(0.2e-3)  # Thunderbolt is as it was
        moved, there = await connected(world, "pro", "laptop")
        assert moved.streams[0].interfaces == ("air", "switch")
        with pytest.raises(ChannelBroken, match="pro has left air"):
            await moved.recv(lambda _: None)
        assert world.loop.time() == about(11.0)
        assert not there.streams[0].unfinished
        back, _ = await connected(world, "laptop", "pro")
        assert back.streams[0].interfaces == ("switch", "switch")

    world.run(main())


def test_a_host_that_moves_back_keeps_its_connections_over_a_medium_that_it_does_not_leave():
    world = home_with(
        CablePulled(at_s=0.0, node="laptop", medium="switch", duration_s=0.5),
        InterfaceChange(at_s=1.0, node="laptop", medium="switch", to="air", duration_s=5.0),
    )

    async def main() -> None:
        await until(0.1)
        before, one = await connected(world, "laptop", "pro")
        await until(2.0)
        during, other = await connected(world, "laptop", "pro")
        assert before.streams[0].interfaces == during.streams[0].interfaces == ("air", "switch")
        await until(7.0)
        assert await echo_s(world, before, one) == about(3e-3)
        assert await echo_s(world, during, other) == about(3e-3)

    world.run(main())


# The router.


def test_while_the_router_reboots_only_thunderbolt_is_left():
    world = home_with(RouterReboot(at_s=1.0, home="home", duration_s=20.0))
    watcher = Watcher(world.host("laptop"))

    async def main() -> None:
        pairs = [await connected(world, *ends) for ends in (("laptop", "mini"), ("ben", "laptop"))]
        await until(2.0)
        await world.host("mini").lan.advertise(Service("printer", "mini:1"))
        near, far = await connected(world, "studio", "pro")
        assert await echo_s(world, near, far) == about(0.2e-3)
        for source, target in (("laptop", "mini"), ("laptop", "ben"), ("ben", "laptop")):
            with pytest.raises(DeadlineExceeded):
                await world.host(source).connect(f"{target}:1000", timeout_s=2.0)
        for near, _ in pairs:
            await near.send(Header(0))
        ends_s = [await _arrival_s(world, far) for _, far in pairs]
        assert ends_s == pytest.approx([21.0 + RTO_S + 1e-3, 21.0 + RTO_S + 21e-3], abs=1e-4)

    world.run(main())
    assert watcher.seen == []


async def _arrival_s(world: World, channel: Any) -> float:
    await channel.recv(lambda _: None)
    return world.loop.time()


# Calls.


def test_a_call_that_was_given_up_leaves_nobody_behind():
    world = World(on_switch(("a", "b"), latency="1 s"))

    async def main() -> list[str]:
        listener = await world.host("b").listen("b:1")
        taken = asyncio.create_task(listener.accept())
        ends = []
        for timeout_s in (0.5, 1.5):  # before the call gets there, and before the answer is back
            with pytest.raises(DeadlineExceeded):
                await world.host("a").connect("b:1", timeout_s=timeout_s)
            await asyncio.sleep(3.0)
            assert not world.host("a").channels
            if taken.done():
                with pytest.raises(ChannelBroken) as broken:
                    await (await taken).recv(lambda _: None)
                ends.append(str(broken.value))
        assert not world.host("b").channels
        return ends

    (end,) = world.run(main())
    assert "a has given it up" in end


def test_a_call_whose_answer_was_lost_leaves_nobody_behind_when_it_is_given_up():
    # b takes the call; nothing from b reaches a for a long time.
    lost = Partition(at_s=1.0, sides=(("b",), ("a",)), duration_s=60.0, oneway=True)
    world = World(on_switch(("a", "b"), (lost,), latency="100 ms"))

    async def main() -> None:
        listener = await world.host("b").listen("b:1")
        await until(2.0)
        with pytest.raises(DeadlineExceeded):
            await world.host("a").connect("b:1", timeout_s=5.0)
        far = await listener.accept()
        with pytest.raises(ChannelBroken, match="a has given it up"):
            await far.recv(lambda _: None)
        assert not world.host("a").channels
        assert not world.net.streams

    world.run(main())


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (HalfOpen(at_s=1.0, between=("a", "b")), Reset(at_s=2.0, between=("b", "a"), mid_frame=False)),
        (HalfOpen(at_s=1.0, between=("a", "b")), HalfOpen(at_s=2.0, between=("b", "a"))),
        (Lid(at_s=1.0, node="a", duration_s=0.5, connections="dead"), HalfOpen(at_s=2.0, between=("b", "a"))),
    ],
    ids=["reset", "half open", "lid"],
)
def test_an_end_whose_other_end_is_gone_breaks_too(first, then):
    world = world_with(first, then)

    async def main() -> float:
        _, far = await connected(world)
        with pytest.raises(ChannelBroken):
            await far.recv(lambda _: None)
        return world.loop.time()

    assert world.run(main()) == about(2.0)


def test_what_had_not_left_a_machine_dies_with_it():
    world = home_with(
        WifiGate(at_s=1.0, medium="air", duration_s=60.0), RouterReboot(at_s=0.5, home="home", duration_s=0.1)
    )
    world.inject(CablePulled(at_s=0.7, node="laptop", medium="switch", duration_s=1000.0))
    world.inject(Crash(at_s=3.0, node="laptop"))
    watcher = Watcher(world.host("mini"))
    world.run(announced(world, "laptop", 2.0, 100.0))
    assert not [seen for seen in watcher.seen if "laptop" in str(seen)]


@pytest.mark.parametrize("then_close", [False, True], ids=["open", "closed"])
def test_what_was_under_way_over_a_medium_that_the_host_leaves_is_gone(then_close):
    world = home_with(InterfaceChange(at_s=1.0, node="laptop", medium="switch", to="air", duration_s=5.0))

    async def main() -> bool:
        near, far = await connected(world, "laptop", "studio")
        await until(0.9)
        await near.send(Header(SECOND), Phantom(SECOND))
        if then_close:
            await near.close()
        return await is_silent(far, 30.0)

    assert world.run(main())


def test_stations_share_as_their_new_links_say():
    air = parse_scenario(
        """
        name = "air"
        effects = "ideal"
        [[medium]]
        kind = "wifi"
        name = "air"
        phy_rate = "1 Gb/s"
        efficiency = 1.0
        fairness = "airtime"
        [[medium]]
        kind = "ethernet"
        name = "switch"
        rate = "10 Gb/s"
        [[node]]
        name = "server"
        machine = "ideal"
        links = ["switch"]
        [[node]]
        name = "a"
        machine = "ideal"
        links = [{ medium = "air", rate = "100 Mb/s" }]
        [[node]]
        name = "b"
        machine = "ideal"
        links = ["air"]
        [[fault]]
        kind = "link_change"
        at = "1 s"
        medium = "air"
        rate = "100 Mb/s"
        """,
        "air",
    )
    world = World(air)

    async def main() -> list[float]:
        pairs = [await connected(world, "a", "server"), await connected(world, "b", "server")]
        await until(1.5)

        async def took_s(near: VirtualChannel, far: VirtualChannel) -> float:
            await near.send(Header(SECOND // 10), Phantom(SECOND // 10))
            await far.recv(lambda _: None)
            return world.loop.time()

        return await asyncio.gather(*(took_s(*ends) for ends in pairs))

    one_s, other_s = world.run(main())
    assert one_s == pytest.approx(other_s, rel=1e-3)


def test_a_machine_that_goes_down_as_it_calls_is_not_taken_for_a_caller():
    world = World(on_switch(("a", "b"), (Restart(at_s=0.05, node="a", down_s=1.0),), latency="100 ms"))

    async def main() -> bool:
        listener = await world.host("b").listen("b:1")
        world.host("a").spawn(world.host("a").connect("b:1"), name="call")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10.0):
                await listener.accept()
        return not world.host("b").channels

    assert world.run(main())


def test_a_call_waits_for_the_air_to_open():
    world = home_with(WifiGate(at_s=1.0, medium="air", duration_s=3.0))

    async def main() -> float:
        await world.host("laptop").listen("laptop:1")
        await until(2.0)
        await world.host("mini").connect("laptop%air:1")
        return world.loop.time()

    assert 4.0 <= world.run(main()) < 4.1


def delays_s(*faults: AnyFault) -> list[float]:
    """What jitter makes of some messages from c to d, where a has called b before, again if it has to."""
    scenario = on_switch(("a", "b", "c", "d"), faults)
    world = World(replace(scenario, media=(replace(scenario.media[0], jitter_s=1e-3),)))

    async def main() -> list[float]:
        near, far = await connected(world)
        await until(2.0)
        try:
            await echo_s(world, near, far)
        except ChannelBroken:
            await connected(world)
        return [await echo_s(world, near, far) for near, far in [await connected(world, "c", "d")] for _ in range(5)]

    return world.run(main())


def test_what_becomes_of_two_hosts_changes_no_delay_between_two_others():
    assert delays_s(Reset(at_s=1.0, between=("a", "b"), mid_frame=False)) == pytest.approx(delays_s(), abs=1e-8)
