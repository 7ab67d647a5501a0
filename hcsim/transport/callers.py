"""Taking in callers that nobody knows yet, a bounded number at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hcsim.runtime.channel import Channel, Listener

MAX_STRANGERS = 64


class Callers:
    """Accepts channels while there is room for strangers; further ones wait in the listener's queue."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(MAX_STRANGERS)

    async def accept(self, listener: Listener, greet: Callable[[Channel, int], object]) -> None:
        """Have each caller greeted, with its number. Whoever greets says `known` when it is no stranger any more."""
        number = 0
        while True:
            await self._room.acquire()
            channel = await listener.accept()
            number += 1
            greet(channel, number)

    def known(self) -> None:
        """A caller has been let in or turned away: there is room for the next."""
        self._room.release()
