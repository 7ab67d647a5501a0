"""How sure a plan is, what limits it, and what would change it.

The band of the speed-up rests on the spread of every figure (`twin.effects`): the plan and the fastest machine alone
are compared draw by draw, so a figure that makes both slower changes their quotient little. What changes in the home is
simulated again with the same plan; after a purchase the best plan is searched for anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

from hcsim.config import Ethernet, Machine, Scenario, Wifi
from hcsim.config.media_names import ethernet_bps
from hcsim.errors import ConfigError
from hcsim.plan.candidates import Candidate
from hcsim.plan.home import bought, on_medium, only_nodes, with_rates
from hcsim.plan.methods import Method
from hcsim.plan.search import Found, Ranked, Request, Search, is_possible, simulation_of
from hcsim.plan.simulation import Simulation, Simulator, analysed
from hcsim.telemetry.critical_path import shares
from hcsim.twin.effects import Effect, effects, percentiles, relative_times
from hcsim.virtual.hardware import machine_of

_MOST_ASLEEP = 4
ALL_MACHINES = "with all machines"
_FEW_EACH = 4
"""Samples of each machine in a step that can be shared out well among unlike ones."""
_MOST_METHODS = 4
"""That are searched for what would be different: those that were best before."""
STANDARD_PURCHASES = ("1gbe", "2.5gbe", "10gbe", "thunderbolt", "wifi7", "M4 mini", "M4 Pro mini")


class Band(msgspec.Struct, frozen=True):
    """A figure and its 10th and 90th percentile."""

    value: float
    p10: float
    p90: float


class MachineTime(msgspec.Struct, frozen=True):
    """Where the time of a step goes on one machine: shares that add up to 1."""

    machine: str
    compute: float
    encode: float
    exposed: float
    """It waits for data that are under way."""
    idle: float
    """It waits for anything else."""
    cause: str
    """What it waits for most."""


class Limits(msgspec.Struct, frozen=True):
    """What limits a plan."""

    machines: tuple[MachineTime, ...]
    path: dict[str, float]
    """The shares of the critical path, by kind: compute, encode, network, other."""
    place: str
    """Where most of the largest kind passes."""


class Change(msgspec.Struct, frozen=True):
    """What would be different, and what the plan would then come to."""

    words: str
    samples_per_s: float
    ratio: float
    """Of the plan's speed as it is."""
    method: str = ""
    """How to train then, where that was searched for anew."""
    nodes: tuple[str, ...] = ()


def speedup(found: Found, request: Request, simulator: Simulator) -> Band | None:
    """Return how much faster the plan is than the fastest machine alone, for the same quality."""
    best, alone = found.best, found.alone
    if alone is None:
        return None
    value = alone.quality_s / best.quality_s
    if best.candidate == alone.candidate:
        return Band(value, value, value)
    of_best, of_alone = (_effects(each, request, simulator) for each in (best, alone))
    seed = request.home.seed
    quotient = relative_times(of_alone, seed, "alone") / relative_times(of_best, seed, "plan")
    low, high = percentiles(quotient)
    learning = best.learning
    return Band(value, low * value, high * value * learning.most / learning.least)


def _effects(each: Ranked, request: Request, simulator: Simulator) -> tuple[Effect, ...]:
    """Return what the figures' spreads do to a candidate's time. All that is to be simulated is found first, so that it
    can be simulated at the same time."""
    whole = simulation_of(request, each.candidate)
    asked: list[Simulation] = []

    def note(scenario: Scenario) -> float:
        asked.append(replace(whole, scenario=scenario))
        return 1.0

    effects(whole.scenario, note, None)
    results = iter(simulator.all(asked))
    return effects(whole.scenario, lambda _: next(results).sample_s, None)


def limits(best: Candidate, request: Request) -> Limits:
    """Return where the time of the plan goes."""
    analysis = analysed(simulation_of(request, best))
    taken: dict[str, list[int]] = {}
    causes: dict[str, Counter[str]] = {}
    for step in analysis.steps:
        parts = (step.compute_ns, step.encode_ns, step.exposed_ns, step.idle_ns)
        taken[step.machine] = [a + b for a, b in zip(taken.get(step.machine, [0] * 4), parts, strict=True)]
        for (kind, where), spent_ns in step.causes:
            causes.setdefault(step.machine, Counter())[f"{kind} {where}"] += spent_ns
    machines = tuple(_machine_time(name, parts, _most(causes.get(name, Counter()))) for name, parts in taken.items())
    kinds: Counter[str] = Counter()
    places: dict[str, Counter[str]] = {}
    for (kind, machine, target), spent_ns in shares(analysis.path).items():
        kinds[kind] += spent_ns
        places.setdefault(kind, Counter())[f"{machine} → {target}" if target else machine] += spent_ns
    whole_ns = max(1, kinds.total())
    path = {kind: spent_ns / whole_ns for kind, spent_ns in kinds.most_common()}
    return Limits(machines, path, _most(places.get(next(iter(path), ""), Counter())))


def _machine_time(name: str, parts: Sequence[int], cause: str) -> MachineTime:
    whole = max(1, sum(parts))
    compute, encode, exposed, idle = (part / whole for part in parts)
    return MachineTime(name, compute, encode, exposed, idle, cause)


def _most(counted: Counter[str]) -> str:
    return counted.most_common(1)[0][0] if counted else ""


def sensitivity(best: Ranked, request: Request, simulator: Simulator) -> tuple[Change, ...]:
    """Return what single changes of the home do to the plan, as it is."""
    changed = list(_changes(best.candidate, request))
    results = simulator.all([simulation_of(other, each) for _, each, other in changed])
    usual_s = simulator.all([simulation_of(request, best.candidate)])[0].sample_s
    return tuple(
        Change(words, 1 / result.sample_s, usual_s / result.sample_s)
        for (words, _, _), result in zip(changed, results, strict=True)
        if not result.failure
    )


def _changes(best: Candidate, request: Request) -> Iterator[tuple[str, Candidate, Request]]:
    """Yield what may change: networks at half their rate, a machine that sleeps, one that grows hot, a cable."""
    home, names = request.home, best.nodes
    there = only_nodes(home, names)
    for medium in there.media:
        yield f"{medium.name} at half its rate", best, replace(request, home=with_rates(home, medium.name, 0.5))
    if len(names) > 2:
        for name in names[:_MOST_ASLEEP]:
            left = tuple(other for other in names if other != name)
            if best.by_speed or request.model.samples % len(left) == 0:
                yield f"{name} asleep", best._replace(nodes=left), request
    for node in there.nodes:
        machine = machine_of(node)
        if machine.fanless:
            yield f"{node.name} kept cool", best, replace(request, home=_cool(home, node.name, machine))
    kinds = {medium.name: medium for medium in home.media}
    for node in there.nodes:
        if len(names) > 1 and all(isinstance(kinds[link.medium], Wifi) for link in node.links) and node.links:
            yield f"a cable for {node.name}", best, replace(request, home=on_medium(home, "1gbe", [node.name]))
    everyone = best._replace(nodes=tuple(node.name for node in home.nodes), by_speed=True)
    if 1 < len(names) < len(home.nodes) and is_possible(request, everyone):
        yield ALL_MACHINES, everyone, request
    more = request.model._replace(samples=2 * request.model.samples)
    yield "twice the samples a step", best, replace(request, model=more)


def _cool(home: Scenario, name: str, machine: Machine) -> Scenario:
    cool = replace(machine, name=f"cool {machine.name}", fanless=False)
    nodes = tuple(replace(node, machine=cool) if node.name == name else node for node in home.nodes)
    return replace(home, nodes=nodes)


def finer(found: Found, request: Request, simulator: Simulator) -> Change | None:
    """Return what more samples a step would do where there are too few to be shared out among unlike machines."""
    count, samples = len(request.home.nodes), request.model.samples
    if count == 1 or samples >= _FEW_EACH * count:
        return None
    each = _FEW_EACH * count // samples * samples // count
    model = request.model._replace(samples=each * count)
    again = replace(request, model=model, methods=_best_methods(found, request))
    try:
        best = Search(again, simulator).run().best
    except ConfigError:  # it does not fit
        return None
    ratio, candidate = found.best.quality_s / best.quality_s, best.candidate
    return Change(f"--set batch={each}", 1 / best.result.sample_s, ratio, str(candidate.method), candidate.nodes)


def _best_methods(found: Found, request: Request) -> tuple[Method, ...]:
    """Return the methods that were best, and one machine alone."""
    allowed = [each.candidate.method for each in found.ranked if request.allows(each.candidate.method)]
    return tuple(dict.fromkeys((*tuple(dict.fromkeys(allowed))[:_MOST_METHODS], Method("single"))))


def purchases(found: Found, request: Request, words: Sequence[str], simulator: Simulator) -> tuple[Change, ...]:
    """Return the best plan after each of these purchases, by the methods that were best before."""
    methods = _best_methods(found, request)
    changes = []
    for each in words:
        home = bought(request.home, each).home
        again = replace(request, home=home, methods=methods)
        both = [Search(again, simulator).run().best, *_as_before(found, again, simulator)]
        best = min(both, key=_quality_s)
        ratio = found.best.quality_s / best.quality_s
        candidate = best.candidate
        changes.append(Change(each, 1 / best.result.sample_s, ratio, str(candidate.method), candidate.nodes))
    return tuple(sorted(changes, key=lambda change: -change.ratio))


def _as_before(found: Found, request: Request, simulator: Simulator) -> list[Ranked]:
    """Return the plan as it was, in a home with more: a search of many machines need not come across it."""
    before = found.best
    if not is_possible(request, before.candidate):
        return []
    [result] = simulator.all([simulation_of(request, before.candidate)])
    return [] if result.failure else [replace(before, result=result)]


def _quality_s(each: Ranked) -> float:
    return each.quality_s


def standard_purchases(home: Scenario) -> tuple[str, ...]:
    """Return what is worth asking for in such a home: what it does not have already."""
    there = {medium.name for medium in home.media}
    return tuple(each for each in STANDARD_PURCHASES if each not in there and _is_possible(home, each))


def _is_possible(home: Scenario, words: str) -> bool:
    wireless = any(isinstance(medium, Wifi) for medium in home.media)
    if words.startswith("wifi") and not wireless:
        return False
    rate_bps, wired = ethernet_bps(words), [medium.rate_bps for medium in home.media if isinstance(medium, Ethernet)]
    if rate_bps is not None and not wireless and rate_bps <= max(wired, default=0.0):
        return False
    try:
        bought(home, words)
    except ConfigError:
        return False
    return True
