"""The vote before every update: it is applied by all members of a view, or by none.

After the exchange everybody holds the same update. One small all-gather then says of every member whether it objects
(its gradients were not finite), what its replica is (a fingerprint, from before the update), and whether it knows of a
later view or wants to leave. Whoever hears all votes knows that everybody holds the update, and applies it; whoever
does not keeps it, and learns from the others, in the next view, whether it counts (see `synchronise`).

A member that objects has sent zeros, so nobody waits for it; all drop the step and try it once more.
Replicas that differ end training: the majority is right, and the first tensor that differs is named.

An all-gather with an echo: all members know that they received the same from each.

What members do next follows from what they received. So if a member sends one thing to one and another to the next,
correct members part ways, and each takes the other for the one that is wrong. Therefore everybody sends to everybody
directly, and then an echo, as in Bracha's reliable broadcast (1987): digests of what it received. Where two received
unlike things from a third, either one of them misreports or the third did not send all the same:
`hcsim.cluster.diagnosis` looks for the fewest members that explain all such findings.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hcsim.cluster.conductor import LAST_CALL_PAUSE_S, LAST_CALL_S, Conductor
from hcsim.cluster.diagnosis import VotesSeen
from hcsim.cluster.view import View
from hcsim.collectives.buffers import array_of
from hcsim.collectives.group import Group
from hcsim.compressors.encoding import is_finite
from hcsim.errors import CollectiveError, CompressionError, Diverged, TrainingError
from hcsim.runtime.channel import Phantom
from hcsim.training.layout import Bucket, Layout
from hcsim.training.learner import fingerprint
from hcsim.training.run import Update
from hcsim.training.task import Flat

_MOST = 16
"""In a larger group that all talk to all takes long: there words are passed on, and nobody compares them."""


class Doubt(NamedTuple):
    """Either the accused is wrong or the witness, which may be ourselves."""

    witness: int
    accused: int
    reason: str


class Contradiction(CollectiveError):
    """Members say unlike things; `doubts` are about which of them."""

    def __init__(
        self, message: str, *, peer: int | None = None, phase: str = "", doubts: tuple[Doubt, ...] = ()
    ) -> None:
        super().__init__(message, peer=peer, phase=phase)
        self.doubts = doubts


async def gather_echoed(group: Group, words: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """What each sent, by rank; all have received the same, or it raises `Contradiction`."""
    said = await gather_direct(group, words)
    if not 2 < group.size <= _MOST:
        return said
    ours = np.array(digests(said), np.int64)
    heard = await gather_direct(group, ours)
    doubts = tuple(doubt for rank, theirs in enumerate(heard) for doubt in _doubts(group.rank, ours, rank, theirs))
    if doubts:
        raise Contradiction(doubts[0].reason, phase="synchronising", doubts=doubts)
    return said


async def gather_direct(group: Group, words: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """What each sent, by rank, from itself unless the group is large; perhaps not what others received."""
    # Folded onto a power of two, words would cross the slow line between two homes three times instead of once.
    direct = group.size <= _MOST or group.size.bit_count() != 1
    return [_numbers(each) for each in await group.all_gather(words, algorithm="direct" if direct else "auto")]


def digests(said: Sequence[npt.NDArray[np.int64]]) -> tuple[int, ...]:
    """One of what each said."""
    return tuple(fingerprint(each) for each in said)


def _doubts(us: int, ours: npt.NDArray[np.int64], them: int, theirs: npt.NDArray[np.int64]) -> list[Doubt]:
    """What does not fit in what another rank has heard, given digests of what each rank said."""
    if theirs[them] != ours[them]:
        return [Doubt(us, them, f"rank {them} told rank {us} something else than it says it told")]
    unlike = [rank for rank in range(len(ours)) if theirs[rank] != ours[rank]]
    return [Doubt(them, rank, f"rank {rank} did not tell rank {us} and rank {them} the same") for rank in unlike]


def _numbers(data: object) -> npt.NDArray[np.int64]:
    return np.asarray(array_of(data), np.int64)  # type: ignore[arg-type]


ATTEMPTS = 4
"""At a step whose gradients are not finite: a model that has diverged gives the same each time, and machines' mishaps,
which may fall into one step when the network was away for a while, do not."""


class _Vote(NamedTuple):
    print: int
    objection: int
    """The number of the first tensor that is not finite; or -1."""
    superseded: int
    leaving: int
    """After the last step: whether it sees newcomers that prepare to join."""


class Ballot:
    """What all votes of a training have in common, whatever the view."""

    def __init__(self, layout: Layout, alike: Callable[[], Flat], conductor: Conductor) -> None:
        self.layout = layout
        self.alike = alike
        self.conductor = conductor
        self.leaving: asyncio.Event | None = None
        """Set by whoever wants this member to leave in an orderly way."""
        self.refused: dict[int, int] = {}
        """How often a step was dropped."""


class Votes:
    """The pact of one view's members."""

    def __init__(self, ballot: Ballot, group: Group, view: View, settled: Callable[[], Awaitable[None]]) -> None:
        self.ends = False
        self.leavers: tuple[int, ...] = ()
        """Who goes after this step."""
        self._settled = settled
        self._ballot = ballot
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
        """Note whether our part is finite. If it is not, zeros take its place: the others wait for something."""
        await self._group.host.device.touch(bucket.size_bytes)
        if isinstance(gradients, Phantom) or is_finite(gradients[bucket.span]):
            return
        names = [tensor.name for tensor in self._ballot.layout.tensors]
        bad = next(t.name for t in bucket.tensors if not is_finite(t.view(gradients[bucket.span]).reshape(-1)))
        if self._objection < 0:
            self._objection = names.index(bad)
        gradients[bucket.span] = 0.0

    async def agreed(self, update: Update) -> bool:
        """Vote."""
        ballot, conductor = self._ballot, self._ballot.conductor
        later = conductor.superseded(self._view.epoch)
        leaving = ballot.leaving is not None and ballot.leaving.is_set()
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

    async def settled(self) -> None:
        """The update is applied here."""
        await self._settled()

    async def confirmed(self, step: int) -> bool:
        """All have come to the end, with the same model. Whether we may go: nobody knows of newcomers who want it, and
        no cluster will let us in.

        Members see newcomers that prepare at different times, and so ask each other again and again: whoever waited
        alone would keep the others waiting for its vote."""
        conductor, epoch, clock = self._ballot.conductor, self._view.epoch, self._group.host.clock
        until_s = clock.elapsed() + LAST_CALL_S
        while True:
            waits = conductor.will_be_let_in(epoch) or (conductor.preparing(epoch) and clock.elapsed() < until_s)
            votes = await self._gathered(step, _Vote(await self._print(), -1, conductor.superseded(epoch), waits))
            if any(vote.superseded for vote in votes):
                return False
            if not any(vote.leaving for vote in votes):
                return True
            await clock.sleep(LAST_CALL_PAUSE_S)

    async def _print(self) -> int:
        alike = self._ballot.alike()
        await self._group.host.device.touch(alike.nbytes)
        return fingerprint(alike)

    async def _gathered(self, step: int, ours: _Vote) -> list[_Vote]:
        self._received = await gather_direct(self._group, np.array(ours, np.int64))
        self._round += 1
        votes = [_Vote(*(int(number) for number in each)) for each in self._received]
        if any(vote.print != votes[0].print for vote in votes):
            await self._differ(step)
        return votes

    async def _differ(self, step: int) -> None:
        """Find out where, and end."""
        alike = self._ballot.alike()
        assert not isinstance(alike, Phantom)  # they have all the same fingerprint
        tensors = self._ballot.layout.tensors
        ours = np.array([fingerprint(tensor.view(alike)) for tensor in tensors])
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

    def cannot_send(self, step: int, error: CompressionError) -> None:
        """What our gradients came to on the way cannot be encoded, or what others sent cannot be decoded."""
        if (count := self._counted(step)) >= ATTEMPTS:
            us = self._ballot.conductor.us.name
            raise TrainingError(f"step {step} was tried {count} times, and ended on {us}: {error}") from error

    def _counted(self, step: int) -> int:
        self._ballot.refused[step] = self._ballot.refused.get(step, 0) + 1
        return self._ballot.refused[step]

    def _refused(self, step: int, votes: list[_Vote]) -> None:
        count = self._counted(step)
        against = [rank for rank, vote in enumerate(votes) if vote.objection >= 0]
        tensor = self._ballot.layout.tensors[votes[against[0]].objection].name
        self._group.host.trace("step refused", step, self._names(against), tensor)
        if count >= ATTEMPTS:
            raise TrainingError(
                f"step {step} was tried {count} times, and the gradients of {tensor} on {self._names(against)} "
                "were not finite: a lower learning rate, a warm-up or clipping may help"
            )

    def _names(self, ranks: range | list[int]) -> str:
        return ", ".join(self._view.members[rank].name for rank in ranks)
