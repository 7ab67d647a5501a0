"""The band of a job's simulated time: the 10th and the 90th percentile of variants of its scenario (`spread.py`)."""

from __future__ import annotations

from statistics import median

import numpy as np
from msgspec.structs import replace

from hcsim.collectives.group import Group
from hcsim.collectives.select import Options
from hcsim.config import Scenario
from hcsim.jobs import run_job
from hcsim.launch.virtual import simulate
from hcsim.transport.groups import Wire
from hcsim.twin.spread import figures_of, variants

USUAL_VARIANTS = 16
JOB_REPEATS = 3
_CHEAP_EVENTS = 16_000
"""So many are simulated in about a second."""


def is_quick_job(scenario: Scenario, events: int) -> bool:
    """Return whether the usual variants of a job, whose run had so many events, are simulated in about a second."""
    return is_cheap(scenario, events * min(1.0, JOB_REPEATS / scenario.job.repeat))


def is_cheap(scenario: Scenario, events: float) -> bool:
    """Return whether the usual variants, each with so many events, are worth simulating without being asked for."""
    spreads = (basis.spread for basis in figures_of(scenario).values())
    return USUAL_VARIANTS * events <= _CHEAP_EVENTS and any(spreads)


def job_band(scenario: Scenario, options: Options, wire: Wire, count: int = USUAL_VARIANTS) -> tuple[float, float]:
    """Return the 10th and the 90th percentile of the time of a job's repeats, relative to the predicted one."""
    drawn_s = [_job_s(variant, options, wire) for variant in variants(scenario, count)]
    return relative_band(_job_s(scenario, options, wire), drawn_s)


def _job_s(scenario: Scenario, options: Options, wire: Wire) -> float:
    """The median time of a few repeats without data."""
    job = replace(scenario.job, payload="phantom", repeat=min(scenario.job.repeat, JOB_REPEATS))
    times_s: dict[int, float] = {}

    async def program(group: Group) -> None:
        await run_job(group, job, lambda lap: times_s.__setitem__(lap.number, lap.seconds))

    simulate(replace(scenario, faults=(), processes=()), program, options=options, wire=wire).values()
    return median(times_s.values())


def relative_band(point_s: float, drawn_s: list[float]) -> tuple[float, float]:
    """Return the 10th and the 90th percentile of drawn times, relative to the predicted one, which is between them."""
    if point_s <= 0.0:
        return 1.0, 1.0
    low_s, high_s = np.quantile(drawn_s, (0.1, 0.9), method="hazen")  # each draw is the middle of its part
    return min(1.0, float(low_s) / point_s), max(1.0, float(high_s) / point_s)
