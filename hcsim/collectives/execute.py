"""The executor: runs any plan over links.

Short messages go in order: the plan, action by action, in one task. Messages that are cut into
segments go in lanes, side by side; see `lanes.py`. Either way what comes next is posted ahead, so
that its bytes find their place without a detour.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from hcsim.collectives.lanes import Lanes
from hcsim.collectives.memory import Memory
from hcsim.collectives.plan import Finish, Recv, Reduce, Round, Send
from hcsim.collectives.schedule import Schedule
from hcsim.collectives.wiring import Progress, Ticket, Wiring
from hcsim.errors import CollectiveError, HcsimError
from hcsim.runtime.channel import Payload
from hcsim.runtime.device import Device
from hcsim.transport.link import Link

T = TypeVar("T")


class Execution:
    """One operation on its way."""

    def __init__(
        self,
        schedule: Schedule,
        memory: Memory,
        ticket: Ticket,
        link_to: Callable[[int], Awaitable[Link]],
        device: Device,
    ) -> None:
        self._schedule = schedule
        self._link_to = link_to
        self._wiring = Wiring(ticket, memory, device)
        self._progress: list[Progress] = []

    async def run(self) -> None:
        """Run the plan to its end. A failure anywhere ends all of it, as a `CollectiveError`."""
        for peer in self._schedule.peers:
            await self._guarded(self._open, peer)
        if not self._schedule.lanes:
            await self._guarded(self._in_order, self._schedule.rounds)
            return
        lanes = Lanes(self._wiring, self._schedule.cells)
        try:
            async with asyncio.TaskGroup() as group:
                for lane in self._schedule.lanes:
                    name = f"{self._wiring.ticket}: {lane.kind.__name__} {lane.peer}"
                    group.create_task(self._guarded(lanes.run, lane), name=name)
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    def blame(self) -> tuple[int | None, str]:
        """The rank that we wait for, and what for: a receiver knows better than a sender who is late."""
        for doing in ("receiving from", "opening a link to", "sending to"):
            for state in self._progress:
                if state.doing == doing:
                    return state.peer, str(state)
        return None, "waiting"

    async def _guarded(self, run: Callable[[Progress, T], Awaitable[None]], what: T) -> None:
        state = Progress()
        self._progress.append(state)
        try:
            await run(state, what)
            state.doing = ""
        except CollectiveError:
            raise
        except HcsimError as error:
            text = f"{self._wiring.ticket} failed while {state}: {error}"
            raise CollectiveError(text, peer=state.peer, phase=str(state)) from error

    async def _open(self, state: Progress, peer: int) -> None:
        state.doing, state.peer = "opening a link to", peer
        self._wiring.links[peer] = await self._link_to(peer)

    async def _in_order(self, state: Progress, rounds: tuple[Round, ...]) -> None:
        wiring = self._wiring
        rank = wiring.ticket.rank
        posted: dict[tuple[int, int], asyncio.Future[Payload]] = {}
        self._post(rounds, 0, Reduce, posted)
        for step, actions in enumerate(rounds):
            # A reduction is received beside the buffer, where it can wait for its turn.
            self._post(rounds, step + 1, Reduce, posted)
            self._post(rounds, step, Recv, posted)
            state.step = step
            for number, action in enumerate(actions):
                if isinstance(action, Finish):
                    await wiring.finish(action.lo, action.hi)
                    continue
                state.peer = action.peer
                if isinstance(action, Send):
                    state.doing = "sending to"
                    await wiring.send(action.peer, action, step)
                    continue
                state.doing = "receiving from"
                arrived = posted.pop((step, number), None)
                if arrived is None:
                    arrived = wiring.post(action.peer, action, step, wiring.memory.place(action.lo, action.hi))
                payload = arrived.result() if arrived.done() else await arrived
                if type(action) is Reduce:
                    await wiring.combine(action.lo, action.hi, payload, received_left=action.peer < rank)

    def _post(
        self,
        rounds: tuple[Round, ...],
        step: int,
        kind: type[Recv] | type[Reduce],
        posted: dict[tuple[int, int], asyncio.Future[Payload]],
    ) -> None:
        """Say where a round's messages of one kind go, except into a range that the round has still to send."""
        if step == len(rounds):
            return
        wiring = self._wiring
        for number, action in enumerate(rounds[step]):
            if type(action) is Reduce is kind:
                room = wiring.scratch((step % 2, number), action.hi - action.lo)
                posted[step, number] = wiring.post(action.peer, action, step, room)
            elif type(action) is Recv is kind and not _sent_too(action, rounds[step]):
                place = wiring.memory.place(action.lo, action.hi)
                posted[step, number] = wiring.post(action.peer, action, step, place)


def _sent_too(recv: Recv, actions: Round) -> bool:
    return any(type(action) is Send and action.lo < recv.hi and recv.lo < action.hi for action in actions)
