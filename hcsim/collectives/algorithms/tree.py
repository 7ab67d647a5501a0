"""Tree algorithms: few steps, so they suit short messages.

Reduce, broadcast and all_reduce use the complete k-ary tree: counted from the root, rank v has the children kv
+ 1 … kv + k. A level costs latency + k L / bandwidth, there are about log_k n levels, and an all_reduce goes up
and down. With segments, all levels work at once, and a long message costs about k L / bandwidth each way.

A parent serves its last child first. The tree fills from the left, so this child's subtree is never the deeper
one, and going up costs exactly as much as going down.

Gather and scatter use a k-nomial tree, whose subtrees are ranges of ranks and therefore contiguous in the
buffer. A range of ranks is cut into k parts; the leader of the range serves the first rank of every part except
its own. This takes log_k n latencies; for k = 2 and n a power of two, log2(n) latency + (n - 1) / n L /
bandwidth, where L is all parts together.
"""

from __future__ import annotations

from itertools import pairwise

from hcsim.collectives.plan import Plan, Recv, Reduce, Round, Rounds, Send, Shape, finished, offsets, split


def _level(v: int, arity: int) -> int:
    level = 0
    while v > 0:
        v, level = (v - 1) // arity, level + 1
    return level


def _edges(rank: int, shape: Shape) -> tuple[int | None, list[int]]:
    """Return this rank's parent, or None, and its children."""
    n, k, root = shape.world, shape.arity, shape.root
    v = (rank - root) % n
    parent = (root + (v - 1) // k) % n if v else None
    return parent, [(root + child) % n for child in range(k * v + 1, min(k * v + k, n - 1) + 1)]


def _up(rank: int, shape: Shape) -> Rounds:
    parent, children = _edges(rank, shape)
    height, level = _level(shape.world - 1, shape.arity), _level((rank - shape.root) % shape.world, shape.arity)
    rounds: list[Round] = [()] * height
    if children:
        rounds[height - level - 1] = tuple(Reduce(child, 0, shape.length) for child in reversed(children))
    if parent is not None:
        rounds[height - level] = (Send(parent, 0, shape.length),)
    return tuple(rounds)


def reduce(rank: int, shape: Shape) -> Plan:
    """Add up the children's sums and send the result to the parent."""
    rounds = _up(rank, shape)
    return Plan(finished(rounds, 0, shape.length) if rank == shape.root else rounds)


def broadcast(rank: int, shape: Shape) -> Plan:
    """Send what the parent sent to the children."""
    parent, children = _edges(rank, shape)
    height, level = _level(shape.world - 1, shape.arity), _level((rank - shape.root) % shape.world, shape.arity)
    rounds: list[Round] = [()] * height
    if parent is not None:
        rounds[level - 1] = (Recv(parent, 0, shape.length),)
    if children:
        rounds[level] = tuple(Send(child, 0, shape.length) for child in children)
    return Plan(tuple(rounds))


def all_reduce(rank: int, shape: Shape) -> Plan:
    """Reduce to the root, finish there, broadcast."""
    return Plan(reduce(rank, shape).rounds + broadcast(rank, shape).rounds)


def scatter(rank: int, shape: Shape) -> Plan:
    """Send ranges of parts from the root; each receiver keeps its own part and sends the rest on."""
    return Plan(_handed_on(rank, shape))


def gather(rank: int, shape: Shape) -> Plan:
    """Reverse a scatter."""
    return Plan(
        tuple(
            tuple((Recv if isinstance(a, Send) else Send)(a.peer, a.lo, a.hi) for a in actions)
            for actions in reversed(_handed_on(rank, shape))
        )
    )


def _handed_on(rank: int, shape: Shape) -> tuple[tuple[Send | Recv, ...], ...]:
    cuts = offsets(shape.counts)
    lo, hi, leader = 0, shape.world, shape.root
    rounds: list[tuple[Send | Recv, ...]] = []
    while shape.arity ** len(rounds) < shape.world:
        bounds = pairwise(lo + cut for cut in split(hi - lo, shape.arity))
        parts = [(leader if a <= leader < b else a, a, b) for a, b in bounds if a < b]
        head, lo, hi = next(part for part in parts if part[1] <= rank < part[2])
        if rank == leader:
            rounds.append(tuple(Send(peer, cuts[a], cuts[b]) for peer, a, b in parts if peer != rank))
        elif rank == head:
            rounds.append((Recv(leader, cuts[lo], cuts[hi]),))
        else:
            rounds.append(())
        leader = head
    return tuple(rounds)
