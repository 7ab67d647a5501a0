"""The dissemination barrier: after step s every rank has heard of the 2^(s + 1) ranks up to itself.

ceil(log2 n) latencies for any n, and no rank is special.

D. Hensgen, R. Finkel, U. Manber: Two algorithms for barrier synchronization, IJPP 17 (1988).
"""

from __future__ import annotations

from hcsim.collectives.plan import Plan, Recv, Send
from hcsim.collectives.shape import Shape


def barrier(rank: int, shape: Shape) -> Plan:
    """Signal the rank 1, 2, 4, … further on, and wait for the one as far behind."""
    n = shape.world
    distances = [1 << step for step in range((n - 1).bit_length())]
    return Plan(tuple((Send((rank + d) % n, 0, 0), Recv((rank - d) % n, 0, 0)) for d in distances))
