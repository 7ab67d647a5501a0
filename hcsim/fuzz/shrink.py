"""Shrinks a scenario that breaks an invariant to a small one that breaks the same invariant.

Greedy delta debugging (Zeller and Hildebrandt, 2002): a smaller scenario replaces the present one if it
still breaks *the same* invariant; another invariant would be another defect. Faults are removed first, in
halves and then one by one, since each makes the rest simpler. Then machines are removed, with the faults
that concern them, and then steps, which take time. Then parameters are reset to their defaults. Last,
faults become simpler, earlier and shorter. The search ends when a whole round changes nothing, or when the
runs are used up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from hcsim.config import (
    AnyFault,
    Attachment,
    Cluster,
    Ethernet,
    Machine,
    Partition,
    Scenario,
    Training,
    parse_scenario,
    write_scenario,
)
from hcsim.config.cluster import PRESETS
from hcsim.errors import HcsimError
from hcsim.fuzz.trial import run_trial
from hcsim.units import BitRate, Seconds

MOST_RUNS = 150
Breaks: TypeAlias = Callable[[Scenario], bool]
ShrinkPass: TypeAlias = Callable[[Scenario], Iterator[Scenario]]
"""Yields smaller scenarios, the smallest first. When one is accepted, the pass starts again with it."""

_WIRED = Ethernet("switch", BitRate(1e9))
_PLAIN_TRAINING = {"strategy": "ddp", "compressor": "none", "algorithm": "auto", "batch": 4}
_PLAIN_CLUSTER = ("peer_timeout_s", "connection_timeout_s", "settle_s", "checkpoint_every", "measure", "quorum")


class Shrunk(msgspec.Struct, frozen=True):
    """The result of shrinking."""

    scenario: Scenario
    runs: int
    is_minimal: bool
    """Whether no further reduction was possible; otherwise the runs were used up."""


def shrink(scenario: Scenario, invariant: str, most_runs: int = MOST_RUNS, breaks: Breaks | None = None) -> Shrunk:
    """Return the smallest scenario found that breaks the same invariant."""
    return _Shrinker(breaks or (lambda one: invariant in run_trial(one).broken), most_runs).shrink(scenario)


class _Shrinker:
    def __init__(self, breaks: Breaks, most_runs: int) -> None:
        self._breaks = breaks
        self._left = self._most = most_runs
        self._tried: dict[str, None] = {}

    def shrink(self, scenario: Scenario) -> Shrunk:
        before = None
        while scenario != before and self._left > 0:
            before = scenario
            for each in PASSES:
                scenario = self._through(each, scenario)
        return Shrunk(scenario, self._most - self._left, self._left > 0)

    def _through(self, smaller: ShrinkPass, scenario: Scenario) -> Scenario:
        """Accept reductions of a pass as long as one of them still breaks the invariant."""
        taken = True
        while taken and self._left > 0:
            taken = False
            for candidate in smaller(scenario):
                if self._still_breaks(candidate):
                    scenario, taken = candidate, True
                    break
        return scenario

    def _still_breaks(self, candidate: Scenario) -> bool:
        if self._left <= 0:
            return False
        try:
            text = write_scenario(candidate)
            if text in self._tried:
                return False
            self._tried[text] = None
            candidate = parse_scenario(text, "smaller")
        except HcsimError:
            return False  # it does not fit together any more
        self._left -= 1
        return self._breaks(candidate)


def _fewer_faults(scenario: Scenario) -> Iterator[Scenario]:
    faults = scenario.faults
    size = len(faults)
    while size:
        for start in range(0, len(faults), size):
            yield replace(scenario, faults=faults[:start] + faults[start + size :])
        size //= 2


def _fewer_nodes(scenario: Scenario) -> Iterator[Scenario]:
    if len(scenario.nodes) < 2:
        return
    for node in reversed(scenario.nodes):
        nodes = tuple(each for each in scenario.nodes if each is not node)
        faults = tuple(left for fault in scenario.faults if (left := _without(fault, node.name)) is not None)
        cluster = scenario.cluster or Cluster()
        everybody = cluster.needed >= len(scenario.nodes)
        needed = len(nodes) if everybody else min(cluster.needed, len(nodes))
        yield replace(scenario, nodes=nodes, faults=faults, cluster=replace(cluster, nodes=needed))


def _without(fault: AnyFault, name: str) -> AnyFault | None:
    """Return the fault without that node: a partition loses a member, and any other fault that concerns the node
    is dropped."""
    if isinstance(fault, Partition):
        one, other = (tuple(node for node in side if node != name) for side in fault.sides)
        return replace(fault, sides=(one, other)) if one and other else None
    if name in (getattr(fault, "between", None) or ()):
        return None
    return None if any(getattr(fault, key, None) == name for key in ("node", "of", "to", "spoofs")) else fault


def _fewer_steps(scenario: Scenario) -> Iterator[Scenario]:
    training = scenario.training or Training()
    steps = training.steps
    for fewer in dict.fromkeys((1, steps // 8, steps // 4, steps // 2, steps * 3 // 4)):
        if 0 < fewer < steps:
            yield replace(scenario, training=replace(training, steps=fewer, evaluate_every=fewer))


def _plain(scenario: Scenario) -> Iterator[Scenario]:
    training, cluster = scenario.training or Training(), scenario.cluster or Cluster()
    usual = Cluster()
    yield _on_one_switch(scenario)
    for field, value in _PLAIN_TRAINING.items():
        if getattr(training, field) != value:
            yield replace(scenario, training=replace(training, **{field: value}))
    for field in _PLAIN_CLUSTER:
        if getattr(cluster, field) != getattr(usual, field):
            yield replace(scenario, cluster=replace(cluster, **{field: getattr(usual, field)}))
    if cluster.beat != PRESETS["low_latency"]:
        yield replace(scenario, cluster=replace(cluster, heartbeat=None, preset="low_latency"))


def _on_one_switch(scenario: Scenario) -> Scenario:
    """Return the scenario with identical machines on one switch. Faults of other media do not fit then."""
    machine = next((node.machine for node in scenario.nodes if isinstance(node.machine, Machine)), "M4")
    links = (Attachment(_WIRED.name),)
    nodes = tuple(replace(node, machine=machine, links=links) for node in scenario.nodes)
    return replace(scenario, nodes=nodes, media=(_WIRED,))


def _simpler_faults(scenario: Scenario) -> Iterator[Scenario]:
    for number, fault in enumerate(scenario.faults):
        for simpler in _simpler(fault):
            faults = [*scenario.faults[:number], simpler, *scenario.faults[number + 1 :]]
            yield replace(scenario, faults=tuple(sorted(faults, key=lambda each: each.at_s)))


def _simpler(fault: AnyFault) -> Iterator[AnyFault]:
    """Yield the fault with default parameters, with whole seconds, earlier, and shorter."""
    for field in msgspec.structs.fields(fault):
        value = getattr(fault, field.name)
        if field.name == "at_s":
            times = (0.0, float(int(value / 2)), float(int(value)), round(value, 1))
            yield from (replace(fault, at_s=Seconds(time_s)) for time_s in dict.fromkeys(times) if time_s < value)
        elif field.name == "duration_s" and value is not None:
            times = (float(int(value / 2)), float(int(value)), round(value / 2, 1), round(value, 1))
            shorter = [time_s for time_s in dict.fromkeys(times) if 0 < time_s < value]
            yield from (replace(fault, duration_s=type(value)(time_s)) for time_s in shorter)
        elif field.name != "duration_s" and not field.required and value != field.default:
            try:
                yield replace(fault, **{field.name: field.default})
            except HcsimError:
                continue  # a fault without any effect


PASSES: Sequence[ShrinkPass] = (_fewer_faults, _fewer_nodes, _fewer_steps, _plain, _simpler_faults)
