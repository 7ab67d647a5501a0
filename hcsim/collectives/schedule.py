"""Schedules: how a plan is executed, either in order or as concurrent lanes of segments.

A plan whose messages all fit into one segment is executed in order. Otherwise it becomes lanes.

A plan is defined as if its actions happened one after the other; lanes keep only the necessary order. Each
direction of each link is a lane with its segments in plan order, and lanes run concurrently. The buffer is
divided into cells such that no segment covers part of one. Every segment states how many writes and sends of
each of its cells must precede it:

    a send     needs the writes that stand before it in the plan
    a write    needs those, and the sends that stand before it

Counting per cell is sufficient, because both happen in plan order. So a segment is sent on as soon as it has
been received and combined, while the next one is still in flight. In a lockstep plan, sends keep the plan order
across lanes, too.

Both ends cut a message alike: at multiples of the segment size, counted from its start.

In a plan executed in order, much data is received only to be sent on, as in every round of a ring. Channels may
forward such data as they arrive. A round that sends at most one range, then receives at most one, possibly
finishes that, and does nothing else is a stage. Where a stage sends what the previous one received, a frame is
forwarded. It need not be stored here if its range is received again before its next use.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import msgspec

from hcsim.collectives.plan import Action, Finish, Plan, PlanSummary, Recv, Reduce, Round, Rounds, Send


class Segment(msgspec.Struct, frozen=True, gc=False):
    """One piece of an action."""

    lo: int
    hi: int
    step: int
    offset: int
    """Its position in the message, in elements."""
    total: int
    """Elements of the whole message."""
    needs: tuple[tuple[int, int, int], ...]
    """Its cells, each with the number of writes and of sends that must precede this segment."""
    turn: int = 0
    """In a lockstep plan, the number of segments that are sent before this one, to any peer."""


class Lane(msgspec.Struct, frozen=True):
    """The segments of one direction with one peer, in order. Those of `Finish` form a lane of their own."""

    kind: type[Send] | type[Recv] | type[Finish]
    peer: int
    segments: tuple[Segment, ...]
    reduces: tuple[bool, ...]
    """For each received segment, whether it is combined rather than stored."""


class Schedule(msgspec.Struct, frozen=True, dict=True):
    """The execution of one rank's plan: rounds in order, or concurrent lanes."""

    ranks: dict[int, int]
    """The rank of each peer number of the plan, in order of first use."""
    scratch: int
    """The limit of scratch memory, in elements."""
    plan: Plan = Plan(())
    """The plan, if it is executed in order."""
    deferred: frozenset[tuple[int, int]] = frozenset()
    """The receives, by round and index in it, whose range is still in use in the previous round."""
    lanes: tuple[Lane, ...] = ()
    cells: int = 0
    sent: int = 0
    """Elements sent."""
    combined: int = 0
    """Elements of the buffer that lanes combine with received data."""

    @cached_property
    def peers(self) -> tuple[int, ...]:
        """The ranks it communicates with. (In a ring of two ranks, both neighbours are the same rank.)"""
        return tuple(dict.fromkeys(self.ranks.values()))

    @cached_property
    def forward_stages(self) -> ForwardStages:
        return forward_stages(self.plan)


def pieces(lo: int, hi: int, segment: int) -> Iterator[tuple[int, int]]:
    """Cut a range into segments."""
    for start in range(lo, hi, segment):
        yield start, min(start + segment, hi)


def schedule(plan: Plan, segment: int) -> Schedule:
    """Make the schedule of a plan; `segment` is in elements."""
    numbers, sent, longest, scratch, deferred = plan.summary or summary(plan.rounds)
    ranks = {number: plan.rank(number) for number in numbers}
    if longest <= segment:
        return Schedule(ranks, scratch, plan, deferred, sent=sent)
    cuts = _cuts(plan, segment)
    writes = [0] * len(cuts)
    sends = [0] * len(cuts)
    lanes: dict[tuple[str, int], tuple[list[Segment], list[bool]]] = {}
    kinds: dict[tuple[str, int], type[Send] | type[Recv] | type[Finish]] = {}
    reduced = [False] * len(cuts)
    turn = 0
    for step, actions in enumerate(plan.rounds):
        for action in actions:
            combines = type(action) is Reduce
            kind = Recv if type(action) is Reduce else type(action)
            peer = -1 if type(action) is Finish else ranks[action.peer]
            key = (kind.__name__, peer)
            kinds[key] = kind
            segments, reduces = lanes.setdefault(key, ([], []))
            counts = sends if kind is Send else writes
            for lo, hi in pieces(action.lo, action.hi, segment):
                cells = range(bisect_left(cuts, lo), bisect_left(cuts, hi))
                needs = tuple([(cell, writes[cell], sends[cell]) for cell in cells])
                segments.append(Segment(lo, hi, step, lo - action.lo, action.hi - action.lo, needs, turn))
                turn += plan.in_step and kind is Send
                reduces.append(combines)
                for cell in cells:
                    counts[cell] += 1
                    reduced[cell] |= combines
    made = tuple(
        Lane(kinds[key], key[1], tuple(segments), tuple(reduces)) for key, (segments, reduces) in lanes.items()
    )
    combined = sum(hi - lo for (lo, hi), yes in zip(pairwise(cuts), reduced, strict=False) if yes)
    return Schedule(ranks, scratch, lanes=made, cells=len(cuts), sent=sent, combined=combined)


def summary(rounds: Rounds) -> PlanSummary:
    """Summarise a plan in a single pass and one function: a ring over hundreds of ranks has a thousand rounds on each.

    A receive is deferred if its range is still in use while the previous round waits for its own messages. The
    sends of the previous round do not count, because they are over by then."""
    numbers: dict[int, None] = {}
    deferred: list[tuple[int, int]] = []
    sent = longest = end = largest = most_exchanged = 0
    before: Round = ()
    for step, actions in enumerate(rounds):
        sends = reduces = 0
        for number, action in enumerate(actions):
            kind, lo, hi = type(action), action.lo, action.hi
            length = hi - lo
            if length > longest:
                longest = length
            if hi > end:
                end = hi
            if type(action) is Finish:
                continue
            numbers[action.peer] = None
            if kind is Send:
                sends += 1
                sent += length
                continue
            if kind is Reduce:
                reduces += 1
                if length > largest:
                    largest = length
                for other in before:
                    if other.lo < hi and lo < other.hi:
                        deferred.append((step, number))
                        break
                else:
                    for other in actions[:number]:
                        if other.lo < hi and lo < other.hi:
                            deferred.append((step, number))
                            break
                continue
            for other in before:
                if other.lo < hi and lo < other.hi and type(other) is not Send:
                    deferred.append((step, number))
                    break
            else:
                for place, other in enumerate(actions):
                    if other.lo < hi and lo < other.hi and (place < number or type(other) is Send):
                        deferred.append((step, number))
                        break
        if sends and reduces > most_exchanged:
            most_exchanged = reduces
        before = actions
    return PlanSummary(tuple(numbers), sent, longest, max(end, most_exchanged * largest), frozenset(deferred))


def _cuts(plan: Plan, segment: int) -> list[int]:
    """Return every position where a segment starts or ends."""
    found: dict[int, None] = {}
    for actions in plan.rounds:
        for action in actions:
            for lo, hi in pieces(action.lo, action.hi, segment):
                found[lo] = None
                found[hi] = None
    return sorted(found)


Taken: TypeAlias = Recv | Reduce


class ForwardStage(NamedTuple):
    """A round that sends one range, then receives one; either may be missing."""

    send: Send | None
    take: Taken | None
    finishes: bool
    """Whether the received range is finished."""
    forwarded: bool
    """Whether the next stage sends the received range."""
    kept: bool
    """Whether the received range is also needed here."""


ForwardStages: TypeAlias = tuple[ForwardStage | None, ...]
"""By round; None for a round that is not a stage."""
_Parts: TypeAlias = tuple[Send | None, Taken | None, bool]
"""The part of a stage that follows from its round alone: send, receive, and whether it finishes."""


def forward_stages(plan: Plan) -> ForwardStages:
    found: list[ForwardStage | None] = []
    anew: dict[tuple[int, int], None] = {}
    """Ranges that are received again, after this point, before any other use."""
    after: _Parts | None = None
    kept = True
    """Whether what the following round sends is still needed after that."""
    for actions in reversed(plan.rounds):
        parts = _parts(actions)
        take = parts[1] if parts is not None else None
        forwarded = take is not None and after is not None and after[0] is not None and _range(take) == _range(after[0])
        found.append(None if parts is None else ForwardStage(*parts, forwarded, kept or not forwarded))
        for action in reversed(actions):
            if isinstance(action, Send):
                kept = _range(action) not in anew
            anew = {(lo, hi): None for lo, hi in anew if hi <= action.lo or action.hi <= lo}
            if isinstance(action, Recv):
                anew[_range(action)] = None
        after = parts
    return tuple(reversed(found))


def _parts(actions: Round) -> _Parts | None:
    send = actions[0] if actions and isinstance(actions[0], Send) else None
    rest = actions[1:] if send is not None else actions
    match rest:
        case () if send is not None:
            return send, None, False
        case (Recv() | Reduce() as take,):
            return send, take, False
        case (Reduce() as take, Finish() as finish) if _range(take) == _range(finish):
            return send, take, True
    return None


def _range(action: Action) -> tuple[int, int]:
    return action.lo, action.hi
