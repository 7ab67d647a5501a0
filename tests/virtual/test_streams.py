"""What a stream does when the network changes under it."""

from __future__ import annotations

import asyncio
from math import inf
from typing import Any

import pytest
from msgspec.structs import replace

from hcsim.config import (
    AnyFault,
    Clog,
    LinkChange,
    Partition,
    Pause,
    Reset,
    Scenario,
    Tcp,
    load_scenario,
    parse_scenario,
)
from hcsim.errors import ChannelBroken
from hcsim.runtime.channel import Phantom
from hcsim.runtime.frame import HEADER_BYTES, Header
from hcsim.virtual.channel import VirtualChannel
from hcsim.virtual.links import Hop, Path
from hcsim.virtual.stream import RTO_S, loss_bound_bytes_ps
from hcsim.virtual.world import World
from tests.switches import on_switch
from tests.virtual.faults.arena import connected, until

MIB = 2**20
MB = 1_000_000


def pair(
    *faults: AnyFault, rate_bps: float = 1e9, latency: str = "0.1 ms", effects: str = "ideal", tcp: str = ""
) -> Scenario:
    scenario = on_switch(("a", "b"), faults, latency=latency, effects=effects, tcp=tcp)
    return replace(scenario, media=(replace(scenario.media[0], rate_bps=rate_bps),))


async def received(channel: VirtualChannel, count: int) -> list[tuple[int, float]]:
    """The next frames' numbers and when they came."""
    loop = asyncio.get_running_loop()
    return [((await channel.recv(lambda _: None))[0].operation, loop.time()) for _ in range(count)]


async def steadily(world: World, count: int, from_s: float, every_s: float) -> list[tuple[int, float]]:
    """Frames that leave one after the other: their numbers in the order of their coming, and when they came."""
    near, far = await connected(world)
    receiving = asyncio.create_task(received(far, count))
    await until(from_s)
    for number in range(count):
        await near.send(Header(0, operation=number))
        await asyncio.sleep(every_s)
    return await receiving


SIDES = (("a",), ("b",))


# Partitions.


@pytest.mark.parametrize("closes", [False, True], ids=["open", "closed"])
def test_a_partition_shorter_than_the_way_neither_loses_nor_reorders(closes):
    # Frames are sent from 1 s on, every 5 ms; they are all in the air when the way closes and opens again.
    world = World(pair(Partition(at_s=1.09, sides=SIDES, duration_s=0.02), latency="100 ms"))

    async def main() -> list[tuple[int, float]]:
        near, far = await connected(world)
        receiving = asyncio.create_task(received(far, 6))
        await until(1.0)
        for number in range(6):
            await near.send(Header(0, operation=number))
            await asyncio.sleep(0.005)
        if closes:
            await near.close()
        found = await receiving
        if closes:
            with pytest.raises(ChannelBroken, match="closed"):
                await far.recv(lambda _: None)
        return found

    found = world.run(main())
    assert [number for number, _ in found] == list(range(6))
    assert all(at_s >= 1.11 for _, at_s in found)
    assert found[-1][1] <= 1.11 + RTO_S + 0.1


def test_thousands_of_small_frames_wait_behind_a_partition():
    world = World(pair(Partition(at_s=1.0, sides=SIDES, duration_s=1.0), rate_bps=inf))
    count = 3000

    async def main() -> list[tuple[int, float]]:
        near, far = await connected(world)
        await until(1.5)
        receiving = asyncio.create_task(received(far, count))
        for number in range(count):
            await near.send(Header(0, operation=number))
        return await receiving

    found = world.run(main())
    assert [number for number, _ in found] == list(range(count))
    assert all(2.0 < at_s < 2.0 + 2 * RTO_S for _, at_s in found)


@pytest.mark.parametrize(
    "fault",
    [
        # It heals while those that left before it are still under way, the last of them to arrive when all is clear.
        Partition(at_s=2.0, sides=SIDES, duration_s=0.05),
        # It ends exactly when a frame arrives.
        Clog(at_s=1.9, between=("a", "b"), duration_s=0.2),
        Clog(at_s=1.9, between=("a", "b"), duration_s=0.200000001),
    ],
    ids=["partition", "clog", "clog a moment longer"],
)
def test_what_is_held_on_its_way_arrives_in_its_order(fault):
    world = World(pair(fault, latency="300 ms", rate_bps=inf))
    found = world.run(steadily(world, 100, from_s=1.5, every_s=0.01))
    assert [number for number, _ in found] == list(range(100))
    assert [at_s for _, at_s in found] == sorted(at_s for _, at_s in found)


def last_word_s(*faults: AnyFault, then_close: bool) -> float:
    """When 10 MB arrive that leave at 0.9 s with 1 MB/s, and perhaps are the last before the end."""
    world = World(pair(*faults, rate_bps=8e6, latency="100 ms"))

    async def main() -> float:
        near, far = await connected(world)
        await until(0.9)
        await near.send(Header(10 * MB - HEADER_BYTES), Phantom(10 * MB - HEADER_BYTES))
        if then_close:
            await near.close()
        (_, at_s), *_ = await received(far, 1)
        if then_close:
            with pytest.raises(ChannelBroken, match="closed"):
                await far.recv(lambda _: None)
        return at_s

    return world.run(main())


@pytest.mark.parametrize("then_close", [False, True], ids=["open", "closed"])
@pytest.mark.parametrize(
    ("fault", "arrives_s"),
    [
        (Partition(at_s=1.0, sides=SIDES, duration_s=2.0), 11.0 + 2.0 + RTO_S),
        (Partition(at_s=1.0, sides=SIDES, duration_s=2.0, oneway=True), 11.0 + 2.0 + RTO_S),
        (Clog(at_s=1.0, between=("a", "b"), duration_s=20.0), 21.0),
        (LinkChange(at_s=5.9, medium="switch", rate_bps=4e6), 16.0),
    ],
    ids=["partition", "one way", "clog", "half the rate"],
)
def test_what_was_sent_before_an_end_is_closed_meets_the_same_faults(fault, arrives_s, then_close):
    assert last_word_s(fault, then_close=then_close) == pytest.approx(arrives_s, abs=1e-3)


def test_a_connection_that_is_made_behind_a_one_way_cut_is_cut_too():
    # b's packets do not reach a. It takes a's call, and speaks first.
    cut = Partition(at_s=1.0, sides=SIDES[::-1], duration_s=2.0, oneway=True)
    events: list[Any] = []
    world = World(pair(cut, latency="100 ms"), sink=events.extend)

    async def main() -> None:
        listener = await world.host("b").listen("b:1")
        await until(1.1)
        calling = world.host("a").spawn(world.host("a").connect("b:1"), name="call")
        far = await listener.accept()
        await far.send(Header(0))
        await (await calling).recv(lambda _: None)

    world.run(main())
    world.trace.digest()
    assert [event[0] >= 3e9 for event in events if event[1:3] == ("deliver", "b→a#1")] == [True]


def test_data_that_was_never_held_is_not_delayed_when_acknowledgements_come_again():
    world = World(pair(Partition(at_s=1.0, sides=SIDES[::-1], duration_s=0.5, oneway=True), rate_bps=inf))
    for number, at_s in world.run(steadily(world, 40, from_s=1.1, every_s=0.02)):
        assert at_s == pytest.approx(1.1 + 0.02 * number + 0.0001, abs=1e-6)


def test_both_ends_closed_leave_no_stream_behind_whatever_was_unread():
    world = World(pair(effects="all", tcp="window = '64 KiB'"))

    async def main() -> tuple[int, int]:
        for _ in range(3):
            near, far = await connected(world)
            await sent(near, 10, 40_000)
            await near.close()
            await asyncio.sleep(1.0)
            await far.close()
            await asyncio.sleep(10.0)
        return len(world.net.streams), len(world.wiring.channels("a", "b") + world.wiring.channels("b", "a"))

    assert world.run(main()) == (0, 0)


def test_without_acknowledgements_one_window_fills_the_receiver_and_no_more():
    world = World(pair(Partition(at_s=1.0, sides=SIDES[::-1], duration_s=50.0, oneway=True), effects="all"))
    size = MIB // 4

    async def main() -> int:
        near, far = await connected(world)
        await until(2.0)
        sending = world.host("a").spawn(sent(near, 100, size), name="send")
        await until(40.0)
        assert not sending.done()
        return far.streams[1].outstanding

    window = Tcp().window_bytes
    assert window <= world.run(main()) < window + size + HEADER_BYTES


async def sent(channel: VirtualChannel, count: int, size: int) -> None:
    for number in range(count):
        await channel.send(Header(size, operation=number), Phantom(size))


def test_a_reset_strikes_half_way_through_a_frame_also_where_one_follows_the_other():
    # It comes while a small frame leaves, which is one packet; the first large one takes a second.
    world = World(pair(Reset(at_s=1.00001, between=("a", "b"), mid_frame=True), rate_bps=8e6))

    async def main() -> list[tuple[int, float]]:
        near, far = await connected(world)
        receiving = asyncio.create_task(received(far, 2))
        await until(1.0)
        await near.send(Header(100, operation=7), Phantom(100))
        await near.send(Header(MB, operation=8), Phantom(MB))
        with pytest.raises(ChannelBroken, match="reset"):
            await receiving
        return [(0, world.loop.time())]

    assert world.run(main())[0][1] == pytest.approx(1.5, abs=1e-3)


def broken_s(scenario: Scenario, size: int) -> float:
    """When the first frame breaks, which is sent at 1 s and never comes whole."""
    world = World(scenario)

    async def main() -> float:
        near, far = await connected(world)
        receiving = asyncio.create_task(received(far, 1))
        await until(1.0)
        await near.send(Header(size - HEADER_BYTES), Phantom(size - HEADER_BYTES))
        with pytest.raises(ChannelBroken, match="reset"):
            await receiving
        return world.loop.time()

    return world.run(main())


@pytest.mark.parametrize(
    ("others", "strikes_s"),
    [
        ((), 1.5),
        ((LinkChange(at_s=1.1, medium="switch", rate_bps=80e6),), 1.14),
        ((LinkChange(at_s=1.1, medium="switch", rate_bps=4e6),), 1.9),
        ((Partition(at_s=1.1, sides=SIDES, duration_s=2.0),), 3.5 + RTO_S),
        ((LinkChange(at_s=0.9, medium="switch", rate_bps=inf),), 1.0),
    ],
    ids=["as it was", "ten times the rate", "half the rate", "partition", "infinite rate"],
)
def test_a_reset_strikes_half_way_through_a_frame_whatever_becomes_of_its_rate(others, strikes_s):
    fault = Reset(at_s=0.5, between=("a", "b"), mid_frame=True)
    assert broken_s(pair(fault, *others, rate_bps=8e6), MB) == pytest.approx(strikes_s, abs=1e-3)


def test_a_reset_strikes_half_way_through_a_frame_in_slow_start():
    fault = Reset(at_s=0.5, between=("a", "b"), mid_frame=True)
    scenario = pair(fault, rate_bps=1e12, latency="100 ms", effects="all", tcp="ack_share = 0")
    # Ten segments of 1448 bytes, then twice as many in each round trip: in the sixth half of 63 such windows has left.
    assert broken_s(scenario, 63 * 14_480) == pytest.approx(1.0 + 0.2 * (5 + 0.5 / 32), rel=1e-3)


@pytest.mark.parametrize("frame_bytes", [1000, 10_000, 10 * MB])
def test_slow_start_does_not_ask_how_the_bytes_are_framed(frame_bytes):
    world = World(pair(rate_bps=1e12, latency="100 ms", effects="all", tcp="ack_share = 0"))
    count = 10 * MB // frame_bytes

    async def main() -> float:
        near, far = await connected(world)
        began_s = world.loop.time()
        world.host("a").spawn(sent(near, count, frame_bytes - HEADER_BYTES), name="send")
        return (await received(far, count))[-1][1] - began_s

    # Ten segments of 1448 bytes, then twice as many in each round trip of 200 ms: 2⁹ − 1 such windows are sent in nine,
    # and what is left in the tenth; then the latency.
    window = 14_480
    left = (10 * MB - (2**9 - 1) * window) / min(2**9 * window, Tcp().window_bytes)
    assert world.run(main()) == pytest.approx(0.2 * (9 + left) + 0.1, rel=0.01)


@pytest.mark.parametrize(
    ("size", "cancelled_s", "breaks"),
    [
        (1000, 1.1005, False),  # one packet
        (MB, 1.0999, False),  # its first byte comes at 1.1 s
        (MB, 1.1001, True),
        (MB, 2.0999, True),  # its last one leaves at 2 s
        (MB // 20, 1.1001, True),  # it has left before its first byte comes, and so has the next
        (MB // 20, 1.1499, True),
        (MB // 20, 1.2001, False),
    ],
)
def test_a_receive_is_cancelled_half_way_when_part_of_its_frame_has_come(size, cancelled_s, breaks):
    world = World(pair(rate_bps=8e6, latency="100 ms"))

    async def main() -> bool:
        near, far = await connected(world)
        await until(1.0)
        await sent(near, 2 if size < MB else 1, size - HEADER_BYTES)
        try:
            while True:
                async with asyncio.timeout_at(cancelled_s):
                    await far.recv(lambda _: None)
        except TimeoutError:
            await near.send(Header(0, operation=99))
        try:
            while (await far.recv(lambda _: None))[0].operation != 99:
                pass
        except ChannelBroken as error:
            return "half-way" in str(error)
        return False

    assert world.run(main()) is breaks


# Wi-Fi.


def wifi_arrivals_s(*faults: AnyFault) -> tuple[list[tuple[float, float]], list[float], list[float]]:
    """When the gate was shut, and when messages arrived there and, after a second, back."""
    scenario = load_scenario("two-macs-wifi")
    air = replace(scenario.media[0], gate_every_s=5.0, gate_min_s=0.3, gate_max_s=0.3)
    events: list[Any] = []
    world = World(replace(scenario, media=(air,), seed=1, faults=faults), sink=events.extend)

    async def send(channel: VirtualChannel, count: int) -> None:
        for number in range(count):
            await channel.send(Header(4 * MB, operation=number), Phantom(4 * MB))

    async def main() -> tuple[list[float], list[float]]:
        near, far = await connected(world, "air-m2", "pro-m3")
        _, there = await asyncio.gather(send(near, 40), received(far, 40))
        await asyncio.sleep(1.0)
        near.limit(1 << 40)
        _, back = await asyncio.gather(send(far, 10), received(near, 10))
        assert [number for number, _ in there + back] == [*range(40), *range(10)]
        return [at_s for _, at_s in there], [at_s for _, at_s in back]

    there, back = world.run(main())
    world.trace.digest()
    return [(event[0] / 1e9, event[3] / 1e9) for event in events if event[1] == "gate"], there, back


def test_a_wifi_rate_change_while_the_gate_is_shut_does_not_open_it_and_holds_after_it():
    gates, there, back = wifi_arrivals_s()
    from_s, until_s = gates[0]
    assert there[0] < from_s < until_s < there[-1]
    half = load_scenario("two-macs-wifi").media[0].phy_rate_bps / 2
    changed = LinkChange(at_s=(from_s + until_s) / 2, medium="air", rate_bps=half)
    gates_after, there_after, back_after = wifi_arrivals_s(changed)
    assert gates_after[0] == (from_s, until_s)
    # What is in the air when the gate shuts may still come in, with its latency and jitter.
    assert not [at_s for at_s in there_after if from_s + 0.05 < at_s <= until_s]
    assert there_after[-1] > there[-1] + 0.5
    assert back_after[-1] - back_after[0] > 1.1 * (back[-1] - back[0])


# Rates.


def test_large_messages_are_as_fast_as_small_ones_with_the_default_window():
    def throughput_bps(size: int, count: int) -> float:
        world = World(pair(rate_bps=500e6, latency="20 ms", effects="all", tcp="slow_start = false"))

        async def main() -> float:
            near, far = await connected(world)
            began_s = world.loop.time()
            receiving = asyncio.create_task(received(far, count))
            for _ in range(count):
                await near.send(Header(size), Phantom(size))
            await receiving
            return 8 * size * count / (world.loop.time() - began_s)

        return world.run(main())

    small = throughput_bps(MIB, 160)
    assert small > 450e6
    for size, count in (4 * MIB, 40), (8 * MIB, 20), (32 * MIB, 5):
        assert throughput_bps(size, count) == pytest.approx(small, rel=0.01)


def test_a_link_change_from_infinite_to_finite_rate_holds_for_a_connection_that_is_there():
    world = World(pair(LinkChange(at_s=1.0, medium="switch", rate_bps=8e6), rate_bps=inf))

    async def main() -> float:
        near, far = await connected(world)
        await until(2.0)
        await near.send(Header(10 * MB - HEADER_BYTES), Phantom(10 * MB - HEADER_BYTES))
        ((_, at_s),) = await received(far, 1)
        return at_s

    assert world.run(main()) == pytest.approx(12.0001)


def test_a_link_is_infinitely_fast_again_when_its_change_has_ended():
    world = World(pair(LinkChange(at_s=1.0, medium="switch", rate_bps=8e6, duration_s=4.0), rate_bps=inf))

    async def main() -> float:
        near, far = await connected(world)
        await until(6.0)
        await near.send(Header(10 * MB), Phantom(10 * MB))
        ((_, at_s),) = await received(far, 1)
        return at_s

    assert world.run(main()) == pytest.approx(6.0001)


def test_timeouts_make_pftk_slower_than_mathis_at_high_loss():
    path = Path((Hop((), 0.01, loss=0.05),))
    pftk, mathis = (loss_bound_bytes_ps(Tcp(loss_model=model), 1448, 0.02, path) for model in ("pftk", "mathis"))
    assert 0 < pftk < 0.7 * mathis


# Ends.


@pytest.mark.parametrize(
    "rate_bps",
    [
        1e9,
        inf,
    ],
)
def test_closed_connections_are_forgotten(rate_bps):
    world = World(pair(rate_bps=rate_bps))

    async def main() -> None:
        for _ in range(100):
            near, far = await connected(world)
            await near.send(Header(1000), Phantom(1000))
            await far.recv(lambda _: None)
            await near.close()
            await far.close()
        await asyncio.sleep(1.0)

    world.run(main())
    assert not world.net.streams
    # A flow that is over leaves its resources when the next one is shared out.
    assert all(len(resource.members) <= 1 for resource in world.topology.resources.values())
    assert not any(host.channels for host in world.hosts)


# Pauses.


@pytest.mark.parametrize(
    ("first", "second", "wakes_s"),
    [((1.0, 2.0), (2.0, 8.0), 10.0), ((1.0, 8.0), (2.0, 2.0), 9.0)],
    ids=["one after the other", "one within the other"],
)
def test_overlapping_pauses_last_until_the_last_has_ended(first, second, wakes_s):
    pauses = [Pause(at_s=at_s, node="a", duration_s=duration_s) for at_s, duration_s in (first, second)]
    world = World(pair(*pauses))

    async def program(host: Any) -> float:
        await host.clock.sleep(1.5)
        return world.loop.time()

    assert world.run_on_all(program) == [pytest.approx(wakes_s), pytest.approx(1.5)]


# Routes.


@pytest.mark.parametrize(("routes", "medium"), [("service_order", "slow"), ("fastest", "quick")])
def test_a_route_is_the_first_link_that_leads_there_or_the_fastest(routes, medium):
    scenario = parse_scenario(
        f"""
        name = "routes"
        routes = "{routes}"
        medium = [
            {{ kind = "ethernet", name = "slow", rate = "1 Gb/s" }},
            {{ kind = "ethernet", name = "quick", rate = "10 Gb/s" }},
        ]
        [[node]]
        name = "a"
        machine = "ideal"
        links = ["slow", "quick"]
        [[node]]
        name = "b"
        machine = "ideal"
        links = ["quick", "slow"]
        """,
        "routes",
    )
    topology = World(scenario).topology
    assert topology.path("a", "b").medium == medium
    assert topology.path("b", "a").medium == "quick"
