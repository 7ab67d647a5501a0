"""Taking in callers that nobody knows yet, a bounded number at a time.

When there are too many, the oldest of the source that has the most of them is hung up on: a source that holds many
places does not keep a caller from elsewhere out. A source is the identity that a channel has proved, or else its
address without the port.

`FailureBackoff` makes guessing slow: after a few failures a source has to wait, twice as long after each further one.

`RefusalLog` keeps who was turned away: one of them may be whom somebody waits for.

`LogDeduplicator` says a thing once: what keeps being tried keeps failing for the same reason, and one line about it is
enough.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from hcsim.runtime.channel import Channel, Listener
from hcsim.runtime.clock import BroadcastEvent
from hcsim.runtime.host import Host

FREE_FAILURES = 5
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 60.0
FORGIVEN_AFTER_S = 300.0
MAX_SOURCES = 4096
"""Bounds the memory against a stranger with many addresses; beyond it the source with the oldest failure is
dropped."""


class FailureBackoff:
    """Counts failures by source. It has no clock; the caller passes `now_s`."""

    def __init__(self) -> None:
        self._failures: dict[str, tuple[int, float]] = {}
        """The count and the time of the last failure by source, in the order of the last failures."""

    def wait_s(self, source: str, now_s: float) -> float:
        """Return how long the source still has to wait, usually 0."""
        count, last_s = self._failures.get(source, (0, now_s))
        if count <= FREE_FAILURES or now_s - last_s > FORGIVEN_AFTER_S:
            return 0.0
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(count - FREE_FAILURES - 1, 30))
        return max(0.0, last_s + wait_s - now_s)

    def failed(self, source: str, now_s: float) -> None:
        count, last_s = self._failures.pop(source, (0, now_s))
        if now_s - last_s > FORGIVEN_AFTER_S:
            count = 0
        self._failures[source] = (count + 1, now_s)
        if len(self._failures) > MAX_SOURCES:
            del self._failures[next(iter(self._failures))]

    def succeeded(self, source: str) -> None:
        """Forget the failures of the source, which has proved to be a member."""
        self._failures.pop(source, None)


LONGEST_LINE = 1000
"""The length limit of a line of peers' text that is shown to the user."""
_LONGEST = 300
"""The length limit of a line of an unauthenticated caller's text."""


def plain(text: str) -> str:
    """Replace the unprintable characters of a peer's text, since a terminal would interpret some of them."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)


def one_line(text: str, longest: int = LONGEST_LINE) -> str:
    """Return the text printable, in one line of bounded length; parts of it may come from a peer."""
    text = plain(text[: longest + 1]).replace("\n", " ")
    return text if len(text) <= longest else text[:longest] + "…"


class RefusalLog:
    """Keeps the last refusal of a caller, and passes each on."""

    def __init__(self, tell: Callable[[str], None] = lambda what: None) -> None:
        self._tell = tell
        self._last = ""

    def __call__(self, why: str) -> None:
        self._last = f"a caller was refused: {one_line(why, _LONGEST)}"
        self._tell(self._last)

    @property
    def hint(self) -> str:
        """The last refusal, as the end of an error message about a peer that did not connect."""
        return f"; {self._last}" if self._last else ""

    def forget(self) -> None:
        """Forget the last refusal, which is unrelated to later errors."""
        self._last = ""


MAX_UNADMITTED = 64


class AdmissionQueue:
    """Accepts channels while there is room for unauthenticated callers; further ones wait if no source has more than
    one."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._unadmitted: dict[Channel, str] = {}
        """The sources of accepted channels that are still unauthenticated, oldest first."""
        self._news = BroadcastEvent()

    async def accept(self, listener: Listener, greet: Callable[[Channel, int], object]) -> None:
        """Accept channels and call `greet` with each and its number. `known` has to be called when the caller is
        authenticated or rejected."""
        number = 0
        while True:
            channel = await listener.accept()
            self._unadmitted[channel] = source_of(channel)
            if len(self._unadmitted) > MAX_UNADMITTED:
                self._hang_up_on_one()
            number += 1
            greet(channel, number)
            while len(self._unadmitted) > MAX_UNADMITTED:
                await self._news.next()

    def known(self, channel: Channel) -> None:
        """Make room for the next caller: this one has been accepted or rejected."""
        if self._unadmitted.pop(channel, None) is not None:
            self._news.tell()

    async def close(self) -> None:
        """Close the channels of unauthenticated callers, whose tasks may never have started."""
        for channel in tuple(self._unadmitted):
            self.known(channel)
            await channel.close()

    def _hang_up_on_one(self) -> None:
        sources: dict[str, list[Channel]] = {}
        for channel, source in self._unadmitted.items():
            sources.setdefault(source, []).append(channel)
        most = max(sources.values(), key=len)
        if len(most) > 1:
            self.known(most[0])
            self._host.spawn(most[0].close(), name="hang up on a stranger")


def source_of(channel: Channel) -> str:
    """Return the source of a caller before its first message."""
    return channel.identity or channel.peer.rpartition(":")[0] or channel.peer


_PORT = re.compile(r":\d+\b")
"""A caller has another port each time."""
_MOST = 256
"""Then it begins to forget: a stranger cannot fill our memory."""


class LogDeduplicator:
    """Passes on what was not said before."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._said: dict[str, None] = {}

    def __call__(self, what: str) -> None:
        """Say it, if it is new."""
        key = _PORT.sub("", what)
        if key not in self._said:
            self._said[key] = None
            if len(self._said) > _MOST:
                del self._said[next(iter(self._said))]
            self._tell(what)
