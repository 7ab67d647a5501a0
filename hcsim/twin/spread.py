"""The figures of a scenario that have a spread, and the variants of the scenario that follow from it.

A variant scales the time that each figure stands for by its own factor: seconds are multiplied, rates divided. The
factors of a figure are lognormal. Half of the distance between their 10th and their 90th percentile is the figure's
spread, so that sigma = asinh(spread) / z, where z = 1.2816 is the 90th percentile of the standard normal distribution.

The draws of a figure are stratified (a Latin hypercube, McKay et al. 1979): of n variants each takes another n-th of
the distribution, in an order that depends on the seed and on the figure's name alone. A few variants then already have
the spread that the figure has, and another figure changes no draw. Each variant also has a seed of its own, for jitter
and loss.
"""

from __future__ import annotations

from collections.abc import Callable
from math import asinh, exp
from statistics import NormalDist
from typing import Literal, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from hcsim import rng
from hcsim.config import AnyMedium, Basis, Cable, Machine, Node, Scenario, Thunderbolt
from hcsim.config.machine import KernelEfficiency
from hcsim.config.table import Table
from hcsim.units import PositiveShare, Quantity, Seconds
from hcsim.virtual.hardware import machine_of

BasisKind: TypeAlias = Literal["measured", "published", "estimated"]
Factor: TypeAlias = Callable[[str, Basis], float]
"""Returns by how much longer what this figure stands for takes, from its name and basis."""

NORMAL = NormalDist()
TENTH_Z = NORMAL.inv_cdf(0.9)
BY_KIND = "efficiency "
"""How the names of figures begin that matter only where work is known by kinds of kernels."""
_UNKNOWN = Basis()
_NOT_A_SPEED = "gate"
"""Times with this prefix are no figures of how fast something is."""

_TIMES, _RATES = ("_s",), ("_bps", "_Bps", "_flops")

TableT = TypeVar("TableT", bound=Table)


def rescaled(scenario: Scenario, factor: Factor) -> Scenario:
    """Return the scenario with the time of each figure multiplied by its factor."""
    machines: dict[str, Machine] = {}

    def machine(node: Node) -> Machine:
        found = machine_of(node)
        if found.name not in machines:
            machines[found.name] = _machine(found, factor)
        return machines[found.name]

    factors = {medium.name: factor(f"link {medium.name}", _basis_of(medium)) for medium in scenario.media}
    return replace(
        scenario,
        nodes=tuple(
            replace(
                node, machine=machine(node), links=tuple(made_slower(link, factors[link.medium]) for link in node.links)
            )
            for node in scenario.nodes
        ),
        media=tuple(_medium(medium, factors[medium.name], factor) for medium in scenario.media),
        wan=tuple(made_slower(line, factor(f"line {line.home}", _basis_of(line))) for line in scenario.wan),
    )


def _basis_of(table: Table) -> Basis:
    return getattr(table, "basis", None) or _UNKNOWN


def _machine(machine: Machine, factor: Factor) -> Machine:
    """The peaks are those of a data sheet: how fast the machine is follows from its efficiencies. Those that were found
    together have one factor."""
    name, messages = machine.name, machine.messages
    slower = factor(f"speed {name}", machine.basis)

    def of_kind(each: KernelEfficiency) -> KernelEfficiency:
        apart = each.basis != machine.basis
        return _less(each, factor(f"{BY_KIND}{name} {each.kind}", each.basis) if apart else slower, "share")

    return replace(
        _less(machine, slower, "efficiency_compute", "efficiency_memory"),
        overhead_s=Seconds(machine.overhead_s * slower),
        efficiencies=tuple(map(of_kind, machine.efficiencies)),
        step_s=Seconds(machine.step_s * factor(f"step {name}", machine.step_basis)),
        kernels=tuple(
            made_slower(curve, factor(f"kernel {name} {curve.kind} {curve.dtype}", curve.basis))
            for curve in machine.kernels
        ),
        codecs=tuple(
            made_slower(codec, factor(f"codec {name} {codec.compressor}", codec.basis)) for codec in machine.codecs
        ),
        messages=None if messages is None else made_slower(messages, factor(f"messages {name}", messages.basis)),
    )


def _less(table: TableT, factor: float, *names: str) -> TableT:
    """Return the table with these shares divided by the factor."""
    return replace(table, **{name: PositiveShare(getattr(table, name) / factor) for name in names})


def _medium(medium: AnyMedium, slower: float, factor: Factor) -> AnyMedium:
    if isinstance(medium, Thunderbolt):
        medium = replace(medium, cables=tuple(_cable(cable, slower, factor) for cable in medium.cables))
    return made_slower(medium, slower)


def _cable(cable: Cable, slower: float, factor: Factor) -> Cable:
    """Cables of which nothing is said are of one kind, and as slow or fast as their medium."""
    if cable.basis is None:
        return made_slower(cable, slower)
    return made_slower(cable, factor(f"cable {'–'.join(cable.between)}", cable.basis))


def made_slower(table: TableT, factor: float) -> TableT:
    """Return the table with its times multiplied and its rates divided by the factor."""
    changed: dict[str, object] = {}
    for field in msgspec.structs.fields(table):
        name, value = field.name, getattr(table, field.name)
        if name.startswith(_NOT_A_SPEED):
            continue
        if name in ("points", "encode", "decode"):
            changed[name] = tuple((size, seconds * factor) for size, seconds in value)
        elif isinstance(value, Quantity) and isinstance(value, float) and name.endswith(_TIMES):
            changed[name] = type(value)(value * factor)
        elif isinstance(value, Quantity) and isinstance(value, float) and name.endswith(_RATES):
            changed[name] = type(value)(value / factor)
    return replace(table, **changed)


def figures_of(scenario: Scenario) -> dict[str, Basis]:
    """Return the basis of each figure, by its name."""
    found: dict[str, Basis] = {}

    def note(name: str, basis: Basis) -> float:
        found[name] = basis
        return 1.0

    rescaled(scenario, note)
    return found


def variants(scenario: Scenario, count: int) -> list[Scenario]:
    """Return so many scenarios, each with other factors."""
    factors = {name: _factors(scenario.seed, name, basis.spread, count) for name, basis in figures_of(scenario).items()}
    seeds = [rng.stream(scenario.seed, "band", "seed", number).getrandbits(31) for number in range(count)]
    return [
        replace(rescaled(scenario, lambda name, basis, i=i: factors[name][i]), seed=seed)  # type: ignore[misc]
        for i, seed in enumerate(seeds)
    ]


def slower_at_p90(spread: float) -> float:
    """Return the 90th percentile of a figure's factors; the 10th is one over it."""
    return exp(asinh(spread))


def _factors(seed: int, name: str, spread: float, count: int) -> list[float]:
    if spread == 0.0:
        return [1.0] * count
    sigma = asinh(spread) / TENTH_Z
    order = list(range(count))
    rng.stream(seed, "band", name).shuffle(order)
    return [exp(sigma * NORMAL.inv_cdf((place + 0.5) / count)) for place in order]


def slower_where(scenario: Scenario, kind: BasisKind, factor: float) -> Scenario:
    """Return the scenario with all figures of this kind made slower."""
    return rescaled(scenario, lambda name, basis: factor if basis.kind == kind else 1.0)
