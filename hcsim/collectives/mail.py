"""A group's receipts of messages that may come from anybody: its inboxes, the links to all members, and their failure.

Who receives from anybody needs links to all. Lower ranks are called; higher ones call when they have something to
send, and until then there is nothing to wait for but the deadline. One that has left, or cannot be reached, is
no failure as long as another could still send.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial

from hcsim.collectives.execute import Execution
from hcsim.collectives.fate import Fate
from hcsim.collectives.inbox import Inbox, Peers, Waiting
from hcsim.collectives.wiring import Ticket
from hcsim.errors import CollectiveError, HcsimError
from hcsim.transport.link import Link, Tag


class Receipt:
    """First waits until it is known which message it receives, then is an execution like any other."""

    sent_bytes = 0

    def __init__(
        self,
        ticket: Ticket,
        waiting: Waiting,
        begin: Callable[[int, int], Execution],
        phase: Callable[[], str],
    ) -> None:
        self.ticket = ticket
        self._waiting = waiting
        self._begin = begin
        self._phase = phase
        self._execution: Execution | None = None

    async def run(self) -> None:
        """See `Execution.run`."""
        try:
            source, number = await self._waiting.matched
        except CollectiveError:
            raise
        except HcsimError as error:
            raise CollectiveError(f"{self.ticket} failed: {error}", phase=self._phase()) from error
        self._execution = self._begin(source, number)
        await self._execution.run()

    def blame(self) -> tuple[int | None, str]:
        """See `Execution.blame`."""
        if self._execution is not None:
            return self._execution.blame()
        return None, self._phase()


class Mail:
    """One group's inboxes, by tag, and the links that feed them."""

    def __init__(
        self,
        fate: Fate,
        members: tuple[int, ...],
        next_tag: Callable[[int, int], Tag],
        take_number: Callable[[int, int], int],
    ) -> None:
        self._fate = fate
        self._members = members
        self._next_tag = next_tag
        self._take_number = take_number
        self._inboxes: dict[int, Inbox] = {}
        self._is_open = False

    @cached_property
    def _peers(self) -> Peers:
        """Few groups ever ask: hundreds of simulated ranks need not each list the others."""
        us = self._fate.mesh.us.rank
        return Peers([rank for rank, member in enumerate(self._members) if member != us])

    def is_awaited(self, tag: int) -> bool:
        """Whether somebody waits for a message with that tag from anybody."""
        return tag in self._inboxes and not self._inboxes[tag].is_idle

    def wait(self, tag: int, source: int | None) -> Waiting:
        """Ask for a message."""
        if not self._is_open:
            self._open()
        if tag not in self._inboxes:
            self._inboxes = {of: inbox for of, inbox in self._inboxes.items() if not inbox.is_idle}
            self._inboxes[tag] = Inbox(self._peers, partial(self._next_tag, tag), partial(self._take_number, tag))
        return self._inboxes[tag].wait(source)

    def receipt(self, ticket: Ticket, waiting: Waiting, begin: Callable[[int, int], Execution]) -> Receipt:
        """What receives that message."""
        return Receipt(ticket, waiting, begin, partial(self._phase, waiting))

    def _phase(self, waiting: Waiting) -> str:
        if waiting.source is not None:
            return f"waiting for rank {self._members[waiting.source]}, after one who receives from any rank"
        why = self._peers.why_silent()
        return f"waiting for a message from any rank{f' ({why})' if why else ''}"

    def joined(self, link: Link) -> None:
        """There is a new link."""
        if link.peer_rank in self._members:
            self._peers.links[self._members.index(link.peer_rank)] = link
            self._look()

    def lost(self, member: int, error: HcsimError) -> None:
        """Nothing more comes from there."""
        if member in self._members:
            self._peers.lost[self._members.index(member)] = error
            self._look()

    def ended(self, error: HcsimError) -> None:
        """The group is over."""
        for inbox in self._inboxes.values():
            inbox.fail(error)

    def _look(self) -> None:
        for inbox in self._inboxes.values():
            inbox.look()

    def _open(self) -> None:
        self._is_open = True
        self._fate.followers.append(self)
        mesh = self._fate.mesh
        for rank in self._peers.ranks:
            member = self._members[rank]
            link = mesh.links.get(member)
            if link is not None:
                self._peers.links[rank] = link
                if link.error is not None:
                    self._peers.lost[rank] = link.error
            elif member < mesh.us.rank:
                mesh.host.spawn(self._call(member), name=f"open a link to rank {member}")

    async def _call(self, member: int) -> None:
        try:
            await self._fate.mesh.link(member)
        except HcsimError as error:
            self.lost(member, error)
