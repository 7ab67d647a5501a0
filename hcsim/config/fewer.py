"""A scenario with fewer machines than it was written for."""

from __future__ import annotations

from collections.abc import Container

from msgspec.structs import replace

from hcsim.config.faults import AnyFault, CopiedIdentity, Partition
from hcsim.config.scenario import Scenario


def first_nodes(scenario: Scenario, count: int) -> Scenario:
    """Its first nodes. Faults that happen to the others, or take one of them, do not happen; a partition has those
    that are left on its sides, if there are any on both."""
    nodes = scenario.nodes[:count]
    left = [node.name for node in nodes]
    faults = (_among(fault, left) for fault in scenario.faults)
    return replace(scenario, nodes=nodes, faults=tuple(fault for fault in faults if fault is not None))


def _among(fault: AnyFault, left: Container[str]) -> AnyFault | None:
    """What of the fault can happen to them."""
    if isinstance(fault, Partition):
        one, other = (tuple(name for name in side if name in left) for side in fault.sides)
        return replace(fault, sides=(one, other)) if one and other else None
    node: str | None = getattr(fault, "node", None)
    pair: tuple[str, ...] = getattr(fault, "between", ())
    source = (fault.of,) if isinstance(fault, CopiedIdentity) else ()
    named = (*(() if node is None else (node,)), *pair, *source)
    return fault if all(name in left for name in named) else None
