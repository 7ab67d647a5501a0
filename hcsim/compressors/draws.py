"""Random bits by the million, from named streams.

numpy keeps the raw bits of its generators the same in every version, which it does not promise of the numbers
that it makes of them. Ranks must draw alike whatever they run on, so we make our own numbers of the raw
bits. SFC64 is four times as fast as the counter-based Philox; a stream for each tensor and step needs no counter.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hcsim.rng import stream


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


def sample(source: np.random.SFC64, population: int, count: int) -> npt.NDArray[np.int64]:
    """So many distinct numbers below `population`, each choice equally likely, ascending.

    Draws until there are enough different ones, never more than are missing; of two halves the smaller is drawn.
    """
    if not count:
        return np.empty(0, np.int64)
    if 2 * count > population:
        kept = np.ones(population, bool)
        kept[sample(source, population, population - count)] = False
        return np.flatnonzero(kept)
    chosen = _distinct(source, population, count)
    while chosen.size < count:
        drawn = _distinct(source, population, count - chosen.size)
        places = np.searchsorted(chosen, drawn)
        new = chosen[np.minimum(places, chosen.size - 1)] != drawn
        chosen = np.insert(chosen, places[new], drawn[new])
    return chosen


def _distinct(source: np.random.SFC64, population: int, count: int) -> npt.NDArray[np.int64]:
    """As many draws; ascending, each once."""
    drawn = uniform(source, count) * population
    # 32-bit numbers are sorted in less than half the time.
    drawn = np.sort(drawn.astype(np.uint32 if population < 1 << 32 else np.int64))
    first = np.ones(drawn.size, bool)
    np.not_equal(drawn[1:], drawn[:-1], out=first[1:])
    return drawn[first].astype(np.int64)
