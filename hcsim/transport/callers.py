"""Taking in callers that nobody knows yet, a bounded number at a time.

When there are too many, the oldest of the source that has the most of them is hung up on: a source that holds many
places does not keep a caller from elsewhere out. A source is the identity that a channel has proved, or else its
address without the port.
"""

from __future__ import annotations

from collections.abc import Callable

from hcsim.runtime.channel import Channel, Listener
from hcsim.runtime.host import Host
from hcsim.runtime.waiting import News

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
