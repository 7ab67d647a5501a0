"""An algorithm for all_reduce: everything goes down a chain of ranks to rank 0, which has the sum, and up again.

Each line carries each element once each way, as in a ring, and the two ends of the chain are not joined: for machines
that stand in a row of Thunderbolt cables. Long messages are cut, so that all links work at once.

    hcsim bench mixed-home --plugin examples/plugins/chain.py --algorithm chain
"""

from hcsim.collectives.plan import Finish, Plan, Recv, Reduce, Send
from hcsim.plugins import register_algorithm


def chain(rank, shape):
    last, everything = shape.world - 1, (0, shape.length)
    rounds = [[] for _ in range(2 * last or 1)]
    if rank < last:
        rounds[last - 1 - rank].append(Reduce(rank + 1, *everything))
        rounds[last + rank].append(Send(rank + 1, *everything))
    if rank > 0:
        rounds[last - rank].append(Send(rank - 1, *everything))
        rounds[last + rank - 1].append(Recv(rank - 1, *everything))
    else:
        rounds[max(last - 1, 0)].append(Finish(*everything))
    return Plan(tuple(map(tuple, rounds)))


register_algorithm("all_reduce", "chain", chain)
