"""What a scenario predicts of a training: the phases of a step, with a band, and what kind of figures it rests on.

A few steps are simulated, with shapes in place of data: they take as long, and no arithmetic is done. The scenario's
faults are left out.

The band is the 10th and the 90th percentile of variants of the scenario (`spread.py`), and always includes the
prediction. The share of a kind of figures is the difference quotient of the step's time: how much longer the step takes
where all figures of that kind are slower by the same factor.
"""

from __future__ import annotations

from math import ceil

import msgspec
from msgspec.structs import replace

from hcsim.config import Cluster, Scenario, Training
from hcsim.errors import ConfigError, HcsimError
from hcsim.launch.virtual import Outcome, simulate_training
from hcsim.launch.virtual_cluster import simulate_cluster
from hcsim.training.run import Report
from hcsim.training.strategies import strategy
from hcsim.training.tasks import task
from hcsim.training.tasks.shapes import shapes_of
from hcsim.transport.groups import Wire
from hcsim.twin.job_band import USUAL_VARIANTS, is_cheap, relative_band
from hcsim.twin.ledger import FIRST_STEPS, PhaseTimes, phase_times
from hcsim.twin.spread import BasisKind, figures_of, slower_where, variants

_MOST_EVENTS = 100_000
"""So many are simulated in less than ten seconds."""
_STEPS = 8
_SLOWER = 1.1
_KINDS: tuple[BasisKind, ...] = ("measured", "published", "estimated")


class PredictedRun(msgspec.Struct, frozen=True):
    """A training whose times are predicted, as one of its ranks sees it."""

    settings: Training
    wire: Wire = Wire()
    rank: int = 0
    forms_cluster: bool = False
    """Whether the nodes are members of an elastic cluster, which vote on each step."""


class Prediction(msgspec.Struct, frozen=True):
    """What was simulated."""

    phases: PhaseTimes
    steps: int
    events: int


class Uncertainty(msgspec.Struct, frozen=True):
    """How far a predicted time may be off, and why."""

    band: dict[str, tuple[float, float]]
    """The 10th and the 90th percentile, by phase, relative to the predicted time."""
    shares: dict[BasisKind, float]
    """The share of a step's time that rests on figures of each kind."""

    def around(self, phases: PhaseTimes) -> dict[str, tuple[float, float]]:
        """Return the percentiles of these times."""
        return {phase: (low * phases[phase], high * phases[phase]) for phase, (low, high) in self.band.items()}


def nodes_of(scenario: Scenario, names: tuple[str, ...]) -> Scenario:
    """Return the scenario with these nodes, in this order, without faults and other work."""
    there = {node.name: node for node in scenario.nodes}
    missing = list(dict.fromkeys(name for name in names if name not in there))
    if missing:
        raise ConfigError(f"there is no node {', '.join(missing)} in it; it has {', '.join(there)}")
    return replace(scenario, nodes=tuple(there[name] for name in names), faults=(), processes=())


def exchanges_every(settings: Training) -> int:
    """Return after how many steps this strategy exchanges something."""
    every = getattr(strategy(settings.strategy), "every", 1)
    return every if isinstance(every, int) else 1


def predict(scenario: Scenario, run: PredictedRun) -> Prediction:
    """Predict the phases of a step: from a few steps, or from as few as can be if these have many events."""
    every = exchanges_every(run.settings)
    fewest, usual = _whole_rounds(1, every), _whole_rounds(_STEPS, every)
    few = _simulated(scenario, run, fewest)
    if usual == fewest or few.events * usual > _MOST_EVENTS * fewest:
        return few
    return _simulated(scenario, run, usual)


def is_quick(scenario: Scenario, events_per_step: float, settings: Training) -> bool:
    """Return whether a band is shown unasked: a figure has a spread, and the usual variants take about a second."""
    every = exchanges_every(settings)
    return is_cheap(scenario, _whole_rounds(_STEPS, every) * events_per_step)


def _whole_rounds(steps: int, every: int) -> int:
    """Return how many steps have so many, behind the first ones, in rounds that end with an exchange."""
    return every * ceil((FIRST_STEPS + steps) / every)


def uncertainty(scenario: Scenario, run: PredictedRun, count: int = USUAL_VARIANTS) -> Uncertainty:
    """Return the band of a prediction, from so many variants.

    Members of a cluster are simulated as fixed ranks here, which differ in the time of the votes alone."""
    run = replace(run, forms_cluster=False)
    point = predict(scenario, run)
    drawn = [_simulated(variant, run, point.steps).phases for variant in variants(scenario, count)]
    kinds = {basis.kind for basis in figures_of(scenario).values()}
    slower = {kind: slower_where(scenario, kind, _SLOWER) for kind in _KINDS if kind in kinds}
    longer_s = {
        kind: max(0.0, _simulated(each, run, point.steps).phases["step"] - point.phases["step"])
        for kind, each in slower.items()
    }
    whole_s = sum(longer_s.values())
    return Uncertainty(
        {phase: relative_band(point_s, [each[phase] for each in drawn]) for phase, point_s in point.phases.items()},
        {kind: each_s / whole_s for kind, each_s in longer_s.items() if whole_s > 0.0},
    )


def _simulated(scenario: Scenario, run: PredictedRun, steps: int) -> Prediction:
    scenario = replace(scenario, faults=(), processes=())
    settings = replace(run.settings, steps=steps, server=None, listen=None)
    outcome: Outcome[Report]
    if run.forms_cluster:
        cluster = replace(scenario.cluster or Cluster(), nodes=len(scenario.nodes), coordinator=None)
        forming = replace(scenario, cluster=cluster)
        outcome = simulate_cluster(forming, settings, wire=run.wire, what=shapes_of(task(settings.task)))
    else:
        outcome = simulate_training(scenario, settings, wire=run.wire, what=shapes_of(task(settings.task)))
    reports = outcome.values()
    training = [report for report in reports if report.points]
    points = (training[0] if len(training) == 1 else reports[run.rank]).points
    if not points:
        raise HcsimError(f"rank {run.rank} takes no steps of its own")
    laps = [point.spent_s for point in points]
    return Prediction(phase_times(laps, exchanges_every(settings)), steps, outcome.events)
