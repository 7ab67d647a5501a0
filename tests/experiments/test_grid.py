"""Sweep files: a grid is the product of its axes, and every mistake names its place and what would be valid."""

from __future__ import annotations

import pytest

from experiments.study.cell import Train
from experiments.study.grid import load_sweep, parse_sweep, shipped_sweeps
from hcsim.errors import ConfigError

GRID = """
[[grid]]
kind = "training"
study = "mine"
tasks = ["convex"]
strategies = ["ddp", "local_sgd:4"]
compressors = ["none", "topk:0.1+ef"]
links = ["1gbe", "ethernet:300 Mb/s"]
worlds = [2, 3]
seeds = [1, 2]

[grid.quick]
seeds = [7]
worlds = [2]
"""


def test_a_grid_is_the_product_of_its_axes() -> None:
    cells = [cell for _, cell in parse_sweep(GRID, "f.toml")]
    assert len(cells) == len({*cells}) == 2 * 2 * 2 * 2 * 2
    assert all(isinstance(cell, Train) for cell in cells)


def test_quick_replaces_what_it_names_and_nothing_else() -> None:
    cells = [cell for _, cell in parse_sweep(GRID, "f.toml", quick=True)]
    assert len(cells) == 2 * 2 * 2
    assert {(cell.seed, cell.world) for cell in cells if isinstance(cell, Train)} == {(7, 2)}


def test_a_machine_alone_is_there_once_whatever_the_links() -> None:
    cells = [cell for _, cell in parse_sweep(GRID.replace('"local_sgd:4"', '"single"'), "f.toml")]
    alone = [cell for cell in cells if isinstance(cell, Train) and cell.strategy == "single"]
    assert [(cell.link, cell.compressor, cell.world, cell.seed) for cell in alone] == [
        ("none", "none", 2, 1), ("none", "none", 2, 2), ("none", "none", 3, 1), ("none", "none", 3, 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('"1gbe"', '"1gb"', r'grid\[0\]: link = "1gb": .* \(did you mean 1gbe\?\); known: 1gbe, 2.5gbe'),
        ("300 Mb/s", "300 Mbs", r"Mbs is not a unit of a rate \(did you mean Mb/s\?\)"),
        ('"convex"', '"digit"', r'task = "digit": .* \(did you mean digits\?\); known: digits, text, convex'),
        ('"convex"', '"transformer:x"', r'task "transformer:x": '),
        ('"ddp"', '"dpp"', r'grid\[0\]: .*"dpp" \(did you mean ddp\?\); known: single, ddp'),
        ("topk:0.1+ef", "topc:0.1", r"grid\[0\]: .*topc.* \(did you mean topk\?\); known are none, topk:RATIO"),
        ("topk:0.1+ef", "topk:7", r"expected a ratio above 0 and up to 1"),
        ("worlds = [2, 3]", "worlds = [1]", r"a link joins at least two Macs, not 1"),
        ("worlds = [2, 3]", "worlds = []", r"grid\[0\].worlds.*of length at least 1"),
        ("seeds = [1, 2]", "seed = [1, 2]", r"grid\[0\].seed: unknown key \(did you mean seeds\?\)"),
        ("seeds = [1, 2]", 'seeds = ["a"]', r'grid\[0\].seeds\[0\] = "a": expected a whole number'),
        ("worlds = [2]", "worlds = [0]", r"with its quick tables: grid\[0\].worlds\[0\] = 0"),
        ('kind = "training"', 'kind = "train"', r"valid: all_reduce, training"),
        ("seeds = [1, 2]", 'algorithms = ["hierarchical"]', r'it goes over several homes, and link = "1gbe" has one'),
        ("seeds = [1, 2]", 'variants = ["one-slow"]', r'variant = "one-slow".*known: equal, nearly-equal, one-old'),
        ("seeds = [1, 2]", "seeds = [1, 9223372036854775808]", r"grid\[0\].seeds\[1\] = 9223372036854775808: expected"),
        ("seeds = [1, 2]", "seeds = [18446744073709551616]", r"grid\[0\].seeds\[0\] = 18446744073709551616: expected"),
        ("seeds = [1, 2]", "failures_per_hour = [inf]", r"grid\[0\].failures_per_hour\[0\] = Infinity: expected"),
        ("[[grid]]", "[[grid]", r"this is not TOML"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_place_and_what_is_valid(old: str, new: str, complaint: str) -> None:
    assert old in GRID
    with pytest.raises(ConfigError, match=complaint):
        parse_sweep(GRID.replace(old, new), "f.toml")


@pytest.mark.parametrize(
    ("algorithm", "world"), [("auto", 4), ("chunked_ring", 4), ("recursive_doubling", 3), ("halving_doubling", 6)]
)
def test_on_ideal_ports_only_what_the_textbook_has_a_formula_for_is_reduced(algorithm: str, world: int) -> None:
    grid = f"""
        [[grid]]
        kind = "all_reduce"
        study = "mine"
        links = ["1gbe", "ideal"]
        worlds = [{world}]
        algorithms = ["ring", "{algorithm}"]
        sizes = ["1 KiB"]
    """
    complaint = f'grid\\[0\\]: algorithm = "{algorithm}", link = "ideal": there is no closed form .* on {world} ranks'
    with pytest.raises(ConfigError, match=complaint):
        parse_sweep(grid, "f.toml")
    assert len(parse_sweep(grid.replace(', "ideal"', ""), "f.toml")) == 2


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", shipped_sweeps())
def test_every_shipped_sweep_is_valid_and_its_rows_belong_to_the_study_of_its_name(name: str, quick: bool) -> None:
    asked = load_sweep(name, quick=quick)
    assert {study for study, _ in asked} == {name}
    assert len({cell.key for _, cell in asked}) == len(asked)
