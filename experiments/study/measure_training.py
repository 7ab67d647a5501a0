"""Runs one training cell."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from experiments.clusters import Cluster, cluster
from experiments.study.cell import Point, Result, Train
from experiments.study.failures import CRASH, MOST, failing
from experiments.study.measure import TIMEOUT_S, fingerprints
from experiments.study.measure_cluster import TIMEOUT_S as CRASH_TIMEOUT_S
from experiments.study.measure_cluster import crashing
from hcsim.collectives.select import Options
from hcsim.compressors.registry import make
from hcsim.config import Scenario
from hcsim.config.training import Training
from hcsim.errors import CompressionError, ConfigError
from hcsim.launch.virtual import Outcome, simulate
from hcsim.training.layout import FLOAT_BYTES
from hcsim.training.run import Report, leading
from hcsim.training.strategies import DiLoCo, LocalSgd, strategy
from hcsim.training.task import Task
from hcsim.training.tasks import task
from hcsim.training.tasks.shapes import shapes_of
from hcsim.training.trainer import train
from hcsim.transport.groups import MAX_FRAME_BYTES, Wire
from hcsim.units import PositiveBytes, PositiveSeconds

COARSE_BYTES = 1 << 30
"""Models from this size on are sent in the largest frames there are: fewer events, and nearly the same times."""
FAILING_TIMEOUT_S = 600.0
"""Where nodes fail, whoever is left behind gives up after this: much longer than any failure lasts."""
NOT_FINITE = "which cannot be sent"
"""How a compressor refuses a gradient with a NaN or an infinity in it."""
LONGEST_S = 24 * 3600.0
"""Until when nodes can fail."""


def trained(cell: Train) -> Result:
    """What the cell comes to."""
    if cell.failure == CRASH:
        what = task(cell.task)
        return crashing(cell, _cluster_settings(cell, what), what)
    place = cluster(cell.link, cell.world, cell.variant)
    scenario, failing_until_s = failing(
        place.scenario, cell.failure, cell.failures_per_hour, cell.failure_s, LONGEST_S, cell.seed
    )
    what = task(cell.task)
    global_batch = (cell.batch or what.defaults.batch) * cell.world
    size_bytes = _size_bytes(what)
    outcome = _simulated(cell, msgspec.structs.replace(place, scenario=scenario), what)
    if any(isinstance(result, CompressionError) and NOT_FINITE in str(result) for result in outcome.results):
        # Training came to nothing, which is a result.
        return Result(diverged=True, batch=global_batch, **fingerprints(scenario, outcome.trace_sha256))
    reports = _reports(outcome, cell)
    lead = leading(reports)
    # The last step: what comes after is parting.
    steps, total_s = lead.steps, lead.points[-1].time_s
    if total_s > failing_until_s:
        raise ConfigError(
            f"failures_per_hour = {cell.failures_per_hour:g}: the run took {total_s:.3g} s, and failures were drawn "
            f"for {failing_until_s:.3g} s ({MOST} of one node are the most); take fewer steps, or a lower rate"
        )
    points = _evaluated(lead)
    last = points[-1] if points else None
    return Result(
        steps=steps,
        step_s=round(_step_s(lead, period(cell.strategy)), 9),
        total_s=round(total_s, 9),
        step_sent_bytes=max(report.sent_bytes for report in reports) / steps,
        payload_share=_payload_bytes(cell, what) / size_bytes,
        final_loss=last.loss if last else None,
        final_accuracy=last.accuracy if last else None,
        time_to_target_s=_time_to_target_s(points, cell.target_loss),
        samples_per_s=_samples(lead, cell, global_batch) / total_s,
        **{f"{purpose}_s": round(max(report.spent_s[purpose] for report in reports), 9) for purpose in lead.spent_s},
        batch=global_batch,
        lost_ranks=len(outcome.results) - len(reports),
        points=points,
        parameters_sha256=lead.sha256,
        **fingerprints(scenario, outcome.trace_sha256),
    )


def step_s(cell: Train, scenario: Scenario) -> float:
    """The time of a step in another scenario of the cell's cluster, with shapes in place of data; where nodes fail, of
    all steps."""
    chosen = failing(scenario, cell.failure, cell.failures_per_hour, cell.failure_s, LONGEST_S, cell.seed)
    place = msgspec.structs.replace(cluster(cell.link, cell.world, cell.variant), scenario=chosen.scenario)
    reports = _reports(_simulated(cell, place, shapes_of(task(cell.task))), cell)
    lead = leading(reports)
    return lead.points[-1].time_s if cell.failures_per_hour else _step_s(lead, period(cell.strategy))


def _simulated(cell: Train, place: Cluster, what: Task) -> Outcome[Report]:
    own_batch = cell.batch or what.defaults.batch
    settings = _settings(cell, own_batch * cell.world if cell.alone else own_batch)
    return simulate(
        place.scenario,
        lambda group: train(group, settings, cell.seed, what=what),
        options=Options(timeout_s=settings.timeout_s, groups=place.groups),
        wire=Wire(segment_bytes=MAX_FRAME_BYTES) if _size_bytes(what) >= COARSE_BYTES else Wire(),
    )


def _cluster_settings(cell: Train, what: Task) -> Training:
    settings = _settings(cell, cell.batch or what.defaults.batch)
    return msgspec.structs.replace(settings, timeout_s=PositiveSeconds(CRASH_TIMEOUT_S))


def _size_bytes(what: Task) -> int:
    return FLOAT_BYTES * sum(math.prod(shape) for block in what.blocks for _, shape in block.shapes)


def _samples(report: Report, cell: Train, global_batch: int) -> int:
    """Return how many samples all ranks have learned from; where each keeps its own pace, a step has fewer."""
    if getattr(strategy(cell.strategy), "pace", "alike") == "alike":
        return report.steps * global_batch
    return sum(point.samples for point in report.points)


def _reports(outcome: Outcome[Report], cell: Train) -> list[Report]:
    """Of all ranks. Where nodes fail, some may have missed the end; the first rank's report tells of the run."""
    if not cell.failures_per_hour or not isinstance(outcome.results[0], Report):
        return outcome.values()
    return [result for result in outcome.results if isinstance(result, Report)]


def _payload_bytes(cell: Train, what: Task) -> int:
    compressor = make(cell.compressor, seed=cell.seed, rank=0)
    return sum(compressor.size_bytes(shape) for block in what.blocks for _, shape in block.shapes)


def _settings(cell: Train, batch: int) -> Training:
    usual = Training()
    return Training(
        task=cell.task, strategy=cell.strategy, compressor=cell.compressor, algorithm=cell.algorithm,
        steps=cell.steps, batch=batch, lr=cell.lr, momentum=cell.momentum, warmup=cell.warmup, scale_lr=cell.scale_lr,
        evaluate_every=cell.evaluate_every,
        timeout_s=PositiveSeconds(FAILING_TIMEOUT_S if cell.failures_per_hour else TIMEOUT_S),
        bucket_bytes=usual.bucket_bytes if cell.bucket_bytes is None else PositiveBytes(cell.bucket_bytes),
    )  # fmt: skip


def period(spec: str) -> int:
    """From how many steps on a run repeats itself."""
    chosen = strategy(spec)
    return chosen.every if isinstance(chosen, LocalSgd | DiLoCo) else 1


def _step_s(report: Report, period: int) -> float:
    """A step's mean time in the second half of the run: by then connections are open and windows are wide.

    Only whole periods count, or it would depend on how many exchanges fall into that half. A run whose second half
    holds none counts from its start; one that is shorter than a period, as a whole, with its one exchange.
    """
    end = report.steps // period * period or report.steps
    start = end - (end - report.steps // 2) // period * period
    (first, first_s), (last, last_s) = (_reached(report, step) for step in (start if start < end else 0, end))
    return (last_s - first_s) / (last - first)


def _reached(report: Report, step: int) -> tuple[int, float]:
    """The last noted step up to this one, and when it was done."""
    return max(((point.step, point.time_s) for point in report.points if point.step <= step), default=(0, 0.0))


def _evaluated(report: Report) -> tuple[Point, ...]:
    return tuple(
        Point(
            point.step, round(point.time_s, 9), point.sent_bytes, _number(point.loss),
            _number(point.score.loss), point.score.accuracy,
        )
        for point in report.points
        if point.score is not None
    )  # fmt: skip


def _number(value: float) -> float | None:
    """JSON and tables have no NaN: what is not a number is left out."""
    return value if math.isfinite(value) else None


def _time_to_target_s(points: Sequence[Point], target_loss: float | None) -> float | None:
    if target_loss is None:
        return None
    return next((point.time_s for point in points if point.loss is not None and point.loss <= target_loss), None)
