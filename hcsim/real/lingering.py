"""Connections that we have closed stay open until what was written has arrived.

Where a socket is closed for good, the system answers whatever the peer still says with a reset, and a reset destroys
what has not been delivered. So it is held, and what comes is thrown away, until the peer's system has everything or
the peer ends it too. Waiting for the latter alone would keep a peer that only sends from ever finding out that we have
gone, and would let a stranger make us hold sockets.

A program that ends waits for this, as long as something moves: then nobody else would hold them.
"""

from __future__ import annotations

import asyncio
import atexit
import time

from hcsim.real.stream import Stream

_MOST_S = 60.0
"""How long what was sent may take to arrive."""
_STUCK_S = 2.0
"""How long nothing may move of it where the program ends. The system alone then goes on."""
_FIRST_LOOK_S, _SLOWEST_LOOK_S = 0.001, 0.05
_MOST_HELD = 64


class _Held:
    """A stream that we have finished with."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.patience_s = _MOST_S
        self._left_bytes = stream.undelivered_bytes()
        self._moved_s = time.monotonic()
        self._until_s = self._moved_s + _MOST_S
        self._look_s = _FIRST_LOOK_S

    def next_look_s(self) -> float | None:
        """When to look again, from now; None when there is nothing more to wait for, and it has been closed."""
        now_s, before_bytes = time.monotonic(), self._left_bytes
        self._left_bytes = self.stream.undelivered_bytes()
        if self._left_bytes < before_bytes:
            self._moved_s = now_s
        if not self._left_bytes or now_s > min(self._until_s, self._moved_s + self.patience_s):
            self.stream.close()
            return None
        self._look_s = min(2 * self._look_s, _SLOWEST_LOOK_S)
        return self._look_s


_HELD: dict[asyncio.Task[None], _Held] = {}
"""Also because the loop itself does not keep tasks alive."""


def close_when_delivered(stream: Stream) -> None:
    """Close a stream that has been finished: now if nothing is under way, or else in the background."""
    if not stream.undelivered_bytes():
        stream.close()
        return
    if len(_HELD) >= _MOST_HELD:
        next(iter(_HELD.values())).stream.close()  # its task will see it
    held = _Held(stream)
    task = asyncio.create_task(_hold(held), name="let what was sent arrive")
    _HELD[task] = held
    task.add_done_callback(_HELD.pop)


async def _hold(held: _Held) -> None:
    while (look_s := held.next_look_s()) is not None:
        try:
            await asyncio.sleep(look_s)
        except asyncio.CancelledError:  # nobody does that but who ends the loop, and waits for us
            held.patience_s = _STUCK_S


@atexit.register
def _hold_out() -> None:
    """For a loop that was left as it stands: its tasks will not move any more, which nobody needs to be told."""
    for task, held in tuple(_HELD.items()):
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        held.patience_s = _STUCK_S
        while (look_s := held.next_look_s()) is not None:
            time.sleep(look_s)
