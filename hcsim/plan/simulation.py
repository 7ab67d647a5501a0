"""Short simulations of candidates, with shapes in place of data, on all cores.

What is measured is the time of a sample once the first steps are over, which open connections and widen windows: over
whole periods of the strategy, until the slowest machine is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from math import ceil, prod
from multiprocessing import get_context

import msgspec
from msgspec.structs import replace

from hcsim.config import Scenario, Training
from hcsim.errors import HcsimError
from hcsim.launch.virtual import simulate_training
from hcsim.registry import load_plugin, loaded_plugins
from hcsim.telemetry.timeline import Timeline, TimelineAnalysis
from hcsim.training.layout import FLOAT_BYTES
from hcsim.training.run import Point, Report, leading
from hcsim.training.strategies import ParameterServer, strategy
from hcsim.training.task import Task
from hcsim.transport.groups import MAX_FRAME_BYTES, Wire
from hcsim.units import PositiveSeconds
from hcsim.workers import starting

_SHORT_STEPS, _LONG_STEPS, _FIRST_STEPS, _FIRST_OF_SERVERS = 2, 8, 1, 4
_COARSE_BYTES = 1 << 30
"""Models from this size on are sent in the largest frames there are: fewer events, and nearly the same times."""
TIMEOUT_S = PositiveSeconds(24 * 3600.0)


class Simulated(msgspec.Struct, frozen=True):
    """What a simulation came to."""

    sample_s: float
    """The time of a sample, of all machines together; infinite where the training failed."""
    step_s: float = 0.0
    sizes: tuple[int, ...] = ()
    """Samples of each machine in a step, where they are shared out by speed."""
    paces: tuple[int, ...] = ()
    """Steps of each machine in a period, where each takes as many as it can."""
    events: int = 0
    failure: str = ""


class Simulation(msgspec.Struct, frozen=True):
    """A training on machines, to be simulated."""

    scenario: Scenario
    settings: Training
    task: Task
    is_long: bool = False

    def steps(self) -> tuple[int, int]:
        """Return the first steps, which do not count, and all."""
        chosen = strategy(self.settings.strategy)
        every = getattr(chosen, "every", 1)
        first = _FIRST_OF_SERVERS if isinstance(chosen, ParameterServer) else _FIRST_STEPS
        counted = _LONG_STEPS if self.is_long else _SHORT_STEPS
        first = every * ceil(first / every)
        return first, first + every * ceil(counted / every)


def simulated(what: Simulation) -> Simulated:
    """Simulate a training; one that fails takes for ever."""
    first, steps = what.steps()
    try:
        reports, events = _reports(what, steps)
    except HcsimError as error:
        return Simulated(float("inf"), failure=str(error))
    lead = leading(reports)
    training = [report for report in reports if report.points]
    lasted_s = max(_reached_s(report, steps) - _reached_s(report, first) for report in training)
    samples = sum(point.samples for point in lead.points if point.step > first)
    shares = [report.share for report in reports if report.share is not None]
    by_speed = isinstance(what.settings.batch, str)
    return Simulated(
        lasted_s / samples,
        lasted_s / (steps - first),
        tuple(share.samples for share in shares) if by_speed else (),
        tuple(share.steps for share in shares) if any(share.every > 1 for share in shares) else (),
        events,
    )


def analysed(what: Simulation) -> TimelineAnalysis:
    """Return where the time of a training goes on each machine."""
    timeline = Timeline(lambda data: None)
    _reports(what, what.steps()[1], timeline)
    return timeline.end()


def _reports(what: Simulation, steps: int, timeline: Timeline | None = None) -> tuple[list[Report], int]:
    size_bytes = FLOAT_BYTES * sum(prod(shape) for block in what.task.blocks for _, shape in block.shapes)
    wire = Wire(segment_bytes=MAX_FRAME_BYTES) if size_bytes >= _COARSE_BYTES else Wire()
    settings = replace(what.settings, steps=steps, evaluate_every=10**9, timeout_s=TIMEOUT_S)
    outcome = simulate_training(what.scenario, settings, wire=wire, what=what.task, sink=timeline)
    return outcome.values(), outcome.events


def _reached_s(report: Report, step: int) -> float:
    """Return when the step was done, or the last one before it."""
    before: list[Point] = [point for point in report.points if point.step <= step]
    return before[-1].time_s if before else 0.0


class Simulator:
    """Simulates many trainings at a time. What was simulated once is known."""

    def __init__(self, jobs: int) -> None:
        self._known: dict[str, Simulated] = {}
        self._jobs = jobs
        self._pool: ProcessPoolExecutor | None = None
        self._asked = 0
        self.count = 0
        """How many were simulated."""
        self.told: Callable[[int, int], None] = lambda done, asked: None
        """Called whenever one is done: with that number, and with how many were asked for."""

    @contextmanager
    def open(self) -> Iterator[Simulator]:
        """Start the worker processes, and end them."""
        if self._jobs == 1:
            yield self
            return
        context = get_context("spawn")
        with ProcessPoolExecutor(self._jobs, context, initializer=_load, initargs=(loaded_plugins(),)) as pool:
            self._pool = pool
            try:
                yield self
            finally:
                self._pool = None
                pool.shutdown(cancel_futures=True)

    def all(self, simulations: Sequence[Simulation]) -> list[Simulated]:
        """Return what each comes to."""
        keys = [_key(each) for each in simulations]
        todo = {key: each for key, each in zip(keys, simulations, strict=True) if key not in self._known}
        self._asked += len(todo)
        if self._pool is None:
            for key, each in todo.items():
                self._note(key, simulated(each))
        else:
            with starting():
                futures = {self._pool.submit(simulated, each): key for key, each in todo.items()}
            for future in as_completed(futures):  # each is put in its own place: the order does not matter
                self._note(futures[future], future.result())
        return [self._known[key] for key in keys]

    @property
    def width(self) -> int:
        """How many are worth asking for at a time."""
        return 2 * self._jobs

    def _note(self, key: str, result: Simulated) -> None:
        self._known[key] = result
        self.count += 1
        self.told(self.count, self._asked)


def _key(what: Simulation) -> str:
    parts = (what.scenario, what.settings, what.task.fingerprint, what.is_long)
    return repr(parts)


def _load(plugins: Sequence[str]) -> None:
    for plugin in plugins:
        load_plugin(plugin)
