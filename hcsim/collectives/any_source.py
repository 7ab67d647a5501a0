"""Receives from any source: which of those that are pending gets which message.

A receive from any source takes, of all messages with its tag, one that is next from its sender. Messages are matched
in the order in which the receives were posted, so a receive from a given source that was posted after one from any
source has to wait until that one is matched: only then is it known which message from its source is next.
The first of those that are pending is therefore always one from any source, and whatever comes is its.

A link reports when the message that we look out for shows; until it has a place, it stays where it is. Where several
are there already, those that were taken in go before those that are still with the system, and then the lowest rank's.

A receive from any source needs links to all. Lower ranks are called; higher ones call when they have something to
send, and until then there is nothing to wait for but the deadline. A rank that has left, or cannot be reached, is
no failure as long as another could still send.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from hcsim.errors import ChannelBroken, HcsimError
from hcsim.runtime.clock import disappoint
from hcsim.transport.link import Link, Tag
from hcsim.transport.mesh import Mesh


class PendingReceive:
    """A receive that does not know its message yet: from a rank, or from any source (None)."""

    __slots__ = ("_senders", "matched", "source")

    def __init__(self, source: int | None, senders: _Senders) -> None:
        self.source = source
        self._senders = senders
        self.matched: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
        """The sender of the message, and its number among those from there."""

    def why_waiting(self) -> str:
        """For people."""
        if self.source is not None:
            return f"waiting for rank {self._senders.members[self.source]}, after one who receives from any rank"
        why = self._senders.why_silent()
        return f"waiting for a message from any rank{f' ({why})' if why else ''}"


class _Senders:
    """The other ranks of a group, as far as they can send us something."""

    def __init__(self, members: Sequence[int], us: int) -> None:
        self.members = members
        self.ranks = tuple(rank for rank, member in enumerate(members) if member != us)
        self.links: dict[int, Link] = {}
        self.lost: dict[int, HcsimError] = {}
        """Those from which nothing more comes, and why."""

    def why_silent(self) -> str:
        """Why nothing comes from the lost ranks, for people."""
        return "; ".join(str(error) for _, error in sorted(self.lost.items()))


class _TagQueue:
    """The pending receives with one tag, in the order in which they were posted."""

    def __init__(self, senders: _Senders, next_tag: Callable[[int], Tag], take_number: Callable[[int], int]) -> None:
        self._senders = senders
        self._next_tag = next_tag
        self._take_number = take_number
        self._pending: deque[PendingReceive] = deque()
        self._sought: dict[int, Tag] = {}
        """What we look out for, by sender."""

    @property
    def is_idle(self) -> bool:
        return not self._pending

    def post(self, source: int | None) -> PendingReceive:
        pending = PendingReceive(source, self._senders)
        self._pending.append(pending)
        self.match()
        return pending

    def match(self) -> None:
        """Hand out what is there, and look out for what is not."""
        while self._pending:
            source = self._pending[0].source
            if source is None:
                source = self._arrived()
            if source is None:
                break
            self._hand_out(source)
        if not self._pending:
            self._look_away()
        elif len(self._senders.lost) == len(self._senders.ranks):
            self.fail(ChannelBroken(f"nobody is left who could send ({self._senders.why_silent()})"))

    def fail(self, error: HcsimError) -> None:
        while self._pending:
            disappoint(self._pending.popleft().matched, error)
        self._look_away()

    def _arrived(self) -> int | None:
        """The lowest rank whose next message was taken in. If there is none, we look out for all."""
        for rank in self._senders.ranks:
            link, tag = self._senders.links.get(rank), self._next_tag(rank)
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
        self.match()

    def _hand_out(self, source: int) -> None:
        """The next message from there goes to the first receive."""
        matched = self._pending.popleft().matched
        number = self._take_number(source)
        if not matched.done():
            matched.set_result((source, number))

    def _look_away(self) -> None:
        for rank, tag in self._sought.items():
            self._senders.links[rank].look_away(tag)
        self._sought.clear()


class AnySource:
    """One group's receives from any source, by tag, and the links that feed them: opened with the first of them."""

    def __init__(
        self,
        mesh: Mesh,
        members: Sequence[int],
        next_tag: Callable[[int, int], Tag],
        take_number: Callable[[int, int], int],
    ) -> None:
        self._mesh = mesh
        self._next_tag = next_tag
        self._take_number = take_number
        self._queues: dict[int, _TagQueue] = {}
        self._senders = senders = _Senders(members, mesh.us.rank)
        for rank in senders.ranks:
            member = members[rank]
            link = mesh.links.get(member)
            if link is not None:
                senders.links[rank] = link
                if link.error is not None:
                    senders.lost[rank] = link.error
            elif member < mesh.us.rank:
                mesh.host.spawn(self._call(member), name=f"open a link to rank {member}")

    async def _call(self, member: int) -> None:
        try:
            await self._mesh.link(member)
        except HcsimError as error:
            self.lost(member, error)

    def is_awaited(self, tag: int) -> bool:
        """Whether a receive with that tag is pending."""
        return tag in self._queues and not self._queues[tag].is_idle

    def post(self, tag: int, source: int | None) -> PendingReceive:
        if tag not in self._queues:
            self._queues = {of: queue for of, queue in self._queues.items() if not queue.is_idle}
            self._queues[tag] = _TagQueue(self._senders, partial(self._next_tag, tag), partial(self._take_number, tag))
        return self._queues[tag].post(source)

    def joined(self, link: Link) -> None:
        """There is a new link."""
        if link.peer_rank in self._senders.members:
            self._senders.links[self._senders.members.index(link.peer_rank)] = link
            self._match()

    def lost(self, member: int, error: HcsimError) -> None:
        """Nothing more comes from there."""
        if member in self._senders.members:
            self._senders.lost[self._senders.members.index(member)] = error
            self._match()

    def ended(self, error: HcsimError) -> None:
        """The group is over."""
        for queue in self._queues.values():
            queue.fail(error)

    def _match(self) -> None:
        for queue in self._queues.values():
            queue.match()
