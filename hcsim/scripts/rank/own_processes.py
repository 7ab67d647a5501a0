"""Processes that a script starts by `multiprocessing.Process` without a fork: fresh interpreters outside of the
simulation. A data loader's worker is welcome there. One that wants to be a rank would wait for others until its own
time-out, so it is refused at once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from multiprocessing.process import BaseProcess
from typing import NoReturn

from hcsim.errors import UsageError
from hcsim.scripts.rank.imports import after_import

_GROUPS = "torch.distributed.distributed_c10d"
_REFUSAL = (
    "a process that the script has started by multiprocessing.Process wants to be a rank, and it is not on any machine "
    "of the simulation: start ranks by torch.multiprocessing.spawn, or leave that to hcsim, which runs the script on "
    "each machine as one RANK of WORLD_SIZE"
)


class _Guard:
    """Is unpickled in the process, as a part of its description, before it does anything."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return refuse_groups, ()


def guard_processes() -> None:
    """Let the processes that this one starts from now on refuse to be ranks."""
    start = BaseProcess.start

    @wraps(start)
    def guarded(self: BaseProcess) -> None:
        self.__dict__["_hcsim_guard"] = _Guard()
        start(self)

    BaseProcess.start = guarded  # type: ignore[method-assign]


def refuse_groups() -> None:
    """Refuse process groups in this process, whenever torch is imported."""
    if _GROUPS in sys.modules:
        _refuse()
    else:
        after_import(_GROUPS, _refuse)


def _refuse() -> None:
    def refused(*_: object, **__: object) -> NoReturn:
        raise UsageError(_REFUSAL)

    groups = sys.modules[_GROUPS]
    for name in ("rendezvous", "_new_process_group_helper"):  # with an address, and with a store
        setattr(groups, name, refused)
