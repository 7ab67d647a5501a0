"""Failures of random nodes at random times, as the explicit list that a scenario has.

Each node fails as a Poisson process of its own: a node's n-th failure depends on the seed, the node and n
alone, so the failures at a higher rate are those of a lower one, only closer together.

A rate counts the time in service: a node that fails 60 times an hour runs for a minute, on average, from the end of
one failure to the next. Where each lasts a minute, too, 30 fall into an hour.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from msgspec.structs import replace

from hcsim import rng
from hcsim.config import AnyFault, Partition, Pause, Restart, Scenario
from hcsim.units import PositiveSeconds, Seconds

CRASH = "crash"
KINDS = ("pause", "dropout", CRASH)
"""A machine that does nothing for a while; one that nobody reaches, and that reaches nobody; or one that falls silent,
has lost what is in its memory, and starts again."""
MOST = 2000
"""Of one node: more than that cannot be what someone wants to wait for."""


class Failing(NamedTuple):
    """A scenario in which nodes fail."""

    scenario: Scenario
    until_s: float
    """From then on some node would fail no more: what takes longer has not had the failures that were asked for."""


def failing(scenario: Scenario, kind: str, per_hour: float, duration_s: float, until_s: float, seed: int) -> Failing:
    """The scenario with each node failing so often, per hour that it runs, until then or until it has failed `MOST`
    times."""
    if not per_hour:
        return Failing(scenario, math.inf)
    faults: list[AnyFault] = []
    names = tuple(node.name for node in scenario.nodes)
    ends_s = until_s
    for name in names:
        draw = rng.stream(seed, "failures", name)
        at_s = 0.0
        for _ in range(MOST):
            at_s += draw.expovariate(1.0) * 3600 / per_hour
            if at_s > until_s:
                break
            faults.append(_fault(kind, name, names, at_s, duration_s))
            at_s += duration_s
        ends_s = min(ends_s, at_s)
    faults.sort(key=lambda fault: fault.at_s)
    return Failing(replace(scenario, faults=(*scenario.faults, *faults)), ends_s)


def _fault(kind: str, name: str, names: tuple[str, ...], at_s: float, duration_s: float) -> AnyFault:
    at, lasts = Seconds(round(at_s, 6)), PositiveSeconds(duration_s)
    if kind == "pause":
        return Pause(at, name, lasts)
    if kind == CRASH:
        return Restart(at, name, down_s=Seconds(duration_s))
    return Partition(at, ((name,), tuple(other for other in names if other != name)), lasts)
