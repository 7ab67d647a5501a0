"""The interface between a computation and its cluster: the members to work with, and whether a view is still
valid.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeAlias

import msgspec

from hcsim.cluster.diagnosis import ViewFailure
from hcsim.cluster.messages import MemberFacts
from hcsim.cluster.probe import Routes
from hcsim.cluster.view import Member, View
from hcsim.runtime.host import Host
from hcsim.transport.groups import CheckedPeer

MemberCheck: TypeAlias = Callable[[Sequence[CheckedPeer]], Awaitable[tuple[str, list[str]]]]
"""Check this machine and the members whose collectives are at these addresses. Return what is wrong with this machine
and with each of them (empty: nothing)."""

LAST_CALL_S = 10.0
"""How long members that have finished wait for machines that prepare to join them."""
LAST_CALL_PAUSE_S = 0.5
"""The interval at which they ask each other again whether there are such machines."""


class NodeInfo(msgspec.Struct, frozen=True):
    """The identity and the addresses of a node."""

    node: str
    boot: int
    """A number that differs at every start of the node."""
    name: str
    control: str
    """The address of its control connections."""
    address: str
    namespace: str = ""
    home: str = ""
    facts: Callable[[], MemberFacts] | None = None
    """What the machine tells members that ask; None: nothing."""


class MembershipSource(Protocol):
    """Determines which view is valid. One computation at a time uses it."""

    @property
    def us(self) -> Member: ...

    @property
    def identified(self) -> bool:
        """Return whether members prove their node id on every channel."""

    @property
    def ways(self) -> Routes | None:
        """Return the known routes to other members; None if routes are neither known nor to be measured."""

    async def view(self, after: int, outcome: str = "") -> View | None:
        """Return the newest view once it is later than epoch `after`, contains this node and is large enough.

        If this node has finished its work, `outcome` is the result. Return None if all other members of the view
        have left and one of them had finished with that outcome. Raise an error once the working members have
        finished without this node."""

    def over(self, epoch: int) -> asyncio.Future[str]:
        """Return a future that gives the reason once the view of that epoch has failed: a member was lost or is
        stuck.

        A view that only gains members, or that a member leaves in an orderly way, does not fail at once:
        `superseded` says that it ends after the current step."""

    def superseded(self, epoch: int) -> bool: ...

    def preparing(self, epoch: int) -> bool:
        """With all steps done, return whether a visible machine is still preparing to join that epoch's view, or
        whether this node, alone in it, is preparing to join another."""

    def will_be_let_in(self, epoch: int) -> bool:
        """With all steps done, return whether this node is alone in that epoch's view and a cluster with precedence
        will admit it. The results of this node are discarded then."""

    def surveyed(self, epoch: int) -> None:
        """Report that the links of that view are measured: from now on members that wait for this node may blame it."""

    def broken(self, epoch: int, failure: ViewFailure) -> None:
        """Report that the work in that view failed: a new view is needed, perhaps without the members that caused
        it."""

    def check_with(self, check: MemberCheck | None) -> None:
        """Use this function to check whether this machine can work with others; None: checks are no longer possible."""

    def finish(self, outcome: str) -> None:
        """Report that all members of the view have finished with this outcome; members that missed the end are told."""

    async def leave(self) -> None:
        """Leave for good; return when the others know, or after a deadline."""


async def next_view(
    host: Host, source: MembershipSource, after: int, leaving: asyncio.Event | None, outcome: str = ""
) -> View | None:
    """Return the next view; None once this member wants to leave while there is no view, or if it need not wait
    (see `MembershipSource.view`)."""
    if leaving is None:
        return await source.view(after, outcome)
    looking: asyncio.Task[View | None] = host.spawn(source.view(after, outcome), name="next view")
    giving_up = host.spawn(_cancel_once(leaving, looking), name="leave without a view")
    us = asyncio.current_task()
    assert us is not None
    try:
        return await looking
    except asyncio.CancelledError:
        if us.cancelling():  # it is we who are cancelled
            raise
        return None
    finally:
        looking.cancel()
        giving_up.cancel()


async def _cancel_once(event: asyncio.Event, task: asyncio.Task[View | None]) -> None:
    await event.wait()
    task.cancel()
