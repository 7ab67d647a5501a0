"""What a computation asks of its cluster: with whom it goes on, and whether it still may."""

from __future__ import annotations

import asyncio
from typing import Protocol

from hcsim.cluster.view import Member, View
from hcsim.cluster.ways import Ways


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

    async def view(self, after: int) -> View:
        """The newest view, once it is later than epoch `after`, has us in it and is large enough to work in."""

    def over(self, epoch: int) -> asyncio.Future[str]:
        """Done, with the reason, once the view of that epoch cannot work any more: a member was lost, or is stuck.

        A view that only gains members, or that somebody leaves in an orderly way, is not over at once:
        `superseded` says that it ends after the step that is under way."""

    def superseded(self, epoch: int) -> bool:
        """Whether a later view is known."""

    def broken(self, epoch: int, rank: int | None, reason: str) -> None:
        """Our work in that view failed, probably because of that rank: a new view is needed."""

    async def leave(self) -> None:
        """Be in no further view; returns when the others know, or after a deadline."""
