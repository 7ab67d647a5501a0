"""`hcsim probe --cluster` has the members of a running cluster measure the links between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hcsim.config import Ethernet, Scenario, load_scenario
from hcsim.units import BitRate
from tests.real.namespaces import Port
from tests.real.together import Together, together

KBIT, QUEUE_BYTES, LOSS = 50_000, 256 << 10, 0.005


@pytest.mark.slow
def test_the_members_find_what_their_cables_carry_in_each_direction(tmp_path: Path) -> None:
    with together(tmp_path, "ab") as cluster:
        cluster.write(2, 100_000, "")
        rates = {"a": (100, 100), "b": (80, 30)}
        for machine in cluster.lan:
            there, back = rates[machine.name]
            machine.slow(1000 * there, "256kb", 1000 * back, "20ms")
        cluster.write(3, 10, "")  # a third one never comes: the two are idle
        processes = cluster.start("a", "b")
        processes[0].says("here so far: ., .")
        twin = tmp_path / "twin.toml"
        probing = cluster.lan["a"].hcsim("probe", "--cluster", "-o", str(twin))
        assert probing.ends() == 0, probing.text
        assert "Traceback" not in probing.text
        assert "predicted" in probing.text
        again = cluster.lan["b"].hcsim("probe", "--cluster", "-o", str(twin), "--device", "cpu")
        assert again.ends() == 2
        assert "--device" in again.text
    scenario = load_scenario(twin)
    nodes = sorted(scenario.nodes, key=lambda node: node.name)  # in the file they are in the order of their ids
    assert [node.name for node in nodes] == ["a", "b"]
    [switch] = scenario.media
    assert isinstance(switch, Ethernet)
    assert switch.basis is not None
    assert switch.basis.kind == "measured"
    [one], [other] = (node.links for node in nodes)
    expected = {(one, "up"): 30, (one, "down"): 80, (other, "up"): 80, (other, "down"): 30}
    for (link, way), mbps in expected.items():
        found: BitRate = getattr(link, f"{way}_bps")
        assert found == pytest.approx(mbps * 1e6, rel=0.05), (way, mbps)


def probed(cluster: Together, folder: Path) -> Scenario:
    """The twin that idle members measure."""
    names = [machine.name for machine in cluster.lan]
    cluster.write(len(names) + 1, 10, "")
    processes = cluster.start(*names)
    processes[0].says("here so far: " + ", ".join("." for _ in names))
    probing = cluster.lan[names[0]].hcsim("probe", "--cluster", "-o", str(folder / "twin.toml"))
    assert probing.ends() == 0, probing.text
    return load_scenario(folder / "twin.toml")


@pytest.mark.namespaces_long
def test_the_queue_of_a_port_is_found(tmp_path: Path) -> None:
    with together(tmp_path, "abc") as cluster:
        for machine in cluster.lan:
            machine.congestion_control("reno")  # which fills queues, and is allowed everywhere
            machine.shape(Port(KBIT, QUEUE_BYTES))
        [switch] = probed(cluster, tmp_path).media
    assert isinstance(switch, Ethernet)
    assert switch.queue_bytes == pytest.approx(QUEUE_BYTES, rel=0.25)
    assert switch.queue_basis is not None
    assert switch.queue_basis.kind == "measured"
    assert switch.loss < 0.001


@pytest.mark.namespaces_long
def test_the_loss_of_a_line_is_found(tmp_path: Path) -> None:
    with together(tmp_path, "ab") as cluster:
        for machine in cluster.lan:
            machine.shape(Port(KBIT, QUEUE_BYTES))
            machine.lose_share(LOSS)
        [switch] = probed(cluster, tmp_path).media
    assert isinstance(switch, Ethernet)
    assert switch.loss == pytest.approx(LOSS, rel=0.6)  # some twenty of four thousand segments
