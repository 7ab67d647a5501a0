"""What a member does in a training, whichever its strategy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

from hcsim.cluster.diagnosis import VotesSeen
from hcsim.cluster.view import View
from hcsim.collectives.group import Group
from hcsim.collectives.options import Options
from hcsim.config.training import Training
from hcsim.training.elastic.checkpoint import Checkpoints
from hcsim.training.elastic.recovery import Recovery
from hcsim.training.run import Observer, Run
from hcsim.training.task import Task


class Extras(msgspec.Struct, frozen=True):
    """What a training may have beside its settings."""

    observer: Observer | None = None
    what: Task | None = None
    """A task of one's own."""
    leaving: asyncio.Event | None = None
    """Once it is set, this member leaves after the step that is under way."""
    checkpoints: Checkpoints | None = None
    began: Callable[[View, int], None] = lambda view, step: None
    """Hears of each view in which all have come to hold the same, and how many steps had been taken by then."""
    by_links: bool = False
    """Whether the ring's order and `auto` follow what was measured of the links; the same for all."""


class Part(Protocol):
    """What a member does in a training, from view to view."""

    @property
    def settings(self) -> Training:
        """What is trained, and how."""

    @property
    def observer(self) -> Recovery:
        """Who looks on."""

    @property
    def leaving(self) -> asyncio.Event | None:
        """Set once this member is to leave."""

    @property
    def has_begun(self) -> bool:
        """Whether there is a run."""

    @property
    def run(self) -> Run:
        """From the first view on."""

    @property
    def is_complete(self) -> bool:
        """Whether all steps are done, and the run has the model that they led to."""

    @property
    def votes_seen(self) -> VotesSeen | None:
        """The last votes that we received in the present view, if its members vote."""

    def options(self, view: View) -> Options:
        """How a view's group works."""

    async def train(self, group: Group, view: View) -> bool:
        """Train in this view for as long as it lasts; whether that was all."""

    async def complete(self) -> None:
        """Nobody needs us any more: note the last step, if that was not done."""

    async def close(self) -> None:
        """Nothing goes on after this."""

    async def save(self) -> None:
        """Save what we hold, if checkpoints are kept: we leave before the end."""
