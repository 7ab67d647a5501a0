"""An all-gather with an echo: all members know that they received the same from each.

What members do next follows from what they received. So if a member sends one thing to one and another to the next,
correct members part ways, and each takes the other for the one that is wrong. Therefore everybody sends to everybody
directly, and then an echo, as in Bracha's reliable broadcast (1987): digests of what it received. Where two received
unlike things from a third, either one of them misreports or the third did not send all the same:
`hcsim.cluster.diagnosis` looks for the fewest members that explain all such findings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hcsim.collectives.buffers import array_of
from hcsim.collectives.group import Group
from hcsim.errors import CollectiveError
from hcsim.training.elastic.fingerprint import fingerprint

_MOST = 16
"""In a larger group that all talk to all takes long: there words are passed on, and nobody compares them."""


class Doubt(NamedTuple):
    """Either the accused is wrong or the witness, which may be ourselves."""

    witness: int
    accused: int
    reason: str


class Contradiction(CollectiveError):
    """Members say unlike things; `doubts` are about which of them."""

    def __init__(
        self, message: str, *, peer: int | None = None, phase: str = "", doubts: tuple[Doubt, ...] = ()
    ) -> None:
        super().__init__(message, peer=peer, phase=phase)
        self.doubts = doubts


async def gather_echoed(group: Group, words: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """What each sent, by rank; all have received the same, or it raises `Contradiction`."""
    said = await gather_direct(group, words)
    if not 2 < group.size <= _MOST:
        return said
    ours = np.array(digests(said), np.int64)
    heard = await gather_direct(group, ours)
    doubts = tuple(doubt for rank, theirs in enumerate(heard) for doubt in _doubts(group.rank, ours, rank, theirs))
    if doubts:
        raise Contradiction(doubts[0].reason, phase="synchronising", doubts=doubts)
    return said


async def gather_direct(group: Group, words: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """What each sent, by rank, from itself unless the group is large; perhaps not what others received."""
    # Folded onto a power of two, words would cross the slow line between two homes three times instead of once.
    direct = group.size <= _MOST or group.size.bit_count() != 1
    return [_numbers(each) for each in await group.all_gather(words, algorithm="direct" if direct else "auto")]


def digests(said: Sequence[npt.NDArray[np.int64]]) -> tuple[int, ...]:
    """One of what each said."""
    return tuple(fingerprint(each) for each in said)


def _doubts(us: int, ours: npt.NDArray[np.int64], them: int, theirs: npt.NDArray[np.int64]) -> list[Doubt]:
    """What does not fit in what another rank has heard, given digests of what each rank said."""
    if theirs[them] != ours[them]:
        return [Doubt(us, them, f"rank {them} told rank {us} something else than it says it told")]
    unlike = [rank for rank in range(len(ours)) if theirs[rank] != ours[rank]]
    return [Doubt(them, rank, f"rank {rank} did not tell rank {us} and rank {them} the same") for rank in unlike]


def _numbers(data: object) -> npt.NDArray[np.int64]:
    return np.asarray(array_of(data), np.int64)  # type: ignore[arg-type]
