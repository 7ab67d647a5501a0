"""The band of a cell: what its time would be with other figures that are as likely.

All cells that take the same time share one band, which is found with few steps and with shapes in place of data. Most
clusters have one figure with a spread, how fast a Mac is: then it takes two more simulations. Sixteen variants, as
`hcsim run` has them, would make a sweep ten times as long.
"""

from __future__ import annotations

from functools import cache

from msgspec.structs import replace

from experiments.clusters import cluster
from experiments.study.cell import AllReduce, AnyCell, Result, Train
from experiments.study.failures import CRASH
from experiments.study.measure import measured, timed
from hcsim.twin.effects import Effect, band, effects

_STEPS, _SERVER_STEPS = 2, 8
_SERVER = "parameter_server"
"""Whose workers take a few steps until they are as far apart as later."""


def banded(cell: AnyCell) -> Result:
    """What the cell comes to, with its band."""
    result = measured(cell)
    if result.step_s is None or (isinstance(cell, Train) and cell.failure == CRASH):
        return result  # two more simulations with crashes say less than other seeds do
    like = representative(cell)
    found = _effects(like, result.step_s if like == cell else None)
    low, high = band(found)
    return replace(result, p10_s=round(low * result.step_s, 9), p90_s=round(high * result.step_s, 9), effects=found)


@cache
def _effects(cell: AnyCell, point_s: float | None) -> tuple[Effect, ...]:
    scenario = cluster(cell.link, cell.world, cell.variant if isinstance(cell, Train) else "equal").scenario
    return effects(scenario, lambda variant: timed(cell, variant), point_s)


def representative(cell: AnyCell) -> AnyCell:
    """The shortest cell that takes as long for a step."""
    if isinstance(cell, AllReduce):
        return replace(cell, repeats=1)
    from experiments.study.measure_training import period

    if cell.failures_per_hour:
        return replace(cell, seed=1)
    steps = _SERVER_STEPS if cell.strategy.startswith(_SERVER) else max(_STEPS, 2 * period(cell.strategy))
    return Train(
        cell.link, cell.world, cell.task, cell.strategy, seed=1, steps=min(cell.steps, steps),
        compressor=cell.compressor, algorithm=cell.algorithm, variant=cell.variant, batch=cell.batch,
        bucket_bytes=cell.bucket_bytes,
    )  # fmt: skip
