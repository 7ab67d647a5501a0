"""One run of a scenario, checked against the invariants."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from hcsim.config import Restart, Scenario, Training
from hcsim.fuzz.evidence import Evidence, Recorder
from hcsim.fuzz.generate import LAUNCHES_OF_A_STEP, scenario_of
from hcsim.fuzz.invariants import Breach, breaches
from hcsim.fuzz.phases import Phases, excuse, phases_of
from hcsim.launch.virtual_cluster import simulate_cluster
from hcsim.training.run import Report
from hcsim.virtual.world import UsageMonitor

SLOWEST = 4.0
"""The longest duration of a step, as a multiple of its computation alone."""
ENDS_S = 60.0
"""Time to leave at the end, and for late machines."""


class Trial(msgspec.Struct, frozen=True):
    """The result of a seed, or of a file."""

    seed: int
    nodes: int
    method: str
    virtual_s: float
    views: int
    struck: dict[str, int]
    """How often each kind of fault struck."""
    pairs: list[str]
    """Pairs of a kind of fault and a phase of the protocol; see `coverage`."""
    excused: str
    """Why nothing was required in the liveness phase; empty: liveness was required."""
    breaches: list[Breach]
    trace_sha256: str

    @property
    def broken(self) -> list[str]:
        """The invariants that did not hold, each once."""
        return list(dict.fromkeys(breach.invariant for breach in self.breaches))


def trial_of(seed: int) -> Trial:
    return run_trial(scenario_of(seed))


def run_trial(scenario: Scenario, tell: Callable[[str, str], None] = lambda host, text: None) -> Trial:
    evidence, recorder, (seconds, digest) = gather(scenario, tell)
    training = evidence.training
    views = {(view.lineage, view.epoch) for view in recorder.views if len(view.members) > 1}
    return Trial(
        scenario.seed, len(scenario.nodes), f"{training.strategy}, {training.compressor}, {evidence.cluster.quorum}",
        round(seconds, 3), len(views), dict(sorted(recorder.tracker.struck.items())), list(recorder.tracker.pairs),
        evidence.excused, breaches(evidence), digest,
    )  # fmt: skip


def gather(
    scenario: Scenario, tell: Callable[[str, str], None] = lambda host, text: None
) -> tuple[Evidence, Recorder, tuple[float, str]]:
    """Run the scenario. Return the evidence, its recorder, the duration and the trace's digest."""
    phases, recorder = phases_of(scenario), Recorder(scenario)
    census = UsageMonitor(recorder.sink)
    training = scenario.training or Training()
    limit_s = _limit_s(scenario, training, phases)

    def heard(host: str, text: str) -> None:
        if not census.is_over:
            recorder.tell(host, text)
            tell(host, text)

    lost = _Complaints(census)
    logger = logging.getLogger("asyncio")
    logger.addHandler(lost)
    try:
        outcome = simulate_cluster(scenario, observer=recorder, tell=heard, limit_s=limit_s, census=census)
    finally:
        logger.removeHandler(lost)
    names = [node.name for node in scenario.nodes]
    results: dict[str, Report | BaseException] = dict(zip(names, outcome.results, strict=True))
    evidence = Evidence(
        scenario=scenario,
        phases=phases,
        events=recorder.events,
        said=recorder.said,
        steps=recorder.steps,
        results=results,
        parameters=recorder.parameters,
        owed=recorder.owed,
        left=recorder.left,
        usage=census.most,
        lost=lost.texts,
        limit_s=limit_s,
    )
    lives = msgspec.structs.replace(recorder.lives(scenario), diverged=evidence.diverged)
    excused = excuse(phases, evidence.cluster, lives) or _ended_early(scenario, phases, outcome.seconds)
    evidence = msgspec.structs.replace(evidence, excused=excused)
    return evidence, recorder, (outcome.seconds, outcome.trace_sha256)


def _ended_early(scenario: Scenario, phases: Phases, over_s: float) -> str:
    """Return why the core need not finish if all members had left before it was complete; empty: it must. The
    world ends when all have left, and later faults or restarts do not happen."""
    late = [each.node for each in scenario.faults if isinstance(each, Restart) and each.at_s > over_s]
    missing = [name for name in phases.core if name in late]
    return f"all had ended before {', '.join(missing)} could start again" if missing else ""


class _Complaints(logging.Handler):
    """Collects asyncio's log records of task errors that were never retrieved."""

    def __init__(self, census: UsageMonitor) -> None:
        super().__init__(logging.ERROR)
        self._census = census
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the record, unless it concerns a task that ended when the world was torn down."""
        if self._census.is_over:
            return
        error = record.exc_info[1] if record.exc_info else None
        self.texts.append(f"{record.getMessage().splitlines()[0]}: {error!r}")


def _limit_s(scenario: Scenario, training: Training, phases: Phases) -> float:
    """Return the time by which every host must have ended: all steps after the last fault, and twice `patience_s`
    for sick members."""
    launches_s = [each.machine.overhead_s for each in scenario.nodes if not isinstance(each.machine, str)]
    step_s = LAUNCHES_OF_A_STEP * max(launches_s, default=0.0)
    work_s = SLOWEST * training.steps * max(step_s, 0.05)
    return phases.liveness_s + work_s + 2 * phases.patience_s + ENDS_S
