"""Which algorithm to use when nobody said: the cheapest over the measured links.

With nothing measured, a rule: few steps (a tree, doubling, halving) for short messages and small
groups, few bytes (the ring) otherwise.
"""

from __future__ import annotations

from functools import lru_cache

from hcsim.collectives.algorithms import algorithms, buffer_elements, plans
from hcsim.collectives.cost import Links, price
from hcsim.collectives.shape import Shape
from hcsim.errors import UsageError

SHORT_BYTES = 1 << 20
SMALL_WORLD = 4
_SEGMENT_BYTES = 1 << 20
_SEGMENTS = 64
"""Into how many segments a price cuts the buffer at most: enough to see what pipelining gains."""

_UNMEASURED = {
    "all_reduce": ("tree", "ring"),
    "reduce": ("tree", "ring"),
    "broadcast": ("tree", "ring"),
    "all_gather": ("recursive_doubling", "ring"),
    "reduce_scatter": ("halving", "ring"),
    "gather": ("tree", "centralized"),
    "scatter": ("tree", "centralized"),
}
"""For short messages or small groups, and otherwise."""


@lru_cache(maxsize=1024)
def choose(
    operation: str, shape: Shape, element_bytes: int, links: Links | None, segment_bytes: int = _SEGMENT_BYTES
) -> str:
    """The algorithm's name. Ranks that pass equal arguments choose alike.

    Hierarchical takes part when the shape has groups."""
    names = [name for name in algorithms(operation) if name != "hierarchical" or shape.groups]
    if len(names) == 1:
        return names[0]
    size_bytes = buffer_elements(operation, shape) * element_bytes
    if links is None:
        short, long = _UNMEASURED[operation]
        return short if size_bytes < SHORT_BYTES or shape.world < SMALL_WORLD else long
    if len(links.latency_s) != shape.world:
        raise UsageError(f"the links of {len(links.latency_s)} ranks say nothing about a group of {shape.world}")
    segment = max(segment_bytes, -(-size_bytes // _SEGMENTS), element_bytes)
    return min(names, key=lambda name: price(plans(operation, name, shape), links, element_bytes, segment))
