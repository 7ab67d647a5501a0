"""The study of plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.planning.__main__ import (
    LEARNING,
    MODELS,
    draw_regret,
    learning_rows,
    random_home,
    regret_cells,
    regret_rows,
    summary,
)
from experiments.planning.cells import Choice, Entry, Exhaustive, Learned, Planned, run_cell
from experiments.study.store import Store
from hcsim.compressors.registry import make
from hcsim.plan.home import home_in_words
from hcsim.training.strategies import strategy

HOME, TASK = "2 x M4 on 10gbe", "transformer:1e6,tokens=64"


def test_random_homes_are_homes_and_always_the_same_ones() -> None:
    homes = [random_home(number) for number in range(20)]
    assert homes == [random_home(number) for number in range(20)]
    assert all(2 <= len(home_in_words(each).nodes) <= 5 for each in homes)


def test_every_method_whose_learning_is_measured_is_known() -> None:
    for spec, compressor in LEARNING:
        assert strategy(spec)
        assert make(compressor, seed=0, rank=0)


@pytest.mark.slow
def test_a_plan_is_as_good_as_the_best_of_all_candidates(tmp_path: Path) -> None:
    cells = [kind(HOME, TASK) for kind in (Exhaustive, Planned)]
    store = Store(tmp_path, Entry)
    for cell in cells:
        store.put(cell, run_cell(cell), 1.0)
    [row] = regret_rows([store.get(cell) for cell in cells])
    assert row["regret"] <= 0.001
    assert row["least_over_bound"] >= 0.95


def entry(cell: Planned | Exhaustive, quality_s: float) -> Entry:
    return Entry(cell, Choice(quality_s, 2.0, "ddp", "none", ("a", "b"), ratios=(1.0, 1.1)), 1.0)


def test_regret_is_how_much_longer_the_choice_takes_than_the_best(tmp_path: Path) -> None:
    pairs = [(Planned(HOME, task), Exhaustive(HOME, task)) for task in MODELS]
    rows = regret_rows([entry(cell, 1.05 - 0.05 * (type(cell) is Exhaustive)) for pair in pairs for cell in pair])
    assert [row["regret"] for row in rows] == [pytest.approx(0.05)] * len(MODELS)
    assert (
        summary("regret", rows)[0]
        == f"{len(MODELS)} of {len(MODELS)} plans are within 5 % of the best; the worst is 5.0% slower"
    )
    draw_regret(rows, tmp_path / "regret")
    assert (tmp_path / "regret.png").stat().st_size > 1000


def test_the_cells_of_the_study_are_twenty_homes_with_three_models_in_two_ways() -> None:
    assert len({cell.key for cell in regret_cells(20)}) == 120


def learned(strategy: str, seed: int, task: str, curve: list[tuple[int, float]]) -> Entry:
    return Entry(Learned("home", task, strategy, "none", seed, 6, 1), Choice(curve=tuple(curve)), 1.0)


def test_a_method_that_falls_half_as_fast_takes_twice_the_samples() -> None:
    entries = [
        learned(spec, seed, task, [(step, 10.0 - step / slower) for step in range(1, 31)])
        for task in ("text", "digits") for spec, slower in (("ddp", 1), ("local_sgd:8", 2)) for seed in (1, 2)
    ]  # fmt: skip
    rows = {(row["task"], row["strategy"]): row for row in learning_rows(entries)}
    assert rows["text", "ddp"]["relative"] == pytest.approx(1.0)
    assert rows["text", "local_sgd:8"]["reached"] == 0  # the target is below all that it came to
    short = [learned(spec, 1, task, [(step, 10.0 - step / slower) for step in range(1, 31 * slower)])
             for task in ("text", "digits") for spec, slower in (("ddp", 1), ("local_sgd:8", 2))]  # fmt: skip
    again = {(row["task"], row["strategy"]): row for row in learning_rows(short)}
    assert again["text", "local_sgd:8"]["relative"] == pytest.approx(2.0, rel=0.02)
