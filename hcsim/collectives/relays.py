"""What a rank receives only to send it on, as in every round of a ring: a channel may pass it on without a stop.

That is so where the last action of a round receives a range, and the next round begins by sending it and sends
nothing else: nothing can come between the two. It need not stay with us where the range is received anew before
anybody asks for it.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from hcsim.collectives.plan import Plan, Recv, Reduce, Round, Send
from hcsim.runtime.channel import Fold, Relay
from hcsim.runtime.frame import Header
from hcsim.transport.link import Link


class Onward(NamedTuple):
    """Where something goes that has come."""

    peer: int
    stays: bool
    """Whether it is needed here as well."""


Onwards: TypeAlias = dict[int, Onward]
"""By the round in which it comes."""


class Sends:
    """How far an operation's sends are: those up to this round have left."""

    __slots__ = ("through",)

    def __init__(self) -> None:
        self.through = -1


class RoundRelay(Relay):
    """Passes on what comes in one round as what the next one sends."""

    __slots__ = ("_link", "_sends")

    def __init__(self, fold: Fold, link: Link, header: Header, sends: Sends, *, stays: bool) -> None:
        super().__init__(fold, link.outlet, header, stays=stays)
        self._link = link
        self._sends = sends

    @property
    def is_due(self) -> bool:
        """See `Relay.is_due`."""
        return self._sends.through == self.header.step - 1

    def passed(self) -> None:
        """See `Relay.passed`."""
        self._sends.through = self.header.step
        self._link.count_sent(self.header)


def onwards(plan: Plan) -> Onwards:
    """What of a plan is passed on."""
    found: Onwards = {}
    anew: dict[tuple[int, int], None] = {}
    """Ranges that are received, from here on, before anything else happens to them."""
    for step in range(len(plan.rounds) - 1, 0, -1):
        before, actions = plan.rounds[step - 1], plan.rounds[step]
        for number in range(len(actions) - 1, -1, -1):
            action = actions[number]
            part = action.lo, action.hi
            if number == 0 and _goes_on(before, actions):
                assert isinstance(action, Send)
                found[step - 1] = Onward(plan.rank(action.peer), stays=part not in anew)
            anew = {(lo, hi): None for lo, hi in anew if hi <= action.lo or action.hi <= lo}
            if isinstance(action, Recv):
                anew[part] = None
    return found


def _goes_on(before: Round, actions: Round) -> bool:
    sends = [action for action in actions if isinstance(action, Send)]
    if len(sends) != 1 or sends[0] is not actions[0] or not before:
        return False
    last = before[-1]
    return isinstance(last, Recv | Reduce) and (last.lo, last.hi) == (sends[0].lo, sends[0].hi)
