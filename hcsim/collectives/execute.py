"""The executor: runs any plan over links.

Short messages go in order: the plan, action by action, in one task. Messages that are cut into
segments go in lanes, side by side; see `lanes.py`. Either way what comes next is posted ahead, so
that its bytes find their place without a detour.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from hcsim.collectives.lanes import Lanes
from hcsim.collectives.plan import Action, Finish, Recv, Reduce, Round, Send
from hcsim.collectives.schedule import Lane, Schedule
from hcsim.collectives.wiring import Progress, Ticket, Wiring
from hcsim.errors import CollectiveError, HcsimError
from hcsim.runtime.channel import Payload
from hcsim.transport.link import Link


class Execution:
    """One operation on its way."""

    def __init__(
        self,
        schedule: Schedule,
        wiring: Wiring,
        link_to: Callable[[int], Awaitable[Link]],
        on_cancel: Callable[[], None],
    ) -> None:
        self._schedule = schedule
        self._wiring = wiring
        self._link_to = link_to
        self._on_cancel = on_cancel
        self._progress: list[Progress] = []

    @property
    def ticket(self) -> Ticket:
        """Which operation it is."""
        return self._wiring.ticket

    @property
    def sent_bytes(self) -> int:
        """What it sends from begin to end."""
        return self._schedule.sent * self._wiring.memory.element_bytes

    async def run(self) -> None:
        """Run the plan to its end. A failure anywhere ends all of it, as a `CollectiveError`."""
        with self._guarded() as state:
            for peer in self._schedule.peers:
                state.doing, state.peer = "opening a link to", peer
                self._wiring.links[peer] = await self._link_to(peer)
        if self._schedule.lanes:
            await self._side_by_side()
        else:
            with self._guarded() as state:
                await self._in_order(state, self._schedule.rounds)
        with self._guarded():
            self._wiring.done()

    async def _side_by_side(self) -> None:
        lanes = Lanes(self._wiring, self._schedule.cells)
        try:
            async with asyncio.TaskGroup() as group:
                for lane in self._schedule.lanes:
                    name = f"{self._wiring.ticket}: {lane.kind.__name__} {lane.peer}"
                    group.create_task(self._in_lane(lanes, lane), name=name)
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _in_lane(self, lanes: Lanes, lane: Lane) -> None:
        with self._guarded() as state:
            await lanes.run(state, lane)

    def blame(self) -> tuple[int | None, str]:
        """The rank that we wait for, and what for: a receiver knows better than a sender who is late."""
        for doing in ("receiving from", "opening a link to", "sending to"):
            for state in self._progress:
                if state.doing == doing:
                    return state.peer, str(state)
        return None, "waiting"

    @contextmanager
    def _guarded(self) -> Iterator[Progress]:
        """Name the operation, and what it was doing, in an error that ends it."""
        state = Progress()
        self._progress.append(state)
        try:
            yield state
            state.doing = ""
        except asyncio.CancelledError:
            self._on_cancel()
            raise
        except CollectiveError:
            raise
        except HcsimError as error:
            text = f"{self._wiring.ticket} failed while {state}: {error}"
            raise CollectiveError(text, peer=state.peer, phase=str(state)) from error

    async def _in_order(self, state: Progress, rounds: tuple[Round, ...]) -> None:
        wiring = self._wiring
        rank = wiring.ticket.rank
        ahead = self._post(rounds, 0)
        for step, actions in enumerate(rounds):
            state.step = step
            sending = True
            for action, arrived in zip(actions, ahead, strict=True):
                if isinstance(action, Send):
                    state.doing, state.peer = "sending to", action.peer
                    await wiring.send(action.peer, action, step)
                    continue
                if sending:  # all sends of a round come first
                    sending = False
                    ahead = self._post(rounds, step + 1)
                if isinstance(action, Finish):
                    await wiring.finish(action.lo, action.hi)
                    continue
                state.doing, state.peer = "receiving from", action.peer
                if arrived is None:
                    arrived = wiring.post(action.peer, action, step, wiring.memory.place(action.lo, action.hi))
                payload = arrived.result() if arrived.done() else await arrived
                if isinstance(action, Reduce):
                    await wiring.combine(action.lo, action.hi, payload, received_left=action.peer < rank)
            if sending:
                ahead = self._post(rounds, step + 1)

    def _post(self, rounds: tuple[Round, ...], step: int) -> list[asyncio.Future[Payload] | None]:
        """Say where a round's messages go, once the round before it has sent all it sends.

        A reduction is received beside the buffer, where it can wait for its turn. Anything else has to
        wait for whatever still reads or writes its range.
        """
        if step == len(rounds):
            return []
        wiring = self._wiring
        posted: list[asyncio.Future[Payload] | None] = []
        for number, action in enumerate(rounds[step]):
            arrived = None
            if isinstance(action, Reduce):
                room = wiring.scratch((step % 2, number), action.hi - action.lo)
                arrived = wiring.post(action.peer, action, step, room)
            elif isinstance(action, Recv) and not (
                _overlaps(action, rounds[step], Send)
                or (step and _overlaps(action, rounds[step - 1], Recv, Reduce, Finish))
            ):
                arrived = wiring.post(action.peer, action, step, wiring.memory.place(action.lo, action.hi))
            posted.append(arrived)
        return posted


def _overlaps(recv: Recv, actions: Round, *kinds: type[Action]) -> bool:
    lo, hi = recv.lo, recv.hi
    for action in actions:
        if type(action) not in kinds:
            continue
        if action.lo < hi and lo < action.hi:
            return True
    return False
