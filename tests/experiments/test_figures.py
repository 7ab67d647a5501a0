"""Each figure is drawn from the tables alone, with a CSV of what it shows beside it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pandas as pd
import pytest

from experiments.figures import STUDIES, draw
from experiments.figures.allreduce import ALGORITHMS
from experiments.figures.style import bytes_label, count_label, looks, rate_label, size_label, time_label
from experiments.study.cell import Result
from tests.experiments.tiny import TINY, Row, compressed, diverged, tables, to_target, training, words_of

pytestmark = pytest.mark.slow

FILES = {
    "allreduce": ("allreduce_by_link", "allreduce_closed_form"),
    "compression": ("compression",),
    "time_to_target": ("time_to_target",),
    "crossover": ("crossover", "crossover_8_macs"),
    "scaling": ("scaling",),
    "stragglers": ("stragglers",),
    "failures": ("failures",),
}


@cache
def files(study: str) -> dict[str, bytes]:
    """All that is written for a study; a figure takes seconds, and several tests look at it."""
    with TemporaryDirectory() as out:
        assert draw(*tables(study, TINY[study]), Path(out)) == {study: ""}
        return {file.name: file.read_bytes() for file in Path(out).iterdir()}


def drawn(study: str, out: Path) -> dict[str, pd.DataFrame]:
    for name, content in files(study).items():
        (out / name).write_bytes(content)
    return {name: pd.read_csv(out / f"{name}.csv") for name in FILES[study]}


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_is_drawn_as_png_and_svg_with_its_data_beside_it(study: str, tmp_path: Path) -> None:
    for name, data in drawn(study, tmp_path).items():
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        assert (tmp_path / f"{name}.svg").read_text().startswith("<?xml")
        assert len(data)


@pytest.mark.usefixtures("svg_alone")
def test_a_figure_of_the_same_table_is_the_same_file(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        assert draw(*tables("scaling", TINY["scaling"]), tmp_path / folder) == {"scaling": ""}
    assert (tmp_path / "one/scaling.svg").read_bytes() == (tmp_path / "two/scaling.svg").read_bytes()


def test_compression_is_measured_against_what_is_sent_without_it(tmp_path: Path) -> None:
    table = drawn("compression", tmp_path)["compression"].set_index("compressor")
    assert table.loc["topk:0.01+ef", "times_fewer_bytes"] == pytest.approx(20)
    assert table.loc["topk:0.01+ef", "accuracy"] == pytest.approx(0.94)
    assert table.loc["randomk:0.1", "diverged"] == 1


def test_the_large_model_takes_the_small_ones_steps_at_its_own_pace(tmp_path: Path) -> None:
    table = drawn("time_to_target", tmp_path)["time_to_target"].set_index(["task", "method"])
    assert table.loc[("digits", "data parallel"), "steps_to_target"] == 2
    assert table.loc[("resnet50", "data parallel"), "time_to_target_s"] == pytest.approx(2 * 2.0)


def test_the_map_shows_the_fastest_and_one_mac_where_nothing_beats_it(tmp_path: Path) -> None:
    tiles = drawn("crossover", tmp_path)["crossover"]
    fastest = {(row.methods, row.link): row.fastest for row in tiles.itertuples()}
    plain, every = "data parallel, nothing compressed", "with compression and local steps"
    assert fastest[plain, "ethernet:10 Mb/s"] == "one Mac alone"
    assert fastest[plain, "ethernet:1 Gb/s"] == "data parallel"
    assert fastest[every, "ethernet:10 Mb/s"] == "DiLoCo 32"
    assert fastest[every, "ethernet:1 Gb/s"] == "data parallel"


@pytest.mark.usefixtures("svg_alone")
def test_a_tile_of_several_seeds_has_their_mean(tmp_path: Path) -> None:
    place = {"task": "transformer:1e6", "world": 4}
    rows = [
        training({"step_s": step_s}, **place, strategy=strategy, link=link, seed=seed)
        for strategy, link, times_s in (("single", "none", (1.0, 3.0)), ("ddp", "ethernet:1 Gb/s", (0.5, 1.5)))
        for seed, step_s in enumerate(times_s)
    ]
    assert draw(*tables("crossover", rows), tmp_path) == {"crossover": ""}
    tile = pd.read_csv(tmp_path / "crossover.csv").iloc[0]
    assert (tile["one Mac alone, s"], tile["data parallel, s"], tile["speedup"]) == (2.0, 1.0, 2.0)


@pytest.mark.usefixtures("svg_alone")
@pytest.mark.parametrize("dense", [[], [diverged("none")]])
def test_what_is_sent_is_shown_also_where_no_run_without_compression_is_there_to_compare(
    tmp_path: Path, dense: list[Row]
) -> None:
    rows = [*dense, compressed("int8+ef", 0.9, 3e5, 1), compressed("topk:0.01+ef", 0.8, 1e5, 1)]
    assert draw(*tables("compression", rows), tmp_path) == {"compression": ""}
    table = pd.read_csv(tmp_path / "compression.csv")
    assert "times_fewer_bytes" not in table
    assert list(table["step_sent_bytes"].dropna()) == [3e5, 1e5]


@pytest.mark.usefixtures("svg_alone")
def test_a_figure_says_with_what_runs_diverged(tmp_path: Path) -> None:
    names = ["none", "randomk:0.1", "onebit+ef", "topk:0.01", "topk:0.01+ef"]
    lost = [diverged(name) for name in names]
    assert draw(*tables("compression", lost), tmp_path) == {"compression": "all of its runs diverged"}
    assert draw(*tables("compression", [*lost, compressed("int8", 0.9, 3e5, 1)]), tmp_path) == {"compression": ""}
    assert words_of(tmp_path / "compression.svg", "diverged") == [
        "diverged without compression; without error feedback: random-k 10 %, top-k 1 %; "
        "with error feedback: one bit, top-k 1 %"
    ]


@pytest.mark.usefixtures("svg_alone")
def test_algorithms_that_no_figure_has_a_look_for_have_one_each(tmp_path: Path) -> None:
    names = ("ring", "auto", "chunked_ring", "spiral")
    rows = [
        (msgspec.structs.replace(cell, algorithm=name), result) for name in names for cell, result in TINY["allreduce"]
    ]
    assert draw(*tables("allreduce", rows), tmp_path) == {"allreduce": ""}
    for file in FILES["allreduce"]:
        for name in names:
            assert words_of(tmp_path / f"{file}.svg", name.replace("_", " "))
    unlike = looks(names, ALGORITHMS).values()
    assert len({tuple(map(str, look.values())) for look in unlike}) == len(ALGORITHMS) + 2
    assert looks(["ring"], ALGORITHMS)["ring"] == looks(names, ALGORITHMS)["ring"]


@pytest.mark.usefixtures("svg_alone")
def test_links_and_models_of_one_s_own_are_drawn_and_named(tmp_path: Path) -> None:
    rows = [to_target("digits", "ddp", link, 1.0) for link in ("1gbe", "10gbe", "ethernet:3 Gb/s")]
    assert draw(*tables("time_to_target", rows), tmp_path) == {"time_to_target": ""}
    assert words_of(tmp_path / "time_to_target.svg", "10 Gb/s")
    assert words_of(tmp_path / "time_to_target.svg", "3 Gb/s")
    rows = [training(task="convex", strategy=name, link=link) for name, link in (("single", "none"), ("ddp", "1gbe"))]
    assert draw(*tables("scaling", rows), tmp_path) == {"scaling": ""}
    assert words_of(tmp_path / "scaling.svg", "convex")


@pytest.mark.usefixtures("svg_alone")
def test_the_map_has_no_panel_for_what_was_not_run(tmp_path: Path) -> None:
    link = "ethernet:1 Gb/s"
    rows = [training(task=f"transformer:1e6,tokens={n}", strategy="single", link="none") for n in (1024, 2048)]
    rows.append(training(task="transformer:1e6,tokens=1024", compressor="int8", link=link))
    rows.append(training(task="transformer:1e6,tokens=2048", strategy="diloco:8", link=link))
    assert draw(*tables("crossover", rows), tmp_path) == {"crossover": ""}
    assert len(words_of(tmp_path / "crossover.svg", "4 M4 Macs, 1,024 tokens")) == 2
    assert len(words_of(tmp_path / "crossover.svg", "4 M4 Macs, 2,048 tokens")) == 1


@pytest.mark.parametrize("study", STUDIES)
def test_what_is_not_drawn_leaves_nothing_behind_that_would_pass_for_it(
    study: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn(study, tmp_path)
    (tmp_path / "recovery.png").write_text("another's")

    def full(*_: object, **__: object) -> None:
        raise ValueError("half-way")

    monkeypatch.setattr(f"experiments.figures.{study}.figure", full)
    assert draw(*tables(study, TINY[study]), tmp_path) == {study: "half-way"}
    assert [file.name for file in tmp_path.iterdir()] == ["recovery.png"]


@pytest.mark.parametrize("why", [OSError, KeyboardInterrupt])
def test_a_figure_that_breaks_off_leaves_no_half(
    why: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(_: object, file: Path, **__: object) -> None:
        file.write_text("half")
        raise why

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", cut_off)
    with pytest.raises(why):
        draw(*tables("stragglers", TINY["stragglers"]), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("svg_alone")
def test_maps_of_other_numbers_of_macs_are_an_earlier_sweeps(tmp_path: Path) -> None:
    for name in ("crossover_16_macs.png", "crossover_plan.png"):
        (tmp_path / name).touch()
    of_four = [(cell, result) for cell, result in TINY["crossover"] if cell.world == 4]
    assert draw(*tables("crossover", of_four), tmp_path) == {"crossover": ""}
    assert not (tmp_path / "crossover_16_macs.png").exists()
    assert (tmp_path / "crossover_plan.png").exists()


def test_a_study_of_which_every_cell_failed_has_no_figure(tmp_path: Path) -> None:
    drawn("scaling", tmp_path)
    failed = [(cell, Result(error="broken")) for cell, _ in TINY["scaling"]]
    assert draw(*tables("scaling", failed), tmp_path) == {"scaling": "all of its cells failed"}
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("svg_alone")
def test_a_figure_of_rows_that_are_there_no_more_goes(tmp_path: Path) -> None:
    drawn("allreduce", tmp_path)
    assert draw(*tables("allreduce", TINY["allreduce"][:2]), tmp_path) == {"allreduce": ""}
    assert not list(tmp_path.glob("allreduce_closed_form.*"))
    assert len(list(tmp_path.glob("allreduce_by_link.*"))) == 3


@pytest.mark.usefixtures("svg_alone")
def test_a_figure_that_cannot_be_drawn_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise TypeError("NAType")

    monkeypatch.setattr("experiments.figures.compression.draw", broken)
    both = [tables(study, TINY[study]) for study in ("compression", "scaling")]
    cells, curves = (pd.concat(parts, ignore_index=True) for parts in zip(*both, strict=True))
    assert draw(cells, curves, tmp_path) == {"compression": "TypeError: NAType", "scaling": ""}
    assert (tmp_path / "scaling.png").exists()


def test_labels_have_units_that_read_well() -> None:
    assert [size_label(1 << 10), size_label(1 << 25), size_label(12)] == ["1 KiB", "32 MiB", "12 B"]
    assert [bytes_label(2500), rate_label(2.5e9), count_label(1e10)] == ["2.5 kB", "2.5 Gb/s", "10B"]
    assert [time_label(t) for t in (2e-6, 0.25, 90, 7200)] == ["2 µs", "250 ms", "90 s", "7,200 s"]


def test_rows_that_a_figure_cannot_show_are_told_and_not_a_failure(tmp_path: Path) -> None:
    problems = draw(*tables("crossover", TINY["stragglers"][:1]), tmp_path)
    assert "there is no task" in problems["crossover"]
    assert not list(tmp_path.glob("*.png"))
