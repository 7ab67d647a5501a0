"""Runs one training cell whose Macs crash and start again: they are members of a cluster, which goes on without those
that are down.

Times are those of the cluster, from its first step to its last: a member that starts again knows only its own. A step
has the samples of those that took part.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from experiments.clusters import cluster
from experiments.study.cell import Result, Train
from experiments.study.failures import failing
from experiments.study.measure import fingerprints
from hcsim.config import Cluster, Scenario, Training
from hcsim.errors import HcsimError
from hcsim.launch.virtual_cluster import simulate_cluster
from hcsim.telemetry.trace import Event
from hcsim.training.run import Report
from hcsim.training.task import Task

TIMEOUT_S = 60.0
"""A rank that is down is given up by its silence; this is for those that none has noticed."""
LONGEST_S = 6 * 3600.0
"""Until when nodes can crash."""


class _Progress:
    """When each step was done, and by how many samples: a sink of the trace."""

    def __init__(self) -> None:
        self.done_s: dict[int, float] = {}
        self.samples: dict[int, int] = {}

    def __call__(self, events: Sequence[Event]) -> None:
        for at_ns, kind, _, *fields in events:
            if kind == "progress":
                step, _, _, samples = (int(field) if number != 1 else 0 for number, field in enumerate(fields[:4]))
                self.done_s.setdefault(step, int(at_ns) / 1e9)
                self.samples[step] = samples  # of a step that is done again, those that count

    def between(self, first: int, last: int) -> tuple[float, int]:
        """Return the time and the samples of the steps behind the first one, up to the last."""
        if not {first, last} <= self.done_s.keys():
            raise HcsimError(f"the cluster did not come to step {last}")
        samples = sum(count for step, count in self.samples.items() if first < step <= last)
        return self.done_s[last] - self.done_s[first], samples


def crashing(cell: Train, settings: Training, what: Task) -> Result:
    """What the cell comes to."""
    scenario, until_s = _scenario(cell)
    progress, outcome_sha = _simulated(scenario, settings, what)
    first = min(progress.done_s, default=0)
    total_s, samples = progress.between(first, settings.steps)
    if progress.done_s[settings.steps] > until_s:
        raise HcsimError(
            f"the run took {progress.done_s[settings.steps]:.3g} s, and crashes were drawn for {until_s:g} s"
        )
    return Result(
        steps=settings.steps,
        step_s=round(total_s / (settings.steps - first), 9),
        total_s=round(total_s, 9),
        samples_per_s=samples / total_s,
        batch=(settings.batch if isinstance(settings.batch, int) else 0) * cell.world,
        **fingerprints(scenario, outcome_sha),
    )


def _scenario(cell: Train) -> tuple[Scenario, float]:
    base = cluster(cell.link, cell.world, cell.variant).scenario
    chosen = failing(base, cell.failure, cell.failures_per_hour, cell.failure_s, LONGEST_S, cell.seed)
    return replace(chosen.scenario, cluster=Cluster(nodes=cell.world)), chosen.until_s


def _simulated(scenario: Scenario, settings: Training, what: Task) -> tuple[_Progress, str]:
    progress = _Progress()
    outcome = simulate_cluster(scenario, settings, sink=progress, what=what)
    if not any(isinstance(result, Report) for result in outcome.results):
        raise next(result for result in outcome.results if isinstance(result, BaseException))
    return progress, outcome.trace_sha256
