"""A barrier that says who did not come: everybody reports to rank 0, which lets all go or names the absent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hcsim.calls import GroupCall
from hcsim.errors import CollectiveTimeout, HcsimError
from hcsim.torch_backend.engine import Line, Pending
from hcsim.torch_backend.work import CallTimedOut, translated

_TAG = (1 << 32) - 1
"""Above what a torch program can say."""


def monitored_barrier(line: Line, timeout_s: float, ranks: Sequence[int], *, name_all: bool) -> None:
    """Return when everybody has called it. `ranks`: who the members are in the whole program; `name_all`: rank 0 names
    all the absent rather than one."""
    others = range(1, line.size) if line.rank == 0 else range(1)
    first, second = ("recv", "send") if line.rank == 0 else ("send", "recv")
    troubles = _troubles({rank: _begin(line, first, rank, timeout_s) for rank in others})
    if line.rank == 0 and any(isinstance(trouble, CollectiveTimeout) for trouble in troubles.values()):
        late = sorted(troubles) if name_all else sorted(troubles)[:1]
        absent = [ranks[rank] for rank in late]
        raise CallTimedOut(
            f"the monitored barrier was not passed within {timeout_s:g} s:"
            f" rank {', '.join(map(str, absent))} did not come to it",
            absent[0],
        )
    troubles = troubles or _troubles({rank: _begin(line, second, rank, timeout_s) for rank in others})
    for trouble in troubles.values():
        raise translated(trouble) from trouble


def _begin(line: Line, operation: str, rank: int, timeout_s: float) -> Pending:
    call = GroupCall(operation=operation, root=rank, tag=_TAG, timeout_s=timeout_s)
    return line.start(call, [np.zeros(1, np.uint8)])


def _troubles(messages: dict[int, Pending]) -> dict[int, HcsimError]:
    """What went wrong with each that something went wrong with."""
    troubles = {}
    for rank, message in messages.items():
        try:
            message.wait(None)
        except HcsimError as error:
            troubles[rank] = error
    return troubles
