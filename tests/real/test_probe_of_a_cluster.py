"""`hcsim probe --cluster` has the members of a running cluster measure the links between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hcsim.config import Ethernet, load_scenario
from hcsim.units import BitRate
from tests.real.together import together

pytestmark = pytest.mark.slow


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
