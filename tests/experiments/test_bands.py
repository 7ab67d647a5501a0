"""The bands of a sweep's cells, and what tables and figures make of them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from experiments.bands import cells, compared
from experiments.figures import draw
from experiments.study.bands import banded
from experiments.study.cell import AllReduce, Result, Train
from hcsim.twin.effects import Effect
from tests.experiments.tiny import Row, tables, training, words_of

SPEED = (Effect("speed M4", 0.7, 1.4),)
"""Of what is bound by the machines."""


def test_a_step_of_one_mac_has_the_band_of_its_speed() -> None:
    result = banded(Train("none", 4, "transformer:1e6", "single", 1, 2))
    assert [effect.figure for effect in result.effects] == ["speed M4"]
    assert (result.p90_s or 0) / (result.step_s or 1) == pytest.approx(1.477, rel=0.01)  # asinh(0.4) = ln 1.477
    assert (result.step_s or 0) / (result.p10_s or 1) == pytest.approx(1.477, rel=0.01)


def test_the_air_bounds_an_all_reduce_and_a_switch_of_a_known_rate_has_hardly_a_band() -> None:
    air, wire = (banded(AllReduce(link, 2, "ring", 1 << 20, 1)) for link in ("wifi6", "1gbe"))
    assert (air.p90_s or 0) > 1.3 * (air.step_s or 0)
    assert (wire.p90_s or 0) < 1.01 * (wire.step_s or 0)


def test_ideal_ports_have_no_band() -> None:
    result = banded(AllReduce("ideal", 2, "ring", 1 << 10, 1))
    assert result.p10_s == result.step_s == result.p90_s
    assert result.effects == ()


def test_cells_that_take_as_long_have_the_same_band_whatever_their_seed_and_number_of_steps() -> None:
    one = banded(Train("1gbe", 2, "convex", "ddp", 1, 8))
    other = banded(Train("1gbe", 2, "convex", "ddp", 2, 12))
    assert one.effects == other.effects != ()


def test_a_band_of_single_figures_is_that_of_many_variants() -> None:
    name, cell = next(iter(cells().items()))
    assert compared(name, cell, 16).error < 0.01


def pair(speed: tuple[Effect, ...]) -> list[Row]:
    """One Mac alone, and four of which the link takes half of the time."""
    alone = training({"step_s": 4.0, "effects": SPEED}, strategy="single", link="none")
    return [alone, training({"step_s": 2.0, "p10_s": 1.7, "p90_s": 2.5, "effects": speed})]


def test_a_speed_up_has_no_band_where_both_times_rest_on_the_same_figure_alike() -> None:
    table, _ = tables("scaling", pair(SPEED))
    assert list(table.loc[1, ["speedup", "speedup_p10", "speedup_p90"]]) == pytest.approx([2.0, 2.0, 2.0])
    table, _ = tables("scaling", pair((Effect("speed M4", 0.85, 1.2),)))
    low, high = table.loc[1, ["speedup_p10", "speedup_p90"]]
    assert low == pytest.approx(2.0 * 0.7 / 0.85, rel=0.01)  # faster Macs gain less together
    assert high == pytest.approx(2.0 * 1.4 / 1.2, rel=0.01)


@pytest.mark.usefixtures("svg_alone")
def test_a_tile_whose_fastest_method_depends_on_an_unsure_figure_is_marked(tmp_path: Path) -> None:
    place = {"task": "transformer:1e6", "world": 4}

    def tile(link: str, other_s: float) -> list[Row]:
        return [
            training({"step_s": 1.0, "effects": SPEED}, **place, link=link),
            training({"step_s": other_s}, **place, link=link, strategy="diloco:32"),
        ]

    alone = training({"step_s": 3.0, "effects": SPEED}, **place, strategy="single", link="none")
    rows = [alone, *tile("ethernet:1 Gb/s", 1.02), *tile("ethernet:10 Gb/s", 2.5)]
    assert draw(*tables("crossover", rows), tmp_path) == {"crossover": ""}
    table = pd.read_csv(tmp_path / "crossover.csv")
    sure = table[table["methods"] == "with compression and local steps"].set_index("link")["fastest_in"]
    assert 0.4 < sure["ethernet:1 Gb/s"] < 0.7
    assert sure["ethernet:10 Gb/s"] > 0.95
    assert words_of(tmp_path / "crossover.svg", "3.0×")[-2:] == ["3.0× ?", "3.0×"]


@pytest.mark.usefixtures("svg_alone")
def test_a_throughput_is_lowest_where_a_step_takes_longest(tmp_path: Path) -> None:
    figures = {"step_s": 2.0, "p10_s": 1.0, "p90_s": 4.0, "samples_per_s": 100.0}
    assert draw(*tables("stragglers", [training(figures)]), tmp_path) == {"stragglers": ""}
    row = pd.read_csv(tmp_path / "stragglers.csv").iloc[0]
    assert (row["samples_per_s_p10"], row["samples_per_s_p90"]) == (50.0, 200.0)


def test_a_run_that_diverged_has_no_band() -> None:
    table, _ = tables("compression", [(Train("1gbe", 4, "digits", "ddp", 1, 4), Result(diverged=True, batch=128))])
    assert table[["p10_s", "p90_s", "effects"]].isna().all(axis=None)
