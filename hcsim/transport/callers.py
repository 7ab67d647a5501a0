"""Taking in callers that nobody knows yet, a bounded number at a time.

When there are too many, the oldest of the source that has the most of them is hung up on: a source that holds many
places does not keep a caller from elsewhere out. A source is the identity that a channel has proved, or else its
address without the port.

`Throttle` makes guessing slow: after a few failures a source has to wait, twice as long after each further one.

`Refusals` keeps who was turned away: one of them may be whom somebody waits for.

`Once` says a thing once: what keeps being tried keeps failing for the same reason, and one line about it is enough.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from hcsim.runtime.channel import Channel, Listener
from hcsim.runtime.clock import News
from hcsim.runtime.host import Host

FREE_FAILURES = 5
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 60.0
FORGIVEN_AFTER_S = 300.0
MAX_SOURCES = 4096
"""A stranger with many addresses must not fill our memory: beyond this the source that failed longest ago goes."""


class Throttle:
    """Counts failures by source. It has no clock: `now_s` comes with every call."""

    def __init__(self) -> None:
        self._failures: dict[str, tuple[int, float]] = {}
        """How many, and when the last one was; the order is that of the last failures."""

    def wait_s(self, source: str, now_s: float) -> float:
        """How long the source still has to wait; nothing, for most."""
        count, last_s = self._failures.get(source, (0, now_s))
        if count <= FREE_FAILURES or now_s - last_s > FORGIVEN_AFTER_S:
            return 0.0
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(count - FREE_FAILURES - 1, 30))
        return max(0.0, last_s + wait_s - now_s)

    def failed(self, source: str, now_s: float) -> None:
        """An attempt from there has failed."""
        count, last_s = self._failures.pop(source, (0, now_s))
        if now_s - last_s > FORGIVEN_AFTER_S:
            count = 0
        self._failures[source] = (count + 1, now_s)
        if len(self._failures) > MAX_SOURCES:
            del self._failures[next(iter(self._failures))]

    def succeeded(self, source: str) -> None:
        """Somebody from there is a member after all."""
        self._failures.pop(source, None)


LONGEST_LINE = 1000
"""Of what a person is told of others."""
_LONGEST = 300
"""Of what a person is told of a stranger."""


def plain(text: str) -> str:
    """What a peer says, for people: a terminal would obey some of what cannot be printed."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)


def one_line(text: str, longest: int = LONGEST_LINE) -> str:
    """The same in one line of bounded length: part of it may be a member's or a stranger's own words."""
    text = plain(text[: longest + 1]).replace("\n", " ")
    return text if len(text) <= longest else text[:longest] + "…"


class Refusals:
    """Keeps the last one, and passes each on."""

    def __init__(self, tell: Callable[[str], None] = lambda what: None) -> None:
        self._tell = tell
        self._last = ""

    def __call__(self, why: str) -> None:
        """A caller was turned away."""
        self._last = f"a caller was refused: {one_line(why, _LONGEST)}"
        self._tell(self._last)

    @property
    def hint(self) -> str:
        """What an error about somebody who did not call ends with."""
        return f"; {self._last}" if self._last else ""

    def forget(self) -> None:
        """What comes next has nothing to do with those so far."""
        self._last = ""


MAX_STRANGERS = 64


class Callers:
    """Accepts channels while there is room for strangers; where nobody has more than one place, further ones wait."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._strangers: dict[Channel, str] = {}
        """Channels that were accepted and are not known yet, the oldest first, with their sources."""
        self._news = News()

    async def accept(self, listener: Listener, greet: Callable[[Channel, int], object]) -> None:
        """Have each caller greeted, with its number. Whoever greets says `known` when it is no stranger any more."""
        number = 0
        while True:
            channel = await listener.accept()
            self._strangers[channel] = source_of(channel)
            if len(self._strangers) > MAX_STRANGERS:
                self._hang_up_on_one()
            number += 1
            greet(channel, number)
            while len(self._strangers) > MAX_STRANGERS:
                await self._news.next()

    def known(self, channel: Channel) -> None:
        """A caller has been let in or turned away: there is room for the next."""
        if self._strangers.pop(channel, None) is not None:
            self._news.tell()

    async def close(self) -> None:
        """Hang up on those who are still strangers: the task that was to greet one may never have begun."""
        for channel in tuple(self._strangers):
            self.known(channel)
            await channel.close()

    def _hang_up_on_one(self) -> None:
        sources: dict[str, list[Channel]] = {}
        for channel, source in self._strangers.items():
            sources.setdefault(source, []).append(channel)
        most = max(sources.values(), key=len)
        if len(most) > 1:
            self.known(most[0])
            self._host.spawn(most[0].close(), name="hang up on a stranger")


def source_of(channel: Channel) -> str:
    """What is known of a caller before it has said anything."""
    return channel.identity or channel.peer.rpartition(":")[0] or channel.peer


_PORT = re.compile(r":\d+\b")
"""A caller has another port each time."""
_MOST = 256
"""Then it begins to forget: a stranger cannot fill our memory."""


class Once:
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
