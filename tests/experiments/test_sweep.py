"""The sweep: each cell runs once, whatever happens in between, and the same code writes the same tables."""

from __future__ import annotations

import csv
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import cache
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import Result as Ran
from rich.console import Console
from typer import Typer
from typer.testing import CliRunner

from experiments.study import cell as cell_module
from experiments.study.cell import AllReduce, AnyCell, Result
from experiments.study.grid import Asked, parse_sweep, shipped_sweeps
from experiments.study.runner import run_cells
from experiments.study.store import Entry, Store
from experiments.study.tables import cell_table, write_csv, write_table
from experiments.sweep import Outcome, Output, main, sweep
from experiments.sweep import results_folder as place_of
from hcsim.cli.app import app as hcsim
from hcsim.pool.local import LocalPool
from tests.test_report import asks_for_nothing

ROOT = Path(__file__).parents[2]
SMALL = """
[[grid]]
kind = "all_reduce"
study = "allreduce"
links = ["1gbe", "ideal"]
worlds = [2]
algorithms = ["ring", "direct"]
sizes = ["1 KiB", "1 MiB"]
repeats = 1
"""
TRAINING = """
[[grid]]
kind = "training"
study = "mine"
tasks = ["convex"]
strategies = ["single", "ddp"]
links = ["1gbe"]
worlds = [2]
seeds = [1, 2]
steps = 6
evaluate_every = 3
target_loss = 100.0
"""
pytestmark = pytest.mark.usefixtures("svg_alone")
TABLES = ("cells.csv", "cells.parquet", "curves.csv", "curves.parquet", "manifest.json")


def run(text: str, out: Path, jobs: int = 1) -> Outcome:
    asked = parse_sweep(text, "small.toml")
    with closing(LocalPool(jobs)) as pool:
        return sweep(asked, Output(out), pool, ["small.toml"], Console(quiet=True))


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], None]:
    """Into a folder, what a sweep leaves there; it is run once for all who only look at that, or go on from it."""

    @cache
    def once(text: str) -> Path:
        out = tmp_path_factory.mktemp("swept")
        run(text, out)
        return out

    return lambda text, out: shutil.copytree(once(text), out, dirs_exist_ok=True)


def kept(out: Path) -> dict[str, tuple[int, int]]:
    """What tells whether a cell was written again: a new file takes the place of the old."""
    return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in (out / ".cells").iterdir()}


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as table:
        return list(csv.DictReader(table))


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "experiments.sweep", *words]


def ran(*words: str) -> Ran:
    app = Typer()
    app.command()(main)
    return CliRunner().invoke(app, words)


@pytest.mark.slow
def test_no_cell_runs_twice_and_the_tables_stay_the_same(tmp_path: Path, swept: Callable[[str, Path], None]) -> None:
    swept(SMALL, tmp_path)
    first, tables = kept(tmp_path), {name: (tmp_path / name).read_bytes() for name in TABLES}
    assert len(first) == 8
    run(SMALL, tmp_path)
    assert kept(tmp_path) == first
    assert {name: (tmp_path / name).read_bytes() for name in TABLES} == tables


@pytest.mark.slow
def test_two_runs_from_nothing_write_the_same_bytes_whatever_the_number_of_processes(tmp_path: Path) -> None:
    for name, jobs in (("one", 1), ("two", 2)):
        run(TRAINING, tmp_path / name, jobs)
    for name in TABLES:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


@pytest.mark.slow
def test_only_what_is_missing_is_run(tmp_path: Path, swept: Callable[[str, Path], None]) -> None:
    swept(SMALL, tmp_path)
    first = kept(tmp_path)
    gone = next(iter(first))
    (tmp_path / ".cells" / gone).unlink()
    run(SMALL, tmp_path)
    second = kept(tmp_path)
    assert {name for name in second if second[name] != first.get(name)} == {gone}


@pytest.mark.slow
def test_a_half_written_cell_is_run_again(tmp_path: Path, swept: Callable[[str, Path], None]) -> None:
    swept(SMALL, tmp_path)
    victim = next((tmp_path / ".cells").iterdir())
    whole = json.loads(victim.read_bytes())["result"]
    victim.write_bytes(victim.read_bytes()[:40])
    run(SMALL, tmp_path)
    assert json.loads(victim.read_bytes())["result"] == whole


def long_sweep(folder: Path, least: int, **settings: Any) -> tuple[subprocess.Popen[str], Path]:
    """One that has finished so many cells, of far more, and its folder."""
    file, out = folder / "long.toml", folder / "out"
    seeds = ", ".join(map(str, range(400)))
    file.write_text(TRAINING.replace("seeds = [1, 2]", f"seeds = [{seeds}]"))
    process = subprocess.Popen(
        command(str(file), "--out", str(out), "--jobs", "2"),
        cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True, **settings,
    )  # fmt: skip
    cells = out / ".cells"
    while process.poll() is None and not (cells.exists() and len(list(cells.glob("*.json"))) >= least):
        time.sleep(0.01)
    time.sleep(0.1)
    return process, out


@pytest.mark.slow
@pytest.mark.parametrize("least", [0, 3])
def test_an_interrupt_keeps_what_is_finished_and_shows_no_traceback(tmp_path: Path, least: int) -> None:
    """Also one that finds the workers still at their imports."""
    process, out = long_sweep(tmp_path, least)
    file, cells = tmp_path / "long.toml", out / ".cells"
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 130, said
    assert "interrupted: finished cells are kept" in said
    assert "Traceback" not in said
    entries = [msgspec.json.decode(kept.read_bytes(), type=Entry) for kept in cells.glob("*.json")]
    assert least <= len(entries) < 800
    assert all(entry.result.error is None for entry in entries)
    asked = {cell for _, cell in parse_sweep(file.read_text(), "long.toml")}
    assert {entry.cell for entry in entries} <= asked


def ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("least", [0, 3])
def test_who_is_told_to_end_takes_the_workers_along(tmp_path: Path, least: int, background: bool) -> None:
    """Only the sweep itself is told; in a shell's background no interrupt would reach it."""
    process, _ = long_sweep(tmp_path, least, preexec_fn=ignore_interrupts if background else None)
    process.terminate()
    _, said = process.communicate(timeout=240)  # until the last worker is gone, which has this pipe too
    assert process.returncode == 143, said
    assert "interrupted: finished cells are kept" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_cell_that_fails_is_a_row_with_its_error_and_is_tried_again(tmp_path: Path) -> None:
    good, bad = AllReduce("1gbe", 2, "ring", 1024, 1), AllReduce("1gbe", 2, "hierarchical", 1024, 1)
    asked = [Asked("mine", bad), Asked("mine", good)]
    for _ in range(2):
        with closing(LocalPool(1)) as pool:
            assert sweep(asked, Output(tmp_path), pool, [], Console(quiet=True)).failed == 1
    first, second = rows(tmp_path / "cells.csv")
    assert first["algorithm"] == "hierarchical"
    assert "groups" in first["error"]
    assert first["step_s"] == ""
    assert second["error"] == ""
    assert float(second["step_s"]) > 0


@pytest.mark.slow
def test_a_worker_that_dies_takes_only_its_own_cell_with_it() -> None:
    cells: list[AnyCell] = [AllReduce("1gbe", 2, "ring", size, 1) for size in (1024, 2048, 4096, 8192)]
    results: dict[AnyCell, Result] = {}

    def finished(cell: AnyCell, result: Result, cost_s: float) -> None:
        results[cell] = result
        if len(results) == 1:
            for child in active_children():
                child.kill()

    with closing(LocalPool(1)) as pool:
        run_cells(cells, pool, finished)
    assert list(results) == cells
    died = [cell for cell, result in results.items() if result.error is not None]
    assert len(died) <= 1
    assert all("ended with code -9" in str(results[cell].error) for cell in died)


@pytest.mark.slow
def test_a_machine_alone_does_the_batch_of_all_and_speed_up_is_relative_to_it(
    tmp_path: Path, swept: Callable[[str, Path], None]
) -> None:
    swept(TRAINING, tmp_path)
    table = rows(tmp_path / "cells.csv")
    assert [(row["strategy"], row["link"], row["seed"]) for row in table] == [
        ("single", "none", "1"), ("single", "none", "2"), ("ddp", "1gbe", "1"), ("ddp", "1gbe", "2"),
    ]  # fmt: skip
    assert len({row["batch"] for row in table}) == 1
    assert [float(row["speedup"]) for row in table[:2]] == pytest.approx([1.0, 1.0])
    # Two ranks compute the same mean gradient as one machine with both batches, so they learn the same.
    for alone, together in zip(table[:2], table[2:], strict=True):
        assert float(together["final_loss"]) == pytest.approx(float(alone["final_loss"]), rel=1e-4)
        # By the time per step: what opening connections takes is no matter of speed.
        ratio = float(alone["step_s"]) / float(together["step_s"])
        assert float(together["speedup"]) == pytest.approx(ratio, rel=1e-6)


@pytest.mark.slow
def test_curves_have_a_row_for_each_evaluation_and_the_target_is_noted_when_it_is_first_met(
    tmp_path: Path, swept: Callable[[str, Path], None]
) -> None:
    swept(TRAINING, tmp_path)
    curves = [row for row in rows(tmp_path / "curves.csv") if row["strategy"] == "ddp" and row["seed"] == "1"]
    assert [row["step"] for row in curves] == ["3", "6"]
    cell = next(row for row in rows(tmp_path / "cells.csv") if row["strategy"] == "ddp" and row["seed"] == "1")
    assert float(cell["time_to_target_s"]) == float(curves[0]["time_s"])
    assert float(cell["final_loss"]) == float(curves[-1]["loss"])


def test_a_cell_that_lies_under_the_name_of_another_is_not_taken_for_it(tmp_path: Path) -> None:
    store, (one, other) = Store(tmp_path), (AllReduce("1gbe", 2, "ring", size, 1) for size in (1024, 2048))
    store.put(one, Result(step_s=1.0), 0.1)
    shutil.copy(tmp_path / f"{one.key}.json", tmp_path / f"{other.key}.json")
    assert store.get(one) == Entry(one, Result(step_s=1.0), 0.1)
    assert store.get(other) is None


@pytest.mark.slow
def test_a_full_disk_leaves_what_was_there_and_nothing_half_written(tmp_path: Path) -> None:
    cell, store = AllReduce("1gbe", 2, "ring", 1024, 1), Store(tmp_path / ".cells")
    table = cell_table([Asked("mine", cell)], {cell: Result(step_s=1.0)})
    write_table(table, tmp_path / "cells")
    store.put(cell, Result(step_s=1.0), 0.1)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.*") if file.is_file()}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limit[1]))
    try:
        for write in (
            lambda: write_csv(table, tmp_path / "cells"),
            lambda: write_table(table, tmp_path / "cells"),
            lambda: store.put(cell, Result(step_s=2.0), 0.1),
        ):
            with pytest.raises(OSError, match="File too large"):
                write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*.*") if file.is_file()} == before


def test_what_was_measured_by_another_library_or_other_c_code_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key() -> str:
        cell_module.code_sha256.cache_clear()
        cell_module.measured_with.cache_clear()
        return AllReduce("1gbe", 2, "ring", 1024, 1).key

    with monkeypatch.context() as patched:
        patched.setattr(cell_module, "ROOT", tmp_path)
        source = tmp_path / "hcsim" / "real" / "rings.c"
        source.parent.mkdir(parents=True)
        source.write_text("int rings;")
        first = key()
        source.write_text("int other;")
        second = key()
        patched.setattr(cell_module, "version", lambda name: "0.0" if name == "torch" else "1.0")
        third = key()
        patched.setattr(cell_module, "version", lambda name: "1.0")
        assert len({first, second, third, key()}) == 4
    key()


@pytest.mark.slow
def test_two_studies_share_a_cell_that_both_ask_for(tmp_path: Path) -> None:
    run(SMALL + SMALL.replace('study = "allreduce"', 'study = "other"'), tmp_path)
    assert len(kept(tmp_path)) == 8
    table = rows(tmp_path / "cells.csv")
    assert [row["study"] for row in table] == ["allreduce"] * 8 + ["other"] * 8


@pytest.mark.slow
def test_the_manifest_tells_what_made_the_tables(tmp_path: Path, swept: Callable[[str, Path], None]) -> None:
    swept(TRAINING, tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["command"] == "python -m experiments.sweep small.toml"
    assert manifest["seeds"] == [1, 2]
    assert manifest["cells"] == {"mine": {"rows": 4, "failed": 0}}
    assert {entry["name"] for entry in manifest["scenarios"]} == {"one-mac", "2-macs-1000mbps"}
    table = rows(tmp_path / "cells.csv")
    assert {row["scenario_sha256"] for row in table} == {entry["sha256"] for entry in manifest["scenarios"]}


@pytest.mark.slow
def test_only_figures_that_were_drawn_are_told_of(tmp_path: Path) -> None:
    file, out = tmp_path / "mine.toml", tmp_path / "out"
    file.write_text(SMALL)
    drawn = ran(str(file), "--out", str(out), "--jobs", "1")
    assert drawn.stdout == f"8 rows in {out / 'cells.csv'}, with figures of allreduce\n"
    assert (out / "allreduce_by_link.png").exists()
    file.write_text(SMALL.replace('"allreduce"', '"crossover"') + TRAINING)
    (out / "crossover.png").write_text("of an earlier sweep")
    (out / "crossover_plan.png").write_text("of somebody else")
    not_drawn = ran(str(file), "--out", str(out), "--jobs", "1")
    assert not_drawn.stdout == f"12 rows in {out / 'cells.csv'}\n"
    assert "no figure of crossover: its rows are not what that figure shows" in not_drawn.stderr
    assert not (out / "crossover.png").exists()
    assert (out / "crossover_plan.png").exists()


def test_a_name_of_nothing_is_not_every_sweep(tmp_path: Path) -> None:
    result = ran("", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "a name is needed" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "quick", "place"),
    [
        ("allreduce.toml", False, "results/allreduce"),
        ("Scaling.toml", False, "results/Scaling"),
        ("failures.toml", True, "results/quick/failures"),
        ("quick.toml", False, "results/quick"),
    ],
)
def test_a_file_of_ones_own_does_not_take_the_place_of_what_is_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, quick: bool, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(file).write_text(SMALL.replace('"allreduce"', '"mine"'))
    words = [f"./{file}", "--jobs", "1", *(["--quick"] if quick else [])]
    result = ran(*words)
    assert result.exit_code == 2
    assert f"./{file}: {place} is for what is shipped" in result.stderr
    assert not Path("results").exists()
    assert ran(*words, "--out", place).exit_code == 0


def test_what_is_shipped_has_its_place_by_its_name_and_by_its_file() -> None:
    for name, file in shipped_sweeps().items():
        assert place_of(name, False) == place_of(str(file), False) == Path("results", name)
    assert place_of("quick.toml", True) == Path("results/quick/quick")
    assert place_of("somewhere/mine.toml", False) == Path("results/mine")


def test_nothing_is_written_where_nobody_said_so_but_in_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(SMALL)
    for words in (("mine.toml",), ("allreduce", "--quick"), ()):
        for result in (ran(*words), CliRunner().invoke(hcsim, ["sweep", *words])):
            assert result.exit_code == 2
            assert "--out FOLDER is needed" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


@pytest.mark.slow
def test_the_installed_command_writes_the_same(tmp_path: Path, swept: Callable[[str, Path], None]) -> None:
    swept(SMALL, tmp_path / "first")
    Path(tmp_path / "small.toml").write_text(SMALL)
    words = ["sweep", str(tmp_path / "small.toml"), "--out", str(tmp_path / "second"), "--jobs", "1"]
    result = CliRunner().invoke(hcsim, words)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "second" / "cells.csv").read_bytes() == (tmp_path / "first" / "cells.csv").read_bytes()


@pytest.mark.slow
def test_the_installed_command_has_the_same_options() -> None:
    shown = [ran("--help"), CliRunner().invoke(hcsim, ["sweep", "--help"])]
    ours, theirs = [sorted(set(re.findall(r"--[a-z]+", one.output)) - {"--install", "--show"}) for one in shown]
    assert "--quick" in ours
    assert [word for word in theirs if word not in ours] == []


def occupied(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.name == ".cells":
        file.touch()
    elif file.name == "manifest.json":
        file.symlink_to("/dev/full")
    else:
        file.mkdir()


@pytest.mark.slow
@pytest.mark.parametrize("name", [".cells", "cells.csv", "curves.csv", "KEY", "allreduce_by_link.png", "manifest.json"])
def test_a_file_that_cannot_be_written_or_read_is_one_clear_line(tmp_path: Path, name: str) -> None:
    if name == "manifest.json" and not Path("/dev/full").exists():
        pytest.skip("no device here is always full")
    file, out = tmp_path / "mine.toml", tmp_path / "out"
    file.write_text(SMALL)
    key = parse_sweep(SMALL, "mine.toml")[0].cell.key
    occupied(out / (f".cells/{key}.json" if name == "KEY" else name))
    result = ran(str(file), "--out", str(out), "--jobs", "1")
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit)
    [line] = result.stderr.splitlines()[-1:]
    assert line.startswith(f"error: {out}")
    assert (key if name == "KEY" else name) in line


def test_a_bad_file_is_one_clear_line(tmp_path: Path) -> None:
    result = ran("allreduc", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "allreduc: no such file (did you mean allreduce?); shipped sweeps: allreduce, compression" in result.stderr


def test_the_report_of_a_sweep_has_its_figures_and_their_numbers_and_asks_for_nothing(tmp_path: Path) -> None:
    asked = parse_sweep(SMALL, "small.toml")
    pages = [tmp_path / "a.html", tmp_path / "b.html"]
    for page in pages:
        with closing(LocalPool(1)) as pool:
            sweep(asked, Output(tmp_path, page), pool, ["small.toml"], Console(quiet=True))
    text = pages[0].read_text()
    assert text == pages[1].read_text()
    found = asks_for_nothing(text)
    for words in ("allreduce by link", "allreduce closed form", "All runs", "python -m experiments.sweep small.toml"):
        assert words in found.words, words
    names = [value for name, value in found.attributes if name == "id"]
    assert len(names) == len(set(names))
    assert {"allreduce_by_link.csv", "allreduce_closed_form.csv", "cells.csv"} == {
        value for name, value in found.attributes if name == "download"
    }
