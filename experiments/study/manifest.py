"""What made these files: enough to make them again, and to tell two runs apart."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.study.cell import code_sha256

RECORDED = ("hcsim", "simpy", "numpy", "torch", "msgspec", "pandas", "pyarrow", "matplotlib", "scikit-learn")


def manifest(table: pd.DataFrame, command: Sequence[str]) -> dict[str, Any]:
    """Of the table's rows."""
    ran = table.dropna(subset=["scenario"]).drop_duplicates(["scenario", "scenario_sha256"])
    commit = _git("rev-parse", "HEAD")
    return {
        "command": " ".join(["python -m experiments.sweep", *command]),
        "commit": commit,
        "dirty": None if commit is None else bool(_git("status", "--porcelain", "--", "hcsim", "experiments")),
        "code_sha256": code_sha256(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in RECORDED}},
        "cells": {
            study: {"rows": len(rows), "failed": int(rows["error"].notna().sum())}
            for study, rows in table.groupby("study", sort=False)
        },
        "seeds": sorted(int(seed) for seed in table["seed"].dropna().unique()),
        "scenarios": [
            {"name": name, "sha256": digest}
            for name, digest in sorted(zip(ran["scenario"], ran["scenario_sha256"], strict=True))
        ],
    }


def _git(*words: str) -> str | None:
    """What git says; None outside a checkout: what is installed may lie in the repository of another project."""
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists():
        return None
    git = ["git", "--no-optional-locks", "-C", str(checkout), *words]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
