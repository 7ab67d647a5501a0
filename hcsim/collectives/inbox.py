"""Messages from anybody: who of those that wait gets which message.

Whoever receives from anybody takes, of all messages with its tag, one that is next from its sender. Messages are given
out in the order in which they were asked for, so a receipt from a given source that was asked for after one from
anybody has to wait until that one has its message: only then is it known which message from its source is next.
The first of those that wait is therefore always one from anybody, and whatever comes is its.

A link tells when the message that we look out for shows; until it has a place, it stays where it is. Where several
are there already, those that were taken in go before those that are still with the system, and then the lowest rank's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from hcsim.errors import ChannelBroken, HcsimError
from hcsim.runtime.waiting import disappoint
from hcsim.transport.link import Link, Tag


class Waiting:
    """A receipt that does not know its message yet: from a rank, or from anybody (None)."""

    __slots__ = ("matched", "source")

    def __init__(self, source: int | None) -> None:
        self.source = source
        self.matched: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
        """Who sends the message, and its number among those from there."""


class Peers:
    """The other ranks of a group, as far as they can send us something."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.links: dict[int, Link] = {}
        self.lost: dict[int, HcsimError] = {}
        """Those from which nothing more comes, and why."""

    def why_silent(self) -> str:
        """Why nothing comes from those who are lost, for people."""
        return "; ".join(str(error) for _, error in sorted(self.lost.items()))


class Inbox:
    """Those that wait for messages with one tag, in the order in which they asked."""

    def __init__(self, peers: Peers, next_tag: Callable[[int], Tag], take_number: Callable[[int], int]) -> None:
        self._peers = peers
        self._next_tag = next_tag
        self._take_number = take_number
        self._waiting: deque[Waiting] = deque()
        self._sought: dict[int, Tag] = {}
        """What we look out for, by sender."""

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits."""
        return not self._waiting

    def wait(self, source: int | None) -> Waiting:
        """Ask for a message."""
        waiting = Waiting(source)
        self._waiting.append(waiting)
        self.look()
        return waiting

    def look(self) -> None:
        """Hand out what is there, and look out for what is not."""
        while self._waiting:
            source = self._waiting[0].source
            if source is None:
                source = self._there()
            if source is None:
                break
            self._hand_out(source)
        if not self._waiting:
            self._look_away()
        elif len(self._peers.lost) == len(self._peers.ranks):
            self.fail(ChannelBroken(f"nobody is left who could send ({self._peers.why_silent()})"))

    def fail(self, error: HcsimError) -> None:
        """Nobody gets anything any more."""
        while self._waiting:
            disappoint(self._waiting.popleft().matched, error)
        self._look_away()

    def _there(self) -> int | None:
        """The lowest rank whose next message was taken in. If there is none, we look out for all."""
        for rank in self._peers.ranks:
            link, tag = self._peers.links.get(rank), self._next_tag(rank)
            if link is None or self._sought.get(rank) == tag:
                continue
            if rank in self._sought:
                link.look_away(self._sought.pop(rank))
            if link.look_out(tag, partial(self._shown, rank)):
                return rank
            self._sought[rank] = tag
        return None

    def _shown(self, rank: int) -> None:
        del self._sought[rank]
        self._hand_out(rank)
        self.look()

    def _hand_out(self, source: int) -> None:
        """The next message from there goes to who is first."""
        matched = self._waiting.popleft().matched
        number = self._take_number(source)
        if not matched.done():
            matched.set_result((source, number))

    def _look_away(self) -> None:
        for rank, tag in self._sought.items():
            self._peers.links[rank].look_away(tag)
        self._sought.clear()
