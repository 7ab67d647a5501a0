"""A copy of the source tree, with a planted bug or without one, and programs that run in it.

The copy has all that the search needs: the packages `hcsim` and `experiments`, compiled parts included. A program that
runs there imports the copy and not what is installed, since PYTHONPATH stands before it. Each one says where its
`hcsim` came from, and another one than the copy's is refused.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import experiments
from experiments.mutants.patches import Patch, apply
from hcsim.workers import ONE_THREAD

PACKAGES = ("hcsim", "experiments")
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc")


def root() -> Path:
    """Of the tree that this program runs from."""
    return Path(experiments.__path__[0]).resolve().parent


def sources() -> list[Path]:
    """The files that decide what the search finds."""
    return sorted((root() / "hcsim").rglob("*.py"))


def copied(to: Path, patch: Patch | None) -> Path:
    """A copy in that folder, which is made; with the bug, if there is one."""
    for package in PACKAGES:
        shutil.copytree(root() / package, to / package, ignore=_LEFT_OUT)
    if patch is not None:
        apply(patch, to)
    return to


def command(module: str, *arguments: str) -> list[str]:
    """The command line of a module of a copy."""
    return [sys.executable, "-m", module, *arguments]


def environment(tree: Path) -> dict[str, str]:
    """Of a program that runs in a copy."""
    return {**os.environ, **ONE_THREAD, "PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"}
