"""What the benchmarks' commands share: a file is tried before the work, and nothing that was measured is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from experiments import asked

ROOT = Path(__file__).parents[2]


def command(module: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"experiments.{module}", *words],
        cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, **variables},
    )  # fmt: skip


def test_a_file_that_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    kept, new = tmp_path / "kept.json", tmp_path / "new.json"
    kept.write_text("[1]")
    for file in (kept, new):
        asked.check_json(str(file))
    assert kept.read_text() == "[1]"
    assert not new.exists()


@pytest.mark.parametrize("name", ["", "folder", "missing/rows.json", "kept.json/rows.json", "n" * 300])
def test_a_file_that_cannot_be_written_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "kept.json").write_text("[1]")
    with pytest.raises(typer.BadParameter, match="cannot be written"):
        asked.check_json(name and str(tmp_path / name))


@pytest.mark.slow
def test_rows_are_in_their_file_whatever_becomes_of_what_is_shown(tmp_path: Path) -> None:
    def broken() -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        asked.hand_over(str(tmp_path / "rows.json"), [{"a": 1}], broken)
    assert json.loads((tmp_path / "rows.json").read_text()) == [{"a": 1}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "sign"),
    [
        (("speed", "--only", "timers", "--turns", "1"), "µ"),
        (("allreduce", "--ranks", "2", "--sizes", "4KB", "--repeat", "1", "--peers", "hcsim,bare"), "÷"),
    ],
)
def test_what_a_terminal_cannot_show_is_spelled(words: tuple[str, ...], sign: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    ended = command(*words, "--json", str(rows), PYTHONIOENCODING="ascii")
    assert ended.returncode == 0, ended.stderr
    assert sign.encode("ascii", "backslashreplace").decode() in ended.stdout
    assert len(json.loads(rows.read_text())) == 1


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("steps", ["0", "-1", "x"])
def test_a_script_takes_at_least_one_step(steps: str) -> None:
    ended = command("scripts", f"--steps={steps}")
    assert ended.returncode == 2
    assert f"argument --steps: '{steps}' is not a number of steps" in ended.stderr


@pytest.mark.slow
def test_a_pipe_has_one_writer(tmp_path: Path) -> None:
    """Who reads it would take an earlier one's end for that of all."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    asked.check_json(str(pipe))  # nobody reads it yet, so that opening it would wait
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        asked.check_json(str(pipe))
        asked.write_json(str(pipe), [{"a": 1}])
        assert reader.stdout is not None
        assert json.loads(reader.stdout.read()) == [{"a": 1}]


@pytest.mark.slow
def test_a_link_to_nowhere_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "rows.json")
    asked.check_json(str(tmp_path / "link.json"))
    assert not (tmp_path / "rows.json").exists()
    assert (tmp_path / "link.json").is_symlink()


@pytest.mark.slow
def test_rows_come_last_where_they_go_to_what_is_shown(tmp_path: Path) -> None:
    both = tmp_path / "both"
    with both.open("w") as shown:
        asked.hand_over(str(both), [{"a": 1}], lambda: print("a table", file=shown, flush=True))
    assert json.loads(both.read_text()) == [{"a": 1}]
