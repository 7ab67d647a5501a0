"""The vote before an update: all members of a view apply it, or none does.

After the exchange all members hold the same update. One small all-gather then tells for every member whether it
objects (its gradients were not finite), the fingerprint of its replica before the update, and whether it knows of a
later view or wants to leave. A member that receives all votes knows that all members hold the update, and applies
it. A member that does not receive them keeps the update, and learns in the next view whether it counts (see
`synchronise`).

A member that objects has sent zeros, so no other member waits for it; all drop the step and retry it. If
replicas differ, training ends: the majority is taken as correct, and the error names the first tensor that
differs.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hcsim.cluster.diagnosis import VotesSeen
from hcsim.cluster.membership_source import LAST_CALL_PAUSE_S, LAST_CALL_S, MembershipSource
from hcsim.cluster.view import View
from hcsim.collectives.group import Group
from hcsim.compressors.encoding import is_finite
from hcsim.errors import CompressionError, Diverged, TrainingError
from hcsim.runtime.channel import Phantom
from hcsim.training.elastic.transfer import digests, gather_direct, gather_echoed
from hcsim.training.layout import Bucket, Layout
from hcsim.training.learner import Learner, fingerprint
from hcsim.training.run import Commit, Update
from hcsim.training.task import Flat, Task

ATTEMPTS = 4
"""Attempts at a step whose gradients are not finite, or cannot be encoded or decoded. A model that has diverged gives
the same each time. Faults of machines do not, though several may fall into one step when the network was down."""


class Synchronised(Protocol):
    """A strategy on one member."""

    @property
    def synchronised(self) -> Flat:
        """The array that must be the same on all members before every update."""


class Voter(Protocol):
    """A member that votes."""

    @property
    def learner(self) -> Learner: ...

    @property
    def method(self) -> Synchronised: ...

    task: Task
    source: MembershipSource
    leaving: asyncio.Event | None
    refused: Counter[int]
    """How often each step was dropped."""

    async def applied(self) -> None:
        """Note that a step is done."""


class _Vote(NamedTuple):
    print: int
    objection: int
    """The number of the first tensor that is not finite, or -1."""
    superseded: int
    leaving: int
    """Whether the member wants to leave. After the last step: whether it waits for newcomers or to be admitted."""


class CommitVote(Commit):
    """The commit votes of the members of one view, step by step."""

    def __init__(self, us: Voter, group: Group, view: View) -> None:
        self.leavers: tuple[int, ...] = ()
        """The members that leave after this step."""
        self._us = us
        self._group = group
        self._view = view
        self._objection = -1
        self._round = 0
        self._received: list[npt.NDArray[np.int64]] = []

    @property
    def seen(self) -> VotesSeen:
        """The votes of the last round."""
        return VotesSeen(self._round, dict(zip(self._view.nodes, digests(self._received), strict=False)))

    async def admit(self, gradients: Flat, bucket: Bucket) -> None:
        """Note whether this rank's part is finite. If it is not, send zeros in its place, so that no other member
        waits."""
        await self._group.host.device.touch(bucket.size_bytes)
        if isinstance(gradients, Phantom) or is_finite(gradients[bucket.span]):
            return
        names = self._tensor_names()
        bad = next(t.name for t in bucket.tensors if not is_finite(t.view(gradients[bucket.span]).reshape(-1)))
        if self._objection < 0:
            self._objection = names.index(bad)
        gradients[bucket.span] = 0.0

    async def agreed(self, update: Update) -> bool:
        us = self._us
        later = us.source.superseded(self._view.epoch)
        leaving = us.leaving is not None and us.leaving.is_set()
        ours = _Vote(await self._print(), self._objection, later, leaving)
        votes = await self._gathered(update.step, ours)
        self._group.host.trace("voted", self._view.lineage, self._view.epoch, update.step, ours.print)
        self._objection = -1
        if any(vote.objection >= 0 for vote in votes):
            self._refused(update.step, votes)
            return False
        self.leavers = tuple(rank for rank, vote in enumerate(votes) if vote.leaving)
        self.ends = bool(self.leavers) or any(vote.superseded for vote in votes)
        return True

    async def applied(self) -> None:
        await self._us.applied()

    async def confirmed(self, step: int) -> bool:
        """Confirm that all members have come to the end with the same model. Return whether this member may leave:
        no member knows of newcomers that wait to join, or the last call is over; and no other cluster is about to
        admit this one.

        Members see preparing newcomers at different times, so they vote again and again: a member that waited
        alone would keep the others waiting for its vote."""
        source, epoch, clock = self._us.source, self._view.epoch, self._group.host.clock
        until_s = clock.elapsed() + LAST_CALL_S
        while True:
            waits = source.will_be_let_in(epoch) or (source.preparing(epoch) and clock.elapsed() < until_s)
            votes = await self._gathered(step, _Vote(await self._print(), -1, source.superseded(epoch), waits))
            if any(vote.superseded for vote in votes):
                return False
            if not any(vote.leaving for vote in votes):
                return True
            await clock.sleep(LAST_CALL_PAUSE_S)

    async def _print(self) -> int:
        parameters = self._us.method.synchronised
        await self._group.host.device.touch(parameters.nbytes)
        return fingerprint(parameters)

    async def _gathered(self, step: int, ours: _Vote) -> list[_Vote]:
        self._received = await gather_direct(self._group, np.array(ours, np.int64))
        self._round += 1
        votes = [_Vote(*(int(number) for number in each)) for each in self._received]
        if any(vote.print != votes[0].print for vote in votes):
            await self._differ(step)
        return votes

    async def _differ(self, step: int) -> None:
        """Find the first tensor that differs, and end training."""
        parameters = self._us.method.synchronised
        assert not isinstance(parameters, Phantom)  # they have all the same fingerprint
        # Where members hold parts alone, these are compared when a view begins.
        tensors = self._us.learner.layout.tensors if parameters.size else ()
        ours = np.array([fingerprint(tensor.view(parameters)) for tensor in tensors], np.int64)
        theirs = await gather_echoed(self._group, ours)
        for number, tensor in enumerate(tensors):
            prints = [int(each[number]) for each in theirs]
            usual, count = Counter(prints).most_common(1)[0]
            if count == len(prints):
                continue
            if 2 * count > len(prints):
                unlike = [rank for rank, each in enumerate(prints) if each != usual]
                whose = f"{self._names(unlike)} differs from the others"
            else:
                whose = f"{self._names(range(len(prints)))} differ, and none is in the majority"
            raise Diverged(
                f"before step {step} the replicas are not alike: {tensor.name} on {whose}; memory or "
                "arithmetic failed there: test that machine, and resume from a checkpoint"
            )
        raise Diverged(f"before step {step} the replicas were not alike, and now they are: some machine's memory fails")

    def count_codec_failure(self, step: int, error: CompressionError) -> None:
        """Count a step whose gradients cannot be encoded, or whose received payloads cannot be decoded."""
        if (count := self._counted(step)) >= ATTEMPTS:
            us = self._us.source.us.name
            raise TrainingError(f"step {step} was tried {count} times, and ended on {us}: {error}") from error

    def _counted(self, step: int) -> int:
        self._us.refused[step] += 1
        return self._us.refused[step]

    def _refused(self, step: int, votes: list[_Vote]) -> None:
        count = self._counted(step)
        against = [rank for rank, vote in enumerate(votes) if vote.objection >= 0]
        tensor = self._tensor_names()[votes[against[0]].objection]
        self._group.host.trace("step refused", step, self._names(against), tensor)
        if count >= ATTEMPTS:
            raise TrainingError(
                f"step {step} was tried {count} times, and the gradients of {tensor} on {self._names(against)} "
                "were not finite: a lower learning rate, a warm-up or clipping may help"
            )

    def _tensor_names(self) -> list[str]:
        """Return the names of the whole model's tensors, alike on all members."""
        return [tensor.name for tensor in Layout.of([block.shapes for block in self._us.task.blocks]).tensors]

    def _names(self, ranks: Iterable[int]) -> str:
        return ", ".join(self._view.members[rank].name for rank in ranks)
