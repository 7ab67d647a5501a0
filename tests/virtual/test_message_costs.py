"""Messages cost processor time, at both ends, one after the other."""

from __future__ import annotations

import asyncio
import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hcsim import Group, simulate
from hcsim.config import (
    CATALOGUE,
    Crash,
    Machine,
    MessageCosts,
    Node,
    Pause,
    Processor,
    Scenario,
    parse_scenario,
    write_scenario,
)
from hcsim.errors import ConfigError, Deadlock
from hcsim.runtime.channel import Phantom
from hcsim.runtime.frame import HEADER_BYTES, Header, Kind
from hcsim.runtime.host import Work
from hcsim.units import ByteRate, FlopRate, Seconds
from hcsim.virtual.channel import VirtualChannel
from hcsim.virtual.processor import SMALLEST_PIECE_BYTES, piece_bytes
from hcsim.virtual.world import World
from tests.switches import on_switch
from tests.virtual.faults.arena import connected, until

PLAIN = "slow_start = false, ack_share = 0, headers = false"
RATE_BPS = 125e6
LATENCY_S = 1e-4
SEND_S, RECEIVE_S = 30e-6, 50e-6
START_S = 1.0
NS = 1e-9


def costing(send_Bps: float = math.inf, receive_Bps: float = math.inf, operation_s: float = 0.0) -> MessageCosts:
    rates = ByteRate(send_Bps), ByteRate(receive_Bps)
    return MessageCosts(Seconds(SEND_S), Seconds(RECEIVE_S), Seconds(operation_s), *rates)


def machine(costs: MessageCosts | None, *, shares: bool = False) -> Machine:
    """A machine that computes one FLOP in a second."""
    return Machine(
        "costly", FlopRate(1.0), ByteRate(math.inf), efficiency_compute=1.0, overhead_s=Seconds(0), messages=costs,
        shares_processor=shares,
    )  # fmt: skip


def hosts(costs: MessageCosts | None, *names: str, shares: bool = False, tcp: str = PLAIN) -> Scenario:
    scenario = on_switch(names or ("a", "b"), effects="all", tcp=tcp)
    nodes = (replace(node, machine=machine(costs, shares=shares)) for node in scenario.nodes)
    return replace(scenario, nodes=tuple(nodes))


async def arrivals(world: World, *sizes: int, kind: Kind = Kind.CONTROL) -> list[float]:
    """When messages that `a` sends at once have been received, in seconds after the first was sent."""
    near, far = await connected(world)
    return await _arrivals(world, near, far, sizes, kind)


async def _arrivals(
    world: World, near: VirtualChannel, far: VirtualChannel, sizes: tuple[int, ...], kind: Kind
) -> list[float]:
    came: list[float] = []

    async def receive() -> None:
        for number, _ in enumerate(sizes):
            header, _ = await far.recv(lambda _: None)
            assert header.operation == number
            came.append(world.loop.time() - START_S)

    async def send() -> None:
        for number, size in enumerate(sizes):
            await near.send(Header(size, kind, operation=number), Phantom(size))

    await until(START_S)
    receiving = world.host("b").spawn(receive(), name="receiver")
    await world.host("a").spawn(send(), name="sender")
    await receiving
    return came


def one(scenario: Scenario, size: int) -> float:
    world = World(scenario)
    [at_s] = world.run(arrivals(world, size))
    return at_s


@pytest.mark.parametrize("size", [0, 1000, SMALLEST_PIECE_BYTES - HEADER_BYTES])
def test_a_message_of_one_piece_is_handled_sent_and_handled(size: int) -> None:
    whole = size + HEADER_BYTES
    expected_s = SEND_S + whole / 1e9 + whole / RATE_BPS + LATENCY_S + whole / 2e9 + RECEIVE_S
    assert one(hosts(costing(1e9, 2e9)), size) == pytest.approx(expected_s, abs=5 * NS)


@pytest.mark.parametrize("rates", [(1e9, 2e9), (1e8, 2e9), (1e9, 1e8), (6e7, 5e7)])
@pytest.mark.parametrize("pieces", [2, 5, 32])
def test_a_message_of_equal_pieces_takes_the_time_of_its_formula(pieces: int, rates: tuple[float, float]) -> None:
    size = pieces * SMALLEST_PIECE_BYTES - HEADER_BYTES
    stages_s = [SMALLEST_PIECE_BYTES / rate for rate in (rates[0], RATE_BPS, rates[1])]
    expected_s = SEND_S + sum(stages_s) + LATENCY_S + RECEIVE_S + (pieces - 1) * max(stages_s)
    assert one(hosts(costing(*rates)), size) == pytest.approx(expected_s, abs=3 * (pieces + 2) * NS)


@pytest.mark.parametrize("rates", [(1e9, 2e9), (1e8, 2e9), (1e9, 1e8), (6e7, 5e7), (math.inf, 1e9), (1e9, math.inf)])
@pytest.mark.parametrize("size", [2**18, 2**20, 7 * 2**20, 40 * 2**20])
def test_a_large_message_goes_through_its_stages_as_in_a_pipeline(size: int, rates: tuple[float, float]) -> None:
    whole = size + HEADER_BYTES
    piece = piece_bytes(whole)
    cut = [min(piece, whole - lo) for lo in range(0, whole, piece)]
    handled_s, left_s, received_s = SEND_S, 0.0, 0.0
    for part in cut:
        handled_s += part / rates[0]
        left_s = max(left_s, handled_s) + part / RATE_BPS
        received_s = max(received_s, left_s + LATENCY_S) + part / rates[1]
    assert one(hosts(costing(*rates)), size) == pytest.approx(received_s + RECEIVE_S, abs=4 * len(cut) * NS)


def test_messages_are_handled_one_after_the_other() -> None:
    world = World(hosts(costing()))
    first_s, second_s, third_s = world.run(arrivals(world, 0, 0, 0))
    assert first_s == pytest.approx(SEND_S + HEADER_BYTES / RATE_BPS + LATENCY_S + RECEIVE_S, abs=2 * NS)
    assert second_s - first_s == pytest.approx(RECEIVE_S, abs=2 * NS)  # the receiver is the slower one
    assert third_s - second_s == pytest.approx(RECEIVE_S, abs=2 * NS)


def test_a_receiver_handles_what_several_send_one_after_the_other() -> None:
    world = World(hosts(costing(), "a", "b", "c"))

    async def main() -> list[float]:
        ends = [await connected(world, "a", "b"), await connected(world, "c", "b")]
        came: list[float] = []

        async def receive(channel: VirtualChannel) -> None:
            await channel.recv(lambda _: None)
            came.append(world.loop.time() - START_S)

        await until(START_S)
        receiving = [world.host("b").spawn(receive(far), name="receiver") for _, far in ends]
        for near, _ in ends:
            near.host.spawn(near.send(Header(0, Kind.CONTROL)), name="sender")
        await asyncio.gather(*receiving)
        return came

    first_s, second_s = world.run(main())
    arrival_s = SEND_S + LATENCY_S + HEADER_BYTES / RATE_BPS
    assert first_s == pytest.approx(arrival_s + RECEIVE_S, abs=1e-6)
    assert second_s - first_s == pytest.approx(RECEIVE_S, abs=1e-6)


def test_tls_costs_a_time_per_byte_unless_it_is_switched_off() -> None:
    costs = replace(costing(1e9, 1e9), tls_send_rate_Bps=ByteRate(5e8), tls_receive_rate_Bps=ByteRate(2.5e8))
    size = 16_000 - HEADER_BYTES
    more_s = one(hosts(costs), size) - one(hosts(costs, tcp=f"{PLAIN}, tls = false"), size)
    assert more_s == pytest.approx(16_000 / 5e8 + 16_000 / 2.5e8, abs=5 * NS)


def test_an_operation_costs_once_and_not_what_a_waiting_host_has_done_already() -> None:
    operation_s = 200e-6
    world = World(hosts(costing(operation_s=operation_s)))
    first_s, second_s = world.run(arrivals(world, 0, 0, kind=Kind.DATA))
    plain_s = SEND_S + HEADER_BYTES / RATE_BPS + LATENCY_S + RECEIVE_S
    assert first_s == pytest.approx(plain_s + 0, abs=5 * NS)  # both were idle for a second
    # The next operation begins at once. Its sender has not waited, and its receiver has waited for a moment only.
    second_sent_s = SEND_S + operation_s + SEND_S
    waited_s = second_sent_s + LATENCY_S + HEADER_BYTES / RATE_BPS - first_s
    late_s = max(operation_s - waited_s, 0)
    assert second_s == pytest.approx(first_s + waited_s + late_s + RECEIVE_S, abs=5 * NS)


def test_kernels_and_messages_share_a_processor_where_the_machine_says_so() -> None:
    """While both have work, each has half of the processor."""

    def computed_s(shares: bool) -> tuple[float, float]:
        world = World(hosts(costing(1e6), shares=shares))

        async def main() -> tuple[float, float]:
            near, far = await connected(world)
            await until(START_S)
            receiving = world.host("b").spawn(far.recv(lambda _: None), name="receiver")
            computing = world.host("a").spawn(near.host.device.run(Work(1.0), lambda: None), name="work")
            size = 50_000 - HEADER_BYTES  # 50 ms at the sender
            await world.host("a").spawn(near.send(Header(size, Kind.CONTROL), Phantom(size)), name="sender")
            sent_s = world.loop.time() - START_S
            await computing
            done_s = world.loop.time() - START_S
            await receiving
            return sent_s, done_s

        return world.run(main())

    message_s = SEND_S + 0.05
    assert computed_s(shares=False) == pytest.approx((message_s, 1.0), abs=1e-8)
    assert computed_s(shares=True) == pytest.approx((2 * message_s, 1.0 + message_s), abs=1e-8)


def test_nodes_that_share_a_processor_have_equal_parts_of_its_cores() -> None:
    size = 50_000 - HEADER_BYTES

    def sent_s(cores: int) -> float:
        scenario = hosts(costing(1e6), "a", "b", "c", "d")
        nodes = tuple(replace(node, processor="vm") for node in scenario.nodes)
        world = World(replace(scenario, nodes=nodes, processors=(Processor("vm", cores),)))

        async def main() -> float:
            ends = [await connected(world, source, "d") for source in "abc"]
            await until(START_S)
            sending = [
                world.host(near.host.name).spawn(near.send(Header(size, Kind.CONTROL), Phantom(size)), name="sender")
                for near, _ in ends
            ]
            await asyncio.gather(*sending)
            return world.loop.time() - START_S

        return world.run(main())

    alone_s = SEND_S + 0.05
    assert sent_s(3) == pytest.approx(alone_s, abs=1e-7)
    assert sent_s(2) == pytest.approx(1.5 * alone_s, abs=1e-7)
    assert sent_s(1) == pytest.approx(3 * alone_s, abs=1e-7)


def test_a_crash_frees_the_cores_for_the_others() -> None:
    scenario = hosts(costing(1e6), "a", "b", "c", shares=True)
    nodes = tuple(replace(node, processor="vm") for node in scenario.nodes)
    crash = Crash(at_s=Seconds(START_S), node="b")
    world = World(replace(scenario, nodes=nodes, processors=(Processor("vm"),), faults=(crash,)))

    async def main() -> float:
        both = world.hosts[:2]
        computing = [host.spawn(host.device.run(Work(2.0), lambda: None), name=host.name) for host in both]
        await computing[0]
        return world.loop.time()

    assert world.run(main()) == pytest.approx(START_S + 1.5)


def test_a_frozen_host_sends_nothing() -> None:
    pause = Pause(at_s=Seconds(START_S + SEND_S / 2), node="a", duration_s=Seconds(2.0))
    world = World(replace(hosts(costing()), faults=(pause,)))
    [at_s] = world.run(arrivals(world, 0))
    assert at_s == pytest.approx(2.0 + SEND_S / 2 + HEADER_BYTES / RATE_BPS + LATENCY_S + RECEIVE_S, abs=1e-6)


def test_senders_that_both_fill_the_buffers_still_deadlock() -> None:
    world = World(hosts(costing(1e9, 1e9)))
    size = 20 * 2**20

    async def main() -> None:
        ends = await connected(world)
        sending = [end.host.spawn(end.send(Header(size), Phantom(size)), name="s") for end in ends]
        await asyncio.gather(*sending)

    with pytest.raises(Deadlock):
        world.run(main())


SIZES = st.lists(st.integers(0, 2**20), min_size=1, max_size=8)
BYTE_RATES = st.one_of(st.just(math.inf), st.floats(1e7, 1e10))


@settings(deadline=None, max_examples=40)
@given(sizes=SIZES, send_Bps=BYTE_RATES, receive_Bps=BYTE_RATES, operation_s=st.floats(0, 1e-3))
def test_costs_make_no_message_earlier_nor_change_the_order(
    sizes: list[int], send_Bps: float, receive_Bps: float, operation_s: float
) -> None:
    free, costly = World(hosts(None)), World(hosts(costing(send_Bps, receive_Bps, operation_s)))
    without = free.run(arrivals(free, *sizes, kind=Kind.DATA))
    found = costly.run(arrivals(costly, *sizes, kind=Kind.DATA))
    assert all(later >= earlier + SEND_S + RECEIVE_S - 1e-8 for earlier, later in zip(without, found, strict=True))
    assert all(later >= earlier + RECEIVE_S - 1e-8 for earlier, later in pairwise(found))


@settings(deadline=None, max_examples=40)
@given(sizes=SIZES, send_Bps=st.floats(1e7, 1e10), receive_Bps=st.floats(1e7, 1e10))
def test_processors_do_exactly_the_work_of_all_messages(sizes: list[int], send_Bps: float, receive_Bps: float) -> None:
    world = World(hosts(costing(send_Bps, receive_Bps)))

    async def main() -> tuple[int, int]:
        near, far = await connected(world)
        before = [_busy_ns(world, name) for name in "ab"]
        await _arrivals(world, near, far, tuple(sizes), Kind.CONTROL)
        return _busy_ns(world, "a") - before[0], _busy_ns(world, "b") - before[1]

    sent_ns, received_ns = world.run(main())
    total, count = sum(sizes) + len(sizes) * HEADER_BYTES, len(sizes)
    rounding_ns = 40 * count
    assert sent_ns == pytest.approx((count * SEND_S + total / send_Bps) * 1e9, abs=rounding_ns)
    assert received_ns == pytest.approx((count * RECEIVE_S + total / receive_Bps) * 1e9, abs=rounding_ns)


def _busy_ns(world: World, name: str) -> int:
    processor = world.host(name).processor
    assert processor is not None
    return processor.busy_ns


async def _all_reduces(group: Group) -> None:
    for size in (1000, 300_000, 9_000_000):
        await group.all_reduce(Phantom(size), algorithm="ring")


def test_the_same_seed_gives_the_same_trace_and_costs_another_one() -> None:
    scenario = hosts(costing(1e9, 1e9, 1e-4), "a", "b", "c")
    digests = {simulate(scenario, _all_reduces).trace_sha256 for _ in range(2)}
    free = simulate(hosts(None, "a", "b", "c"), _all_reduces).trace_sha256
    assert len(digests) == 1
    assert free not in digests


def test_costs_of_zero_change_nothing() -> None:
    free = simulate(hosts(None, "a", "b", "c"), _all_reduces)
    zero = simulate(hosts(MessageCosts(), "a", "b", "c"), _all_reduces)
    assert zero.trace_sha256 == free.trace_sha256


def test_a_collective_takes_the_costs_of_its_rounds() -> None:
    """A ring of three passes four messages one after the other, each of which is sent and received in between."""

    def took_s(costs: MessageCosts | None) -> float:
        async def program(group: Group) -> float:
            await group.all_reduce(Phantom(300), algorithm="ring")
            await asyncio.sleep(START_S - group.host.clock.now())
            await group.all_reduce(Phantom(300), algorithm="ring")
            return group.host.clock.now() - START_S

        return max(simulate(hosts(costs, "a", "b", "c"), program).values())

    assert took_s(costing()) - took_s(None) == pytest.approx(4 * (SEND_S + RECEIVE_S), rel=0.01)


def test_a_node_that_names_an_unknown_processor_is_refused_with_the_known_ones() -> None:
    text = """
    name = "shared"
    processor = [{ name = "vm", cores = 2 }]
    node = [{ name = "a", machine = "ideal", processor = "wm" }]
    """
    with pytest.raises(ConfigError, match=r'node\[0\]\.processor = "wm".*vm'):
        parse_scenario(text, "shared")


def test_a_shared_processor_survives_being_written_to_a_file() -> None:
    scenario = on_switch(("a", "b"), effects="all")
    profile = replace(CATALOGUE["M4"], messages=costing(1e9, 2e9, 1e-4), shares_processor=True)
    nodes = tuple(Node(node.name, profile, links=node.links, processor="vm") for node in scenario.nodes)
    shared = replace(scenario, nodes=nodes, processors=(Processor("vm", 2),))
    again = parse_scenario(write_scenario(shared), "again")
    assert again.processors == shared.processors
    assert [(node.machine, node.processor) for node in again.nodes] == [(profile, "vm")] * 2
