"""Scripts that start their own ranks. The machines are the processes of `torch.multiprocessing.spawn`, and this rank is
one of them; launchers are refused, since their processes would run outside of the simulation."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from typing import Any, NoReturn

import torch.multiprocessing as multiprocessing

from hcsim.errors import UsageError
from hcsim.scripts.rank.imports import after_import

_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "mpirun", "mlx.launch")
_IS_THE_LAUNCHER = "hcsim is the launcher, and runs the script on each machine as one RANK of WORLD_SIZE"


class _Ended:
    """What `spawn(…, join=False)` returns: processes that have ended."""

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        return True


def install_spawn() -> None:
    """Let `spawn` call the function here, as the process of this rank."""
    for name in ("spawn", "start_processes"):
        setattr(multiprocessing, name, _spawn)
    start = subprocess.Popen.__init__

    @wraps(start)
    def checked(self: Any, args: Any, *more: Any, **named: Any) -> None:
        words = args.split() if isinstance(args, str) else [str(os.fspath(word)) for word in args]
        started = (
            {words[0].rpartition("/")[2], *(of for flag, of in pairwise(words[:3]) if flag == "-m")} if words else ()
        )
        launcher = next((name for name in _LAUNCHERS if name in started), None)
        if launcher is not None:
            raise UsageError(f"the script starts {launcher}: {_IS_THE_LAUNCHER}")
        start(self, args, *more, **named)

    subprocess.Popen.__init__ = checked  # type: ignore[method-assign]
    after_import("torch.distributed.launcher.api", _refuse_agents)


def _refuse_agents() -> None:
    from torch.distributed.launcher import api

    def refused(*_: object, **__: object) -> NoReturn:
        raise UsageError(f"the script starts torchrun's agent: {_IS_THE_LAUNCHER}")

    api.launch_agent = refused


def _spawn(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
    **_: object,
) -> _Ended | None:
    ranks = int(os.environ["WORLD_SIZE"])
    if nprocs != ranks:
        raise UsageError(
            f"the script spawns {nprocs} processes, and {ranks} machines run it, each as one of them: "
            f"say --nodes {nprocs}, or spawn {ranks}"
        )
    fn(int(os.environ["RANK"]), *args)
    return None if join else _Ended()
