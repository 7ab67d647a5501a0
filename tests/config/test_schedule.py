"""Faults drawn at random: what every schedule promises, and that it can be written down and read back."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hcsim.config import (
    FAULTS,
    AnyFault,
    CopiedIdentity,
    Crash,
    Restart,
    Scenario,
    load_scenario,
    parse_scenario,
    write_faults,
)
from hcsim.config.schedule import DEFAULT_KINDS, random_faults
from hcsim.errors import ConfigError, UsageError
from hcsim.virtual.world import HostCrashed, World
from tests.virtual.faults.arena import HOME, home

DURATION_S = 100.0


def schedule(seed: int, scenario: Scenario | None = None) -> tuple[AnyFault, ...]:
    where = scenario or home()
    return random_faults(seed, where.nodes, where.media, DURATION_S)


def end_s(fault: AnyFault) -> float:
    return fault.at_s + sum(getattr(fault, name, None) or 0.0 for name in ("duration_s", "down_s", "slow_for_s"))


@given(st.integers())
def test_a_schedule_is_short_in_the_order_of_time_and_healed_in_time(seed):
    faults = schedule(seed)
    assert 1 <= len(faults) <= 6
    assert all(one.at_s <= other.at_s for one, other in pairwise(faults))
    assert all(end_s(fault) <= 0.6 * DURATION_S + 1e-9 for fault in faults)
    assert faults == schedule(seed)


@given(st.integers(), st.sampled_from(["home", "two-macs-wifi", "four-macs-1gbe", "mixed-home"]))
def test_who_crashes_comes_back_and_a_minority_forgets(seed, name):
    scenario = home() if name == "home" else load_scenario(name)
    faults = schedule(seed, scenario)
    for crash in faults:
        if isinstance(crash, Crash):
            assert any(isinstance(f, Restart) and f.node == crash.node and f.at_s > crash.at_s for f in faults)
    forgetful = {
        fault.node
        for fault in faults
        if isinstance(fault, CopiedIdentity) or (isinstance(fault, Restart) and fault.state != "kept")
    }
    assert 2 * len(forgetful) < len(scenario.nodes)
    for copy in faults:
        if isinstance(copy, CopiedIdentity):
            own = [f for f in faults if isinstance(f, Restart) and f.node == copy.node and f.state != "kept"]
            assert {f.state for f in own} == {"lost"}
            assert any(f.at_s > copy.at_s + copy.down_s for f in own)


@given(st.integers())
def test_a_schedule_is_written_as_it_is_read(seed):
    faults = schedule(seed)
    assert parse_scenario(HOME + write_faults(faults), "home").faults == faults


@pytest.mark.slow
def test_every_kind_and_every_state_can_be_drawn():
    drawn = [fault for seed in range(600) for fault in schedule(seed)]
    assert {type(fault) for fault in drawn} == {FAULTS[kind] for kind in DEFAULT_KINDS}
    states = [fault.state for fault in drawn if isinstance(fault, Restart)]
    assert states.count("kept") > states.count("lost") > states.count("stale") > 0
    assert any(fault.slow < 1 for fault in drawn if isinstance(fault, Restart))


@pytest.mark.slow
def test_every_other_kind_is_drawn_when_it_is_named_and_heals_in_time():
    for kind in FAULTS:
        for seed in range(20):
            faults = random_faults(seed, home().nodes, home().media, DURATION_S, kinds=(kind,))
            assert any(isinstance(fault, FAULTS[kind]) for fault in faults)
            assert all(end_s(fault) <= 0.6 * DURATION_S + 1e-9 for fault in faults)
            assert not any(fault.is_for_good for fault in faults)
            assert parse_scenario(HOME + write_faults(faults), "home").faults == faults


def test_a_share_of_the_faults_lasts_for_good_and_all_else_is_drawn_as_before():
    nodes, media = home().nodes, home().media
    for seed in range(20):
        healing = random_faults(seed, nodes, media, DURATION_S, tuple(FAULTS))
        lasting = random_faults(seed, nodes, media, DURATION_S, tuple(FAULTS), for_good=1.0)
        for one, other in zip(healing, lasting, strict=True):
            assert other in (one, replace(one, duration_s=None) if hasattr(one, "duration_s") else one)
        assert parse_scenario(HOME + write_faults(lasting), "home").faults == lasting
    drawn = [f for seed in range(200) for f in random_faults(seed, nodes, media, DURATION_S, ("pause",), for_good=0.5)]
    assert 0.4 < sum(fault.is_for_good for fault in drawn) / len(drawn) < 0.6


def test_only_the_kinds_that_are_asked_for_are_drawn():
    for seed in range(50):
        faults = random_faults(seed, home().nodes, home().media, DURATION_S, kinds=("pause", "clog"))
        assert {fault.__struct_config__.tag for fault in faults} <= {"pause", "clog"}


def test_what_cannot_be_drawn_is_refused():
    nodes, media = home().nodes, home().media
    with pytest.raises(
        ConfigError, match=re.escape('kinds[1] = "craash": there is no such fault (did you mean crash?)')
    ):
        random_faults(1, nodes, media, DURATION_S, kinds=("pause", "craash"))
    wired = load_scenario("four-macs-1gbe")
    with pytest.raises(UsageError, match="none of these faults can happen here: wifi_gate"):
        random_faults(1, wired.nodes, wired.media, DURATION_S, kinds=("wifi_gate",))
    with pytest.raises(UsageError, match="two nodes at least"):
        random_faults(1, nodes[:1], media, DURATION_S)


@pytest.mark.slow
@settings(max_examples=25)
@given(st.integers())
def test_a_world_survives_any_schedule_and_every_host_lives_in_the_end(seed):
    def outcome() -> tuple[list[object], str]:
        world = World(replace(home(), faults=schedule(seed)))

        async def program(host):
            listener = await host.listen(f"{host.name}:1000")
            started_s = host.loop.time()
            host.store.save("node_key", host.name.encode())
            while host.loop.time() < DURATION_S:
                await host.clock.sleep(1.0)
            await listener.close()
            return host.alive and host.device.throttle == pytest.approx(1.0) and started_s < 0.6 * DURATION_S + 1e-9

        results = world.run_on_all(program)
        return results, world.trace.digest()

    results, digest = outcome()
    assert not any(isinstance(result, HostCrashed) for result in results)
    assert results == [True] * len(home().nodes)
    assert outcome()[1] == digest
