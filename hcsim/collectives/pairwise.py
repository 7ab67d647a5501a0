"""All-to-all by pairwise exchange: in step s every rank sends to the one s further on.

Each step is a permutation, so no two ranks send to the same one at once. It costs n - 1 steps of
latency + part / bandwidth, and the parts may all differ in size.

What a rank sends to itself is no message: whoever calls puts it into the output.

R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in MPICH,
IJHPCA 19 (2005).
"""

from __future__ import annotations

from hcsim.collectives.plan import Plan, Recv, Send, offsets
from hcsim.collectives.shape import Shape
from hcsim.errors import UsageError


def all_to_all(rank: int, shape: Shape) -> Plan:
    """One exchange per distance."""
    if shape.sent[rank] != shape.received[rank]:
        raise UsageError(f"rank {rank} sends itself {shape.sent[rank]} elements and expects {shape.received[rank]}")
    n, out = shape.world, offsets(shape.sent)
    into = [out[-1] + offset for offset in offsets(shape.received)]
    peers = [((rank + distance) % n, (rank - distance) % n) for distance in range(1, n)]
    return Plan(tuple((Send(to, out[to], out[to + 1]), Recv(of, into[of], into[of + 1])) for to, of in peers))
