"""What a computation asks of its cluster: with whom it goes on, and whether it still may."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeAlias

import msgspec

from hcsim.cluster.diagnosis import Failure
from hcsim.cluster.probe import Ways
from hcsim.cluster.view import Member, View
from hcsim.runtime.host import Host

Checker: TypeAlias = Callable[[Sequence[tuple[str, float]]], Awaitable[tuple[str, list[str]]]]
"""Given addresses of members' collectives, each with the seconds that the answer to a check may take: what is wrong
with this machine, and with each of them (empty: nothing)."""

LAST_CALL_S = 10.0
"""How long members that have finished wait for machines that prepare to join them."""
LAST_CALL_PAUSE_S = 0.5
"""How long they wait before they ask each other again whether there are any."""


class Introduction(msgspec.Struct, frozen=True):
    """Who this node is, and where."""

    node: str
    boot: int
    """Tells its lives apart: another number whenever it is started."""
    name: str
    control: str
    """Where it takes calls about membership."""
    address: str
    """Where its collectives listen."""
    namespace: str = ""
    home: str = ""


class Conductor(Protocol):
    """Says which view counts. One computation at a time follows it."""

    @property
    def us(self) -> Member:
        """This node, in this life."""

    @property
    def identified(self) -> bool:
        """Whether members prove on every channel which node they are."""

    @property
    def ways(self) -> Ways | None:
        """What is known of the ways to other members; None: nothing is, and nothing is to be measured."""

    async def view(self, after: int, outcome: str = "") -> View | None:
        """The newest view, once it is later than epoch `after`, has us in it and is large enough to work in.

        If our work is done, `outcome` says what came of it. None: all others of our view have gone, and one of them
        had finished with that outcome. Raises an error once those who worked have finished without us."""

    def over(self, epoch: int) -> asyncio.Future[str]:
        """Done, with the reason, once the view of that epoch cannot work any more: a member was lost, or is stuck.

        A view that only gains members, or that somebody leaves in an orderly way, is not over at once:
        `superseded` says that it ends after the step that is under way."""

    def superseded(self, epoch: int) -> bool:
        """Whether a later view is known."""

    def preparing(self, epoch: int) -> bool:
        """All steps are done: whether a machine in sight is still preparing to join that epoch's view, or this node,
        alone in it, another one."""

    def will_be_let_in(self, epoch: int) -> bool:
        """All steps are done: whether this node is alone in that epoch's view, and a cluster that goes before it will
        let it in. What was learned here is given up then."""

    def surveyed(self, epoch: int) -> None:
        """We have measured the links of that view: from now on others that wait for us have a reason to blame us."""

    def broken(self, epoch: int, failure: Failure) -> None:
        """Our work in that view failed: a new view is needed, perhaps without those that are the reason."""

    def check_with(self, check: Checker | None) -> None:
        """From now on, see by this whether this machine can work with others; None: that cannot be seen any more."""

    def finish(self, outcome: str) -> None:
        """All members of our view have done their work, and this came of it: whoever has missed the end is told."""

    async def leave(self) -> None:
        """Be in no further view; returns when the others know, or after a deadline."""


async def next_view(
    host: Host, conductor: Conductor, after: int, leaving: asyncio.Event | None, outcome: str = ""
) -> View | None:
    """The next view; None once this member wants to leave, while there is none, or need not wait (see `view`)."""
    if leaving is None:
        return await conductor.view(after, outcome)
    looking: asyncio.Task[View | None] = host.spawn(conductor.view(after, outcome), name="next view")
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
