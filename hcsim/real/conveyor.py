"""Belts from one channel to another within a machine: frames that go on as they come, without a stop in Python.

The frames' headers are known beforehand; belt.h compares them with what comes, and moves what is its. Whatever else
comes is received in the usual way, and so is what is left of a belt that got stuck.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

from hcsim.runtime.channel import Leg, Outlet
from hcsim.runtime.frame import Header, encode_header

if TYPE_CHECKING:
    from hcsim.real import rings


class How(IntEnum):
    """How a belt stands once it has run; the numbers are belt.h's."""

    WAITS = 0
    """For more to come, and somebody will ring."""
    OTHERS = 1
    """What comes is none of its."""
    TURN_OVER = 2
    """It can go on, but others have waited for long enough."""
    STUCK = 3
    COMPLETE = 4


class _Load:
    """A belt, and who waits for it."""

    __slots__ = ("_belt", "_moved", "_to", "over")

    def __init__(self, belt: rings.Belt, to: Conveyor, moved: Callable[[int], None]) -> None:
        self._belt = belt
        self._to = to
        self._moved = moved
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def run(self, begun: bytes) -> tuple[int, bool]:
        """How it stands then, and whether it has taken anything that came."""
        belt = self._belt
        if not self._to.is_idle():
            return How.STUCK, False
        before, how = belt.done, belt.run(begun)
        if belt.done > before:
            self._moved(belt.done)
        return how, bool(belt.took)


class Conveyor:
    """The outlet of a channel whose stream goes through rings."""

    def __init__(self, ours: rings.Rings, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._rings = ours
        self._loop = asyncio.get_running_loop()
        self._loads: list[_Load] = []
        self.is_idle: Callable[[], bool] = lambda: False
        """Whether a frame can be sent over the channel here and now."""
        self.go_on: Callable[[], None] = lambda: None
        """Lets the channel take what there is."""

    def convey(self, legs: Sequence[Leg], to: Outlet, moved: Callable[[int], None]) -> asyncio.Future[None]:
        """See `Outlet.convey`."""
        assert isinstance(to, Conveyor)
        belt = self._rings.belt(to._rings, [(_head(leg.comes), _head(leg.goes), *leg[2:]) for leg in legs])
        load = _Load(belt, to, moved)
        self._loads.append(load)
        load.over.add_done_callback(lambda _: self._loads.remove(load))
        # Not at once: whoever asks has to know what it waits for when others' frames land.
        self._loop.call_soon(self.go_on)
        return load.over

    @property
    def is_busy(self) -> bool:
        """Whether there are belts."""
        return bool(self._loads)

    def run(self, begun: bytes) -> tuple[bool, bool]:
        """Let the belts run. Of the header that comes first, `begun` has been read.

        Whether its frame has been taken, and whether what comes now is none of theirs."""
        took, others = False, True
        for load in [load for load in self._loads if not load.over.done()]:
            how, taken = load.run(b"" if took else begun)
            others = others and how == How.OTHERS
            took = took or taken
            if how >= How.STUCK:
                load.over.set_result(None)
            elif how == How.TURN_OVER:
                self._loop.call_soon(self.go_on)
        if took and others:  # what comes now may be for a belt that has been asked before
            self._loop.call_soon(self.go_on)
        return took, others and not took


def _head(header: Header | None) -> bytes:
    return b"" if header is None else encode_header(header)
