"""Several places where one machine may be reached, tried beside each other: the first channel counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeAlias

from hcsim.real.failures import is_distrust
from hcsim.runtime.channel import Channel

Place: TypeAlias = tuple[int, Any]
"""A socket's family and address."""


class Race:
    """Rounds of attempts. As an async context manager it ends those that have not won."""

    def __init__(self, attempt: Callable[[Place], Coroutine[Any, Any, Channel]]) -> None:
        self._attempt = attempt
        self._running: dict[Place, asyncio.Task[Channel]] = {}
        self._won: list[asyncio.Task[Channel]] = []
        self._failures: dict[Place, OSError | None] = {}
        """Of the last round's places: why the last attempt there has failed, if one has."""

    @property
    def distrust(self) -> OSError | None:
        """What is wrong with a certificate at one of the places. A person must know that, whatever the others say."""
        return next((error for error in self._failures.values() if error is not None and is_distrust(error)), None)

    @property
    def hopeless(self) -> bool:
        """Whether none of the places is to be trusted, or trusts us."""
        return all(error is not None and is_distrust(error) for error in self._failures.values())

    async def round(self, places: list[Place], next_place_s: float) -> Channel:
        """Try all those where no attempt is under way, the next when one has failed or after that time.

        Raises `OSError` when it has no channel then; attempts that are still under way go on."""
        self._failures = {place: self._failures.get(place) for place in places}
        for place in self._failures:
            if len(self._failures) == 1 and not self._running:
                return await self._alone(place)
            if place not in self._running:
                self._running[place] = asyncio.create_task(self._attempt(place), name=f"connect to {place[1][0]}")
                if (channel := await self.wait(next_place_s)) is not None:
                    return channel
        raise self.distrust or next(filter(None, reversed(self._failures.values())), TimeoutError())

    async def wait(self, seconds: float) -> Channel | None:
        """The first channel that comes in that time; None sooner where an attempt fails."""
        if not self._running:
            await asyncio.sleep(seconds)
            return None
        await asyncio.wait(self._running.values(), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for place, task in tuple(self._running.items()):
            if task.done():
                del self._running[place]
                try:
                    channel = task.result()
                except OSError as error:
                    self._failures[place] = error
                else:
                    self._won.append(task)
                    return channel
        return None

    async def _alone(self, place: Place) -> Channel:
        try:
            return await self._attempt(place)
        except OSError as error:
            self._failures[place] = error
            raise

    async def __aenter__(self) -> Race:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        except asyncio.CancelledError:
            tasks += self._won  # nobody gets that channel any more
            raise
        finally:
            for task in tasks:
                if not task.cancelled() and task.exception() is None:
                    await task.result().close()
