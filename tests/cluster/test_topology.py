"""What machines measure of themselves and of each other, held against what the scenario says they are."""

from __future__ import annotations

import asyncio
from itertools import permutations
from math import inf, nan
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from hcsim.cli.app import app
from hcsim.cluster.probe import SCHEMA, DeviceSpeed, Found, LinkSpeed, Prober, Took, measure_speed
from hcsim.cluster.topology import Topology, TopologyEdge, TopologyNode, describe, draw, fastest, survey, table
from hcsim.collectives.ring_order import ring_order
from hcsim.config import CATALOGUE, Scenario, idealised, load_scenario, parse_scenario
from hcsim.errors import RemoteProtocolError, UsageError
from hcsim.launch.virtual_cluster import measure_topology
from hcsim.real.host import RealHost, RealOptions
from hcsim.runtime.host import Chip, Interface, KernelGroup, Medium, Work
from hcsim.runtime.work_time import seconds
from hcsim.virtual.links import ResourceGraph
from hcsim.virtual.world import World

MIXED = load_scenario("mixed-home")
E = Medium.ETHERNET


@pytest.fixture(scope="module")
def mixed() -> Topology:
    return measure_topology(MIXED)


def wires_of(scenario: Scenario, way: TopologyEdge) -> tuple[float, float, float]:
    """Bandwidth there and back, and latency, as the scenario has them."""
    wires = ResourceGraph(scenario)
    there = wires.route(way.source, way.target, ("", way.interface))
    assert there is not None
    back = wires.route(way.target, way.source, (there.arrives_by, there.medium))
    assert back is not None
    return there.rate_bytes_ps, back.rate_bytes_ps, (there.latency_s + back.latency_s) / 2


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["mixed-home", "four-macs-1gbe", "two-homes-wan"])
def test_ideal_lines_are_measured_to_the_percent(name: str) -> None:
    scenario = idealised(load_scenario(name))
    topology = measure_topology(scenario)
    assert len(topology.ways) >= len(scenario.nodes) * (len(scenario.nodes) - 1)
    for way in topology.ways:
        there_Bps, back_Bps, latency_s = wires_of(scenario, way)
        assert (way.line.there_Bps, way.line.back_Bps) == pytest.approx((there_Bps, back_Bps), rel=0.01)
        assert way.line.latency_s == pytest.approx(latency_s, rel=0.01, abs=5e-6)


@pytest.mark.slow
def test_lines_with_all_effects_are_measured_to_a_few_percent(mixed: Topology) -> None:
    for way in mixed.ways:
        there_Bps, back_Bps, latency_s = wires_of(MIXED, way)
        assert (way.line.there_Bps, way.line.back_Bps) == pytest.approx((there_Bps, back_Bps), rel=0.05)
        if Medium.WIFI not in way.media:  # there jitter comes on top
            assert way.line.latency_s == pytest.approx(latency_s, rel=0.03)


@pytest.mark.slow
def test_a_machine_is_as_fast_as_its_profile(mixed: Topology) -> None:
    for node, configured in zip(mixed.nodes, MIXED.nodes, strict=True):
        machine = CATALOGUE[str(configured.machine)]
        product, total = (
            KernelGroup("matmul", 2.0 * 1024**3, 12.0 * 1024**2),
            KernelGroup("copy", 2.0**22, 12.0 * 2**22),
        )
        assert node.chip == Chip(machine.name, configured.memory_bytes)
        assert node.speed.flops == pytest.approx(product.flops / seconds(machine, Work(groups=(product,))), 1e-4)
        assert node.speed.memory_Bps == pytest.approx(total.moved_bytes / seconds(machine, Work(groups=(total,))), 1e-4)


def test_a_machine_that_takes_no_time_is_infinitely_fast() -> None:
    world = World(idealised(MIXED))
    assert world.run(measure_speed(world.hosts[0])) == DeviceSpeed(inf, inf)


def test_the_memory_of_a_machine_is_what_its_profile_says() -> None:
    text = """
    name = "one"
    medium = [{ kind = "ethernet", name = "switch", rate = "1 Gb/s" }]
    [[node]]
    name = "mine"
    machine = { name = "M9", peak = "1 TFLOPS", memory = "100 GB/s", ram = "24 GiB" }
    links = ["switch"]
    """
    [node] = measure_topology(parse_scenario(text, "test")).nodes
    assert node.chip == Chip("M9", 24 * 2**30)


@pytest.mark.slow
def test_every_way_into_a_machine_is_known_and_the_same_seed_measures_the_same(mixed: Topology) -> None:
    ways = [(way.source, way.interface) for way in mixed.ways if way.target == "studio-2"]
    assert ways == [("laptop", "switch"), ("mini", "switch"), ("studio-1", "bridge0"), ("studio-1", "switch")]
    assert measure_topology(MIXED).ways == mixed.ways
    assert mixed.graph.number_of_edges("studio-1", "studio-2") == 4
    [cable] = [data for *_, data in mixed.graph.edges("studio-1", data=True) if data["bandwidth_Bps"] > 1e9][:1]
    assert cable["medium"] is Medium.THUNDERBOLT


def test_nodes_and_ways_can_be_sent(mixed: Topology) -> None:
    sent = msgspec.msgpack.encode((mixed.nodes, mixed.ways))
    nodes, ways = msgspec.msgpack.decode(sent, type=tuple[tuple[TopologyNode, ...], tuple[TopologyEdge, ...]])
    assert (nodes, ways) == (mixed.nodes, mixed.ways)
    assert Topology(nodes, ways).addresses("mini", ["studio-1", "laptop", "mini"], 9) == (
        "studio-1%switch:9", "laptop%air:9", "mini:9",
    )  # fmt: skip


def test_its_matrices_order_a_ring_that_no_other_order_beats(mixed: Topology) -> None:
    names = [node.name for node in mixed.nodes]
    figures = mixed.matrices(names)
    assert figures.bandwidth_Bps[0][1] > 3 * figures.bandwidth_Bps[1][0] > 0
    assert all(figures.bandwidth_Bps[i][i] == 0 for i in range(len(names)))

    def slowest(order: tuple[int, ...]) -> float:
        return min(figures.bandwidth_Bps[a][b] for a, b in zip(order, (*order[1:], order[0]), strict=True))

    found = ring_order(figures.bandwidth_Bps, figures.latency_s)
    assert slowest(found) == max(slowest((0, *rest)) for rest in permutations(range(1, len(names))))


def way(interface: str, medium: Medium, there: float, back: float, latency_s: float) -> TopologyEdge:
    return TopologyEdge("a", "b", interface, f"b%{interface}", (medium, medium), LinkSpeed(latency_s, there, back))


@pytest.mark.parametrize(
    ("ways", "best"),
    [
        ([way("en0", Medium.WIFI, 90, 90, 0.004), way("bridge0", Medium.THUNDERBOLT, 2000, 600, 0.0002)], "bridge0"),
        ([way("en0", E, 100, 100, 0.2), way("en1", E, 95, 99, 0.1)], "en1"),
        ([way("en0", E, 100, 100, 0.2), way("en1", E, 80, 100, 0.1)], "en0"),
        ([way("a", Medium.WIFI, 100, 100, 0.1), way("b", Medium.THUNDERBOLT, 100, 100, 0.1)], "b"),
        ([way("fast-there", E, 1000, 10, 0.1), way("even", E, 100, 100, 0.1)], "even"),
    ],
)
def test_the_best_way_is_the_fastest_then_the_nearest(ways: list[TopologyEdge], best: str) -> None:
    for order in (ways, ways[::-1]):
        chosen = fastest(order)
        assert chosen is not None
        assert chosen.interface == best
    assert fastest([]) is None


def test_a_way_to_nowhere_is_refused() -> None:
    node = TopologyNode("a", Chip("M1"), DeviceSpeed(1.0, 1.0), ())
    with pytest.raises(UsageError, match="leads to b"):
        Topology([node], [way("en0", E, 1, 1, 1)])


@pytest.mark.slow
def test_real_machines_measure_each_other_over_loopback() -> None:
    async def main() -> tuple[TopologyNode, list[TopologyEdge], LinkSpeed | None]:
        async with RealHost(RealOptions("left")) as left, RealHost(RealOptions("right")) as right:
            listener = await right.listen("127.0.0.1:0")
            right.spawn(Prober(right, "right").serve(listener), name="answer probes")
            us = await describe(left, "left")
            port = int(listener.address.rpartition(":")[2])
            there = Interface("en5", Medium.ETHERNET, addresses=("127.0.0.1", "fe80::1"))
            other = TopologyNode(
                "right", us.chip, us.speed, (there, Interface("lo0", Medium.LOOPBACK, addresses=("127.0.0.1",)))
            )
            prober = Prober(left, "left")
            ways = await survey(prober, us, [other], port)
            await listener.close()
            return us, ways, await prober.measure("right", f"127.0.0.1:{port}")

    us, ways, gone = asyncio.run(main())
    assert gone is None
    assert us.chip.memory_bytes
    assert 1e8 < us.speed.flops < inf
    assert 1e8 < us.speed.memory_Bps < inf
    [found] = ways
    assert (found.source, found.target, found.interface, found.address) == ("left", "right", "en5", "127.0.0.1")
    assert 1e6 < found.bandwidth_Bps < inf
    assert 0 < found.line.latency_s < 1


@pytest.mark.slow
def test_probes_from_all_sides_at_once_neither_stick_nor_disturb_each_other() -> None:
    """All nodes want each other's turn; each pair measures alone, so all find the line that is there."""
    scenario = load_scenario("four-macs-1gbe")
    world = World(scenario)

    async def main() -> list[LinkSpeed | None]:
        probers = {host.name: Prober(host, host.name) for host in world.hosts}
        for host in world.hosts:
            listener = await host.listen(f"{host.name}:9")
            host.spawn(probers[host.name].serve(listener), name="serve")
        measuring = [
            one.spawn(probers[one.name].measure(other.name, f"{other.name}:9"), name="measure")
            for one, other in permutations(world.hosts, 2)
        ]
        return await asyncio.gather(*measuring)

    lines = world.run(main())
    assert len(lines) == 12
    for line in lines:
        assert line is not None
        assert (line.there_Bps * 8, line.back_Bps * 8) == pytest.approx((0.941e9, 0.941e9), rel=0.02)


def test_a_prober_that_dies_gives_its_turn_back() -> None:
    world = World(load_scenario("four-macs-1gbe"))

    async def main() -> LinkSpeed | None:
        first, second, third, _ = world.hosts
        listener = await first.listen(f"{first.name}:9")
        first.spawn(Prober(first, first.name).serve(listener), name="serve")
        dying = second.spawn(Prober(second, second.name).measure(first.name, f"{first.name}:9"), name="measure")
        await second.clock.sleep(0.05)
        dying.cancel()
        return await Prober(third, third.name).measure(first.name, f"{first.name}:9")

    assert world.run(main()) is not None


@pytest.mark.parametrize("figure", [nan, -1.0, -inf])
def test_a_figure_that_no_measurement_gives_is_the_peers_fault(figure: float) -> None:
    lines = LinkSpeed(figure, 1e8, 1e8), LinkSpeed(0.1, figure, 1e8), LinkSpeed(0.1, 1e8, figure)
    for message in (Took(figure), *map(Found, lines)):
        with pytest.raises(RemoteProtocolError, match="mini does not measure as we do"):
            SCHEMA.decode(msgspec.msgpack.encode(message), "mini")
    endless = Found(LinkSpeed(0.0, inf, inf))
    assert SCHEMA.decode(msgspec.msgpack.encode(endless), "mini") == endless


@pytest.mark.slow
def test_the_table_names_what_is_best(mixed: Topology) -> None:
    lines = table(mixed).splitlines()
    [cable] = [line for line in lines if line.startswith("*  studio-1  studio-2")]
    assert cable.split() == ["*", "studio-1", "studio-2", "bridge0", "thunderbolt", "16.2", "5.25", "0.20", "ms"]
    assert [line.split() for line in lines[1:2]] == [["studio-1", "M2", "Max", "64", "GiB", "8.48", "260"]]


@pytest.mark.slow
def test_it_can_be_drawn(mixed: Topology, tmp_path: Path) -> None:
    import matplotlib.image

    file = tmp_path / "home.png"
    draw(mixed, file)
    pixels = np.asarray(matplotlib.image.imread(file))[:, :, :3]
    for colour in ((0x6A, 0x3D, 0x9A), (0x1F, 0x78, 0xB4), (0xFF, 0x7F, 0x00)):  # a line of each kind is there
        near = np.abs(pixels * 255 - np.array(colour)).max(axis=2) < 3
        assert near.sum() > 300


def test_the_command_shows_it_and_refuses_what_cannot_be_drawn(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["topology", "two-macs-wifi", "--picture", str(tmp_path / "home.svg")])
    assert shown.exit_code == 0, shown.output
    assert "wifi" in shown.output
    assert (tmp_path / "home.svg").read_text(encoding="utf-8").startswith("<?xml")
    refused = CliRunner().invoke(app, ["topology", "two-macs-wifi", "--picture", "home.txt"])
    assert (refused.exit_code, "ends in .png, .svg, .pdf" in refused.output) == (2, True)
