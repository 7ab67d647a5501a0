"""What real TCP does at ports with queues, with its send buffers, and with its acknowledgements."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from hcsim import Group, simulate
from hcsim.config import Ethernet, Scenario, parse_scenario, write_scenario
from hcsim.errors import ConfigError
from hcsim.runtime.channel import Phantom
from hcsim.runtime.frame import HEADER_BYTES, Header
from hcsim.units import BitRate, Bytes, PositiveBytes
from hcsim.virtual.world import World
from tests.switches import on_switch
from tests.virtual.faults.arena import connected, until

START_S = 1.0
MIB = 2**20
RATE = 125e6 / 10
PLAIN = "slow_start = false, headers = false"


def home(names: str, *, queue: int | None = None, seed: int = 1, tcp: str = PLAIN) -> Scenario:
    scenario = on_switch(names, rate="100 Mb/s", effects="all", tcp=tcp)
    [switch] = scenario.media
    assert isinstance(switch, Ethernet)
    queued = replace(switch, queue_bytes=None if queue is None else PositiveBytes(queue))
    return replace(scenario, media=(queued,), seed=seed)


def with_bursts(scenario: Scenario, **figures: object) -> Scenario:
    """Let the ports of all nodes let a burst pass."""
    nodes = (replace(node, links=(replace(node.links[0], **figures),)) for node in scenario.nodes)
    return replace(scenario, nodes=tuple(nodes))


def into_one(scenario: Scenario, *sizes: int) -> list[float]:
    """When messages have arrived that all others send at once to the first host, of one size or of one each."""
    world = World(scenario)
    target, *sources = (host.name for host in world.hosts)

    async def main() -> list[float]:
        ends = [await connected(world, source, target) for source in sources]
        await until(START_S)

        async def pass_on(source: str, number: int) -> float:
            near, far = ends[number]
            size = sizes[number % len(sizes)]
            sending = world.host(source).spawn(near.send(Header(size), Phantom(size)), name="sender")
            await world.host(target).spawn(far.recv(lambda _: None), name="receiver")
            await sending
            return world.loop.time() - START_S

        return list(await asyncio.gather(*(pass_on(source, number) for number, source in enumerate(sources))))

    return world.run(main())


@pytest.mark.parametrize("congestion", ["cubic", "bbr"])
@pytest.mark.parametrize("queue", [128 * 1024, 512 * 1024, 4 * MIB])
def test_connections_that_fill_a_port_share_it_unequally_and_lose_no_throughput(queue: int, congestion: str) -> None:
    tcp = f'{PLAIN}, ack_share = 0, congestion = "{congestion}"'
    fair_s = into_one(home("abcd", tcp=tcp), 4 * MIB)
    whole_s = 3 * (4 * MIB + HEADER_BYTES) / RATE
    assert fair_s == pytest.approx([whole_s] * 3, rel=1e-3)
    for seed in range(5):
        found_s = into_one(home("abcd", queue=queue, seed=seed, tcp=tcp), 4 * MIB)
        full_queue_s = queue / RATE
        assert whole_s - 1e-6 <= max(found_s) <= whole_s + 2 * full_queue_s + 1e-3
        assert min(found_s) < 0.998 * whole_s
        assert max(found_s) > 0.99 * whole_s


def test_the_shares_at_a_port_differ_by_seed_and_are_the_same_for_the_same_seed() -> None:
    found = [tuple(into_one(home("abc", queue=128 * 1024, seed=seed), 2 * MIB)) for seed in (1, 1, 2, 3)]
    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_one_connection_alone_loses_nothing_at_a_port() -> None:
    queued, free = (into_one(home("ab", queue=queue), 8 * MIB) for queue in (4096, None))
    assert queued == pytest.approx(free, rel=1e-9)


def test_messages_that_fit_the_queue_together_lose_nothing() -> None:
    """What is lost delays a message by a round trip through the full queue at least."""
    size, queue = 60_000, 10 * MIB
    for seed in range(5):
        assert max(into_one(home("abcd", queue=queue, seed=seed), size)) < 3 * (size + 1000) / RATE + 2e-3


def test_losses_delay_a_message_that_ends_while_others_go_on_and_with_bbr_most() -> None:
    """With the same seed the shares are the same, so that a large queue shows what a small one costs."""
    queue, late = 64 * 1024, {}
    for congestion in ("cubic", "bbr"):
        tcp = f'{PLAIN}, ack_share = 0, congestion = "{congestion}"'
        round_trips: list[float] = []
        for seed in range(20):
            small, large = (
                into_one(home("abcd", queue=each, seed=seed, tcp=tcp), MIB, 8 * MIB, 8 * MIB)[0]
                for each in (queue, 64 * MIB)
            )
            round_trips.append((small - large) / (queue / RATE))
        assert all(each == pytest.approx(round(each), abs=0.1) and 0 <= round(each) <= 2 for each in round_trips)
        late[congestion] = sum(each > 0.5 for each in round_trips)
    assert late["cubic"] < 10 <= late["bbr"]


@pytest.mark.parametrize(("autotune", "turns"), [("false", 5), ("true", 4)])
def test_a_small_send_buffer_serves_one_peer_after_the_other(autotune: str, turns: int) -> None:
    """A tree of four, with an inner rank on one side. With large buffers the root sends to both of its children at
    once, so that one of them begins to pass on after two turns; with real ones it begins after one."""
    size = MIB
    tcp = f"ack_share = 0, headers = false, autotune = {autotune}"

    async def program(group: Group) -> float:
        for _ in range(2):  # the first one opens connections and buffers
            began_s = group.host.clock.now()
            await group.all_reduce(Phantom(size), algorithm="tree")
        return group.host.clock.now() - began_s

    took_s = max(simulate(home("abcd", tcp=tcp), program).values())
    assert took_s == pytest.approx(turns * size / RATE, rel=0.05)


def test_a_send_buffer_grows_to_its_limit_and_no_further() -> None:
    world = World(home("ab", tcp="autotune = true, send_buffer = '64 KiB'"))

    async def main() -> tuple[int, int]:
        near, far = await connected(world)
        out = near.streams[0]
        before = out.send_buffer_bytes
        receiving = world.host("b").spawn(far.recv(lambda _: None), name="receiver")
        await world.host("a").spawn(near.send(Header(4 * MIB), Phantom(4 * MIB)), name="sender")
        await receiving
        return before, out.send_buffer_bytes

    before, after = world.run(main())
    assert before < after == 64 * 1024


@pytest.mark.parametrize(("piggyback", "share"), [("false", 0.05), ("true", 0.0)])
def test_acknowledgements_ride_on_data_that_go_the_same_way(piggyback: str, share: float) -> None:
    size = 8 * MIB
    world = World(home("ab", tcp=f"{PLAIN}, ack_share = 0.05, piggyback = {piggyback}"))

    async def main() -> list[float]:
        ends = await connected(world)
        await until(START_S)

        async def send(number: int) -> None:
            end = ends[number]
            sending = end.host.spawn(end.send(Header(size), Phantom(size)), name="sender")
            await ends[1 - number].host.spawn(ends[1 - number].recv(lambda _: None), name="receiver")
            await sending

        await asyncio.gather(send(0), send(1))
        both_s = world.loop.time() - START_S
        began_s = world.loop.time()
        await send(0)
        return [both_s, world.loop.time() - began_s]

    both_s, alone_s = world.run(main())
    assert both_s == pytest.approx((1 + share) * size / RATE, rel=2e-3)
    assert alone_s == pytest.approx(size / RATE, rel=2e-3)


async def _all_reduces(group: Group) -> None:
    for size in (1000, 300_000, 3_000_000):
        for algorithm in ("ring", "centralized"):
            await group.all_reduce(Phantom(size), algorithm=algorithm)


def test_the_same_seed_gives_the_same_trace_with_all_of_it() -> None:
    def digest(seed: int) -> str:
        scenario = home("abcd", queue=128 * 1024, seed=seed, tcp="autotune = true, piggyback = true")
        return simulate(scenario, _all_reduces).trace_sha256

    assert digest(1) == digest(1) != digest(2)


def test_a_queue_survives_being_written_to_a_file_and_must_not_be_empty() -> None:
    scenario = home("ab", queue=131072)
    [switch] = parse_scenario(write_scenario(scenario), "again").media
    assert isinstance(switch, Ethernet)
    assert switch.queue_bytes == 131072
    with pytest.raises(ConfigError, match=r"medium\[0\]\.queue"):
        parse_scenario('name = "x"\n[[medium]]\nkind = "ethernet"\nname = "s"\nrate = "1 Gb/s"\nqueue = "0 B"', "x")


BURST = {"rate_bps": BitRate(100e6), "burst_bytes": Bytes(100_000), "peak_bps": BitRate(200e6)}
LATENCY_S = 100e-6
WIRE, PEAK = 125e6, 2 * RATE
"""Bytes per second of the switch of `bursty`, and of its ports' peak."""


def bursty(names: str, *, peak_burst: int = 0) -> Scenario:
    scenario = on_switch(names, rate="1 Gb/s", effects="all", tcp=f"{PLAIN}, ack_share = 0")
    return with_bursts(scenario, **BURST, peak_burst_bytes=Bytes(peak_burst))


@pytest.mark.parametrize("size", [50_000, 150_000, 1_000_000])
def test_a_port_that_was_idle_lets_its_burst_pass_at_its_peak(size: int) -> None:
    """The bucket of B bytes that fills at r is empty after B·p/(p − r) bytes at p."""
    size -= HEADER_BYTES
    fast = min(size + HEADER_BYTES, 100_000 * PEAK / (PEAK - RATE))
    [took_s] = into_one(bursty("ab"), size)
    assert took_s == pytest.approx(fast / PEAK + (size + HEADER_BYTES - fast) / RATE + LATENCY_S, rel=2e-3)


def test_the_smaller_bucket_lets_a_short_message_pass_at_the_speed_of_the_medium() -> None:
    [took_s] = into_one(bursty("ab", peak_burst=10_000), 5_000)
    assert took_s == pytest.approx((5_000 + HEADER_BYTES) / WIRE + LATENCY_S, rel=1e-3)


def test_two_senders_have_the_burst_of_the_port_that_they_share_once() -> None:
    size = 500_000
    took_s = into_one(bursty("abc"), size)
    fast = 100_000 * PEAK / (PEAK - RATE)
    whole_s = fast / PEAK + (2 * (size + HEADER_BYTES) - fast) / RATE + LATENCY_S
    assert max(took_s) == pytest.approx(whole_s, rel=2e-3)


@pytest.mark.parametrize("pause_s", [0.0, 2e-3, 20e-3])
def test_a_port_has_its_burst_again_after_a_pause(pause_s: float) -> None:
    """The first message takes all of the burst. What comes into the bucket until the second one shortens that one."""
    size = 200_000 - HEADER_BYTES
    idle_s = min(pause_s + LATENCY_S, 100_000 / RATE)
    expected_s = 200_000 / RATE - idle_s
    assert second_of_two(bursty("ab"), size, pause_s) == pytest.approx(expected_s, rel=1e-3)


def second_of_two(scenario: Scenario, size: int, pause_s: float) -> float:
    """How long the second of two messages is on its way, whose sender pauses between them."""
    world = World(scenario)

    async def main() -> float:
        near, far = await connected(world, "a", "b")
        took_s = 0.0
        for _ in range(2):
            await asyncio.sleep(pause_s)
            began_s = world.loop.time()
            receiving = world.host("b").spawn(far.recv(lambda _: None), name="receiver")
            await world.host("a").spawn(near.send(Header(size), Phantom(size)), name="sender")
            await receiving
            took_s = world.loop.time() - began_s
        return took_s - LATENCY_S

    return world.run(main())


def test_a_burst_is_refused_on_wifi() -> None:
    text = """name = "x"
    medium = [{ kind = "wifi", name = "air" }]
    node = [{ name = "a", machine = "M4", links = [{ medium = "air", burst = "64 KiB" }] }]"""
    with pytest.raises(ConfigError, match=r"burst.*Wi-Fi"):
        parse_scenario(text, "x")


def test_a_burst_is_written_and_read_again() -> None:
    scenario = bursty("ab", peak_burst=3_000)
    assert parse_scenario(write_scenario(scenario), "x").nodes[0].links == scenario.nodes[0].links
