"""Random bits by the million, from named streams.

numpy keeps the raw bits of its generators the same in every version, which it does not promise of the numbers
that it makes of them. Ranks must draw alike whatever they run on, so we make our own numbers of the raw
bits. SFC64 is four times as fast as the counter-based Philox; a stream for each tensor and step needs no counter.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hcsim.compressors import kernels
from hcsim.compressors.kernels.plain import WORD_BITS, Words
from hcsim.rng import stream

SPARE = 1 << 15
"""Room for more places than are drawn: they do not fill it evenly."""


def bits(seed: int, *name: str | int) -> np.random.SFC64:
    """The source of raw bits of that name."""
    return np.random.SFC64(stream(seed, *name).getrandbits(128))


def uniform(source: np.random.SFC64, count: int) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1), on a grid of 2⁻⁵³."""
    raw = source.random_raw(count)
    raw >>= np.uint64(11)
    return np.multiply(raw, 2.0**-53, dtype=np.float64)


def uniform16(source: np.random.SFC64, count: int) -> npt.NDArray[np.uint16]:
    """Whole numbers from 0 to 65535: four of them from every raw number."""
    return source.random_raw(-(-count // 4)).astype("<u8", copy=False).view("<u2")[:count]


class Chooser:
    """Makes choices, one after the other in the same memory: fresh pages cost as much as choosing."""

    def __init__(self) -> None:
        self._seen = np.empty(0, np.uint64)
        self._room = np.empty(0, np.uint32)

    def choice(self, source: np.random.SFC64, population: int, count: int) -> Words:
        """So many distinct numbers below `population`, each choice equally likely, as bits that are set until the next.

        Draws until there are enough different ones, never more than are missing; of two halves the smaller is drawn.
        They are drawn from where the source is, which itself stays there: numpy takes longer to draw than we to mark.
        """
        words, drawn = -(-population // WORD_BITS), min(count, population - count)
        if self._seen.size < words:
            self._seen = np.empty(words, np.uint64)
        if self._room.size < drawn:
            self._room = np.empty(drawn + drawn // 8 + SPARE, np.uint32)
        seen = self._seen[:words]
        kernels.choose(source.state["state"]["state"].copy(), drawn, population, seen, self._room)
        if 2 * count > population:
            np.invert(seen, out=seen)
            seen[-1] &= np.uint64((1 << (population - 1) % WORD_BITS + 1) - 1)
        return seen


def numbers(chosen: Words, count: int) -> npt.NDArray[np.int64]:
    """Which so many bits are set, ascending."""
    places = np.empty(count, np.int64)
    kernels.marked(chosen, places)
    return places
