"""Cost model: the duration of a set of plans over given links, from the critical path of their segments.

A message is cut into segments, each of which is a frame. A frame from i to j

    waits      until the last write of its range is over, and the frames before it have left i;
    leaves     i's port after the overhead, and then takes size / bandwidth on the link from i to j;
    arrives    a latency later, and takes its turn at j's port;
    is added   (`Reduce`) at `reduce_Bps`, one frame after the other;
    is written when earlier sends and writes of its range are over.

Each rank has one output and one input port, which work at the speed of its best link, one frame at a time, in
the order of the plan; the messages of one round take turns, segment by segment. So a fast rank can serve two
slow ones at once, and no rank gains from having many peers. This is the α–β model with ports (R. W. Hockney,
Parallel Computing 20, 1994), plus pipelining. It does not model shared media such as Wi-Fi, or variation in
time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import msgspec

from hcsim.collectives.plan import Finish, Recv, Reduce, Round, Rounds, Send
from hcsim.collectives.verify import DryRun, IntervalMap, MessageKey, PlanError
from hcsim.errors import UsageError

Matrix: TypeAlias = tuple[tuple[float, ...], ...]
"""Rows are senders, columns receivers. The diagonal is not used."""


class Links(msgspec.Struct, frozen=True):
    """Measured figures of the links between all pairs of ranks."""

    latency_s: Matrix
    bandwidth_Bps: Matrix
    overhead_s: float = 0.0
    """The cost of sending a frame of any size."""
    reduce_Bps: float | None = None
    """Bytes that a rank reduces per second; None if that time is negligible."""
    pass_on: bool = False
    """Whether all links can forward received data directly, as links within a machine do."""

    def __post_init__(self) -> None:
        n = len(self.latency_s)
        if any(len(row) != n for row in (*self.latency_s, *self.bandwidth_Bps)) or len(self.bandwidth_Bps) != n:
            raise UsageError("latency_s and bandwidth_Bps are square matrices of one size")
        if any(self.bandwidth_Bps[i][j] <= 0 for i in range(n) for j in range(n) if i != j):
            raise UsageError("every bandwidth_Bps between two ranks is above zero")

    @classmethod
    def uniform(cls, world: int, latency_s: float, bandwidth_Bps: float) -> Links:
        """Return equal links between all pairs."""
        return cls(((latency_s,) * world,) * world, ((bandwidth_Bps,) * world,) * world)


def price(plans: Sequence[Rounds], links: Links, element_bytes: int, segment_bytes: int) -> float:
    """Return the seconds until the last rank is done, when all start together."""
    if len(plans) != len(links.latency_s):
        raise UsageError(f"{len(plans)} plans cannot run over the links of {len(links.latency_s)} ranks")
    if segment_bytes < element_bytes:
        raise UsageError(f"a segment of {segment_bytes} bytes does not hold an element of {element_bytes}")
    pricing = _Pricing(plans, links, element_bytes, segment_bytes // element_bytes)
    if pricing.dry_run.run([pricing.walk(rank) for rank in range(len(plans))]):
        raise PlanError("these plans wait for each other for ever, or for messages that nobody sends")
    return pricing.end_s


class _RankTimes:
    """The times when a rank's ports, arithmetic and ranges are free."""

    def __init__(self, rounds: Rounds, out_Bps: float, in_Bps: float) -> None:
        self.out_Bps, self.in_Bps = out_Bps, in_Bps
        self.out_free_s = self.in_free_s = self.adder_free_s = 0.0
        self.size = max((action.hi for actions in rounds for action in actions), default=0)
        # One cell more: signals carry no range, and wait for each other there.
        self.written_s = IntervalMap(self.size + 1, 0.0)
        self.released_s = IntervalMap(self.size + 1, 0.0)

    def cell(self, lo: int, hi: int) -> tuple[int, int]:
        return (lo, hi) if lo < hi else (self.size, self.size + 1)


class _Pricing:
    def __init__(self, plans: Sequence[Rounds], links: Links, element_bytes: int, segment: int) -> None:
        self.plans, self.links, self.element_bytes, self.segment = plans, links, element_bytes, segment
        speed, everyone = links.bandwidth_Bps, range(len(plans))
        self.ranks = [
            _RankTimes(
                plans[rank],
                max((speed[rank][peer] for peer in everyone if peer != rank), default=1.0),
                max((speed[peer][rank] for peer in everyone if peer != rank), default=1.0),
            )
            for rank in everyone
        ]
        self.link_free_s = [[0.0] * len(plans) for _ in plans]
        self.dry_run: DryRun[tuple[float, float]] = DryRun()
        self.end_s = 0.0

    def walk(self, rank: int) -> Iterator[MessageKey]:
        for s, actions in enumerate(self.plans[rank]):
            for action, index, lo, hi in _segments(actions, self.segment):
                if isinstance(action, Send):
                    self.dry_run.post((s, rank, action.peer, index), self._leave(rank, action.peer, lo, hi))
                    continue
                key = (s, action.peer, rank, index)
                if key not in self.dry_run:
                    yield key
                self._arrive(rank, action, lo, hi, *self.dry_run.take(key))

    def _leave(self, rank: int, peer: int, lo: int, hi: int) -> tuple[float, float]:
        """Send a frame; return when its first and its last byte reach the peer's port."""
        us, size_bytes = self.ranks[rank], (hi - lo) * self.element_bytes
        cell = us.cell(lo, hi)
        start = max(us.out_free_s, self.link_free_s[rank][peer], *us.written_s.values(*cell)) + self.links.overhead_s
        left = start + size_bytes / self.links.bandwidth_Bps[rank][peer]
        us.out_free_s = start + size_bytes / us.out_Bps
        self.link_free_s[rank][peer] = left
        for a, b, free in us.released_s.pieces(*cell):
            us.released_s.put(a, b, max(free, left))
        latency_s = self.links.latency_s[rank][peer]
        return start + latency_s, left + latency_s

    def _arrive(self, rank: int, action: Recv | Reduce, lo: int, hi: int, first_s: float, last_s: float) -> None:
        us, size_bytes = self.ranks[rank], (hi - lo) * self.element_bytes
        cell = us.cell(lo, hi)
        free = max(us.released_s.values(*cell))
        begin = max(first_s, us.in_free_s)
        if isinstance(action, Recv):
            begin = max(begin, free)
        us.in_free_s = begin + size_bytes / us.in_Bps
        done = max(us.in_free_s, last_s)
        if isinstance(action, Reduce):
            done = max(done, free)
            if self.links.reduce_Bps is not None:
                us.adder_free_s = max(done, us.adder_free_s) + size_bytes / self.links.reduce_Bps
                done = us.adder_free_s
        us.written_s.put(*cell, done)
        us.released_s.put(*cell, done)
        self.end_s = max(self.end_s, done)


def _segments(actions: Round, segment: int) -> Iterator[tuple[Send | Recv | Reduce, int, int, int]]:
    """Yield the segments of a round's messages in turn, cut as by the executor, from the start of each message.

    Ranges of one round must be equal or disjoint, as in all planners here."""
    messages = [action for action in actions if not isinstance(action, Finish)]
    longest = max((action.hi - action.lo for action in messages), default=0)
    for offset in range(0, max(longest, 1), segment):
        for action in messages:
            lo = action.lo + offset
            if lo < action.hi or offset == 0:
                yield action, offset, lo, min(lo + segment, action.hi)


def closed_form(
    algorithm: str,
    world: int,
    size_bytes: float,
    alpha_s: float,
    beta_Bps: float,
    arity: int = 2,
    header_bytes: int = 0,
) -> float:
    """Return the textbook duration of an all_reduce of L bytes over n uniform links, in seconds.

    Messages are not cut, overhead and arithmetic cost nothing, and L is a multiple of n. With the latency α and the
    time of the whole buffer on a link, B = L / β:

        ring                 2 (n - 1) (α + B / n)
        recursive_doubling   log2(n) (α + B)                           n a power of two
        halving_doubling     2 log2(n) α + 2 (n - 1) / n B             n a power of two
        direct               2 (α + (n - 1) / n B)                     every port serves n - 1 peers
        centralized          2 (α + (n - 1) B)                         the root's port serves one at a time
        tree                 up + down, over the ranks of the tree; 2 h (α + k B) for a full one of height h

    Simultaneous messages of a rank share its port evenly. Going down, a parent of c children is done after α + c B.
    Going up, it has c messages after α and the time that its port is busy with them, from the first that is ready
    to the last. Headers, which make each message longer, are not part of the textbook formulas; they are added if
    `header_bytes` is given."""
    n = world
    whole_s, part_s = ((length_bytes + header_bytes) / beta_Bps for length_bytes in (size_bytes, size_bytes / n))
    if n == 1:
        return 0.0
    if algorithm == "ring":
        return 2 * (n - 1) * (alpha_s + part_s)
    if algorithm == "direct":
        return 2 * (alpha_s + (n - 1) * part_s)
    if algorithm == "centralized":
        return 2 * (alpha_s + (n - 1) * whole_s)
    if algorithm == "tree":
        return _up_s(0, n, alpha_s, whole_s, arity) + _down_s(0, n, alpha_s, whole_s, arity)
    steps = n.bit_length() - 1
    if algorithm not in ("recursive_doubling", "halving_doubling") or n != 1 << steps:
        raise UsageError(f"there is no closed form for {algorithm} on {n} ranks")
    if algorithm == "recursive_doubling":
        return steps * (alpha_s + whole_s)
    return 2 * steps * (alpha_s + header_bytes / beta_Bps) + 2 * (n - 1) / n * size_bytes / beta_Bps


def _children(v: int, world: int, arity: int) -> range:
    return range(arity * v + 1, min(arity * v + arity, world - 1) + 1)


def _up_s(v: int, world: int, alpha_s: float, buffer_s: float, arity: int) -> float:
    """Return when v has the sum of its subtree.

    A port shared evenly finishes at the same time as one that serves the ready messages in turn."""
    ready_s = sorted(_up_s(child, world, alpha_s, buffer_s, arity) for child in _children(v, world, arity))
    waiting = [ready + (len(ready_s) - i) * buffer_s for i, ready in enumerate(ready_s)]
    return alpha_s + max(waiting) if waiting else 0.0


def _down_s(v: int, world: int, alpha_s: float, buffer_s: float, arity: int) -> float:
    """Return how long after v the last rank of its subtree has the result."""
    children = _children(v, world, arity)
    if not children:
        return 0.0
    deepest = max(_down_s(child, world, alpha_s, buffer_s, arity) for child in children)
    return alpha_s + len(children) * buffer_s + deepest
