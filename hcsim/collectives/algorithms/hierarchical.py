"""Hierarchical all-reduce, for groups of well-connected ranks with few slow links between them.

Every group reduces to its leader, the leaders all_reduce among themselves, and every leader broadcasts. A slow
link between groups then carries the data of one rank instead of a whole group. The cost is that of the slowest
group's reduce and broadcast, plus the leaders' all_reduce.

Groups may differ in size: only sums travel between them, and only the leaders finish, when the sum covers all
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from hcsim.collectives.algorithms import direct, doubling, ring, tree
from hcsim.collectives.plan import Finish, Plan, Planner, Rounds, Shape
from hcsim.errors import UsageError

LOCAL: dict[str, tuple[Planner, Planner]] = {
    "ring": (ring.reduce, ring.broadcast),
    "tree": (tree.reduce, tree.broadcast),
    "centralized": (direct.centralized_reduce, direct.centralized_broadcast),
}
"""The algorithms within a group: reduce to the leader, and broadcast from it."""

CROSS: dict[str, Planner] = {
    "ring": ring.all_reduce,
    "tree": tree.all_reduce,
    "centralized": direct.centralized_all_reduce,
    "recursive_doubling": doubling.doubling_all_reduce,
    "halving_doubling": doubling.halving_doubling_all_reduce,
    "direct": direct.direct_all_reduce,
}
"""The algorithms among the leaders."""


def _among(members: Sequence[int], rank: int, planner: Planner, shape: Shape) -> Rounds:
    """Return the planner's rounds for a subset of the ranks, in which member i has rank i; the others idle."""
    part = Shape(world=len(members), length=shape.length, arity=shape.arity)
    if rank not in members:
        return ((),) * len(planner(0, part).rounds)
    return planner(members.index(rank), part).among(members).by_rank()


def _within(rank: int, planner: Planner, shape: Shape) -> Rounds:
    """Return the rounds of all groups at once; a small group idles until the largest is done."""
    longest = max(shape.groups, key=len)
    group = next(group for group in shape.groups if rank in group)
    rounds = _among(group, rank, planner, shape)
    return rounds + ((),) * (len(_among(longest, longest[0], planner, shape)) - len(rounds))


def all_reduce(rank: int, shape: Shape) -> Plan:
    """Reduce within each group, all_reduce among the leaders, broadcast within each group."""
    if not shape.groups:
        raise UsageError("a hierarchical all_reduce needs groups in its shape")
    if shape.local not in LOCAL or shape.cross not in CROSS:
        raise UsageError(
            f"a hierarchical all_reduce cannot be made of {shape.local!r} within groups and {shape.cross!r} across; "
            f"valid are {', '.join(LOCAL)} within and {', '.join(CROSS)} across"
        )
    reduce, broadcast = LOCAL[shape.local]
    partial = tuple(tuple(a for a in actions if not isinstance(a, Finish)) for actions in _within(rank, reduce, shape))
    leaders = [group[0] for group in shape.groups]
    return Plan(partial + _among(leaders, rank, CROSS[shape.cross], shape) + _within(rank, broadcast, shape))
