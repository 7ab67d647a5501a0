"""The generators that a program usually draws from: torch's, numpy's and Python's own."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Where they are now."""
    kind, words, at, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, cached = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": {"kind": kind, "words": torch.from_numpy(np.array(words, np.int64)), "rest": (at, has_gauss, gauss)},
        "python": {"version": version, "words": torch.tensor(internal, dtype=torch.int64), "cached": cached},
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Go on drawing where that was taken."""
    torch.set_rng_state(state["torch"])
    theirs = state["numpy"]
    np.random.set_state((theirs["kind"], theirs["words"].numpy().astype(np.uint32), *theirs["rest"]))
    theirs = state["python"]
    random.setstate((theirs["version"], tuple(theirs["words"].tolist()), theirs["cached"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])
