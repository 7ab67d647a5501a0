"""The compiled inner loops. An installation without a C compiler succeeds without them, and what they do is slower."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path

LOOPS: Mapping[str, str] = {
    "hcsim.compressors.kernels.compiled": "compressors",
    "hcsim.real.folding": "sums on receipt",
    "hcsim.real.shm.rings": "shared memory",
}
"""Compiled modules, and what is slower without them."""


def is_built(module: str, package: Path = Path(__file__).parent) -> bool:
    """Return whether the module is in the installed package. It is not loaded."""
    folder = package.joinpath(*module.split(".")[1:-1])
    return PathFinder.find_spec(module, [str(folder)]) is not None


def missing_loops(has: Callable[[str], bool] = is_built) -> str:
    """Return what is missing, as a finding; empty if everything is there."""
    missing = [what for module, what in LOOPS.items() if not has(module)]
    return f"not built, and so slower: {', '.join(missing)}" if missing else ""


def how_to_build(system: str = sys.platform) -> str:
    """Return what to do about loops that are missing."""
    compiler = "xcode-select --install" if system == "darwin" else "install a C compiler and Python's headers"
    return f"{compiler}; then pip install --force-reinstall --no-deps hcsim"
