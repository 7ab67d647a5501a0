"""Bands from the effects of single figures, against what follows from the figures by arithmetic."""

from __future__ import annotations

from math import asinh, exp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hcsim.config import Basis, Cable, Scenario, Thunderbolt, idealised, load_scenario, parse_scenario
from hcsim.twin.effects import CHANCE, Effect, band, effects, main_effects, percentiles, relative_times
from hcsim.twin.spread import figures_of, rescaled
from hcsim.units import BitRate

SPREADS = st.floats(0.01, 1.0)


def of(figure: str, spread: float) -> Effect:
    """A time that is in proportion to the figure."""
    (found,) = main_effects({figure: spread}, 1.0, lambda factors: factors[figure])
    return found


@given(SPREADS)
def test_the_band_of_a_time_in_proportion_to_one_figure_is_that_of_the_figure(spread: float) -> None:
    assert band([of("speed", spread)]) == pytest.approx((exp(-asinh(spread)), exp(asinh(spread))), rel=0.01)


@given(SPREADS, st.floats(0.0, 2.0))
def test_the_percentiles_of_a_time_that_grows_with_one_figure_are_its_times_at_the_percentiles_of_the_figure(
    spread: float, bound: float
) -> None:
    def time_s(factors: dict[str, float]) -> float:
        return max(factors["speed"], bound) / max(1.0, bound)

    found = main_effects({"speed": spread}, 1.0, time_s)  # type: ignore[arg-type]
    slow = exp(asinh(spread))
    ends = min(1.0, time_s({"speed": 1 / slow})), max(1.0, time_s({"speed": slow}))
    assert band(found) == pytest.approx(ends, rel=0.01)


@given(SPREADS, SPREADS)
@settings(max_examples=20)
def test_the_spreads_of_two_figures_whose_product_a_time_is_add_up_as_squares(one: float, other: float) -> None:
    low, high = band([of("speed", one), of("link", other)])
    both = (asinh(one) ** 2 + asinh(other) ** 2) ** 0.5
    assert (low, high) == pytest.approx((exp(-both), exp(both)), rel=0.1)


def test_the_quotient_of_times_that_rest_on_one_figure_has_no_band_and_of_chance_it_has() -> None:
    speed, chance = of("speed", 0.4), of(CHANCE, 0.4)
    assert percentiles(relative_times([speed], of="a") / relative_times([speed], of="b")) == pytest.approx((1.0, 1.0))
    low, high = percentiles(relative_times([chance], of="a") / relative_times([chance], of="b"))
    assert low < 0.7
    assert high > 1.4


def test_a_band_is_the_same_each_time_and_another_with_another_seed() -> None:
    two = [of("speed", 0.4), of("link", 0.3)]
    assert band(two, seed=1) == band(two, seed=1) != band(two, seed=2)


def test_figures_that_do_not_matter_and_kinds_of_kernels_are_left_out() -> None:
    scenario = load_scenario("two-macs-wifi")
    names = {name for name, basis in figures_of(scenario).items() if basis.spread}
    assert any(name.startswith("efficiency ") for name in names)
    asked: list[Scenario] = []

    def timed(variant: Scenario) -> float:
        asked.append(variant)
        return float(1e9 / variant.media[0].phy_rate_bps)  # type: ignore[union-attr]

    (found,) = effects(scenario, timed)
    assert found.figure == "link air"
    assert len(asked) == 1 + 2 * len([name for name in names if not name.startswith("efficiency ")]) + 3


def test_a_scenario_without_spread_and_chance_costs_no_simulation() -> None:
    scenario = idealised(load_scenario("four-macs-1gbe"))
    assert effects(scenario, lambda _: pytest.fail("nothing is to be simulated")) == ()
    assert band(()) == (1.0, 1.0)


def test_wifi_has_a_spread_unless_the_file_says_otherwise_and_a_switch_has_none() -> None:
    air = 'name = "h"\n[[medium]]\nkind = "wifi"\nname = "air"\n'
    switch = '\n[[medium]]\nkind = "ethernet"\nname = "switch"\nrate = "1 Gb/s"\n'
    basis = 'basis = { kind = "measured", spread = 0.1 }'
    usual, own = (parse_scenario(f"{air}{line}{switch}", "h") for line in ("", basis))
    assert figures_of(usual)["link air"].spread == 0.4
    assert figures_of(own)["link air"].spread == 0.1
    assert figures_of(usual)["link switch"].spread == 0.0


def test_cables_of_which_nothing_is_said_are_as_slow_as_their_medium() -> None:
    rate = BitRate(10e9)
    cables = Cable(("a", "b"), rate, rate), Cable(("b", "c"), rate, rate, basis=Basis("measured", spread=0.1))
    desk = Thunderbolt("desk", cables, basis=Basis("published", spread=0.2))
    scenario = Scenario("home", media=(desk,))
    assert set(figures_of(scenario)) == {"link desk", "cable b–c"}
    slow = rescaled(scenario, lambda name, _: 2.0 if name == "link desk" else 1.0).media[0]
    assert isinstance(slow, Thunderbolt)
    assert [cable.forward_bps for cable in slow.cables] == [rate / 2, rate]
