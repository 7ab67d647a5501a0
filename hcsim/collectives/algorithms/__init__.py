"""The registry of algorithms by operation, and the function that makes a plan."""

from __future__ import annotations

from hcsim.collectives.algorithms import direct, doubling, hierarchical, ring, tree
from hcsim.collectives.plan import Plan, Planner, Rounds, Shape
from hcsim.errors import UsageError

PLANNERS: dict[str, dict[str, Planner]] = {
    "all_reduce": {
        **hierarchical.CROSS,
        "chunked_ring": ring.chunked_all_reduce,
        "hierarchical": hierarchical.all_reduce,
    },
    "reduce": {"ring": ring.reduce, "tree": tree.reduce, "centralized": direct.centralized_reduce},
    "broadcast": {"ring": ring.broadcast, "tree": tree.broadcast, "centralized": direct.centralized_broadcast},
    "all_gather": {
        "ring": ring.all_gather,
        "recursive_doubling": doubling.doubling_all_gather,
        "direct": direct.direct_all_gather,
    },
    "reduce_scatter": {
        "ring": ring.reduce_scatter,
        "halving": doubling.halving_reduce_scatter,
        "direct": direct.direct_reduce_scatter,
    },
    "all_to_all": {"pairwise": direct.pairwise_all_to_all},
    "gather": {"tree": tree.gather, "centralized": direct.centralized_gather},
    "scatter": {"tree": tree.scatter, "centralized": direct.centralized_scatter},
    "barrier": {"dissemination": doubling.dissemination_barrier},
}
"""Planners by operation and algorithm."""

AUTO = {operation: tuple(planners) for operation, planners in PLANNERS.items()}
"""The candidates of `auto`. Algorithms of plugins are used only by name, because some ranks may lack them."""

_NEEDS: dict[str, tuple[str, ...]] = {
    "all_gather": ("counts",),
    "gather": ("counts",),
    "reduce_scatter": ("counts",),
    "scatter": ("counts",),
    "all_to_all": ("sent", "received"),
}
"""The shape fields that give the size of an operation, if it is not `length`."""


def algorithms(operation: str) -> tuple[str, ...]:
    if operation not in PLANNERS:
        raise UsageError(f"there is no operation {operation!r}; there are {', '.join(PLANNERS)}")
    return tuple(PLANNERS[operation])


def register_algorithm(operation: str, name: str, planner: Planner) -> None:
    """Register the algorithm of a plugin: a planner maps a rank and the operation's shape to a plan."""
    if name in algorithms(operation) or name == "auto":
        raise UsageError(f"{operation} has an algorithm {name!r} already")
    PLANNERS[operation][name] = planner


def plan(operation: str, algorithm: str, rank: int, shape: Shape) -> Plan:
    if algorithm not in algorithms(operation):
        valid = ", ".join(algorithms(operation))
        raise UsageError(f"{operation} has no algorithm {algorithm!r}; it has {valid}")
    if not 0 <= rank < shape.world:
        raise UsageError(f"rank {rank} is not one of the ranks 0 to {shape.world - 1}")
    for field in _NEEDS.get(operation, ()):
        if not getattr(shape, field):
            raise UsageError(f"{operation} needs {field}, one size per rank, in its shape")
    made = PLANNERS[operation][algorithm](rank, shape)
    if not _has_empty_parts(operation, shape):
        return made
    return Plan(_without_empty(made.rounds), made.peers, in_step=made.in_step)


def plans(operation: str, algorithm: str, shape: Shape) -> list[Rounds]:
    """Return the rounds of every rank, with peers as ranks, for ranks of equal shape."""
    return [plan(operation, algorithm, rank, shape).by_rank() for rank in range(shape.world)]


def buffer_elements(operation: str, shape: Shape) -> int:
    """Return the number of elements of the buffer that the operation's plans address."""
    fields = _NEEDS.get(operation, ())
    if fields:
        return sum(sum(getattr(shape, field)) for field in fields)
    return 0 if operation == "barrier" else shape.length


def _has_empty_parts(operation: str, shape: Shape) -> bool:
    if operation == "barrier":
        return False  # its messages are all empty, and mean something
    sizes = [size for field in _NEEDS.get(operation, ()) for size in getattr(shape, field)]
    return 0 in sizes if sizes else shape.length < shape.world


def _without_empty(rounds: Rounds) -> Rounds:
    return tuple(tuple(action for action in actions if action.lo < action.hi) for actions in rounds)
