"""Connections that we have closed stay open until what was written has arrived.

Where a socket is closed for good, the system answers whatever the peer still says with a reset, and a reset destroys
what has not been delivered. So it is held, and what comes is thrown away, until the peer's system has everything or
the peer ends it too. Waiting for the latter alone would keep a peer that only sends from ever finding out that we have
gone, and would let a stranger make us hold sockets.

A program that ends waits for this a little, as long as something moves: then nobody else would hold them.
"""

from __future__ import annotations

import asyncio
import atexit
import time
from contextlib import suppress

from hcsim.real.stream import Stream

MOST_S = 60.0
"""How long what was sent may take to arrive."""
MOST_AT_END_S = 10.0
"""The same where the program ends. The system alone then goes on."""
STUCK_S = 2.0
"""How long nothing of it may move then."""
_FIRST_LOOK_S, _SLOWEST_LOOK_S = 0.001, 0.05
MOST_HELD = 64


class _Held:
    """A stream that we have finished with."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.loop = asyncio.get_running_loop()
        self._left_bytes = stream.undelivered_bytes()
        self._moved_s = time.monotonic()
        self._until_s = self._moved_s + MOST_S
        self._patience_s = MOST_S
        self._look_s = _FIRST_LOOK_S

    def hurry(self) -> None:
        """The program ends."""
        self._until_s = min(self._until_s, time.monotonic() + MOST_AT_END_S)
        self._patience_s = STUCK_S

    def is_over(self) -> bool:
        """Whether there is nothing more to wait for."""
        now_s, before_bytes = time.monotonic(), self._left_bytes
        self._left_bytes = self.stream.undelivered_bytes()
        if self._left_bytes < before_bytes:
            self._moved_s = now_s
        return not self._left_bytes or now_s > min(self._until_s, self._moved_s + self._patience_s)

    def next_look_s(self) -> float:
        """When to look again, from now: less and less often."""
        self._look_s = min(2 * self._look_s, _SLOWEST_LOOK_S)
        return self._look_s


_HELD: dict[_Held, None] = {}
"""The oldest first."""


def still_held() -> int:
    """How many connections wait until what was written has arrived."""
    return len(_HELD)


def close_when_delivered(stream: Stream) -> None:
    """Close a stream that has been finished: now if nothing is under way, or else in the background."""
    for held in tuple(_HELD):
        if held.loop.is_closed() and held.is_over():  # nobody else looks after it
            _let_go(held)
    if not stream.undelivered_bytes():
        stream.close()
        return
    if len(_HELD) >= MOST_HELD:
        _let_go(next(iter(_HELD)))
    held = _Held(stream)
    _HELD[held] = None
    _look_after(held)


def _look_after(held: _Held) -> None:
    if held in _HELD:
        if held.is_over():
            _let_go(held)
        else:
            held.loop.call_later(held.next_look_s(), _look_after, held)


def _let_go(held: _Held) -> None:
    _HELD.pop(held, None)
    held.stream.close()


@atexit.register
def hold_out() -> None:
    """No loop runs any more. Whoever interrupts us does not want to wait."""
    for held in tuple(_HELD):
        held.hurry()
    with suppress(KeyboardInterrupt):
        for held in tuple(_HELD):
            while not held.is_over():
                time.sleep(held.next_look_s())
    for held in tuple(_HELD):
        _let_go(held)
