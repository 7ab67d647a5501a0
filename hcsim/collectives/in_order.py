"""In order: a plan of short messages, action by action, in one task.

A round's messages are given their places while the round before it still waits for its own. Those
that are combined get rooms beside the buffer, in the plan's order, as long as there is space for them.

What a round receives only for the next one to send, channels may pass on as it comes, round after round; see
`belts.py`. The task goes on where that ends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any, TypeAlias

from hcsim.collectives.belts import At, Belts
from hcsim.collectives.buffers import RESERVE_BYTES
from hcsim.collectives.plan import Finish, Recv, Reduce, Send
from hcsim.collectives.schedule import Schedule
from hcsim.collectives.wiring import RECEIVING, Progress, Wiring
from hcsim.runtime.channel import Payload

_Posted: TypeAlias = list[tuple[asyncio.Future[Payload], int] | None]
"""What comes, for each action of a round, and the elements of space that its room takes: as many as the largest before
it, which may be used again for less."""


class InOrder:
    """One operation's rounds, and what of them is posted."""

    __slots__ = ("_belts", "_largest", "_links", "_patient", "_roomless", "_rounds", "_space", "_wiring")

    def __init__(self, wiring: Wiring, schedule: Schedule) -> None:
        self._wiring = wiring
        self._rounds = schedule.plan.rounds
        self._links = {number: wiring.links[rank] for number, rank in schedule.names.items()}
        self._patient = schedule.patient
        self._space = max(schedule.beside, RESERVE_BYTES // wiring.buffer.element_bytes)
        self._roomless: deque[tuple[_Posted, int, int, Reduce]] = deque()
        """Those of the rounds so far that have no room yet."""
        self._largest = 0
        self._belts = Belts(wiring, self._links, schedule.stages) if wiring.may_convey(schedule.sent) else None

    def run(self, state: Progress) -> Coroutine[Any, Any, object]:
        """Run all rounds."""
        # Not awaited by a coroutine in between: each wake-up would take a step more.
        return self._run(At(0, sent=False), state) if self._belts is None else self._run_with(self._belts, state)

    async def _run_with(self, belts: Belts, state: Progress) -> None:
        at = At(0, sent=False)
        while at.step < len(self._rounds):
            at = await belts.run(at, state)
            at = await self._run(at, state)

    async def _run(self, at: At, state: Progress) -> At:
        """From there on, to the end or to where a belt may begin, behind the first round at least."""
        wiring, links, roomless, belts = self._wiring, self._links, self._roomless, self._belts
        rank = wiring.ticket.rank
        step, sent = at
        ahead = self._post(step)
        for actions in self._rounds[step:]:
            state.step = step
            posted = ahead
            sending = True
            number = -1
            for action in actions:
                number += 1  # not by `enumerate`: among hundreds of ranks each object more is one that no cache holds
                if type(action) is Send:
                    if sent:
                        sent = False  # it was passed on as it came
                        continue
                    link = links[action.peer]
                    state.doing, state.peer = "sending to", link.peer_rank
                    await wiring.send(link, action, step)
                    continue
                if sending:  # all sends of a round come first
                    sending = False
                    if belts is None or not belts.may_begin(step + 1):
                        ahead = self._post(step + 1)
                if type(action) is Finish:
                    await wiring.finish(action.lo, action.hi)
                    continue
                link = links[action.peer]
                state.doing, state.peer = RECEIVING, link.peer_rank
                if (known := posted[number]) is not None:
                    arrived, taken = known
                else:
                    arrived = wiring.post(link, action, step, wiring.buffer.place(action.lo, action.hi))
                payload = arrived.result() if arrived.done() else await arrived
                if type(action) is Reduce:
                    await wiring.combine((step, number), action, payload, received_left=link.peer_rank < rank)
                    self._space += taken
                    while roomless and self._post_reduce(*roomless[0]):
                        roomless.popleft()
            step += 1
            if belts is not None and belts.may_begin(step):
                break
            if sending:
                ahead = self._post(step)
        return At(step, sent=False)

    def _post(self, step: int) -> _Posted:
        """Say where a round's messages go, once the round before it has sent all it sends.

        A reduction is received beside the buffer, where it can wait for its turn. Anything else has to
        wait for whatever still reads or writes its range.
        """
        if step == len(self._rounds):
            return []
        wiring, patient, roomless, actions = self._wiring, self._patient, self._roomless, self._rounds[step]
        posted: _Posted = [None] * len(actions)
        for number, action in enumerate(actions):
            if type(action) is Send:
                continue
            if type(action) is Reduce:
                if roomless or not self._post_reduce(posted, step, number, action):
                    roomless.append((posted, step, number, action))
            elif type(action) is Recv and not (patient and (step, number) in patient):
                place = wiring.buffer.place(action.lo, action.hi)
                posted[number] = wiring.post(self._links[action.peer], action, step, place), 0
        return posted

    def _post_reduce(self, posted: _Posted, step: int, number: int, action: Reduce) -> bool:
        """Whether there was room for the one that comes next. One whose turn it is finds all the space free."""
        largest = self._largest = max(self._largest, action.hi - action.lo)
        if largest > self._space:
            return False
        wiring, which = self._wiring, (step, number)
        self._space -= largest
        room = wiring.scratch(which, action, now=which not in self._patient)
        posted[number] = wiring.post(self._links[action.peer], action, step, room), largest
        return True
