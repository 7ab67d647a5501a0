"""Where a model is cut, and which machine computes which stage.

A stage is a run of blocks, and for each microbatch it computes them forward and backward. With gpipe a stage takes as
long as that, or as its activations need to arrive or to leave, whichever is longest: sending overlaps with computing
(as in PipeDream: Narayanan et al., SOSP 2019). With 1f1b only as many microbatches are under way as there are stages
from there on. So a stage that has sent one waits for the gradient of an earlier one, and the messages over both of its
boundaries count in addition. A pipeline is as fast as its slowest stage. So the cut is that for which the slowest stage
is fastest and, of several, that which sends least, among those whose stages fit into the memory of their machines.

Dynamic programming over the machines that have their stages already and the blocks they compute is exact, the order
of the machines included. Machines that are alike are not told apart, so that p equal machines cost p · B² for B blocks,
and p unlike ones 2ᵖ · B². Beyond `EXACT` machines they are taken in the order of their speed.

With several replicas of the pipeline the ranks are sorted by speed, and each stage is computed by as many consecutive
ones as there are replicas: the slowest of them counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple, TypeAlias

import msgspec

EXACT = 8
"""The number of machines whose best order is found."""

Fits: TypeAlias = Callable[[int, int, int, float], bool]
"""Whether a stage (its number, its first block and the one after its last) fits into so many bytes."""


class StageMachine(msgspec.Struct, frozen=True):
    """What a rank can do."""

    block_s: tuple[float, ...]
    """By block, the seconds of a forward and a backward pass of a microbatch."""
    usable_bytes: float = inf
    rate_Bps: float = inf
    """At which it sends and receives."""


class Cut(msgspec.Struct, frozen=True):
    """Who computes what."""

    bounds: tuple[int, ...]
    """The first block of each stage, and the number of blocks."""
    seats: tuple[tuple[int, ...], ...]
    """By stage, the ranks that compute it: one of each replica."""
    slowest_s: float
    """The time of the slowest stage for a microbatch."""

    @property
    def stages(self) -> int:
        return len(self.seats)

    def span(self, stage: int) -> tuple[int, int]:
        return self.bounds[stage], self.bounds[stage + 1]

    def stage_of(self, rank: int) -> int:
        return next(stage for stage, ranks in enumerate(self.seats) if rank in ranks)


class _Best(NamedTuple):
    cost: float
    begins: int
    """The first block of the last stage."""
    before: tuple[int, ...]
    """How many machines of each kind have the stages before."""


def cut(
    machines: Sequence[StageMachine], stages: int, entering_bytes: Sequence[int], fits: Fits, *, overlaps: bool
) -> Cut | None:
    """Return the best cut into stages; None if there is none that fits. `entering_bytes` are those that enter each
    block for a microbatch; `overlaps` says whether all messages are sent while others are computed."""
    replicas = len(machines) // stages
    ranks = sorted(range(len(machines)), key=lambda rank: (sum(machines[rank].block_s), rank))
    seats = [tuple(sorted(ranks[at : at + replicas])) for at in range(0, len(ranks), replicas)]
    merged = [_merged([machines[rank] for rank in seat]) for seat in seats]
    search = _Search(merged, entering_bytes, fits, overlaps=overlaps)
    found = search.best()
    if found is None:
        return None
    bounds, order, slowest_s = found
    return Cut(bounds, tuple(seats[number] for number in order), slowest_s)


def _merged(machines: Sequence[StageMachine]) -> StageMachine:
    """Return a machine that can do what each of them can."""
    return StageMachine(
        tuple(max(each) for each in zip(*(machine.block_s for machine in machines), strict=True)),
        min(machine.usable_bytes for machine in machines),
        min(machine.rate_Bps for machine in machines),
    )


class _Search:
    def __init__(
        self, machines: Sequence[StageMachine], entering_bytes: Sequence[int], fits: Fits, *, overlaps: bool
    ) -> None:
        self._overlaps = overlaps
        self._machines = machines
        self._stages, self._blocks = len(machines), len(entering_bytes)
        self._entering_bytes = [0, *entering_bytes[1:], 0]
        # Beyond a number of machines each place has a kind of its own, whose turn comes with its stage.
        self._in_order = len(machines) > EXACT
        self._kinds = list(range(len(machines))) if self._in_order else _kinds(machines)
        self._members = [[n for n, kind in enumerate(self._kinds) if kind == k] for k in range(max(self._kinds) + 1)]
        self._sums = [_sums(machines[members[0]].block_s) for members in self._members]
        self._fits = fits
        self._farthest: dict[tuple[int, int, float], int] = {}

    def best(self) -> tuple[tuple[int, ...], tuple[int, ...], float] | None:
        """Return the bounds, the machines by stage, and the time of the slowest stage."""
        slowest_s = self._solve(self._stage_s, max)
        if slowest_s is None:
            return None
        limit_s = slowest_s[2] * (1 + 1e-9)

        def sending_s(kind: int, first: int, end: int) -> float:
            if self._stage_s(kind, first, end) > limit_s:
                return inf
            return self._send_s(kind, first)

        least = self._solve(sending_s, lambda one, other: one + other)
        assert least is not None
        return least[0], least[1], slowest_s[2]

    def _solve(
        self, cost: Callable[[int, int, int], float], joined: Callable[[float, float], float]
    ) -> tuple[tuple[int, ...], tuple[int, ...], float] | None:
        """Find the cut of least cost by dynamic programming over the kinds used and the blocks done."""
        done = tuple(0 for _ in self._members)
        layers: list[dict[tuple[tuple[int, ...], int], _Best]] = [{(done, 0): _Best(0.0, 0, done)}]
        for stage in range(self._stages):
            layer: dict[tuple[tuple[int, ...], int], _Best] = {}
            for (used, first), best in layers[-1].items():
                for kind in self._candidates(stage, used):
                    now = (*used[:kind], used[kind] + 1, *used[kind + 1 :])
                    for end in self._ends(stage, kind, first):
                        price = joined(best.cost, cost(kind, first, end))
                        known = layer.get((now, end))
                        if price < inf and (known is None or price < known.cost):
                            layer[now, end] = _Best(price, first, used)
            layers.append(layer)
        full = tuple(map(len, self._members))
        at = full, self._blocks
        if at not in layers[-1]:
            return None
        total = layers[-1][at].cost
        bounds, kinds = [self._blocks], list[int]()
        for layer in reversed(layers[1:]):
            best = layer[at]
            kinds.append(next(kind for kind, count in enumerate(at[0]) if count != best.before[kind]))
            bounds.append(best.begins)
            at = best.before, best.begins
        return tuple(reversed(bounds)), self._seated(list(reversed(kinds))), total

    def _candidates(self, stage: int, used: tuple[int, ...]) -> list[int]:
        if self._in_order:
            return [stage]
        return [kind for kind, members in enumerate(self._members) if used[kind] < len(members)]

    def _ends(self, stage: int, kind: int, first: int) -> range:
        """Return where a stage can end: at least a block is left for each later one."""
        last = self._blocks - (self._stages - stage - 1)
        if stage == self._stages - 1:
            return range(last, last + 1) if self._reach(stage, kind, first) >= last else range(0)
        return range(first + 1, min(last, self._reach(stage, kind, first)) + 1)

    def _reach(self, stage: int, kind: int, first: int) -> int:
        """Return how far a stage that begins there can go in its machine's memory, by bisection: it needs more with
        each block."""
        usable = self._machines[self._members[kind][0]].usable_bytes
        if usable == inf:
            return self._blocks
        key = stage, first, usable
        if key not in self._farthest:
            fitting, too_far = first, self._blocks + 1
            while too_far - fitting > 1:
                middle = (fitting + too_far) // 2
                fitting, too_far = (middle, too_far) if self._fits(stage, first, middle, usable) else (fitting, middle)
            self._farthest[key] = fitting
        return self._farthest[key]

    def _stage_s(self, kind: int, first: int, end: int) -> float:
        sums = self._sums[kind]
        computing_s, before_s, after_s = sums[end] - sums[first], self._send_s(kind, first), self._send_s(kind, end)
        return max(computing_s, before_s, after_s) if self._overlaps else computing_s + before_s + after_s

    def _send_s(self, kind: int, block: int) -> float:
        """Return how long it takes a machine to receive what enters a block, or to send it."""
        return self._entering_bytes[block] / self._machines[self._members[kind][0]].rate_Bps

    def _seated(self, kinds: Sequence[int]) -> tuple[int, ...]:
        waiting = [list(members) for members in self._members]
        return tuple(waiting[kind].pop(0) for kind in kinds)


def _kinds(machines: Sequence[StageMachine]) -> list[int]:
    """Number the kinds of machines, in the order in which they appear."""
    known: dict[StageMachine, int] = {}
    return [known.setdefault(machine, len(known)) for machine in machines]


def _sums(block_s: Sequence[float]) -> list[float]:
    total, sums = 0.0, [0.0]
    for each in block_s:
        total += each
        sums.append(total)
    return sums
