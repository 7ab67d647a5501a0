"""A training script in a process of its own, whose steps are timed: `python -m hcsim.twin.script_rank SPEC`.

A step ends where an optimizer's step ends. Where several optimizers take turns it ends with that of the one that steps
most rarely, so that a step has a part of each; a script without an optimizer ends a step with a backward pass.

Steps are timed in turns: some of them undisturbed, then one whose kernels are timed one by one, then one that only
brings the caches back to normal. When the script has taken enough steps, its process ends.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from hcsim.config import KernelKind
from hcsim.scripts.environment import environment
from hcsim.scripts.rank.script import run_as_main
from hcsim.torch_kernels import Kernel
from hcsim.twin.script import ScriptJob, ScriptTimes, TimedKernel, TimedTurn
from hcsim.twin.stopwatch import HostTimer, Stopwatch, waiting

WARM_UP_STEPS = 3
MOST_WARM_UP_STEPS = 12
TURNS = 12
FEWEST_PLAIN, MOST_PLAIN = 3, 40
PLAIN_S = 0.1
"""Undisturbed steps of a turn last about so long."""


class GapStopwatch(Stopwatch):  # type: ignore[no-untyped-call]
    """Tells the kernels of a script's step."""

    def __init__(self, device: str) -> None:
        super().__init__(HostTimer(waiting(device)))

    def kernels(self) -> list[TimedKernel]:
        """Return the kernels of the step that has just ended. What comes after the last one counts as before the
        first."""
        if self.gaps_s:
            self.gaps_s[0] += time.perf_counter() - self._left_s
        return [
            TimedKernel(each.signature, *_figures(each.kernel), each.seconds[0], each.gaps[0])
            for each in self.samples()
        ]


def _figures(kernel: Kernel) -> tuple[KernelKind, float, float, str]:
    return kernel.kind, kernel.flops, kernel.moved_bytes, kernel.dtype


class StepObserver:
    """Notices the ends of steps, and times them."""

    def __init__(self, limit_s: float, done: Callable[[], NoReturn]) -> None:
        self.device = "cpu"
        self.backward_passes = 0
        self.turns: list[TimedTurn] = []
        self._done = done
        self._limit_s = limit_s
        self._created = 0
        self._taken: list[tuple[Optimizer, int]] = []
        """The optimizers in the order of their first steps, and how many steps each has taken."""
        self._marker: Optimizer | None = None
        self._timing: Generator[None] | None = None

    def install(self) -> None:
        """Watch torch's optimizers and backward passes."""
        create = Optimizer.__init__
        backward, gradients = torch.autograd.backward, torch.autograd.grad

        @wraps(create)
        def creating(optimizer: Optimizer, *given: Any, **named: Any) -> None:
            create(optimizer, *given, **named)
            self._created += 1

        @wraps(backward)
        def passing(tensors: Any, *given: Any, **named: Any) -> None:
            backward(tensors, *given, **named)
            self._passed_back(tensors)

        @wraps(gradients)
        def differentiating(outputs: Any, *given: Any, **named: Any) -> Any:
            found = gradients(outputs, *given, **named)
            self._passed_back(outputs)
            return found

        Optimizer.__init__ = creating  # type: ignore[method-assign, assignment]
        torch.autograd.backward, torch.autograd.grad = passing, differentiating
        register_optimizer_step_post_hook(lambda optimizer, *_: self._optimized(optimizer))

    def _passed_back(self, outputs: Any) -> None:
        self.backward_passes += 1
        first = next(iter(outputs), None) if isinstance(outputs, tuple | list) else outputs
        if isinstance(first, torch.Tensor):
            self.device = first.device.type
        if not self._created and self.backward_passes >= WARM_UP_STEPS:
            self._step_ended()

    def _optimized(self, optimizer: Optimizer) -> None:
        if self._marker is None:
            self._warm_up(optimizer)
        elif optimizer is self._marker:
            self._step_ended()

    def _warm_up(self, optimizer: Optimizer) -> None:
        """Count the first steps of each optimizer, and choose the one that marks the ends of steps."""
        counts = {id(each): number for each, number in self._taken}
        number = counts.get(id(optimizer), 0) + 1
        self._taken = [(each, count) for each, count in self._taken if each is not optimizer]
        self._taken.append((optimizer, number))
        fewest = min(count for _, count in self._taken)
        all_step = len(self._taken) >= self._created and fewest >= WARM_UP_STEPS
        if all_step or sum(count for _, count in self._taken) >= MOST_WARM_UP_STEPS:
            self._marker = next(each for each, count in self._taken if count == fewest)
            if optimizer is self._marker:
                self._step_ended()

    def _step_ended(self) -> None:
        if self._timing is None:
            self._timing = self._time_steps()
        if next(self._timing, self) is self:
            self._done()

    def _time_steps(self) -> Generator[None]:
        """Time steps in turns; wait at each `yield` for the end of a step."""
        wait = waiting(self.device)
        began_s = time.perf_counter()
        for number in range(TURNS):
            turn = TimedTurn([], [])
            self.turns.append(turn)
            # The first turn is short, so that one is complete in a script of few steps, however fast they are.
            yield from self._time_plain(turn, wait, MOST_PLAIN if number else FEWEST_PLAIN)
            stopwatch = GapStopwatch(self.device)
            # Not in a `with`: the mode is active in the script, while this generator waits.
            stopwatch.__enter__()  # type: ignore[no-untyped-call]
            yield
            stopwatch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            turn.kernels.extend(stopwatch.kernels())
            if time.perf_counter() - began_s > self._limit_s or number == TURNS - 1:
                return
            yield

    def _time_plain(self, turn: TimedTurn, wait: Callable[[], object], most: int) -> Generator[None]:
        """Time undisturbed steps. A device that works while the program goes on is waited for at the end alone."""
        wait()
        first_s = began_s = time.perf_counter()
        number = 0
        while number < FEWEST_PLAIN or (number < most and began_s - first_s < PLAIN_S):
            yield
            number += 1
            ended_s = time.perf_counter()
            if self.device == "cpu":
                turn.plain_s.append(ended_s - began_s)
            began_s = ended_s
        if self.device != "cpu":
            wait()
            turn.plain_s.append((time.perf_counter() - first_s) / number)


def _time_script(job: ScriptJob) -> NoReturn:
    variables = environment(0, 1, "127.0.0.1", 1)
    os.environ.update(variables | {"MASTER_PORT": str(job.port)})
    if job.device == "cpu":
        torch.backends.mps.is_available = lambda: False  # type: ignore[assignment]

    def leave(code: int = 0, error: str = "", *, ended: bool = False) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        turns = [turn for turn in observer.turns if turn.plain_s and turn.kernels]
        found = ScriptTimes(turns, observer.device, observer.backward_passes, ended, code, error)
        Path(job.result).write_bytes(msgspec.json.encode(found))
        os._exit(0)

    observer = StepObserver(job.limit_s, leave)
    observer.install()
    sys.argv = [job.script, *job.arguments]
    sys.path[0] = str(Path(job.script).parent)
    code, error = run_as_main(job.script, nullcontext())
    leave(code, error, ended=True)


if __name__ == "__main__":
    _time_script(msgspec.json.decode(sys.argv[1], type=ScriptJob))
