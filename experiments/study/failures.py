"""Failures of random nodes at random times, as the explicit list that a scenario has.

Each node fails as a Poisson process of its own: a node's n-th failure depends on the seed, the node and n
alone, so the failures at a higher rate are those of a lower one, only closer together.
"""

from __future__ import annotations

from msgspec.structs import replace

from hcsim import rng
from hcsim.config import AnyFault, Partition, Pause, Scenario
from hcsim.units import PositiveSeconds, Seconds

KINDS = ("pause", "dropout")
"""A machine that does nothing for a while; or one that nobody reaches, and that reaches nobody."""
MOST = 2000
"""Of one node: more than that cannot be what someone wants to wait for."""


def failing(scenario: Scenario, kind: str, per_hour: float, duration_s: float, until_s: float, seed: int) -> Scenario:
    """The scenario with each node failing so often until then."""
    if not per_hour:
        return scenario
    faults: list[AnyFault] = []
    names = tuple(node.name for node in scenario.nodes)
    for name in names:
        draw = rng.stream(seed, "failures", name)
        at_s = 0.0
        for _ in range(MOST):
            at_s += draw.expovariate(1.0) * 3600 / per_hour
            if at_s > until_s:
                break
            faults.append(_fault(kind, name, names, at_s, duration_s))
            at_s += duration_s
    return replace(scenario, faults=(*scenario.faults, *sorted(faults, key=lambda fault: fault.at_s)))


def _fault(kind: str, name: str, names: tuple[str, ...], at_s: float, duration_s: float) -> AnyFault:
    at, lasts = Seconds(round(at_s, 6)), PositiveSeconds(duration_s)
    if kind == "pause":
        return Pause(at, name, lasts)
    return Partition(at, ((name,), tuple(other for other in names if other != name)), lasts)
