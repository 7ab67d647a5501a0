"""In a figure two methods are two, also where words would call them the same."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from experiments.figures import draw
from experiments.figures.methods import with_methods
from tests.experiments.tiny import Row, tables, to_target, training

BOUNDED = ("parameter_server:bounded,staleness=0", "parameter_server:bounded,staleness=32")


def shown(study: str, rows: list[Row], out: Path) -> pd.DataFrame:
    assert draw(*tables(study, rows), out) == {study: ""}
    return pd.read_csv(out / f"{study}.csv")


def named(*pairs: tuple[str, str]) -> list[str]:
    return list(with_methods(pd.DataFrame(pairs, columns=["strategy", "compressor"]))["method"])


def test_methods_have_words_for_names_where_words_tell_them_apart() -> None:
    assert named(("ddp", "none"), ("ddp", "int8+ef"), ("diloco:32", "int8")) == [
        "data parallel", "data parallel, int8", "DiLoCo 32, int8",
    ]  # fmt: skip
    assert named(*((mode, "none") for mode in ("parameter_server", BOUNDED[0]))) == [
        "server, waits for all", "server, bounded",
    ]  # fmt: skip


def test_methods_that_words_do_not_tell_apart_are_named_as_the_sweep_names_them() -> None:
    assert named(("ddp", "none"), ("ddp", "int8"), ("ddp", "int8+ef"), ("ddp", "int8")) == [
        "data parallel", "ddp, int8", "ddp, int8+ef", "ddp, int8",
    ]  # fmt: skip
    assert named(*((server, "none") for server in BOUNDED)) == list(BOUNDED)


@pytest.mark.parametrize("setting", ["quorum=1", "sync,quorum=1", "deadline_s=3,mode=async"])
def test_every_way_to_write_a_server_has_words(setting: str) -> None:
    [name] = named((f"parameter_server:{setting}", "none"))
    assert name == ("server, async" if "async" in setting else "server, waits for 1")


@pytest.mark.slow
def test_the_map_has_the_times_of_both(tmp_path: Path) -> None:
    place = {"task": "transformer:1e6", "link": "ethernet:1 Gb/s"}
    rows = [
        training({"step_s": 1.0}, **place | {"link": "none"}, strategy="single"),
        *(training({"step_s": t}, **place, compressor=c) for c, t in (("none", 2.0), ("int8", 0.5), ("int8+ef", 0.7))),
    ]
    tile = shown("crossover", rows, tmp_path).iloc[-1]
    assert tile["fastest"] == "ddp, int8"
    assert (tile["ddp, int8, s"], tile["ddp, int8+ef, s"]) == (0.5, 0.7)


def test_a_straggler_is_relative_to_its_own_method(tmp_path: Path) -> None:
    rates = {(BOUNDED[0], "equal"): 100.0, (BOUNDED[0], "one-old"): 50.0}
    rates |= {(BOUNDED[1], "equal"): 10.0, (BOUNDED[1], "one-old"): 8.0}
    rows = [training({"samples_per_s": rate}, strategy=s, variant=v) for (s, v), rate in rates.items()]
    table = shown("stragglers", rows, tmp_path)
    assert list(table["of_equal"]) == [1.0, 0.5, 1.0, 0.8]


@pytest.mark.slow
def test_a_line_is_of_one_method(tmp_path: Path) -> None:
    rows = [
        training({"step_s": 1.0}, strategy="single", link="none"),
        *(training({"step_s": t}, compressor=c) for c, t in (("int8", 0.5), ("int8+ef", 0.25))),
    ]
    table = shown("scaling", rows, tmp_path).set_index("method")
    assert table["speedup"].to_dict() == {"ddp, int8": 2.0, "ddp, int8+ef": 4.0}


@pytest.mark.slow
def test_the_large_model_takes_the_steps_of_the_same_method(tmp_path: Path) -> None:
    rows = [to_target("digits", strategy, "1gbe", 1.0) for strategy in BOUNDED]
    rows.append(to_target("resnet50", BOUNDED[0], "1gbe", 3.0))
    table = shown("time_to_target", rows, tmp_path)
    assert list(table["method"]) == [*BOUNDED, BOUNDED[0]]
