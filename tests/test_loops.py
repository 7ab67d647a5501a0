"""An installation without a C compiler works, and says what it lacks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import hcsim
from hcsim.loops import LOOPS, how_to_build, is_built, missing_loops

PACKAGE = Path(hcsim.__file__).parent
BENCH = ("bench", "four-macs-1gbe", "--operation", "barrier", "--repeat", "1")


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A copy of the package without compiled modules."""
    compiled = [f"*{suffix}" for suffix in EXTENSION_SUFFIXES]
    shutil.copytree(PACKAGE, tmp_path / "hcsim", ignore=shutil.ignore_patterns("__pycache__", *compiled))
    return tmp_path


def test_what_was_not_built_is_found_and_named(bare: Path) -> None:
    assert not any(is_built(module, bare / "hcsim") for module in LOOPS)
    assert missing_loops(lambda module: True) == ""
    told = missing_loops(lambda module: "rings" not in module)
    assert told == "not built, and so slower: shared memory"
    assert "xcode-select --install; then pip install" in how_to_build("darwin")


@pytest.mark.slow
def test_a_run_without_them_says_so_in_one_line_and_gives_its_result(bare: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hcsim", *BENCH], cwd=bare, env={"PYTHONPATH": str(bare)}, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "exact" in done.stdout
    first, *_ = done.stderr.splitlines()
    assert first == f"not built, and so slower: {', '.join(LOOPS.values())}; to get it: {how_to_build()}"
