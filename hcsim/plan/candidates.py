"""The candidates of a plan: a method, the machines that take part, and how the samples of a step are shared out.

All learn from the same number of samples in a step, so that a step of an exact method is worth the same in each.
Machines that are alike stand for each other: of four M4s on one switch, the first two stand for any two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from msgspec.structs import replace

from hcsim.config import Node, Scenario, Training
from hcsim.plan.home import is_joined, only_nodes
from hcsim.plan.methods import Method
from hcsim.training.task import Task

MOST_SUBSETS = 96


class Model(NamedTuple):
    """What is trained."""

    task: Task
    """Of shapes."""
    base: Training
    """The settings that all candidates share."""
    samples: int
    """Of a step, of all machines together."""


class Candidate(NamedTuple):
    """One way to train."""

    method: Method
    nodes: tuple[str, ...]
    by_speed: bool = False
    """Whether the samples of a step are shared out by speed, and not equally."""

    def settings(self, model: Model) -> Training:
        """Return the settings of the training."""
        samples = model.samples
        batch = f"auto:{samples}" if self.by_speed else samples // len(self.nodes)
        method = self.method
        return replace(model.base, strategy=method.strategy, compressor=method.compressor, batch=batch)

    def scenario(self, home: Scenario) -> Scenario:
        """Return the part of the home that takes part."""
        return only_nodes(home, self.nodes)


def candidates(home: Scenario, methods: Sequence[Method], samples: int, speeds: Sequence[float]) -> Iterator[Candidate]:
    """Yield all of them; `speeds` are those of the home's machines, to choose which sets are tried where there are too
    many."""
    sets = [nodes for nodes in _subsets(home, speeds) if is_joined(only_nodes(home, nodes))]
    for method in methods:
        for nodes in sets:
            alone = len(nodes) == 1
            if alone != (method.family == "single") or len(nodes) > samples:
                continue
            if method.family == "hierarchical" and len(homes_of(home, nodes)) < 2:
                continue
            if samples % len(nodes) == 0:
                yield Candidate(method, nodes)
            if not alone and not _are_alike(home, nodes):
                yield Candidate(method, nodes, by_speed=True)


def homes_of(home: Scenario, nodes: Sequence[str]) -> set[str]:
    return {node.home for node in home.nodes if node.name in nodes}


def _are_alike(home: Scenario, nodes: Sequence[str]) -> bool:
    """Whether equal shares are shares by speed."""
    return len({node.machine for node in home.nodes if node.name in nodes}) == 1 and all(
        node.processor == "" for node in home.nodes
    )


def _subsets(home: Scenario, speeds: Sequence[float]) -> Iterator[tuple[str, ...]]:
    """Yield sets of machines, each in the order of the home."""
    groups: dict[Node, list[int]] = {}
    for rank, node in enumerate(home.nodes):
        groups.setdefault(replace(node, name="any"), []).append(rank)
    count = 1
    for members in groups.values():
        count *= len(members) + 1
    if count - 1 <= MOST_SUBSETS:
        picked = product(*(range(len(members) + 1) for members in groups.values()))
        sets = [sorted(rank for n, group in zip(counts, groups.values(), strict=True) for rank in group[:n])
                for counts in picked]  # fmt: skip
    else:
        sets = list(_promising(home, list(groups.values()), speeds))
    seen = dict.fromkeys(tuple(home.nodes[rank].name for rank in ranks) for ranks in sets if ranks)
    yield from sorted(seen, key=len)


def _promising(home: Scenario, groups: Sequence[Sequence[int]], speeds: Sequence[float]) -> Iterator[list[int]]:
    """Yield each kind of machine alone; the fastest few of all and of each network; and all but one kind."""
    everyone = range(len(home.nodes))
    yield from ([group[0]] for group in groups)
    media = dict.fromkeys(link.medium for node in home.nodes for link in node.links)
    on = [[rank for rank in everyone if name in [link.medium for link in home.nodes[rank].links]] for name in media]
    for among in (list(everyone), *on):
        fastest = sorted(among, key=lambda rank: (-speeds[rank], rank))
        yield from (sorted(fastest[:count]) for count in range(2, len(fastest) + 1))
    yield from ([rank for rank in everyone if rank not in group] for group in groups)
