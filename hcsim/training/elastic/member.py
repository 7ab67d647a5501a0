"""The part of an elastic member that all strategies have in common.

`follow` (`hcsim.training.elastic.train`) leads a member from view to view. A `ReplicatedMember` holds a replica
of the model and votes on every step. A `ServedMember` is a worker of a parameter server, and runs the server or
its standby if it is among the first two members.
"""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Callable

import msgspec

from hcsim.cluster.diagnosis import Accusation, ViewFailure, VotesSeen
from hcsim.cluster.membership_source import MembershipSource
from hcsim.cluster.view import View
from hcsim.collectives.failure_domain import TOLD
from hcsim.collectives.group import Group
from hcsim.collectives.select import Options
from hcsim.config.training import Training
from hcsim.errors import CollectiveError, CollectiveTimeout, RemoteProtocolError
from hcsim.runtime.host import Host
from hcsim.training.elastic.checkpoint import CheckpointWriter
from hcsim.training.elastic.recovery import NotAnswering, Recovery, SlowSteps
from hcsim.training.elastic.transfer import Contradiction, StateArrays
from hcsim.training.run import Observer
from hcsim.training.task import Task
from hcsim.training.trainer import Trainer

_LAST_STEPS = 4
"""The number of last steps whose compute time a member reports when a view fails."""


class TrainingExtras(msgspec.Struct, frozen=True):
    """Optional inputs of a training, beside its settings."""

    observer: Observer | None = None
    what: Task | None = None
    """A user-defined task."""
    leaving: asyncio.Event | None = None
    """Once it is set, this member leaves after the current step."""
    checkpoints: CheckpointWriter | None = None
    began: Callable[[View, int], None] = lambda view, step: None
    """Called with each view whose members have synchronised, and the number of steps taken by then."""
    by_links: bool = False
    """Whether the ring's order and `auto` follow the measured links; the same on all members."""


class ElasticMember(Trainer, ABC):
    """A member of a cluster that trains from view to view."""

    def __init__(
        self,
        host: Host,
        source: MembershipSource,
        settings: Training,
        seed: int,
        extras: TrainingExtras,
        *,
        ranks: int = 1,
    ) -> None:
        super().__init__(host, settings, seed, extras.what, ranks)
        self.source = source
        self.observer = Recovery(host, extras.observer, settings.timeout_s)
        self.leaving = extras.leaving
        """Set once this member is to leave."""
        self.checkpoints = extras.checkpoints
        self.began = extras.began
        self._failed_at = 0
        """The step at which a view last failed. Steps since then may have been taken in views that other members
        joined."""

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Whether all steps are done and the run holds the resulting model."""

    @property
    def votes_seen(self) -> VotesSeen | None:
        """The last votes received in the present view, if the members vote."""
        return None

    @abstractmethod
    def reload(self, checkpoint: StateArrays) -> None:
        """Begin with a saved state, unless a member holds a newer one."""

    @abstractmethod
    def options(self, view: View) -> Options: ...

    @abstractmethod
    async def train(self, group: Group, view: View) -> bool:
        """Train in this view for as long as it lasts.

        Return whether this member is done with the cluster: training is complete, or it has left."""

    async def complete(self) -> None:
        """Note the last step, if that was not done, once no other member needs this one."""

    async def close(self) -> None: ...

    @abstractmethod
    async def save(self) -> None:
        """Save the state, if checkpoints are kept, because this member leaves before the end."""

    def failure(self, view: View, group: Group) -> ViewFailure:
        """Return what this member knows of a view whose group failed."""
        error, waited_for, progress_s = group.error, group.waited_for, self.observer.progress_s
        peer = error.peer if isinstance(error, CollectiveError) and error.peer != group.rank else None
        seen_here = isinstance(error, CollectiveError) and error.phase != TOLD
        violation = seen_here and error is not None and isinstance(error.__cause__, RemoteProtocolError)
        wrong = error.wrong if isinstance(error, NotAnswering) else {}
        accusations = [Accusation(view.nodes[rank], why) for rank, why in wrong.items()]
        for witness, accused, why in error.doubts if isinstance(error, Contradiction) else ():
            accusations.append(Accusation(view.nodes[accused], named(why, view), view.nodes[witness]))
        reason, violator = named(str(error), view), view.nodes[peer] if violation and peer is not None else ""
        if not violator and group.skipped is not None and waited_for is not None:
            reason, violator = named(f"{error}; {group.skipped}", view), view.nodes[waited_for]
        slow, now = isinstance(error, SlowSteps), self.host.clock.elapsed()
        stalled_s = 0.0 if progress_s is None else now - progress_s
        before, self._failed_at = self._failed_at, self.run.step if self.has_begun else 0
        return ViewFailure(
            reason,
            violator,
            isinstance(error, CollectiveTimeout),
            view.nodes[waited_for] if waited_for is not None and not slow else "",
            self._failed_at != before,
            max(stalled_s, self.observer.step_timer.slow_s),
            slow,
            self._work_s(),
            tuple(accusations),
            self.votes_seen,
            group.standing_s,
        )

    def _work_s(self) -> float:
        """Return the seconds per step that this member computed and encoded in its last steps."""
        points = self.run.points[-_LAST_STEPS:] if self.has_begun else []
        return sum(point.spent_s["compute"] + point.spent_s["encode"] for point in points) / max(1, len(points))


def named(text: str, view: View) -> str:
    """Replace ranks and ids in an error of a view's group by the members' names and addresses."""

    def name(match: re.Match[str]) -> str:
        rank = int(match[1])
        return f"{view.members[rank].name} ({view.members[rank].address})" if rank < len(view.members) else match[0]

    text = re.sub(r"\brank (\d+)\b", name, text)
    nodes = {member.node: f"{member.name} ({member.address})" for member in view.members}
    return re.sub(rf"\b({'|'.join(map(re.escape, nodes))})\b", lambda match: nodes[match[0]], text)
