"""The fluid network against numbers computed by hand: shares, media, TCP's bounds, order of delivery."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import sqrt

import msgspec
import pytest

from hcsim.config import Scenario, Tcp, parse_scenario
from hcsim.runtime.channel import Phantom
from hcsim.runtime.frame import HEADER_BYTES, Header
from hcsim.telemetry.trace import Event
from hcsim.virtual.links import Hop, Path
from hcsim.virtual.stream import loss_bound_bytes_ps
from hcsim.virtual.world import World

MB = 1_000_000
SIZE = 100 * MB - HEADER_BYTES
"""A payload that takes 100 MB on the wire."""
BARE = "slow_start = false, ack_share = 0, headers = false, loss_model = 'none', window = '1 TB'"
"""A TCP that does nothing of its own."""


def home(media: str, nodes: str, tcp: str = BARE, wan: str = "") -> Scenario:
    return parse_scenario(f"name = 'home'\ntcp = {{ {tcp} }}\nmedium = [{media}]\nnode = [{nodes}]\n{wan}", "home")


def node(name: str, medium: str = "", rate: str = "") -> str:
    link = f"{{ medium = '{medium}', rate = '{rate}' }}" if rate else f"'{medium}'"
    return f"{{ name = '{name}', machine = 'ideal', links = [{link if medium else ''}] }}"


def ethernet(rate: str, latency: str = "0.1 ms", extra: str = "") -> str:
    return f"{{ kind = 'ethernet', name = 'switch', rate = '{rate}', latency = '{latency}' {extra} }}"


def arrivals_s(
    scenario: Scenario,
    flows: Sequence[tuple[str, str, int]],
    sink: Callable[[Sequence[Event]], None] | None = None,
    last_after_s: float = 0.0,
) -> list[float]:
    """When each transfer (from, to, payload bytes) has arrived, on connections of their own; all start at zero, or the
    last one later."""
    world = World(scenario, sink=sink)

    async def connected(number: int, source: str, target: str):
        listener = await world.host(target).listen(f"{target}:{1000 + number}")
        near = await world.host(source).connect(listener.address)
        far = await listener.accept()
        far.limit(1 << 40)
        return near, far

    async def main() -> list[float]:
        ends = [await connected(number, source, target) for number, (source, target, _) in enumerate(flows)]
        started_s = world.loop.time()

        async def transfer(flow: tuple[str, str, int], near, far) -> float:
            await asyncio.gather(near.send(Header(flow[2]), Phantom(flow[2])), far.recv(lambda _: None))
            return world.loop.time() - started_s

        *moves, last = [transfer(flow, *pair) for flow, pair in zip(flows, ends, strict=True)]

        async def late() -> float:
            await asyncio.sleep(last_after_s)
            return await last

        return await asyncio.gather(*moves, late() if last_after_s else last)

    arrived_s = world.run(main())
    world.trace.digest()  # and the sink has all events
    return arrived_s


TWO = f"{node('a', 'switch')}, {node('b', 'switch')}"
THREE = f"{TWO}, {node('c', 'switch')}"


# Sharing.


def test_one_flow_has_the_whole_link():
    (alone_s,) = arrivals_s(home(ethernet("1 Gb/s"), TWO), [("a", "b", SIZE)])
    assert alone_s == pytest.approx(0.8 + 0.0001)


@pytest.mark.parametrize("pairs", [("ab", "ac"), ("ab", "cb"), ("ab", "ab")], ids=["out", "in", "both"])
def test_two_flows_share_a_link_equally(pairs):
    flows = [(source, target, SIZE) for source, target in pairs]
    assert arrivals_s(home(ethernet("1 Gb/s"), THREE), flows) == pytest.approx([1.6001, 1.6001])


def test_the_two_directions_of_a_wire_do_not_share():
    flows = [("a", "b", SIZE), ("b", "a", SIZE)]
    assert arrivals_s(home(ethernet("1 Gb/s"), TWO), flows) == pytest.approx([0.8001, 0.8001])


def test_a_flow_speeds_up_when_another_has_ended():
    half = 50 * MB - HEADER_BYTES
    # Until the short one is through, each has 62.5 MB/s; the other 50 MB then go at 125 MB/s.
    assert arrivals_s(home(ethernet("1 Gb/s"), THREE), [("a", "b", half), ("a", "c", SIZE)]) == pytest.approx(
        [0.8001, 1.2001]
    )


def test_a_slow_receiver_leaves_the_rest_to_the_others():
    nodes = f"{TWO}, {node('c', 'switch', '200 Mb/s')}"
    to_b, to_c = arrivals_s(home(ethernet("1 Gb/s"), nodes), [("a", "b", SIZE), ("a", "c", SIZE)])
    assert to_b == pytest.approx(100 / 100 + 0.0001)  # 800 Mb/s
    assert to_c == pytest.approx(100 / 25 + 0.0001)  # 200 Mb/s


# Media.


def wifi(fairness: str = "throughput", extra: str = "") -> str:
    air = "{ kind = 'wifi', name = 'air', phy_rate = '1.2 Gb/s', latency = '1 ms', jitter = '0 ms', loss = 0"
    return f"{air}, fairness = '{fairness}', {extra or 'gate = false'} }}, {ethernet('10 Gb/s', '0 ms')}"


STATIONS = f"{node('near', 'air')}, {node('far', 'air', '120 Mb/s')}, {node('wired', 'switch')}"


def test_a_station_alone_reaches_its_part_of_the_phy_rate():
    (alone_s,) = arrivals_s(home(wifi(), STATIONS), [("near", "wired", SIZE)])
    assert alone_s == pytest.approx(100 / 97.5 + 0.0005)  # 0.65 × 1.2 Gb/s is 97.5 MB/s; half the latency is its end's


def test_a_slow_station_drags_all_with_equal_throughput():
    """The anomaly: with 97.5 and 9.75 MB/s alone, each gets x with x/97.5 + x/9.75 = 1."""
    near_s, far_s = arrivals_s(home(wifi(), STATIONS), [("near", "wired", SIZE), ("far", "wired", SIZE)])
    each = 1 / (1 / 97.5 + 1 / 9.75)
    assert each == pytest.approx(8.8636, rel=1e-4)
    assert [near_s, far_s] == pytest.approx([100 / each + 0.0005] * 2)


def test_with_airtime_fairness_each_station_has_half_its_own_rate():
    flows = [("near", "wired", SIZE), ("far", "wired", SIZE)]
    near_s, far_s = arrivals_s(home(wifi("airtime"), STATIONS), flows)
    assert near_s == pytest.approx(100 / 48.75 + 0.0005)
    # 2.0513 s at 4.875 MB/s, and what is left at 9.75 MB/s.
    assert far_s == pytest.approx(2.0513 + (100 - 2.0513 * 4.875) / 9.75 + 0.0005, rel=1e-4)


def test_airtime_fairness_holds_for_a_station_that_is_faster_than_the_nominal_rate():
    nodes = f"{node('fast', 'air', '2.4 Gb/s')}, {node('slow', 'air')}, {node('wired', 'switch')}"
    fast_s, slow_s = arrivals_s(home(wifi("airtime"), nodes), [("fast", "wired", SIZE), ("slow", "wired", SIZE)])
    assert fast_s == pytest.approx(100 / 97.5 + 0.0005)  # half of 195 MB/s
    # By then 50 MB of the slow one's are through, at half of 97.5 MB/s.
    assert slow_s == pytest.approx(100 / 97.5 + 50 / 97.5 + 0.0005)


@pytest.mark.parametrize(
    ("partner", "part"),
    [
        ("other", 1 / 3),  # three stations with equal rates have a third of the air each
        ("far", 10 / 21),  # near and far have as much as each other, and near-2 the tenth of it that it needs for far
    ],
)
def test_with_airtime_fairness_two_stations_that_talk_have_a_part_each(partner, part):
    """Near sends to the wire, near-2 to its partner; each byte of those is one of both stations' air time.

    Per second of the air near has `part`, and the slower of the two as well; so near moves part × 97.5 MB,
    and the two part × the partner's rate."""
    stations = f"{STATIONS}, {node('near-2', 'air')}, {node('other', 'air')}"
    slower = 9.75 if partner == "far" else 97.5
    theirs = round(100 * MB * slower / 97.5) - HEADER_BYTES  # both end at once
    flows = [("near", "wired", SIZE), ("near-2", partner, theirs)]
    near_s, two_s = arrivals_s(home(wifi("airtime"), stations), flows)
    assert part * (1 + 1 + slower / 97.5) == pytest.approx(1.0)  # all of the air
    assert near_s == pytest.approx(100 / (part * 97.5) + 0.0005, rel=1e-6)
    assert two_s == pytest.approx(100 / (part * 97.5) + 0.001, rel=1e-6)


def test_from_station_to_station_every_byte_crosses_the_air_twice():
    (between_s,) = arrivals_s(home(wifi(), STATIONS), [("near", "far", SIZE)])
    assert between_s == pytest.approx(100 * (1 / 97.5 + 1 / 9.75) + 0.001)


BOTH_WAYS = ", ".join(f"{{ name = '{name}', machine = 'ideal', links = ['air', 'switch'] }}" for name in "ab")


def test_the_fastest_way_counts_that_two_stations_share_one_air():
    # A station has 0.8 Gb/s to itself, two that talk to each other 0.4 Gb/s: less than the cable.
    air = wifi(extra="gate = false, efficiency = 0.6667").replace("10 Gb/s", "500 Mb/s")
    topology = World(home(air, BOTH_WAYS)).topology
    assert topology.path("a", "b").medium == "switch"
    assert topology.path("a", "b").rate_bytes_ps == 62.5e6
    over_air = topology.route("a", "b", ("air", "air"))
    assert over_air is not None
    assert over_air.rate_bytes_ps == pytest.approx(1.2e9 * 0.6667 / 2 / 8)


def test_what_a_way_can_carry_does_not_depend_on_whether_its_air_is_shut():
    world = World(home(wifi(), STATIONS))
    open_rate = world.topology.path("near", "far").rate_bytes_ps
    world.net.shut(world.topology.resources["air.air"])
    assert world.topology.path("near", "far").rate_bytes_ps == open_rate == pytest.approx(1e6 / (1 / 97.5 + 1 / 9.75))


def test_the_gate_only_delays():
    extra = "gate_every = '1 s', gate_min = '100 ms', gate_max = '250 ms'"
    flows = [("near", "wired", SIZE), ("near", "wired", SIZE), ("wired", "near", SIZE)]
    open_s = arrivals_s(home(wifi(), STATIONS), flows)
    gated_s = arrivals_s(home(wifi(extra=extra), STATIONS), flows)
    added_s = [gated - free for gated, free in zip(gated_s, open_s, strict=True)]
    assert all(0.1 <= added <= 0.25 * 20 for added in added_s)


def test_the_air_closes_for_100_to_250_ms_about_every_33_s_and_nothing_else_takes_time():
    """A gigabyte at 0.1 MB/s keeps it busy for 10,000 s."""
    air = wifi(extra="efficiency = 0.8").replace("1.2 Gb/s", "1 Mb/s")
    scenario = home(air, f"{node('a', 'air')}, {node('b', 'switch')}")
    gates: list[tuple[float, float]] = []

    def watch(events: Sequence[Event]) -> None:
        gates.extend((event[0] / 1e9, event[3] / 1e9) for event in events if event[1] == "gate")

    (took_s,) = arrivals_s(scenario, [("a", "b", 1000 * MB - HEADER_BYTES)], watch)
    lengths_s = [until_s - from_s for from_s, until_s in gates]
    open_s = [later - until_s for (_, until_s), (later, _) in pairwise(gates)]
    assert took_s == pytest.approx(10_000 + sum(lengths_s) + 0.0005, abs=1e-6)
    assert 250 < len(gates) < 360  # 303, standard deviation 17
    assert sum(open_s) / len(open_s) == pytest.approx(33, abs=3 * 33 / sqrt(len(open_s)))
    assert 0.1 <= min(lengths_s) < 0.105
    assert 0.245 < max(lengths_s) <= 0.25
    assert sum(lengths_s) / len(lengths_s) == pytest.approx(0.175, abs=3 * 0.15 / sqrt(12 * len(lengths_s)))


@pytest.mark.slow
def test_wifi_6_has_the_round_trips_that_its_documentation_says():
    """Twice 1.2 ms, and twice a jitter of mean 1 ms: the chance of more than t ms above 2.4 ms is (1 + t)·exp(−t).

    The gate is closed for 0.175 s in 33.175 s, and 0.12 % of the packets are lost, each way: 0.77 % are held up, and
    the 99th percentile is where 0.23 % of the others are slower. Longer than 51 ms take 0.24 % that lost a packet, and
    those that meet a gate of length L in its first L − 47 ms, on average 128 ms: 0.39 %."""
    count = 8000
    nodes = f"{node('a', 'air')}, {node('b', 'air')}"
    world = World(home("{ kind = 'wifi', name = 'air', standard = 'wifi6' }", nodes))

    async def echo(far) -> None:
        while True:
            await far.recv(lambda _: None)
            await far.send(Header(0))

    async def main() -> list[float]:
        listener = await world.host("b").listen("b:1000")
        near = await world.host("a").connect(listener.address)
        world.host("b").spawn(echo(await listener.accept()), name="echo")
        found = []
        for second in range(1, count + 1):
            await asyncio.sleep(second - world.loop.time())
            await near.send(Header(0))
            await near.recv(lambda _: None)
            found.append(1e3 * (world.loop.time() - second))
        return sorted(found)

    trips_ms = world.run(main())
    median_ms, p95_ms, p99_ms = (trips_ms[round(share * count)] for share in (0.5, 0.95, 0.99))
    assert median_ms == pytest.approx(2.4 + 1.69, abs=0.1)
    assert p95_ms == pytest.approx(2.4 + 4.94, abs=0.25)
    assert 9.5 < p99_ms < 13  # 2.4 + 8.3, where one more or less that is held up counts for much
    late = sum(trip_ms > 51 for trip_ms in trips_ms) / count
    assert late == pytest.approx(0.0063, abs=3 * sqrt(0.0063 / count))


def test_names_with_dots_do_not_make_two_cards_one():
    media = ", ".join(
        f"{{ kind = 'ethernet', name = '{name}', rate = '1 Gb/s', latency = '0 s' }}" for name in ("c", "b.c")
    )
    nodes = f"{node('a', 'b.c')}, {node('a.b', 'c')}, {node('x', 'c')}, {node('y', 'c')}"
    assert arrivals_s(home(media, nodes), [("a", "x", SIZE), ("a.b", "y", SIZE)]) == pytest.approx([0.8, 0.8])


def test_names_with_dots_do_not_make_two_cables_one():
    media = ", ".join(
        f"{{ kind = 'thunderbolt', name = '{name}', forwarding = '4 Gb/s', cable = ["
        f"{{ between = ['{ends[0]}', '{ends[1]}'], forward = '8 Gb/s', latency = '0 s' }},"
        f"{{ between = ['{ends[1]}', '{ends[2]}'], forward = '8 Gb/s', latency = '0 s' }}] }}"
        for name, ends in (("t", ("o.a", "o.b", "o.c")), ("t.o", ("a", "b", "c")))
    )
    nodes = ", ".join(node(name, "switch") for name in ("o.a", "o.b", "o.c", "a", "b", "c"))
    flows = [("o.a", "o.c", SIZE), ("a", "c", SIZE)]
    assert arrivals_s(home(f"{media}, {ethernet('1 Gb/s')}", nodes), flows) == pytest.approx([0.2, 0.2])


def test_a_cable_can_be_faster_one_way():
    cables = (
        "{ kind = 'thunderbolt', name = 'desk', cable = "
        "[{ between = ['a', 'b'], forward = '16.4 Gb/s', backward = '5.3 Gb/s', latency = '0.2 ms' }] }"
    )
    there_s, back_s = arrivals_s(home(cables, f"{node('a')}, {node('b')}"), [("a", "b", SIZE), ("b", "a", SIZE)])
    assert there_s == pytest.approx(0.8 / 16.4 + 0.0002)
    assert back_s == pytest.approx(0.8 / 5.3 + 0.0002)


def test_a_host_forwards_between_cables_and_pays_for_it():
    chain = (
        "{ kind = 'thunderbolt', name = 'desk', forwarding = '4 Gb/s', cable = ["
        "{ between = ['a', 'b'], forward = '8 Gb/s', latency = '0 ms' },"
        "{ between = ['b', 'c'], forward = '8 Gb/s', latency = '0 ms' }] }"
    )
    nodes = ", ".join(node(name) for name in "abc")
    assert arrivals_s(home(chain, nodes), [("a", "b", SIZE)]) == pytest.approx([0.1])
    assert arrivals_s(home(chain, nodes), [("a", "c", SIZE)]) == pytest.approx([0.2])


def test_a_host_with_two_thunderbolt_networks_does_not_join_them():
    def desk(name: str, ends: str) -> str:
        cable = f"{{ between = {list(ends)}, forward = '8 Gb/s', latency = '0 ms' }}"
        return f"{{ kind = 'thunderbolt', name = '{name}', cable = [{cable}] }}"

    nodes = f"{TWO}, {node('c', 'switch')}"
    topology = World(home(f"{desk('left', 'ab')}, {desk('right', 'bc')}, {ethernet('1 Gb/s')}", nodes)).topology
    assert [topology.path(*ends).medium for ends in ("ab", "bc", "ac")] == ["left", "right", "switch"]
    assert [interface.name for interface in topology.interfaces("b")] == ["bridge0", "switch"]


def test_of_two_thunderbolt_networks_between_two_hosts_the_faster_one_is_taken():
    desks = ", ".join(
        f"{{ kind = 'thunderbolt', name = '{name}', cable = [{{ between = ['a', 'b'], forward = '{rate}' }}] }}"
        for name, rate in (("old", "8 Gb/s"), ("new", "16 Gb/s"))
    )
    topology = World(home(desks, f"{node('a')}, {node('b')}")).topology
    assert topology.path("a", "b").medium == topology.path("b", "a").medium == "new"
    assert [interface.rate_bps for interface in topology.interfaces("a")] == [16e9]
    slower = topology.route("a", "b", ("old", "old"))
    assert slower is not None
    assert slower.rate_bytes_ps == 1e9


# TCP.


def long_line(tcp: str, line: str = "") -> Scenario:
    """Two homes, 100 Mb/s each way, 2 × 25 ms apart: the round trip is 100 ms."""
    media = ", ".join(
        f"{{ kind = 'ethernet', name = '{name}', home = '{name}', rate = '1 Gb/s', latency = '0 ms' }}" for name in "ab"
    )
    wan = "".join(
        f"\n[[wan]]\nhome = '{name}'\nup = '100 Mb/s'\ndown = '100 Mb/s'\nlatency = '25 ms'\n{line}" for name in "ab"
    )
    return home(media, f"{node('a', 'a')}, {node('b', 'b')}", tcp, wan)


def without(*effects: str) -> str:
    return ", ".join(setting for setting in BARE.split(", ") if setting.split(" ")[0] not in effects)


def test_a_window_bounds_the_rate_by_the_round_trip():
    size = 10 * MB - HEADER_BYTES
    (bound_s,) = arrivals_s(long_line(f"{without('window')}, window = '125 kB'"), [("a", "b", size)])
    assert bound_s == pytest.approx(10 / 1.25 + 0.05)  # 125 kB per 100 ms
    (free_s,) = arrivals_s(long_line(BARE), [("a", "b", size)])
    assert free_s == pytest.approx(10 / 12.5 + 0.05)


@pytest.mark.parametrize("latency", ["0 ms", "0.1 ms"])
@pytest.mark.parametrize("ends", ["ab", "ba"])
def test_a_host_bounds_each_of_its_streams_and_no_other(ends, latency):
    """One has 200 Mb/s of the line's 1 Gb/s, two have twice that, and somebody else's has the rest."""
    latency_s = float(latency.removesuffix(" ms")) / 1e3
    slow = node("b", "switch").replace(" }", ", cap = '200 Mb/s' }")
    scenario = home(ethernet("1 Gb/s", latency), f"{node('a', 'switch')}, {slow}, {node('c', 'switch')}")
    ours = (*ends, SIZE)
    assert arrivals_s(scenario, [ours]) == pytest.approx([100 / 25 + latency_s])
    assert arrivals_s(scenario, [ours, ours]) == pytest.approx([100 / 25 + latency_s] * 2)
    others = ("a", "c", SIZE) if ends == "ab" else ("c", "a", SIZE)
    shared = arrivals_s(scenario, [ours, ours, others])
    assert shared == pytest.approx([100 / 25 + latency_s] * 2 + [100 / 75 + latency_s])
    six = arrivals_s(scenario, [ours] * 6)  # 1.2 Gb/s is more than the line has
    assert six == pytest.approx([6 * 100 / 125 + latency_s] * 6)


def test_the_lowest_of_a_streams_bounds_holds():
    size = 10 * MB - HEADER_BYTES
    for window, cap, wanted_mb_ps in (
        ("125 kB", "8 Mb/s", 1.0),
        ("125 kB", "80 Mb/s", 1.25),
        ("1 TB", "80 Mb/s", 10.0),
    ):
        line = long_line(f"{without('window')}, window = '{window}'")
        capped = msgspec.structs.replace(line.nodes[0], cap_bps=float(cap.removesuffix(" Mb/s")) * 1e6)
        scenario = msgspec.structs.replace(line, nodes=(capped, *line.nodes[1:]))
        assert arrivals_s(scenario, [("a", "b", size)]) == pytest.approx([10 / wanted_mb_ps + 0.05])


def test_slow_start_doubles_the_window_every_round_trip():
    """Ten segments of 1448 bytes in the first 100 ms, then 20, 40, 80: 14,480 × (2^k − 1) bytes after k round trips."""
    first = 10 * 1448
    for rounds in (1, 2, 3, 4):
        size = first * (2**rounds - 1) - HEADER_BYTES
        (took_s,) = arrivals_s(long_line(without("slow_start")), [("a", "b", size)])
        assert took_s == pytest.approx(0.1 * rounds + 0.05, rel=0.02)


def test_slow_start_ends_at_the_rate_of_the_line():
    """The line carries 1.25 MB per round trip. Seven move 14,480 × 127 bytes; the rest goes at 12.5 MB/s."""
    (took_s,) = arrivals_s(long_line(without("slow_start")), [("a", "b", SIZE)])
    assert took_s == pytest.approx(0.7 + (100 * MB - 14_480 * 127) / 12.5e6 + 0.05, rel=0.02)


def test_a_connection_keeps_its_window_unless_it_restarts_after_an_idle_time():
    def second_s(tcp: str) -> float:
        world = World(long_line(tcp))

        async def main() -> float:
            listener = await world.host("b").listen("b:1000")
            near = await world.host("a").connect(listener.address)
            far = await listener.accept()
            for _ in range(2):
                started_s = world.loop.time()
                await near.send(Header(5 * MB), Phantom(5 * MB))
                await far.recv(lambda _: None)
                took_s = world.loop.time() - started_s
                await asyncio.sleep(1.0)
            return took_s

        return world.run(main())

    assert second_s(without("slow_start")) == pytest.approx(0.4 + 0.05, rel=0.01)
    assert second_s(f"{without('slow_start')}, restart_after_idle = true") > 0.9


MSS, RTT_S, LOSS = 1448, 0.1, 1e-4
CAPS = {
    "mathis": MSS / RTT_S * sqrt(1.5 / LOSS),
    "cubic": 1.054 * (RTT_S / LOSS) ** 0.75 * MSS / RTT_S,  # above Reno's here
    "bbr": 12.5e6 * (1 - LOSS),
}


@pytest.mark.parametrize("model", CAPS)
def test_loss_caps_the_rate(model):
    # Two lines lose half of LOSS each. A hit among a message's last packets costs 0.2 s more, once.
    scenario = long_line(f"{without('loss_model')}, loss_model = '{model}'", f"loss = {LOSS / 2:f}")
    (took_s,) = arrivals_s(scenario, [("a", "b", SIZE)])
    assert 0 <= took_s - (100e6 / CAPS[model] + 0.05) <= 0.2 + 1e-3


def test_with_many_losses_or_a_short_round_trip_cubic_is_as_fast_as_reno():
    """RFC 9438, 4.3. Over lines of 10 Mb/s that lose 0.2 % in 60 ms, a Linux stream had 0.64 MB/s."""
    tcp, loss, rtt_s = Tcp(loss_model="cubic"), 2e-3, 0.06
    hop = Hop((), rtt_s / 2, loss=loss)
    found = loss_bound_bytes_ps(tcp, MSS, rtt_s, Path((hop,)))
    assert found == pytest.approx(MSS / rtt_s * sqrt(1.5 / loss))
    assert found == pytest.approx(0.64e6, rel=0.1)


def test_between_stations_loss_caps_the_rate_of_the_air_that_they_share():
    tcp = f"{without('loss_model')}, loss_model = 'bbr'"
    lossy = wifi().replace("loss = 0", "loss = 0.4")
    (took_s,) = arrivals_s(home(lossy, f"{node('a', 'air')}, {node('b', 'air')}", tcp), [("a", "b", SIZE)])
    assert 0 <= took_s - (100 / (97.5 / 2 * 0.6) + 0.001) <= 0.2 + 1e-3  # a hit in the tail costs a time-out


def test_headers_leave_941_of_1000_megabits():
    (took_s,) = arrivals_s(home(ethernet("1 Gb/s", "0 ms"), TWO, without("headers")), [("a", "b", SIZE)])
    assert 800e6 / took_s == pytest.approx(941.48e6, rel=1e-4)  # × (1500 − 52) / (1500 + 38)


def test_acknowledgements_take_their_share_of_the_way_back():
    scenario = home(ethernet("1 Gb/s", "0 ms"), TWO, f"{without('ack_share')}, ack_share = 0.03")
    assert arrivals_s(scenario, [("a", "b", SIZE)]) == pytest.approx([0.8])
    # Each direction carries x of data and 0.03 x of the other's acknowledgements.
    assert arrivals_s(scenario, [("a", "b", SIZE), ("b", "a", SIZE)]) == pytest.approx([0.8 * 1.03] * 2)


# Delivery.


def test_jitter_delays_but_never_reorders():
    world = World(home(ethernet("1 Gb/s", "1 ms", ", jitter = '5 ms'"), TWO))

    async def main() -> list[tuple[int, float]]:
        listener = await world.host("b").listen("b:1000")
        near = await world.host("a").connect(listener.address)
        far = await listener.accept()
        started_s = world.loop.time()
        for step in range(200):
            await near.send(Header(0, step=step))
        return [((await far.recv(lambda _: None))[0].step, world.loop.time() - started_s) for _ in range(200)]

    found = world.run(main())
    times_s = [at_s for _, at_s in found]
    assert [step for step, _ in found] == list(range(200))
    assert times_s == sorted(times_s)
    assert times_s[0] >= 0.001
    assert len({round(at_s, 4) for at_s in times_s}) > 3
    # The latest of 200 draws of mean 5 ms is about 5 ms × ln 200 = 26 ms.
    assert 0.012 < times_s[-1] < 0.070


def test_a_short_message_waits_behind_the_buffer_that_others_have_filled():
    flows = [("a", "b", 10 * MB), ("a", "b", 1000)]
    _, empty_s = arrivals_s(long_line(BARE), flows, last_after_s=0.5)
    _, full_s = arrivals_s(long_line(BARE, line="buffer = '125 kB'"), flows, last_after_s=0.5)
    assert full_s - empty_s == pytest.approx(2 * 0.01, rel=0.01)  # 125 kB at 12.5 MB/s, up and down


def test_a_transfer_that_shared_a_line_has_waited_for_others_in_its_buffer_already():
    """The line carries the bytes of both by then, in whatever order they stood in its buffer."""
    flows = [("a", "b", 10 * MB), ("a", "b", MB - HEADER_BYTES)]
    _, took_s = arrivals_s(long_line(BARE, line="buffer = '125 kB'"), flows)
    assert took_s == pytest.approx(2 * MB / 12.5e6 + 0.05, rel=0.01)


def test_data_both_ways_slow_each_other_where_acknowledgements_wait_in_the_buffer():
    """The line idles for 0.85 round trips of 100 ms with each window: 1.25 MB in flight, and as much in the queue."""
    one_way, both_ways = [("a", "b", 10 * MB)], [("a", "b", 10 * MB), ("b", "a", 10 * MB)]
    (alone_s,) = arrivals_s(long_line(BARE, line="buffer = '1.25 MB'"), one_way)
    assert arrivals_s(long_line(BARE), both_ways) == pytest.approx([alone_s] * 2, rel=1e-3)
    windows = 10 * MB / 2.5e6
    expected_s = alone_s + windows * 0.85 * 0.1
    assert arrivals_s(long_line(BARE, line="buffer = '1.25 MB'"), both_ways) == pytest.approx([expected_s] * 2, rel=0.1)


@pytest.mark.parametrize("size", [100, 500_000, 10 * MB])
def test_alone_on_a_line_nobody_waits_in_its_queue(size):
    # However long the queue is, the line carries all the time, so that the last byte is through after size / rate.
    (took_s,) = arrivals_s(long_line(BARE, line="buffer = '1 MB'"), [("a", "b", size - HEADER_BYTES)])
    assert took_s == pytest.approx(size / 12.5e6 + 0.05, rel=1e-3)


def test_others_fill_a_queue_with_no_more_than_they_have_sent():
    # Two pings at once: each finds at most the other before it.
    pings = [("a", "b", 1000 - HEADER_BYTES)] * 2
    took_s = arrivals_s(long_line(BARE, line="buffer = '1 MB'"), pings)
    assert max(took_s) <= 2 * 1000 / 12.5e6 + 0.05 + 2 * 1000 / 12.5e6 + 1e-6
