"""One rank: the script as `__main__`, with its simulated environment.

`python -m hcsim.scripts.rank.script SPEC CONVERSATION ARENA` is a rank that is started without forking (see
`fork_server`).
"""

from __future__ import annotations

import atexit
import os
import random
import runpy
import signal
import socket
import sys
import threading
import traceback
from contextlib import AbstractContextManager, suppress
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hcsim.engine import use_engine
from hcsim.scripts.environment import RankSpec, environment, import_early
from hcsim.scripts.ipc import ANSWERS, IpcConnection, Left, SharedMemoryAllocator, Stepped
from hcsim.scripts.rank.counting import WorkCounter
from hcsim.scripts.rank.imports import after_import, answer_mlx
from hcsim.scripts.rank.own_processes import guard_processes
from hcsim.scripts.rank.rendezvous import RemoteStore, install_store
from hcsim.scripts.rank.simulator import RemoteEngine, SimulatorClient
from hcsim.scripts.rank.spawn import install_spawn
from hcsim.scripts.rank.stdlib import ScriptClock, install_output

_OURS = (str(Path(__file__).parent), str(Path(runpy.__file__)), "<frozen runpy>")


def run_script(spec: RankSpec, connection: int, arena: int) -> NoReturn:
    """Run the script to its end, report how it ended, and exit the process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    simulator = SimulatorClient(IpcConnection(socket.socket(fileno=connection), ANSWERS), SharedMemoryAllocator(arena))
    counter = simulator.work = WorkCounter(simulator, spec.flops_per_byte, spec.grouping)
    install_output(simulator)
    clock = ScriptClock(simulator, counter)
    os.register_at_fork(after_in_child=lambda: _no_rank(simulator, clock))
    store = RemoteStore(simulator)  # held here: torch's own reference is to its C++ half
    install_store(store)
    install_spawn()
    guard_processes()
    use_engine(RemoteEngine(simulator))
    register_optimizer_step_post_hook(lambda *_: simulator.tell(Stepped()))
    register_optimizer_step_post_hook(lambda *_: counter.step_ended())
    _follow_mlx(simulator, counter, spec.seed)
    torch.set_num_threads(1)
    _seed(spec.seed)
    os.environ.update(environment(spec.rank, spec.world, spec.first, spec.life))
    sys.argv = [spec.script, *spec.arguments]
    sys.path[0] = str(Path(spec.script).parent)
    clock.install()
    code, error = run_as_main(spec.script, counter)
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
    simulator.tell(Left(code, error))
    clock.uninstall()
    os._exit(code)


def _follow_mlx(simulator: SimulatorClient, counter: WorkCounter, seed: int) -> None:
    """Count, seed and answer MLX, if the script imports it."""

    def begun() -> None:
        import mlx.core as mx

        from hcsim.scripts.rank.mlx_counting import GraphCounter

        mx.random.seed(seed)
        GraphCounter(counter).install()

    def with_optimizers() -> None:
        from mlx.optimizers import Optimizer

        update = Optimizer.update

        @wraps(update)
        def stepping(self: Any, *given: Any, **named: Any) -> None:
            update(self, *given, **named)
            simulator.tell(Stepped())

        Optimizer.update = stepping

    answer_mlx()
    after_import("mlx.core", begun)
    after_import("mlx.optimizers", with_optimizers)


def _seed(seed: int) -> None:
    """Seed each rank differently and reproducibly, as for processes that were not forked from one parent."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def run_as_main(script: str, observed: AbstractContextManager[object]) -> tuple[int, str]:
    """Run the script; return its exit status, and the error that ended it."""
    try:
        with observed:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return _status(end.code)
    except BaseException as error:
        _show(error)
        said = str(error).strip().partition("\n")[0]
        return 1, f"{type(error).__name__}: {said}" if said else type(error).__name__
    return 0, ""


def _status(code: Any) -> tuple[int, str]:
    """Return the status as the system reports it to a waiting parent: one byte."""
    if code is None or isinstance(code, int):
        status = int(code or 0)
        status = status & 0xFF if -sys.maxsize - 1 <= status <= sys.maxsize else 0xFF
        return status, f"it exited with status {status}" if status else ""
    print(code, file=sys.stderr)
    return 1, str(code)


def _show(error: BaseException) -> None:
    """Print the traceback, starting at the script."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename.startswith(_OURS):
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames, file=sys.stderr)


def _no_rank(simulator: SimulatorClient, clock: ScriptClock) -> None:
    """Leave the simulation in a process that the script forks (a data loader, say): it computes at no cost and
    sees the real time."""
    simulator.leave()
    clock.uninstall()


def _main(encoded: str, connection: str, arena: str) -> None:
    spec = msgspec.json.decode(encoded, type=RankSpec)
    import_early(spec.script)  # which is no part of its work, as it is none where ranks are forked
    run_script(spec, int(connection), int(arena))


if __name__ == "__main__":
    _main(*sys.argv[1:])
