"""A member that holds a stage of a pipeline.

No member has the whole model, so a lost one takes its stage with it. Therefore members keep *backups*: the parameters
and the optimizer's state of their own stage, and of the stage before, which its member sends to them. All members make
one when a view begins, after every `backup` steps, and before they end a view in an orderly way. An older backup is
kept until the next step is agreed on, when all have the new one.

When a view begins, members tell each other which blocks of which backups they have. They go on from the newest that has
all blocks: its steps count, and those after it are taken again. They agree on a new cut for the machines that are there
now, and a member that lacks a block gets it from one that has it. So one lost member costs the steps since the last
backup. Of several lost at once, neighbours may have had the only copies of a stage. Training then ends with an error
that names the blocks. A member that joins or leaves costs no step.

Blocks are kept one by one, so that a backup, or a checkpoint that is made of one, serves any number of stages. All
members save checkpoints, each of its own blocks. Error-feedback residuals are lost with a view: they belong to a cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from hcsim.cluster.diagnosis import VotesSeen
from hcsim.cluster.membership_source import MembershipSource
from hcsim.cluster.view import View
from hcsim.collectives.group import Group
from hcsim.collectives.select import Options
from hcsim.config.training import Training
from hcsim.errors import ConfigError, TrainingError
from hcsim.runtime.channel import Phantom
from hcsim.runtime.host import Host
from hcsim.training.data import Batches
from hcsim.training.elastic.checkpoint import fitting
from hcsim.training.elastic.commit_vote import CommitVote
from hcsim.training.elastic.member import ElasticMember, TrainingExtras
from hcsim.training.elastic.progress import intent_digest, lineage_digest
from hcsim.training.elastic.recovery import watch_steps
from hcsim.training.elastic.synchronise import same_intent
from hcsim.training.elastic.transfer import StateArrays, gather_echoed, relay
from hcsim.training.learner import Learner, StateArray
from hcsim.training.memory import optimizer_bytes
from hcsim.training.pipeline.stage import StageRank
from hcsim.training.pipeline.state import BlockState, blocks_of, restore
from hcsim.training.pipeline.strategy import Pipeline
from hcsim.training.precision import compressor_of
from hcsim.training.strategies import optimizer, strategy
from hcsim.training.task import Flat, sequential
from hcsim.training.trainer import encoded

_WORD_BITS = 62
_KEPT = 2
"""The most backups that a member has at once."""


class BackupKey(NamedTuple):
    """Which backup it is, the newest last."""

    epoch: int
    """Of the view in which it was made."""
    step: int
    lineage: int
    position: int
    """The samples dealt out before that step."""


class Backup(msgspec.Struct):
    """Some blocks of a model as it was after a step."""

    key: BackupKey
    blocks: dict[int, BlockState]


class NoReplica:
    """What votes compare: nothing, since members hold unlike parts."""

    synchronised: Flat = Phantom(0)


class StagedMember(ElasticMember):
    """A member that holds a stage, votes, and backs up its neighbour."""

    def __init__(
        self, host: Host, source: MembershipSource, settings: Training, seed: int, extras: TrainingExtras
    ) -> None:
        how = strategy(settings.strategy)
        assert isinstance(how, Pipeline)
        self._how = how
        first = len(settings.batch) if isinstance(settings.batch, tuple) else how.stages or 1
        super().__init__(host, source, settings, seed, extras, ranks=first)
        self.method = NoReplica()
        self.refused: Counter[int] = Counter()
        self._backups: list[Backup] = []
        """The newest last."""
        self._stage: StageRank | None = None
        self._lineage = 0
        self._due = 0
        """The step after which to save."""
        self._votes: CommitVote | None = None

    @cached_property
    def _intent(self) -> bytes:
        return encoded(self.intent())

    @property
    def is_complete(self) -> bool:
        return self.has_begun and self.run.step >= self.settings.steps

    @property
    def votes_seen(self) -> VotesSeen | None:
        return self._votes.seen if self._votes is not None else None

    def options(self, view: View) -> Options:
        return Options(timeout_s=self.settings.timeout_s, views_change=True)

    # A view.

    async def train(self, group: Group, view: View) -> bool:
        """See `ElasticMember.train`."""
        self._votes = None
        stage = await self._synchronise(group, view)
        run = self.run
        run.keep_alive()
        self.began(view, run.step)
        if self.checkpoints is not None:
            self._due = self.checkpoints.after(run.step)
        votes = run.commit = self._votes = CommitVote(self, group, view)
        run.observer = self.observer
        watching = self.host.spawn(
            watch_steps(group, view, self.source, self.observer), name=f"watch the steps of view {view.epoch}"
        )
        try:
            await stage.train(run)
        finally:
            watching.cancel()
        if run.step >= run.settings.steps:
            return await votes.confirmed(run.step)
        await self._back_up(votes.leavers)
        if group.rank not in votes.leavers:
            return False
        await self.source.leave()
        return True

    async def applied(self) -> None:
        """Note that a step is done: all members have the newest backup. Make the next one if it is due."""
        run, checkpoints = self.run, self.checkpoints
        self.host.trace("applied", run.group.epoch, run.step)
        self._backups = self._backups[-1:]
        if run.step % self._how.backup == 0 and run.step < run.settings.steps:
            await self._back_up(())
        if checkpoints is not None and run.step >= self._due:
            self._due = checkpoints.after(run.step)
            await checkpoints.save(self.host, self._saved(), self._backups[-1].key.step)
        if run.group.size > 1:
            self.observer.step_timer.settled(run.step, self.host.clock.elapsed())

    async def save(self) -> None:
        """Save the newest backup."""
        if self.checkpoints is not None and self._backups:
            await self.checkpoints.save_last(self.host, self._saved(), self._backups[-1].key.step)

    # A view begins.

    async def _synchronise(self, group: Group, view: View) -> StageRank:
        blocks = len(self.task.blocks)
        told = [_Told.read(each, blocks) for each in await gather_echoed(group, self._told(blocks))]
        best = _newest_whole(told, blocks)
        right = 0 if best is None else next(rank for rank, each in enumerate(told) if best in each.held)
        await same_intent(group, self._intent, [each.intent for each in told], right, view)
        if best is None and any(each.held for each in told):
            raise TrainingError(_lost(told, blocks, self.task.name))
        stages = self._how.stages_for(group.size, blocks)
        how = msgspec.structs.replace(self._how, stages=stages)
        stage = await how.part(group, self.settings, self.task)
        learner = self._learner_of(stage)
        if best is not None:
            first, end = stage.cut.span(stage.stage)
            state = await self._brought(group, told, best, self._wanted(first, end))
            restore(learner, self.task, first, state)
        step, position = (0, 0) if best is None else (best.step, best.position)
        sizes = self.batch_sizes(group.size)
        if len(sizes) != group.size:
            raise ConfigError(f"batch = {list(sizes)} is for {len(sizes)} members: give one figure for all")
        batches = Batches.of(self.task, sizes, self.seed, (step, position))
        run = self.enter(group, batches, compressor_of(self.settings, self.seed, group.rank))
        run.learner, run.step, run.pending = learner, step, None
        vars(run).pop("buckets", None)  # they are the stage's
        self._stage, self._lineage = stage, lineage_digest(view)
        self.host.trace("synchronised", view.epoch, step, -1)
        await self._back_up(())
        return stage

    def _learner_of(self, stage: StageRank) -> Learner:
        """Make the stage's model; time goes on to be accounted where it was."""
        before = vars(self).get("learner")
        self.part = stage.task
        self.learner = Learner(self.host, stage.task, optimizer(self.settings), self.seed)
        if before is not None:
            self.learner.ledger = before.ledger
        return self.learner

    def _told(self, blocks: int) -> npt.NDArray[np.int64]:
        numbers = [intent_digest(self._intent)]
        for number in range(_KEPT):
            backup = self._backups[number] if number < len(self._backups) else None
            key = BackupKey(-1, -1, -1, -1) if backup is None else backup.key
            mask = 0 if backup is None else sum(1 << block for block in backup.blocks)
            numbers += [*key, *(mask >> at & (1 << _WORD_BITS) - 1 for at in range(0, blocks, _WORD_BITS))]
        return np.array(numbers, np.int64)

    async def _brought(
        self, group: Group, told: Sequence[_Told], best: BackupKey, wanted: Sequence[int]
    ) -> dict[int, BlockState]:
        """Get the wanted blocks of the backup, and give others what they want."""
        routes, giving, ours = list[tuple[int, int]](), dict[int, StateArrays](), dict[int, BlockState]()
        own = next((backup.blocks for backup in self._backups if backup.key == best), {})
        for taker, span in enumerate(await gather_echoed(group, np.array(wanted, np.int64))):
            needed = [int(block) for block in span if block >= 0]
            lacking = [block for block in needed if block not in told[taker].held.get(best, ())]
            givers = {block: _giver(told, best, block, taker) for block in lacking}
            for giver in sorted({*givers.values()}):
                routes.append((giver, taker))
                if giver == group.rank:
                    parcel = {block: own[block] for block, of in givers.items() if of == giver}
                    giving[taker] = StateArrays(b"", _named(parcel))
            if taker == group.rank:
                ours = {block: own[block] for block in needed if block in own}
        if routes:
            for snapshot in await relay(group, routes, giving):
                ours |= _by_block(snapshot.arrays)
        return ours

    def _wanted(self, first: int, end: int) -> list[int]:
        """Return the blocks that a stage needs, filled up with -1: its own, and those whose parameters it shares."""
        owners = [tie.owner for tie in sequential(self.task).ties if first <= tie.user < end]
        blocks = sorted({*range(first, end), *owners})
        return blocks + [-1] * (len(self.task.blocks) - len(blocks))

    # Backups.

    async def _back_up(self, leavers: Sequence[int]) -> None:
        """Keep a copy of the stage, and send one to the next member that stays."""
        run, stage = self.run, self._stage
        assert stage is not None
        group, seats = run.group, stage.cut.seats
        first, _ = stage.cut.span(stage.stage)
        state = blocks_of(run.learner, self.task, first, optimizer_bytes(self.settings, run.learner.layout))
        moved_bytes = sum(array.nbytes for arrays in state.values() for array in arrays.values())
        await self.host.device.touch(2 * moved_bytes)
        key = BackupKey(group.epoch, run.step, self._lineage, run.batches.position(run.step))
        backup = Backup(key, state)
        routes = _routes(seats, leavers)
        giving = {taker: StateArrays(b"", _named(state)) for giver, taker in routes if giver == group.rank}
        with run.learner.ledger.spent_on("exchange", "backup"):
            for snapshot in await relay(group, routes, giving) if routes else ():
                backup.blocks |= _by_block(snapshot.arrays)
        self._backups = [*self._backups[-1:], backup]

    def _saved(self) -> StateArrays:
        backup = self._backups[-1]
        return StateArrays(msgspec.msgpack.encode(backup.key), _named(backup.blocks))

    def reload(self, checkpoint: StateArrays) -> None:
        """Begin with the blocks of a checkpoint, unless members have newer ones."""
        with fitting():
            key = msgspec.msgpack.decode(checkpoint.about, type=BackupKey)
            # A checkpoint is older than what members hold that went on.
            self._backups = [Backup(key._replace(epoch=-1), _by_block(checkpoint.arrays))]


class _Told(NamedTuple):
    """What a member says of itself."""

    intent: int
    held: dict[BackupKey, frozenset[int]]
    """The blocks of its backups."""

    @classmethod
    def read(cls, numbers: npt.NDArray[np.int64], blocks: int) -> _Told:
        words = len(range(0, blocks, _WORD_BITS))
        held = {}
        for number in range(_KEPT):
            at = 1 + number * (4 + words)
            (*key,) = (int(each) for each in numbers[at : at + 4])
            mask = sum(int(each) << _WORD_BITS * n for n, each in enumerate(numbers[at + 4 : at + 4 + words]))
            if key[1] >= 0:
                held[BackupKey(*key)] = frozenset(block for block in range(blocks) if mask >> block & 1)
        return cls(int(numbers[0]), held)


def _newest_whole(told: Sequence[_Told], blocks: int) -> BackupKey | None:
    """Return the newest backup of which all blocks are there."""
    there: dict[BackupKey, list[int]] = {}
    for each in told:
        for key, held in each.held.items():
            there.setdefault(key, []).extend(sorted(held))
    return max((key for key, held in there.items() if len({*held}) == blocks), default=None)


def _lost(told: Sequence[_Told], blocks: int, name: str) -> str:
    newest = max(key for each in told for key in each.held)
    there = {block for each in told for block in each.held.get(newest, ())}
    missing = ", ".join(str(block) for block in range(blocks) if block not in there)
    return f"the members that are left do not have all of {name}: blocks {missing} were on machines that are gone"


def _giver(told: Sequence[_Told], best: BackupKey, block: int, taker: int) -> int:
    """Return who gives a block: of several members that have it, not always the same."""
    holders = [rank for rank, each in enumerate(told) if block in each.held.get(best, ())]
    return holders[taker % len(holders)]


def _routes(seats: Sequence[Sequence[int]], leavers: Sequence[int]) -> list[tuple[int, int]]:
    """Return from whom to whom backups go: to the next stage whose member stays. The replicas of a stage have the
    same state, and are backups of each other as long as one stays."""
    routes = []
    for stage, seat in enumerate(seats):
        if len([rank for rank in seat if rank not in leavers]) > 1:
            continue
        for replica, giver in enumerate(seat[:1]):
            later = [seats[(stage + far) % len(seats)][replica] for far in range(1, len(seats))]
            taker = next((rank for rank in later if rank not in leavers), None)
            if taker is not None:
                routes.append((giver, taker))
    return routes


def _named(blocks: Mapping[int, BlockState]) -> dict[str, StateArray]:
    return {f"{block}/{name}": array for block, arrays in blocks.items() for name, array in arrays.items()}


def _by_block(arrays: Mapping[str, StateArray]) -> dict[int, BlockState]:
    found: dict[int, BlockState] = {}
    for name, array in arrays.items():
        block, _, rest = name.partition("/")
        found.setdefault(int(block), {})[rest] = array
    return found
