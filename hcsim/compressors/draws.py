"""Random bits in large quantities, from named streams.

numpy guarantees the raw bits of its generators across versions, but not the numbers derived from them. Ranks
must draw the same numbers on any platform, so the numbers are derived from the raw bits here. SFC64 is four
times as fast as the counter-based Philox. With a stream for each tensor and step no counter is needed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hcsim.compressors import kernels
from hcsim.compressors.base import Array
from hcsim.compressors.kernels import plain
from hcsim.compressors.kernels.plain import FEW_BITS, FEW_MOST, WORD_BITS, Bits, Words
from hcsim.rng import stream

SPARE = 1 << 15
"""Additional slots beyond those drawn, since draws do not fill the buckets evenly."""
_MANY, _FEW = 1 << 23, 1 / 32
"""A choice from at least so many elements, of at most this fraction, is stored as a list: the bits would
not fit a near cache, and most would be zero."""


def bits(seed: int, *name: str | int) -> np.random.SFC64:
    """Return the generator of raw bits of this name."""
    return np.random.SFC64(stream(seed, *name).getrandbits(128))


def uniform(source: np.random.SFC64, count: int) -> npt.NDArray[np.float64]:
    """Draw numbers in [0, 1), on a grid of 2⁻⁵³."""
    raw = source.random_raw(count)
    raw >>= np.uint64(11)
    return np.multiply(raw, 2.0**-53, dtype=np.float64)


def uniform16(source: np.random.SFC64, count: int) -> npt.NDArray[np.uint16]:
    """Draw integers from 0 to 65535, four from every raw number."""
    return source.random_raw(-(-count // 4)).astype("<u8", copy=False).view("<u2")[:count]


class BitmaskChoice:
    """A choice as a bit mask. Taking it reads the whole tensor, so all elements are checked along the way."""

    checks_all = True

    def __init__(self, words: Words, count: int) -> None:
        self.words = words
        self._count = count

    def take(self, flat: Array, factor: float, values: Array) -> float:
        """Take the chosen elements times the factor. Return their largest magnitude; NaN if not all elements of the
        tensor are finite."""
        return kernels.take_marked(flat, self.words, factor, values)

    def numbers(self) -> npt.NDArray[np.int64]:
        places = np.empty(self._count, np.int64)
        kernels.marked(self.words, places)
        return places


class IndexChoice:
    """A sparse choice as a list: only the chosen elements are read."""

    checks_all = False

    def __init__(self, places: Bits) -> None:
        self._places = places

    def take(self, flat: Array, factor: float, values: Array) -> float:
        """Take the chosen elements times the factor. Return their largest magnitude."""
        return kernels.take_listed(flat, self._places, factor, values)

    def numbers(self) -> npt.NDArray[np.int64]:
        """Return the chosen indices, grouped by blocks of elements in ascending order."""
        return self._places.astype(np.int64)


class Chooser:
    """Makes choices one after the other in the same memory: fresh pages cost as much as choosing."""

    def __init__(self) -> None:
        self._seen = np.empty(0, np.uint64)
        self._room = np.empty(0, np.uint32)

    def choice(self, source: np.random.SFC64, population: int, count: int) -> BitmaskChoice | IndexChoice:
        """Choose distinct numbers below `population` uniformly; the choice is valid until the next.

        It draws as many numbers as are missing until all are distinct. If more than half are chosen, the
        complement is drawn. The draws start at the source's state, which is not advanced: numpy takes longer to
        draw than the marking takes."""
        words, drawn = -(-population // WORD_BITS), min(count, population - count)
        if _MANY < population <= FEW_MOST and count <= _FEW * population:
            return self._listed(source, population, count)
        if self._room.size < drawn:
            self._room = np.empty(drawn + drawn // 8 + SPARE, np.uint32)
        if self._seen.size < words:
            self._seen = np.empty(words, np.uint64)
        seen = self._seen[:words]
        kernels.choose(_state(source), drawn, population, seen, self._room)
        if 2 * count > population:
            np.invert(seen, out=seen)
            seen[-1] &= np.uint64((1 << (population - 1) % WORD_BITS + 1) - 1)
        return BitmaskChoice(seen, count)

    def _listed(self, source: np.random.SFC64, population: int, count: int) -> IndexChoice:
        # A list for each block, with room for a quarter more than are expected, and for a few.
        blocks = (population - 1 >> FEW_BITS) + 1
        needed = blocks * (5 * -(-count // blocks) // 4 + 64)
        if self._room.size < needed:
            self._room = np.empty(needed, np.uint32)
        room = self._room[:needed]
        if not kernels.choose_few(_state(source), count, population, room):
            plain.choose_few(_state(source), count, population, room)
        return IndexChoice(room[:count])


def _state(source: np.random.SFC64) -> Words:
    state: Words = source.state["state"]["state"].copy()
    return state
