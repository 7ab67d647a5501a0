"""In order: a plan of short messages, action by action, in one task.

A round's messages are given their places while the round before it still waits for its own. Those
that are combined get rooms beside the buffer, in the plan's order, as long as there is space for them.
"""

from __future__ import annotations

import asyncio
from collections import deque

from hcsim.collectives.memory import RESERVE_BYTES
from hcsim.collectives.plan import Action, Finish, Recv, Reduce, Round, Send
from hcsim.collectives.schedule import Schedule
from hcsim.collectives.wiring import Progress, Wiring
from hcsim.runtime.channel import Payload


class InOrder:
    """One operation's rounds, and what of them is posted."""

    def __init__(self, wiring: Wiring, schedule: Schedule) -> None:
        self._wiring = wiring
        self._rounds = schedule.rounds
        self._space = max(schedule.beside, RESERVE_BYTES // wiring.memory.element_bytes)
        self._posted: dict[tuple[int, int], asyncio.Future[Payload]] = {}
        """By round and number in it."""
        self._reduces = deque(
            (step, number, action)
            for step, actions in enumerate(schedule.rounds)
            for number, action in enumerate(actions)
            if isinstance(action, Reduce)
        )
        """Those without a room."""
        self._taken: dict[tuple[int, int], int] = {}
        """Elements of space that a room takes: as many as the largest before it, which may be used again for less."""
        self._largest = 0

    async def run(self, state: Progress) -> None:
        """Run all rounds."""
        self._post(0)
        for step, actions in enumerate(self._rounds):
            state.step = step
            sending = True
            for number, action in enumerate(actions):
                if isinstance(action, Send):
                    state.doing, state.peer = "sending to", action.peer
                    await self._wiring.send(action.peer, action, step)
                    continue
                if sending:  # all sends of a round come first
                    sending = False
                    self._post(step + 1)
                if isinstance(action, Finish):
                    await self._wiring.finish(action.lo, action.hi)
                    continue
                state.doing, state.peer = "receiving from", action.peer
                await self._receive(step, number, action)
            if sending:
                self._post(step + 1)

    async def _receive(self, step: int, number: int, action: Recv | Reduce) -> None:
        wiring = self._wiring
        arrived = self._posted.pop((step, number), None)
        if arrived is None:
            arrived = wiring.post(action.peer, action, step, wiring.memory.place(action.lo, action.hi))
        payload = arrived.result() if arrived.done() else await arrived
        if isinstance(action, Reduce):
            await wiring.combine((step, number), action, payload, received_left=action.peer < wiring.ticket.rank)
            self._space += self._taken.pop((step, number))
            self._post_reduces(step + 1)

    def _post(self, step: int) -> None:
        """Say where a round's messages go, once the round before it has sent all it sends.

        A reduction is received beside the buffer, where it can wait for its turn. Anything else has to
        wait for whatever still reads or writes its range.
        """
        if step == len(self._rounds):
            return
        wiring, rounds = self._wiring, self._rounds
        for number, action in enumerate(rounds[step]):
            if isinstance(action, Recv) and not (
                _overlaps(action, rounds[step], Send)
                or (step and _overlaps(action, rounds[step - 1], Recv, Reduce, Finish))
            ):
                place = wiring.memory.place(action.lo, action.hi)
                self._posted[step, number] = wiring.post(action.peer, action, step, place)
        self._post_reduces(step)

    def _post_reduces(self, last_step: int) -> None:
        """Give rooms to those that come next, up to a round. One whose turn it is finds all the space free."""
        wiring, reduces = self._wiring, self._reduces
        while reduces and reduces[0][0] <= last_step:
            step, number, action = reduces[0]
            self._largest = max(self._largest, action.hi - action.lo)
            if self._largest > self._space:
                return
            reduces.popleft()
            self._taken[step, number] = self._largest
            self._space -= self._largest
            now = not wiring.memory.is_phantom and self._untouched(step, number, action)
            room = wiring.scratch((step, number), action, now=now)
            self._posted[step, number] = wiring.post(action.peer, action, step, room)

    def _untouched(self, step: int, number: int, action: Reduce) -> bool:
        """Whether nothing that may still come before a reduction, of which a round ahead is posted, has its range."""
        before = (*(self._rounds[step - 1] if step else ()), *self._rounds[step][:number])
        return not _overlaps(action, before, Send, Recv, Reduce, Finish)


def _overlaps(received: Recv | Reduce, actions: Round, *kinds: type[Action]) -> bool:
    lo, hi = received.lo, received.hi
    for action in actions:
        if type(action) not in kinds:
            continue
        if action.lo < hi and lo < action.hi:
            return True
    return False
