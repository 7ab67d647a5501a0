"""Short simulations of candidates, with shapes in place of data, on all cores or on a Dask cluster.

What is measured is the time of a sample once the first steps are over, which open connections and widen windows: over
whole periods of the strategy, until the slowest machine is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from math import ceil, prod

import msgspec
from msgspec.structs import replace

from hcsim.config import Scenario, Training
from hcsim.config.file import pack_scenario, unpack_scenario
from hcsim.errors import ConfigError, HcsimError
from hcsim.launch.virtual import simulate_training
from hcsim.pool import Pool
from hcsim.pool.open import open_pool
from hcsim.telemetry.timeline import Timeline, TimelineAnalysis
from hcsim.training.layout import FLOAT_BYTES
from hcsim.training.run import Point, Report, leading
from hcsim.training.strategies import ParameterServer, strategy
from hcsim.training.task import Task
from hcsim.training.tasks import task
from hcsim.training.tasks.shapes import shapes_of
from hcsim.transport.groups import MAX_FRAME_BYTES, Wire
from hcsim.units import PositiveSeconds

_SHORT_STEPS, _LONG_STEPS, _FIRST_STEPS, _FIRST_OF_SERVERS = 2, 8, 1, 4
_SHORT_STEPS_OF_LARGE, _LONG_STEPS_OF_LARGE = 1, 2
_LARGE_BYTES = 1 << 30
"""Models from this size on are sent in the largest frames there are: fewer events, and nearly the same times. Steps of
seconds are alike as soon as connections are open, so that few are counted."""
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

    @property
    def is_large(self) -> bool:
        """Whether the model is."""
        lengths = (prod(shape) for block in self.task.blocks for _, shape in block.shapes)
        return FLOAT_BYTES * sum(lengths) >= _LARGE_BYTES

    def steps(self) -> tuple[int, int]:
        """Return the first steps, which do not count, and all."""
        chosen = strategy(self.settings.strategy)
        every = getattr(chosen, "every", 1)
        first = _FIRST_OF_SERVERS if isinstance(chosen, ParameterServer) else _FIRST_STEPS
        counted = _LONG_STEPS if self.is_long else _SHORT_STEPS
        if self.is_large:
            counted = _LONG_STEPS_OF_LARGE if self.is_long else _SHORT_STEPS_OF_LARGE
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
    wire = Wire(segment_bytes=MAX_FRAME_BYTES) if what.is_large else Wire()
    settings = replace(what.settings, steps=steps, evaluate_every=10**9, timeout_s=TIMEOUT_S)
    outcome = simulate_training(what.scenario, settings, wire=wire, what=what.task, sink=timeline)
    return outcome.values(), outcome.events


def _reached_s(report: Report, step: int) -> float:
    """Return when the step was done, or the last one before it."""
    before: list[Point] = [point for point in report.points if point.step <= step]
    return before[-1].time_s if before else 0.0


WIDTH = 8
"""So many simulations are worth asking for at a time. The same however many processes there are: what a search
simulates, and so what it finds, does not depend on where it runs."""


class _Asked(msgspec.Struct, frozen=True):
    """A simulation as a worker gets it."""

    scenario: bytes
    """With the training."""
    is_long: bool


def _asked(what: Simulation) -> bytes:
    """Encode a simulation of a task of shapes that its settings name."""
    packed = pack_scenario(replace(what.scenario, training=what.settings))
    return msgspec.msgpack.encode(_Asked(packed, what.is_long))


def answer_simulation(asked: bytes) -> bytes:
    """In a worker: simulate a training."""
    what = msgspec.msgpack.decode(asked, type=_Asked)
    scenario = unpack_scenario(what.scenario)
    assert scenario.training is not None
    shapes = shapes_of(task(scenario.training.task))
    return msgspec.msgpack.encode(simulated(Simulation(scenario, scenario.training, shapes, what.is_long)))


class Simulator:
    """Simulates many trainings at a time, in processes here or on a Dask cluster. With one local process, the current
    one does the work. What was simulated once is known."""

    def __init__(self, jobs: int, dask: str | None = None) -> None:
        self._known: dict[str, Simulated] = {}
        self._jobs, self._dask = jobs, dask
        self._pool: Pool | None = None
        self._asked = 0
        self.count = 0
        """How many were simulated."""
        self.told: Callable[[int, int], None] = lambda done, asked: None
        """Called whenever one is done: with that number, and with how many were asked for."""

    @contextmanager
    def open(self) -> Iterator[Simulator]:
        """Start the pool, and end it."""
        if self._jobs == 1 and self._dask is None:
            yield self
            return
        with closing(open_pool(self._jobs, self._dask)) as self._pool:
            try:
                yield self
            finally:
                self._pool = None

    def all(self, simulations: Sequence[Simulation]) -> list[Simulated]:
        """Return what each comes to."""
        keys = [_key(each) for each in simulations]
        todo = {key: each for key, each in zip(keys, simulations, strict=True) if key not in self._known}
        self._asked += len(todo)
        if self._pool is None:
            for key, each in todo.items():
                self._note(key, simulated(each))
        else:
            self._simulate_in(self._pool, todo)
        return [self._known[key] for key in keys]

    def _simulate_in(self, pool: Pool, todo: dict[str, Simulation]) -> None:
        tasks = {_asked(each): key for key, each in todo.items()}
        with closing(pool.run(answer_simulation, iter(tasks))) as over:
            for each in over:  # each is put in its own place: the order does not matter
                if each.answer is None:
                    raise ConfigError(f"a simulation came to no end (is there enough memory?): {each.error}")
                self._note(tasks[each.task], msgspec.msgpack.decode(each.answer, type=Simulated))

    def _note(self, key: str, result: Simulated) -> None:
        self._known[key] = result
        self.count += 1
        self.told(self.count, self._asked)


def _key(what: Simulation) -> str:
    parts = (what.scenario, what.settings, what.task.fingerprint, what.is_long)
    return repr(parts)
