"""What a rank receives only to send it on, as in every round of a ring: channels may pass it on without a stop.

A round that sends one range, then takes one, perhaps finishes that, and does no more is a stage. Stages that follow
each other make a belt, one leg for each frame that comes: where a stage sends what the one before has taken, that is
one leg. It need not stay with us where the range is received anew before anybody asks for it.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from hcsim.collectives.buffers import Buffer
from hcsim.collectives.plan import Action, Finish, Plan, Recv, Reduce, Round, Send
from hcsim.collectives.wiring import RECEIVING, WORTH_CONVEYING_BYTES, Progress, Wiring
from hcsim.runtime.channel import Leg
from hcsim.transport.link import Link

Taken: TypeAlias = Recv | Reduce

_STAGES_AT_ONCE = 32
"""How many are prepared before the first of them moves: the other ranks can begin meanwhile."""


class Stage(NamedTuple):
    """A round of that kind; it may lack one of the two."""

    send: Send | None
    take: Taken | None
    finishes: bool
    """What it takes is the last of a reduction."""
    goes_on: bool
    """What it takes is what the next stage sends."""
    stays: bool
    """And is needed here as well."""


Stages: TypeAlias = tuple[Stage | None, ...]
"""By round; None where it does something else."""
_Parts: TypeAlias = tuple[Send | None, Taken | None, bool]
"""A stage's, as far as its round alone tells."""


def stages(plan: Plan) -> Stages:
    """What of a plan can be passed on."""
    found: list[Stage | None] = []
    anew: dict[tuple[int, int], None] = {}
    """Ranges that are received, from here on, before anything else happens to them."""
    after: _Parts | None = None
    stays = True
    """Whether what the round after sends is needed once it has been sent."""
    for actions in reversed(plan.rounds):
        parts = _parts(actions)
        take = parts[1] if parts is not None else None
        goes_on = take is not None and after is not None and after[0] is not None and _range(take) == _range(after[0])
        found.append(None if parts is None else Stage(*parts, goes_on, stays or not goes_on))
        for action in reversed(actions):
            if isinstance(action, Send):
                stays = _range(action) not in anew
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


class At(NamedTuple):
    """How far an operation is: which round comes next, and whether what it sends has left."""

    step: int
    sent: bool


class Belts:
    """Runs those stages of an operation that its links can pass on."""

    def __init__(self, wiring: Wiring, links: dict[int, Link], found: Stages) -> None:
        self._wiring = wiring
        self._links = links
        self._stages = found
        size = wiring.buffer.element_bytes
        self._least = WORTH_CONVEYING_BYTES // size
        self._most = {peer: link.outlet.most_bytes // size if link.outlet else -1 for peer, link in links.items()}
        """Elements of a message that can be passed on, by peer."""

    def may_begin(self, step: int) -> bool:
        """Whether a round can be the first of a belt."""
        return self._ends(step) is not None

    async def run(self, at: At, state: Progress) -> At:
        """As far as that goes. What comes then is to be done in the usual way."""
        while (ends := self._ends(at.step)) is not None:
            source, to = ends
            legs, reached = self._legs(at, source, to)
            state.doing, state.peer, state.step = RECEIVING, source.peer_rank, at.step

            def moved(done: int, reached: list[At] = reached) -> None:
                nonlocal at
                at = reached[done - 1]
                state.step = at.step

            await source.convey(legs, to, moved)
            if at != reached[-1]:
                break
        return at

    def _ends(self, step: int) -> tuple[Link, Link] | None:
        """From where to where a belt would lead that begins with the round."""
        stage = self._stages[step] if step < len(self._stages) else None
        if stage is None or stage.take is None or stage.send is None:
            return None
        if not (self._can_take(stage.take) and self._can_move(stage.send)):
            return None
        return self._links[stage.take.peer], self._links[stage.send.peer]

    def _legs(self, at: At, source: Link, to: Link) -> tuple[list[Leg], list[At]]:
        """The legs from there on that come from one peer and go to another, and how far we are after each."""
        wiring, buffer, links = self._wiring, self._wiring.buffer, self._links
        us, source_rank = wiring.ticket.rank, source.peer_rank
        legs: list[Leg] = []
        reached: list[At] = []
        goes_on = False
        for step in range(at.step, min(at.step + _STAGES_AT_ONCE, len(self._stages))):
            stage = self._stages[step]
            if stage is None:
                break
            send, take = stage.send, stage.take
            if send is not None and at != (step, True):
                if links[send.peer] is not to or not self._can_move(send):
                    break
                goes = wiring.header(send, step, us)
                if goes_on:
                    legs[-1] = legs[-1]._replace(goes=goes)
                    reached[-1] = At(step, sent=True)
                else:
                    legs.append(Leg(None, goes, _place(buffer, send), "", stays=True))
                    reached.append(At(step, sent=True))
            if take is None or links[take.peer] is not source or not self._can_take(take):
                break
            comes = wiring.header(take, step, source_rank)
            numbers = buffer.numbers if type(take) is Reduce else ""
            divisor = buffer.divisor if stage.finishes else 1
            legs.append(Leg(comes, None, _place(buffer, take), numbers, stage.stays, divisor))
            reached.append(At(step + 1, sent=False))
            goes_on = stage.goes_on
        return legs, reached

    def _can_take(self, take: Taken) -> bool:
        return self._can_move(take) and (type(take) is Recv or self._wiring.buffer.numbers != "")

    def _can_move(self, action: Send | Taken) -> bool:
        return self._least <= action.hi - action.lo <= self._most[action.peer]


def _place(buffer: Buffer, action: Send | Taken) -> memoryview:
    place = buffer.place(action.lo, action.hi)
    assert place is not None  # a phantom is not passed on
    return place
