"""Any-source receives: matching of messages to pending receives.

An any-source receive takes a message with its tag that is the next one from its sender. Messages are matched in
the order in which the receives were posted. A receive from a given source that was posted after an any-source
receive therefore waits until that one is matched: only then is its own message known. So the first pending
receive is always an any-source one and takes whatever arrives.

A link reports when the expected message arrives; the message stays there until it has a place. If several have
arrived, messages already read take precedence over those still in the system's buffers, and then the lowest
rank.

An any-source receive needs links to all ranks. Links to lower ranks are opened; higher ranks connect when they
have something to send, and until then only the deadline limits the wait. A rank that has left or is unreachable
is no failure as long as another rank could still send.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from hcsim.errors import ChannelBroken, HcsimError
from hcsim.runtime.clock import fail_future
from hcsim.transport.link import Link, Tag
from hcsim.transport.mesh import Mesh


class PendingReceive:
    """A receive whose message is not known yet: from a rank, or from any source (None)."""

    __slots__ = ("_senders", "matched", "source")

    def __init__(self, source: int | None, senders: _Senders) -> None:
        self.source = source
        self._senders = senders
        self.matched: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
        """The sender of the message and its number among the messages from there."""

    def why_waiting(self) -> str:
        """Describe what it waits for, for error messages."""
        if self.source is not None:
            return f"waiting for rank {self._senders.members[self.source]}, after one who receives from any rank"
        why = self._senders.why_silent()
        return f"waiting for a message from any rank{f' ({why})' if why else ''}"


class _Senders:
    """The other ranks of a group as possible senders."""

    def __init__(self, members: Sequence[int], us: int) -> None:
        self.members = members
        self.ranks = tuple(rank for rank, member in enumerate(members) if member != us)
        self.links: dict[int, Link] = {}
        self.lost: dict[int, HcsimError] = {}
        """Ranks that can send no more, and the reason."""

    def why_silent(self) -> str:
        """Describe why the lost ranks cannot send, for error messages."""
        return "; ".join(str(error) for _, error in sorted(self.lost.items()))


class _TagQueue:
    """The pending receives with one tag, in the order in which they were posted."""

    def __init__(self, senders: _Senders, next_tag: Callable[[int], Tag], take_number: Callable[[int], int]) -> None:
        self._senders = senders
        self._next_tag = next_tag
        self._take_number = take_number
        self._pending: deque[PendingReceive] = deque()
        self._sought: dict[int, Tag] = {}
        """The expected message of each sender."""

    @property
    def is_idle(self) -> bool:
        return not self._pending

    def post(self, source: int | None) -> PendingReceive:
        pending = PendingReceive(source, self._senders)
        self._pending.append(pending)
        self.match()
        return pending

    def match(self) -> None:
        """Match what has arrived, and watch for what has not."""
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
            fail_future(self._pending.popleft().matched, error)
        self._look_away()

    def _arrived(self) -> int | None:
        """Return the lowest rank whose next message has been read. If there is none, watch all links."""
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
        """Match the next message from this source with the first pending receive."""
        matched = self._pending.popleft().matched
        number = self._take_number(source)
        if not matched.done():
            matched.set_result((source, number))

    def _look_away(self) -> None:
        for rank, tag in self._sought.items():
            self._senders.links[rank].look_away(tag)
        self._sought.clear()


class AnySource:
    """The any-source receives of one group by tag, and their links, which open with the first receive."""

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
        """Return whether a receive with that tag is pending."""
        return tag in self._queues and not self._queues[tag].is_idle

    def post(self, tag: int, source: int | None) -> PendingReceive:
        if tag not in self._queues:
            self._queues = {of: queue for of, queue in self._queues.items() if not queue.is_idle}
            self._queues[tag] = _TagQueue(self._senders, partial(self._next_tag, tag), partial(self._take_number, tag))
        return self._queues[tag].post(source)

    def joined(self, link: Link) -> None:
        if link.peer_rank in self._senders.members:
            self._senders.links[self._senders.members.index(link.peer_rank)] = link
            self._match()

    def lost(self, member: int, error: HcsimError) -> None:
        if member in self._senders.members:
            self._senders.lost[self._senders.members.index(member)] = error
            self._match()

    def ended(self, error: HcsimError) -> None:
        for queue in self._queues.values():
            queue.fail(error)

    def _match(self) -> None:
        for queue in self._queues.values():
            queue.match()
