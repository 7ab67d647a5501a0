"""Named random streams.

Every source of randomness has its own stream, keyed by the run's seed and a name such as ("jitter",
"studio→mini"). A stream's n-th draw depends only on the key and on n, so removing one fault, node or link
from a scenario changes no other draw.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np


def stream(seed: int, *name: str | int) -> random.Random:
    """Return the stream of that name: the same in every process, for every PYTHONHASHSEED."""
    text = "\x1f".join(str(part) for part in (seed, *name))
    return random.Random(int.from_bytes(hashlib.sha256(text.encode()).digest(), "big"))


def generator(seed: int, *name: str | int) -> np.random.Generator:
    """Return the stream of that name as a numpy generator. Its numbers may differ between versions of numpy."""
    return np.random.Generator(np.random.Philox(key=stream(seed, *name).getrandbits(128)))
