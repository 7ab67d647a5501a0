"""What nodes tell of their cluster in metrics, held against what happened to it."""

from __future__ import annotations

import asyncio
import socket
from itertools import pairwise
from pathlib import Path
from urllib.request import urlopen

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families as read_text
from typer.testing import CliRunner

from hcsim.cli.app import app
from hcsim.cluster.membership_source import NodeInfo
from hcsim.cluster.node import ClusterNode
from hcsim.config import Cluster, Crash, Partition, Training
from hcsim.launch.real import RealNode, train_in_cluster
from hcsim.launch.virtual_cluster import simulate_cluster
from hcsim.node import ClusterJob
from hcsim.real.keys import new_secret, save_secret
from hcsim.telemetry.metrics import HistogramSeries, HostMetrics
from hcsim.training.run import Point, Report, Run
from hcsim.units import PositiveSeconds, Seconds
from hcsim.virtual.host import VirtualHost
from hcsim.virtual.world import HostCrashed, World
from tests.cluster.nodes import Party
from tests.conftest import free_addresses
from tests.switches import on_switch

ABC = ("a", "b", "c")
BEAT = Cluster(preset="low_latency").beat
CRASH_S, END_S = 3.0, 10.0


@pytest.fixture(scope="module")
def crashed() -> Party:
    """Three nodes, of which one crashes after a while."""
    return Party(ABC, [Crash(at_s=Seconds(CRASH_S), node="b")]).run(END_S)


def of(party: Party, name: str) -> HostMetrics:
    return party.world.host(name).metrics


def by_label(metrics: HostMetrics, name: str) -> dict[str, float]:
    return {labels[0][1]: getattr(series, "value", 0) for metric, labels, series in metrics.series()
            if metric.name == name}  # fmt: skip


def seconds(metrics: HostMetrics, name: str) -> tuple[int, float]:
    """How many values a histogram has, and their sum."""
    [found] = [series for metric, _, series in metrics.series() if metric.name == name]
    assert isinstance(found, HistogramSeries)
    return found.count, found.sum


def views_told(party: Party, name: str) -> int:
    """How many views with others a host had to say something about."""
    return len([what for who, what in party.told if who == name and what.startswith(("view ", "here so far"))])


@pytest.mark.parametrize("name", ["a", "c"])
def test_gauges_show_the_view_that_a_crash_left(crashed: Party, name: str) -> None:
    metrics, view = of(crashed, name), crashed.views[name][-1]
    gauges = ("peers_known", "peers_connected", "peers_suspected", "view_epoch", "view_members", "leader")
    assert [metrics.value(f"hcsim_{gauge}") for gauge in gauges] == [2, 1, 0, view.epoch, 2, name == "a"]


def test_who_has_left_leads_nobody() -> None:
    party = Party(ABC)
    party.meanwhile = dict.fromkeys(ABC, ClusterNode.leave)
    party.run(3.0)
    assert {name: of(party, name).value("hcsim_leader") for name in ABC} == dict.fromkeys(ABC, 0)


@pytest.mark.parametrize("name", ["a", "c"])
def test_every_view_is_counted_by_its_reason_and_who_came_and_went(crashed: Party, name: str) -> None:
    metrics = of(crashed, name)
    changes = by_label(metrics, "hcsim_view_changes_total")
    assert (changes.pop("alone"), changes["lost"]) == (1, 1)
    assert sum(changes.values()) == views_told(crashed, name)
    assert metrics.value("hcsim_evictions_total") == 1
    assert metrics.value("hcsim_joins_total") == (2 if name == "a" else 0)  # a took in the others


def test_whoever_leads_has_its_rounds_decided_and_the_others_answer_them(crashed: Party) -> None:
    views = views_told(crashed, "a")
    assert by_label(of(crashed, "a"), "hcsim_elections_total")["decided"] == views
    assert by_label(of(crashed, "c"), "hcsim_elections_total")["decided"] == 0
    answers = by_label(of(crashed, "c"), "hcsim_ballots_total")
    assert answers["promised"] >= answers["accepted"] >= 1
    assert by_label(of(crashed, "a"), "hcsim_ballots_total")["accepted"] == views


@pytest.mark.parametrize(("name", "other"), [("a", "c"), ("c", "a")])
def test_heartbeats_are_counted_and_timed_for_each_node(crashed: Party, name: str, other: str) -> None:
    metrics = of(crashed, name)
    sent = by_label(metrics, "hcsim_heartbeats_sent_total")
    assert sent[f"{other}-{other}"] == pytest.approx(END_S / BEAT.interval_s, abs=2)
    missed = by_label(metrics, "hcsim_heartbeats_missed_total")
    assert list(missed) == ["b-b"]
    assert 1 <= missed["b-b"] <= BEAT.failures
    way_s = crashed.world.topology.path(name, other).latency_s
    latency = by_label(metrics, "hcsim_heartbeat_latency_seconds")
    assert latency[f"{other}-{other}"] == pytest.approx(2 * way_s, rel=0.2)
    phi = by_label(metrics, "hcsim_heartbeat_phi")
    assert phi[f"{other}-{other}"] < BEAT.phi < phi["b-b"]


@pytest.mark.parametrize("name", ["a", "c"])
def test_detection_is_timed_from_the_last_sign_of_life(crashed: Party, name: str) -> None:
    count, silence_s = seconds(of(crashed, name), "hcsim_detection_seconds")
    suspected_after_s = crashed.when_s[name, crashed.views[name][-1].epoch] - CRASH_S
    assert count == 1
    assert BEAT.interval_s < silence_s <= BEAT.timeout_s
    assert silence_s == pytest.approx(suspected_after_s, abs=BEAT.interval_s + 0.1)  # the last beat came before


def test_members_that_cannot_be_heard_are_suspected_until_a_view_is_without_them() -> None:
    """Two of four are cut off: neither side may go on, so the view stays, and half of it is suspected."""
    cut = Partition(sides=(("a", "b"), ("c", "d")), at_s=Seconds(3), duration_s=PositiveSeconds(30))
    party = Party("abcd", [cut], quorum="majority").run(9)
    for name in "abcd":
        assert of(party, name).value("hcsim_peers_suspected") == 2
        assert of(party, name).value("hcsim_view_members") == 4
        assert of(party, name).value("hcsim_evictions_total") == 0
    assert by_label(of(party, "a"), "hcsim_elections_total")["given_up"] > 0


def test_a_machine_with_a_copied_key_is_refused_and_counted() -> None:
    world = World(on_switch(ABC))

    async def live(host: VirtualHost) -> None:
        identity = "b" if host.name == "c" else host.name
        await host.clock.sleep(2.0 if host.name == "c" else 0.0)
        me = NodeInfo(identity, host.rng("boot").getrandbits(47), host.name, f"{host.name}:1", f"{host.name}:2")
        node = ClusterNode(host, me, Cluster(nodes=2, preset="low_latency"))
        await node.start()
        await host.clock.sleep(8.0 - world.loop.time())
        await node.stop()

    assert world.run_on_all(live) == [None, None, None]
    refusals = [by_label(host.metrics, "hcsim_admission_refusals_total") for host in world.hosts]
    assert refusals[0]["copied_identity"] >= 1
    assert [host.metrics.value("hcsim_view_members") for host in world.hosts] == [2, 2, 1]


@pytest.mark.slow
def test_recovery_lasts_from_the_failure_to_the_next_step() -> None:
    scenario = on_switch(ABC, [Crash(at_s=Seconds(20), node="b")])
    scenario = replace(scenario, cluster=Cluster(preset="low_latency"))
    outcome = simulate_cluster(scenario, Training(task="gpt2", steps=6))
    first, lost, third = outcome.results
    assert isinstance(lost, HostCrashed)
    for name, report in (("a", first), ("c", third)):
        assert isinstance(report, Report)
        count, lasted_s = seconds(outcome.metrics[name], "hcsim_recovery_seconds")
        longest_s = max(after.time_s - before.time_s for before, after in pairwise(report.points))
        assert count == 1
        assert 0 < lasted_s < longest_s
        assert by_label(outcome.metrics[name], "hcsim_admission_refusals_total") == {}


class Scraper:
    """Reads the figures that are served at an address, once there is a first step, and then leaves."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/metrics"
        self.leaving = asyncio.Event()
        self.reading: asyncio.Future[str] | None = None

    def point(self, rank: int, point: Point) -> None:
        if self.reading is None:
            self.reading = asyncio.get_running_loop().run_in_executor(None, self._read)
            self.reading.add_done_callback(lambda _: self.leaving.set())

    def finished(self, run: Run) -> None:
        """It has read all that it wanted."""

    def _read(self) -> str:
        with urlopen(self._url, timeout=10) as answer:
            return str(answer.read().decode())


@pytest.mark.slow
def test_prometheus_finds_a_node_of_a_real_cluster(tmp_path: Path) -> None:
    save_secret(tmp_path, "home", new_secret())
    served, *free = free_addresses(3)
    control, data = (int(address.rpartition(":")[2]) for address in free)
    cluster = Cluster(nodes=1, discover=False, discovery_port=control, gradient_port=data)
    node = RealNode(tmp_path, hosts=("127.0.0.1",), metrics_at=served)

    async def main() -> str:
        scraper = Scraper(served)
        plan = ClusterJob(cluster, Training(task="convex", steps=1_000_000), 1)
        await train_in_cluster(node, plan, observer=scraper, leaving=scraper.leaving)
        assert scraper.reading is not None
        return await scraper.reading

    families = {family.name: family for family in read_text(asyncio.run(main()))}
    assert [sample.value for sample in families["hcsim_view_members"].samples] == [1]
    assert [sample.value for sample in families["hcsim_leader"].samples] == [1]


@pytest.mark.slow
@pytest.mark.parametrize(("port", "words"), [("x", "give a port, or host:port"), ("{busy}", "cannot be served at")])
def test_a_node_of_a_cluster_takes_a_place_for_metrics_as_a_rank_does(tmp_path: Path, port: str, words: str) -> None:
    save_secret(tmp_path, "home", new_secret())
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = port.format(busy=busy.getsockname()[1])
        arguments = ["run", "--real", "--task", "convex", "--nodes", "1", "--set", f"metrics={port}"]
        result = CliRunner().invoke(app, arguments, env={"HCSIM_HOME": str(tmp_path)})
    assert (result.exit_code, words in result.output) == (2, True), result.output
