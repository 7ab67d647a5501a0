"""Scenarios that go to another process of the program."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hcsim.config import Training, load_scenario
from hcsim.config.file import pack_scenario, shipped_scenarios, unpack_scenario
from hcsim.config.machine import CATALOGUE
from hcsim.units import PositiveShare


@pytest.mark.parametrize("name", shipped_scenarios())
def test_a_scenario_comes_out_as_it_went_in(name: str) -> None:
    scenario = replace(load_scenario(name), training=Training(task="resnet50", batch="auto:12", lr=0.1))
    assert repr(unpack_scenario(pack_scenario(scenario))) == repr(scenario)


def test_a_machine_may_be_faster_than_a_file_may_say() -> None:
    scenario = load_scenario("mixed-home")
    faster = replace(CATALOGUE["M4"], efficiency_memory=PositiveShare(1.2))
    changed = replace(scenario, nodes=tuple(replace(node, machine=faster) for node in scenario.nodes))
    assert unpack_scenario(pack_scenario(changed)).nodes == changed.nodes
