"""A member that holds shards of the model: what becomes of them when members come and go.

A lost member takes its shards along. With `copies=k` each of them is held by k members in a row, all of which apply the
same updates, so that up to k − 1 neighbours may be lost at once. When a view begins, its members tell which shards they
hold, after which step. Those who were in the newest trained view hold the truth; a plan that all compute alike says who
gives which range to whom (`hcsim.training.resharding`), until each member holds its shards of the new view. What a
member held before it keeps until the first update in the new view, which all members have come to by then: if the view
fails earlier, nothing is missing.

If nobody in the view holds a part, all go back to the newest checkpoint that one of them has. If there is none, they
keep what they have and wait for the missing members: a cable may have been pulled. After a while they end training with
an error. A member that leaves in an orderly way gives its shards to the others first.

A checkpoint has the whole model, as that of any strategy: the first member of a view gathers it from the others and
saves it. So it can be loaded by any number of members, which share it out when they meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, cast

import msgspec
import numpy as np

from hcsim.cluster.membership_source import LAST_CALL_PAUSE_S
from hcsim.cluster.view import View
from hcsim.collectives.buffers import array_of
from hcsim.collectives.group import Group
from hcsim.errors import TrainingError
from hcsim.runtime.channel import Phantom
from hcsim.training.elastic.progress import NOTHING_YET, MemberProgress, Provenance, lineage_digest, most_right
from hcsim.training.elastic.replicated import ReplicatedMember
from hcsim.training.elastic.transfer import Contradiction, StateArrays, VoteConflict, gather_echoed, relay
from hcsim.training.learner import fingerprint
from hcsim.training.recoverable import LocalProgress
from hcsim.training.resharding import Holding, Lost, Range, Source, packed, plan, unpacked, whole_of
from hcsim.training.run import Whole
from hcsim.training.sharded import Sharded
from hcsim.training.shards import Piece

MOST_HOLDINGS = 32
"""The shards of which a member tells that it holds them, its present ones first."""


MISSING_MOST_S = 120.0
"""How long members wait for others whose shards nobody else has."""


class _Awaited(Exception):
    """The next view is there, perhaps with the members that were missing."""


class ShardedMember(ReplicatedMember):
    """A member that holds shards and votes."""

    _saves_every = 0
    """After how many steps the first member of the view saves; 0: never."""
    _last: StateArrays | None = None
    """The whole model, if nobody stays when this member leaves."""

    @property
    def _shards(self) -> Sharded:
        return cast(Sharded, self.method)

    async def train(self, group: Group, view: View) -> bool:
        try:
            return await super().train(group, view)
        except _Awaited:
            return False

    async def _resolve(self, truth: MemberProgress) -> None:
        """Do nothing yet: whoever is missing may have applied what these members have not."""

    async def _level(self, group: Group, view: View, headers: list[MemberProgress], right: int) -> list[LocalProgress]:
        try:
            return await self._shared_out(group, headers, right)
        except Lost as lost:
            headers, right = await self._go_back(group, view, lost)
            return await self._shared_out(group, headers, right)

    async def _shared_out(self, group: Group, headers: list[MemberProgress], right: int) -> list[LocalProgress]:
        """Bring each member to hold its shards of this view."""
        method, truth = self._shards, headers[right]
        self._saves_every = (await self._told_numbers(group, [self._every]))[0][0]
        if truth.epoch < 0:
            method.begin_again()
            method.hold_first(group)
            return [LocalProgress(0, 0)] * group.size
        steps = [max(each.step, each.pending + 1 if truth.step > each.pending else 0) for each in headers]
        newest = [each.trained == truth.trained for each in headers]
        step = max(step for step, new in zip(steps, newest, strict=True) if new)
        holds = [new and each == step for new, each in zip(newest, steps, strict=True)]
        have = await self._told_holdings(group, holds=holds[group.rank])
        shards = [method.shards_of(each, group.size) for each in range(group.size)]
        want = [[Holding(group.size, shard) for shard in each] for each in shards]
        plan(method.buckets, have, want)  # before anything changes, is everything there?
        await super()._resolve(truth)
        await self._reshard(group, have, want, holds)
        await self._compare_copies(group, shards)
        return [LocalProgress(0, self.run.step)] * group.size

    @property
    def _every(self) -> int:
        return self.checkpoints.every if self.checkpoints is not None else 0

    async def _told_holdings(self, group: Group, *, holds: bool) -> list[list[Holding]]:
        ours = self._shards.holdings[:MOST_HOLDINGS] if holds else []
        words = [number for each in ours for number in each]
        told = await self._told_numbers(group, words + [0] * (2 * MOST_HOLDINGS - len(words)))
        return [
            [Holding(*pair) for pair in zip(each[::2], each[1::2], strict=True) if 0 <= pair[1] < pair[0]]
            for each in told
        ]

    async def _told_numbers(self, group: Group, ours: Sequence[int]) -> list[list[int]]:
        return [[int(number) for number in each] for each in await gather_echoed(group, np.array(ours, np.int64))]

    async def _reshard(
        self, group: Group, have: list[list[Holding]], want: list[list[Holding]], holds: Sequence[bool]
    ) -> None:
        """Hold what this rank is to hold; a rank that is to hold nothing keeps what it has."""
        method, rank = self._shards, group.rank
        ranges = plan(method.buckets, have, want)
        for taker, is_right in enumerate(holds):
            if not is_right and not any(route[1] == taker for route in ranges):
                ranges[holds.index(True), taker] = []  # it has to learn at least where the others are
        routes = sorted(ranges)
        pieces = method.pieces if holds[rank] else []
        giving = {taker: self._parcel(pieces, ranges[giver, taker]) for giver, taker in routes if giver == rank}
        ours = [Source.of(piece) for piece in pieces]
        about: Provenance | None = None
        coming = [route for route in routes if route[1] == rank]
        for route, parcel in zip(coming, await relay(group, routes, giving) if routes else [], strict=True):
            about = parcel.told(Provenance)
            ours += unpacked(parcel.arrays, ranges[route])
        if not want[rank]:
            return
        if not holds[rank]:
            method.begin_again()
        if method.holdings[: len(want[rank])] != want[rank]:
            method.hold(want[rank][0].shards, [each.shard for each in want[rank]], ours)
        self.run.whole = Whole()
        if about is not None and not holds[rank]:
            self.provenance, self.run.step = about, about.step
            self._reloaded = False

    def _parcel(self, pieces: Sequence[Piece], ranges: Sequence[Range]) -> StateArrays:
        about = msgspec.structs.replace(self.provenance, step=self.run.step, since=self._since, memory=False)
        arrays = packed(pieces, ranges) if ranges else {}
        return StateArrays(msgspec.msgpack.encode(about), arrays)

    async def _compare_copies(self, group: Group, want: Sequence[Sequence[int]]) -> None:
        """Raise if two members hold unlike copies of a shard."""
        method = self._shards
        assert method.state is not None
        prints = []
        for shard in method.state.held:
            values = [piece.values for piece in method.state.pieces[shard]]
            plain = [array_of(each) for each in values if not isinstance(each, Phantom)]
            prints.append(fingerprint(np.concatenate(plain)) if plain else 0)
        told = await self._told_numbers(group, [self.run.step, *prints])
        seen: dict[int, tuple[int, int]] = {}
        for rank, (shards, (step, *theirs)) in enumerate(zip(want, told, strict=True)):
            for shard, found in zip(shards, theirs, strict=True):
                first, value = seen.setdefault(shard, (rank, found))
                if value != found or step != told[0][0]:
                    text = f"rank {first} and rank {rank} hold unlike copies of shard {shard}"
                    raise Contradiction(text, phase="synchronising", doubts=(VoteConflict(first, rank, text),))

    async def _go_back(self, group: Group, view: View, lost: Lost) -> tuple[list[MemberProgress], int]:
        """Load this member's newest checkpoint; return the progress of all. If there is none, wait for the members that
        are missing."""
        saved = self.checkpoints.load() if self.checkpoints is not None else None
        if not any(told[0] for told in await self._told_numbers(group, [saved is not None])):
            await self._wait_for_others(group, view, lost)
        self._shards.begin_again()
        self.run.drop()
        self.provenance, self.run.step = NOTHING_YET, 0
        if saved is not None:
            self._reload(saved)
        ours = np.array(self._header().numbers(), np.int64)
        headers = [MemberProgress.read(each) for each in await gather_echoed(group, ours)]
        right = most_right(headers, lineage_digest(view))
        self.host.trace("went back", view.epoch, headers[right].step)
        return headers, right

    async def _wait_for_others(self, group: Group, view: View, lost: Lost) -> NoReturn:
        """Keep what is held until members come back, or the time is up."""
        clock = self.host.clock
        until_s = clock.elapsed() + MISSING_MOST_S
        self.host.trace("waits for shards", view.epoch)
        while True:
            ours = [self.source.superseded(view.epoch), clock.elapsed() >= until_s]
            told = await self._told_numbers(group, ours)
            if any(superseded for superseded, _ in told):
                raise _Awaited
            if any(over for _, over in told):
                name = self.settings.strategy.partition(":")[0]
                raise TrainingError(
                    f"{lost}, which did not come back within {MISSING_MOST_S:g} s, and there is no checkpoint; more "
                    f"copies ({name}:copies=2) let members be lost"
                )
            await clock.sleep(LAST_CALL_PAUSE_S)

    # What is saved and handed over.

    async def applied(self) -> None:
        run, group = self.run, self.run.group
        due = bool(self._saves_every) and run.step % self._saves_every == 0
        if due and not self.task.phantom:
            whole = await self._whole(group)
            if whole is not None and self.checkpoints is not None:
                await self.checkpoints.save(self.host, whole, run.step)
        self._due = run.settings.steps + 1  # saved above, by all together
        await super().applied()

    async def _whole(self, group: Group) -> StateArrays | None:
        """Gather the state of all members on the first one."""
        method = self._shards
        assert method.state is not None
        nobody: list[list[Holding]] = [[] for _ in range(group.size)]
        have = [
            [Holding(group.size, shard) for shard in method.shards_of(rank, group.size)] for rank in range(group.size)
        ]
        ranges = plan(method.buckets, have, [[Holding(1, 0)], *nobody[1:]])
        routes = sorted(ranges)
        giving = {taker: self._parcel(method.pieces, ranges[giver, taker])
                  for giver, taker in routes if giver == group.rank}  # fmt: skip
        parcels = await relay(group, routes, giving) if routes else []
        if group.rank:
            return None
        sources = [Source.of(piece) for piece in method.pieces]
        for route, parcel in zip(routes, parcels, strict=True):
            sources += unpacked(parcel.arrays, ranges[route])
        return StateArrays(self._parcel([], []).about, whole_of(sources, method.learner.layout.length))

    async def _hand_over(self, group: Group, leavers: tuple[int, ...]) -> None:
        """Give the shards of leaving members to those who stay. If nobody does, the first one saves the whole model."""
        method = self._shards
        staying = [rank for rank in range(group.size) if rank not in leavers]
        if not staying:
            self._last = await self._whole(group) if self._saves_every and not self.task.phantom else None
            return
        have = [
            [Holding(group.size, shard) for shard in method.shards_of(rank, group.size)] for rank in range(group.size)
        ]
        want: list[list[Holding]] = [[] for _ in range(group.size)]
        for place, rank in enumerate(staying):
            want[rank] = [Holding(len(staying), shard) for shard in method.shards_of(place, len(staying))]
        await self._reshard(group, have, want, [True] * group.size)
        await group.barrier()  # whoever leaves has given all

    async def save(self) -> None:
        """Save the whole model if this member has it, and nobody has stayed."""
        if self.checkpoints is not None and self._last is not None:
            await self.checkpoints.save_last(self.host, self._last, self.run.step)
