"""Attempts that run beside each other: one channel is taken, and nothing else is left open."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hcsim.real.host import DialTarget, HappyEyeballs

ONE, OTHER = DialTarget(2, ("127.0.0.1", 1)), DialTarget(2, ("127.0.0.1", 2))


class Line:
    """What stands for a channel here."""

    def __init__(self) -> None:
        self.closed = False

    async def close(self) -> None:
        self.closed = True


def test_of_two_channels_that_come_at_once_one_is_taken_and_the_other_closed() -> None:
    lines = {ONE: Line(), OTHER: Line()}

    async def main() -> Any:
        both_called: asyncio.Event = asyncio.Event()

        async def attempt(place: DialTarget) -> Any:
            if place == OTHER:
                both_called.set()
            await both_called.wait()
            return lines[place]

        async with HappyEyeballs(attempt) as race:
            return await race.round([ONE, OTHER], 0.01)

    taken = asyncio.run(main())
    assert [line.closed for line in lines.values()] == [line is not taken for line in lines.values()]


def test_who_is_cancelled_while_the_other_attempts_end_leaves_no_channel_open() -> None:
    line = Line()

    async def main() -> None:
        ending: asyncio.Event = asyncio.Event()

        async def attempt(place: DialTarget) -> Any:
            if place == OTHER:
                return line
            try:
                await asyncio.Event().wait()
            finally:
                ending.set()
                await asyncio.Event().wait()

        async def connect() -> None:
            async with HappyEyeballs(attempt) as race:
                await race.round([ONE, OTHER], 0.01)

        connecting = asyncio.create_task(connect())
        await ending.wait()
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting

    asyncio.run(main())
    assert line.closed
