"""Predicted phases and their band."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hcsim.collectives.select import Options
from hcsim.config import Basis, CodecCurve, Job, KernelCurve, MessageCosts, Scenario, Training, parse_scenario
from hcsim.errors import ConfigError
from hcsim.launch.virtual import simulate_training
from hcsim.transport.groups import Wire
from hcsim.twin.job_band import is_quick_job, job_band
from hcsim.twin.ledger import phase_times
from hcsim.twin.prediction import PredictedRun, is_quick, nodes_of, predict, uncertainty
from hcsim.twin.spread import figures_of, rescaled, variants
from hcsim.units import Bytes, Seconds

HOME = """
name = "home"
seed = 3
[[medium]]
kind = "ethernet"
name = "switch"
rate = "1 Gb/s"
[[machine]]
name = "mini"
peak = "20 GFLOPS"
memory = "10 GB/s"
basis = {{ kind = "measured", spread = {speed} }}
[[node]]
name = "a"
machine = "mini"
links = ["switch"]
[[node]]
name = "b"
machine = "mini"
links = ["switch"]
"""
RUN = PredictedRun(Training(task="convex", steps=40))


def home(speed: float = 0.0, link: float = 0.0) -> Scenario:
    scenario = parse_scenario(HOME.format(speed=speed), "home.toml")
    basis = Basis("published", spread=link)
    return replace(scenario, media=tuple(replace(medium, basis=basis) for medium in scenario.media))


def width(scenario: Scenario, count: int = 16) -> float:
    low, high = uncertainty(scenario, RUN, count).band["step"]
    assert low <= 1.0 <= high
    return high - low


def test_shapes_alone_predict_what_a_simulated_run_with_data_takes() -> None:
    report = simulate_training(home(), RUN.settings).values()[0]
    measured = phase_times([point.spent_s for point in report.points])
    assert predict(home(), RUN).phases == pytest.approx(measured, rel=0.02)


def test_members_of_a_cluster_vote_and_so_take_longer() -> None:
    assert predict(home(), replace(RUN, forms_cluster=True)).phases["step"] > predict(home(), RUN).phases["step"]


def test_an_average_in_every_eighth_step_is_predicted_as_part_of_each() -> None:
    local = replace(RUN, settings=Training(task="convex", strategy="local_sgd:8"))
    assert 0 < predict(home(), local).phases["exchange"] < predict(home(), RUN).phases["exchange"] / 2


@pytest.mark.slow
def test_no_spread_gives_no_width() -> None:
    assert width(home()) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.slow
def test_a_larger_spread_gives_a_wider_band() -> None:
    assert 0 < width(home(speed=0.05)) < width(home(speed=0.2))
    assert 0 < width(home(link=0.1)) < width(home(link=0.3))


@pytest.mark.slow
def test_a_band_is_the_same_each_time_and_another_with_another_seed() -> None:
    scenario = home(0.2, 0.2)
    assert uncertainty(scenario, RUN, 8) == uncertainty(scenario, RUN, 8)
    assert uncertainty(scenario, RUN, 8) != uncertainty(replace(scenario, seed=4), RUN, 8)


def test_a_job_of_a_link_with_a_spread_has_a_band_and_one_of_known_figures_has_none() -> None:
    job = Job(size_bytes=Bytes(1 << 20), repeat=2)
    sure, unsure = (replace(home(link=spread), job=job) for spread in (0.0, 0.3))
    assert job_band(sure, Options(), Wire(), 4) == pytest.approx((1.0, 1.0), abs=1e-9)
    low, high = job_band(unsure, Options(), Wire(), 16)
    assert (high - low) / 2 == pytest.approx(0.3, rel=0.15)
    assert is_quick_job(unsure, 500)
    assert not is_quick_job(sure, 500)
    assert not is_quick_job(unsure, 500_000)


def test_jitter_gives_a_width_without_any_spread() -> None:
    still = home()
    jittery = replace(still, media=tuple(replace(medium, jitter_s=Seconds(1e-3)) for medium in still.media))
    assert width(jittery) > 0


def test_the_shares_say_which_figures_the_step_rests_on() -> None:
    found = uncertainty(home(), RUN, 2)
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert set(found.shares) == {"measured", "published", "estimated"}
    slow = uncertainty(rescaled(home(), lambda name, basis: 10.0 if "mini" in name else 1.0), RUN, 2)
    assert slow.shares["measured"] > found.shares["measured"]


def test_a_band_is_shown_unasked_where_a_figure_has_a_spread_and_steps_have_few_events() -> None:
    assert is_quick(home(0.2), 20, RUN.settings)
    assert not is_quick(home(), 20, RUN.settings)
    assert not is_quick(home(0.2), 20_000, RUN.settings)


def test_the_factors_of_a_figure_have_its_spread_and_depend_on_its_name_alone() -> None:
    few, more = (variants(home(0.2, link), 16) for link in (0.0, 0.3))

    def speeds(scenarios: list[Scenario]) -> list[float]:
        return sorted(1 / each.nodes[0].machine.efficiency_compute for each in scenarios)  # type: ignore[union-attr]

    assert speeds(few) == speeds(more)
    [middle] = {1 / machine.efficiency_compute for machine in home().machines}
    tenth, ninth = speeds(few)[1], speeds(few)[-2]
    assert (ninth - tenth) / 2 / middle == pytest.approx(0.2, rel=0.1)


@pytest.mark.slow
@given(st.floats(0.1, 10))
@settings(max_examples=20, deadline=None)
def test_all_figures_together_scale_the_step(factor: float) -> None:
    quick = replace(home(), tcp=replace(home().tcp, slow_start=False))
    slower = predict(rescaled(quick, lambda name, basis: factor), RUN).phases["step"]
    assert slower == pytest.approx(factor * predict(quick, RUN).phases["step"], rel=0.02)


def test_every_figure_of_a_machine_has_a_name_of_its_own() -> None:
    scenario = home()
    machine = scenario.machines[0]
    basis = Basis("measured", spread=0.1)
    machine = replace(
        machine,
        kernels=(KernelCurve("matmul", ((1.0, 1e-6),), basis=basis), KernelCurve("copy", ((1.0, 1e-6),), basis=basis)),
        codecs=(CodecCurve("int8", ((1.0, 1e-6),), ((1.0, 1e-6),), basis),),
        messages=MessageCosts(send_s=Seconds(1e-4), basis=basis),
        step_s=Seconds(1e-3),
    )
    full = replace(scenario, nodes=(replace(scenario.nodes[0], machine=machine), scenario.nodes[1]))
    assert set(figures_of(full)) - set(figures_of(scenario)) == {
        "kernel mini matmul float32", "kernel mini copy float32", "codec mini int8", "messages mini",
    }  # fmt: skip
    twice = rescaled(full, lambda name, basis: 2.0).nodes[0].machine
    assert not isinstance(twice, str)
    assert (twice.kernels[0].points, twice.codecs[0].decode) == (((1.0, 2e-6),), ((1.0, 2e-6),))
    assert (twice.step_s, twice.efficiency_compute) == (2e-3, machine.efficiency_compute / 2)
    assert twice.messages is not None
    assert twice.messages.send_s == 2e-4


def test_nodes_that_took_no_part_are_left_out_and_missing_ones_are_named() -> None:
    assert [node.name for node in nodes_of(home(), ("b",)).nodes] == ["b"]
    with pytest.raises(ConfigError, match="there is no node c, d in it; it has a, b"):
        nodes_of(home(), ("c", "a", "d"))
