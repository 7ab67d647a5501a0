"""From a plan to what is executed: in order, or as lanes of segments that wait for each other.

A plan whose messages all fit a segment is executed in order. Otherwise it becomes lanes.

A plan reads as if its actions happened one after the other; lanes keep only the order that
matters. Each direction of each link is a lane with its segments in plan order, and lanes run side
by side. The buffer is cut into cells, so that no segment covers part of one, and every segment
says how many writes and sends of each of its cells must have happened before it:

    a send     needs the writes that stand before it in the plan
    a write    needs those, and the sends that stand before it

Counting per cell is enough, because both happen in plan order. So a segment is passed on as soon
as it has been received and combined, while the next one is still under way. In a plan whose rounds go in step, what
is sent keeps plan order across lanes too.

Both ends cut a message alike: at multiples of the segment size, counted from its start.

In a plan that is executed in order, much is received only to be sent on, as in every round of a ring: channels may
forward that as it comes. A round that sends one range, then takes one, perhaps finishes that, and does no more is a
stage. Where a stage sends what the one before has taken, a frame is forwarded; it need not stay here where its range is
received anew before anything else happens to it.
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
    """One piece of one action."""

    lo: int
    hi: int
    step: int
    offset: int
    """Where it lies in its message, in elements."""
    total: int
    """Elements of the whole message."""
    needs: tuple[tuple[int, int, int], ...]
    """Its cells, each with the number of writes and of sends that come before this."""
    turn: int = 0
    """How many are sent before this, to any peer, where the plan's rounds go in step."""


class Lane(msgspec.Struct, frozen=True):
    """What happens in one direction with one peer (or, for `Finish`, with ourselves), in order."""

    kind: type[Send] | type[Recv] | type[Finish]
    peer: int
    segments: tuple[Segment, ...]
    reduces: tuple[bool, ...]
    """For each received segment, whether it is combined rather than stored."""


class Schedule(msgspec.Struct, frozen=True, dict=True):
    """What one rank does: rounds in order, or else lanes side by side."""

    ranks: dict[int, int]
    """The rank behind each number by which the plan names a peer, in the order in which it does."""
    scratch: int
    """Elements that may lie beside the buffer, waiting to be combined with it."""
    plan: Plan = Plan(())
    """Where it is executed in order."""
    deferred: frozenset[tuple[int, int]] = frozenset()
    """What of the rounds, by round and number in it, is received into a range that is still in use a round before."""
    lanes: tuple[Lane, ...] = ()
    cells: int = 0
    sent: int = 0
    """Elements that it sends."""
    combined: int = 0
    """Elements of the buffer that lanes combine with something."""

    @cached_property
    def peers(self) -> tuple[int, ...]:
        """The ranks that it talks to. (Two ranks are each other's neighbours on both sides.)"""
        return tuple(dict.fromkeys(self.ranks.values()))

    @cached_property
    def forward_stages(self) -> ForwardStages:
        """What of the rounds can be forwarded."""
        return forward_stages(self.plan)


def pieces(lo: int, hi: int, segment: int) -> Iterator[tuple[int, int]]:
    """Cut a range into segments."""
    for start in range(lo, hi, segment):
        yield start, min(start + segment, hi)


def schedule(plan: Plan, segment: int) -> Schedule:
    """Work out how a plan is executed; `segment` is in elements."""
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
    """One pass, in one piece: a ring over hundreds of ranks has a thousand rounds on each of them.

    A range waits that cannot be received into, or added to, while the round before still waits for its own. What is
    received does not disturb the sends of the round before, which are over by then."""
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
    """Every place where some segment starts or ends."""
    found: dict[int, None] = {}
    for actions in plan.rounds:
        for action in actions:
            for lo, hi in pieces(action.lo, action.hi, segment):
                found[lo] = None
                found[hi] = None
    return sorted(found)


Taken: TypeAlias = Recv | Reduce


class ForwardStage(NamedTuple):
    """A round that sends one range, then takes one; it may lack either."""

    send: Send | None
    take: Taken | None
    finishes: bool
    """What it takes is the last of a reduction."""
    forwarded: bool
    """What it takes is what the next stage sends."""
    kept: bool
    """And is needed here as well."""


ForwardStages: TypeAlias = tuple[ForwardStage | None, ...]
"""By round; None where it does something else."""
_Parts: TypeAlias = tuple[Send | None, Taken | None, bool]
"""A stage's, as far as its round alone tells."""


def forward_stages(plan: Plan) -> ForwardStages:
    """What of a plan can be forwarded."""
    found: list[ForwardStage | None] = []
    anew: dict[tuple[int, int], None] = {}
    """Ranges that are received, from here on, before anything else happens to them."""
    after: _Parts | None = None
    kept = True
    """Whether what the round after sends is needed once it has been sent."""
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
