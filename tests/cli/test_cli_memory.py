"""A run that does not fit into memory is refused, with what it needs and what would fit."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from hcsim.cli.app import app

LARGE = ("run", "four-macs-1gbe", "--task", "llama-7b:tokens=64", "--steps", "1")


def hcsim(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_a_virtual_run_that_does_not_fit_is_refused_before_it_starts_with_what_would() -> None:
    result = hcsim(*LARGE)
    assert result.exit_code == 2
    assert "weights" in result.stderr
    assert "mini-1 and 3 more" in result.stderr
    assert "--task llama-7b:tokens=64,lora=16 --set recompute=true --set precision=bf16" in result.stderr
    assert "machines with 128 GiB" in result.stderr
    assert "error: mini-1 (M4) needs 7" in result.stderr
    assert "can use 16 GiB of its 24 GiB of memory; --set ignore_memory=true" in result.stderr
    assert result.stdout == ""


def test_it_runs_anyway_where_memory_is_ignored_and_says_so() -> None:
    result = hcsim(*LARGE, "--strategy", "single", "--set", "ignore_memory=true")
    assert result.exit_code == 0
    assert "a real one would fail, and this run goes on (--set ignore_memory=true)" in result.stderr
    assert "1 steps in" in result.stdout


def test_ignoring_memory_is_for_trainings() -> None:
    result = hcsim("run", "four-macs-1gbe", "--set", "ignore_memory=true")
    assert result.exit_code == 2
    assert "only where something is learned" in result.stderr


def test_what_fits_is_not_mentioned() -> None:
    result = hcsim("run", "four-macs-1gbe", "--task", "llama-7b:tokens=64,lora=16", "--steps", "1", "--set",
                   "precision=bf16")  # fmt: skip
    assert result.exit_code == 0
    assert "memory" not in result.stderr
