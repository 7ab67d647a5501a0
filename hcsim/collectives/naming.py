"""Errors of groups in the names of machines: a group knows its members by their ranks alone."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hcsim.collectives.failure_domain import TOLD
from hcsim.errors import ChannelBroken, CollectiveError, CollectiveTimeout


def with_names(text: str, names: Sequence[str]) -> str:
    """Return the text with each rank called by its machine's name, unless the name stands there already."""

    def named(found: re.Match[str]) -> str:
        rank = int(found[1])
        return f"{names[rank]} (rank {rank})" if rank < len(names) else found[0]

    return re.sub(r"(?<!\()\brank (\d+)\b(?! \()", named, text)


def naming(error: CollectiveError, names: Sequence[str]) -> CollectiveError:
    """Return the error with the names of machines. The one whose connection broke comes first."""
    text = with_names(str(error), names)
    if _says_who_was_lost(error) and error.peer is not None and error.peer < len(names):
        text = f"{names[error.peer]} (rank {error.peer}) was lost: {text}"
    again = type(error)(text, peer=error.peer, phase=error.phase)
    again.__cause__ = error
    return again


def _says_who_was_lost(error: CollectiveError) -> bool:
    broke = isinstance(error.__cause__, ChannelBroken) and error.phase != TOLD
    return broke and not isinstance(error, CollectiveTimeout)
