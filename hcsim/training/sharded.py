"""Sharded training: the ranks share out what data parallelism keeps on each of them.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020
(https://arxiv.org/abs/1910.02054). Ψ are the bytes of the gradients, n the ranks; a rank sends

    zero1   The optimizer's state is sharded. Gradients are reduce-scattered in buckets while the backward pass goes
            on; each rank updates its shard; the new parameters are gathered.                         2 Ψ (n − 1) / n
    zero2   Gradients too: a bucket's are there from the backward pass through its first block until it is
            reduce-scattered. The forward pass goes block by block.                                   2 Ψ (n − 1) / n
    zero3   Parameters too: those of a block are gathered before its forward and before its backward pass, while the
            rank computes with the block before, and released afterwards.                             3 Ψ (n − 1) / n

as many bytes as an all-reduce sends, or half as many again. All ranks hold the bits that data parallelism would lead
to, where the sums are added in the same order: by the ring or directly, of the same buckets (those of zero3 are single
blocks), or among two ranks. Elsewhere they differ by rounding, as two algorithms of an all-reduce do. The norm for
clipping is a sum over the shards, in their order; it is the same on all ranks.

With `shards=N` each N ranks in a row shard among themselves, and ranks with the same shard sum their gradients of it
(hybrid sharding: 2 or 3 Ψ (N − 1) / N, and an all-reduce of Ψ / N).

With `copies=k` each shard is held by k ranks. Its owner sends them the averaged gradients, Ψ (k − 1) / n, and all apply
the same update. So the others can go on when up to k − 1 ranks in a row are lost: see `hcsim.training.elastic.sharded`.

An update changes a rank's own shards alone. All communication is before the ranks agree on it, or after it counts.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import sqrt
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from msgspec.structs import replace

from hcsim.collectives.buffers import array_of, empty_like, length_of, part_of
from hcsim.collectives.group import Group
from hcsim.compressors.encoding import check_input
from hcsim.config.training import Training
from hcsim.errors import ConfigError, UsageError
from hcsim.runtime.channel import Phantom
from hcsim.runtime.host import Work
from hcsim.training.balance import EVERY_STEPS
from hcsim.training.blockwise import BlockwiseReplica, tied_blocks
from hcsim.training.layout import Bucket
from hcsim.training.learner import Learner, StateArray
from hcsim.training.optimizer import Optimizer, clip_scale, update_work
from hcsim.training.recoverable import LocalProgress, Recoverable, SharedState, all_of
from hcsim.training.resharding import Holding, Source, fill
from hcsim.training.run import Run, Whole
from hcsim.training.shards import HeldShards, Partition, Piece, held_shards
from hcsim.training.task import Flat, backward_work, block_forward_work

Stage = Literal[1, 2, 3]
_UNDER_WAY = 1
"""Buckets that are reduced while the next one is computed: gradients that are not kept are there until then."""


class Ranks(NamedTuple):
    """The groups that a rank is in."""

    near: Group
    """The ranks that share out the shards."""
    far: Group | None
    """Those that hold the same shard, if there are others."""

    @classmethod
    def of(cls, group: Group, shards: int | None) -> Ranks:
        if shards is None or shards == group.size:
            return cls(group, None)
        if group.size % shards:
            raise ConfigError(f"shards={shards}: {group.size} ranks cannot be cut into groups of {shards}")
        first = group.rank - group.rank % shards
        near = group.subgroup(range(first, first + shards))
        return cls(near, group.subgroup(range(group.rank % shards, group.size, shards)))


class Sharded(Recoverable):
    """Each rank updates its shard of the model."""

    def __init__(
        self, learner: Learner, settings: Training, optimizer: Optimizer, stage: Stage, shards: int | None, copies: int
    ) -> None:
        self.learner = learner
        self.copies = copies
        self.optimizer = optimizer
        self.state: HeldShards | None = None
        self.spare: list[HeldShards] = []
        """What was held before, in the same step."""
        self.stage = stage
        self.buckets = learner.layout.buckets(1 if stage == 3 else settings.bucket_bytes)
        """The units of exchange."""
        self._shards = shards
        self._ranks: Ranks | None = None
        self._scale: np.float32 | None = None

    @property
    def synchronised(self) -> Flat:
        """All parameters, where every rank has them; there is nothing else that all have."""
        if self.stage < 3:
            return self.learner.replica.parameters
        return Phantom(0) if self.learner.task.phantom else np.zeros(0, np.float32)

    def shared(self) -> SharedState:
        """Return nothing: shards are handed over part by part."""
        return {}

    def adopt(self, held: Mapping[str, StateArray], step: int) -> None:
        """Hold the whole model of a checkpoint, until it is shared out."""
        parameters, size = held["parameters"], self.learner.layout.length
        if isinstance(parameters, Phantom) or parameters.shape != (size,):
            raise UsageError(f"these are not the {size} parameters of this model")
        prefix = "optimizer/"
        arrays = {n.removeprefix(prefix): a for n, a in held.items() if n.startswith(prefix)}
        state = {n: a for n, a in arrays.items() if not isinstance(a, Phantom)}
        each = {n: a for n, a in state.items() if a.dtype == np.float32 and a.shape == (size,)}
        common = {n: a for n, a in state.items() if n not in each}
        self.begin_again()
        self.hold(1, (0,), [Source(0, parameters.view(np.float32), each, common)])

    def progress(self, run: Run) -> LocalProgress:
        return LocalProgress(0, run.step)

    def take_over(self, progress: Sequence[LocalProgress]) -> None: ...

    async def train(self, run: Run) -> None:
        self._ranks = Ranks.of(run.group, self._shards)
        if self.state is None:
            self.hold_first(self._ranks.near)
        run.assemble = partial(self._assemble, run)
        self._forget(run)
        try:
            await self._refresh(run)
            for step in run.steps():
                await run.rebalance(EVERY_STEPS)
                self._forget(run)
                loss = await _Step(self, run, step).reduced()
                await self._find_scale(run.settings.clip)
                await run.settle(step, partial(self._update, run, step), loss)
            if run.step >= run.settings.steps and (run.whole is None or run.whole.sha256 is None):
                await self._refresh(run)
                await self._assemble_whole(run)
        finally:
            run.assemble = None

    # What is held.

    def begin_again(self) -> None:
        """Hold nothing, so that training begins with the first values."""
        self.state, self.spare = None, []

    def hold_first(self, near: Group) -> None:
        """Hold the values that training begins with."""
        state = HeldShards(Partition(self.buckets, near.size), self.shards_of(near.rank, near.size), self.optimizer)
        values: dict[int, list[Flat]] = {shard: [] for shard in state.held}
        for number, bucket in enumerate(self.buckets):
            first = self.first_values(bucket)
            for shard in state.held:
                lo, hi = state.partition.part(number, shard)
                values[shard].append(self.place(bucket.lo + lo, part_of(first, lo, hi)))
        for shard, parts in values.items():
            state.hold(shard, parts)
        self.state = state

    def hold(self, shards: int, held: Sequence[int], sources: Sequence[Source]) -> None:
        """Hold these shards, which the sources have. What was held stays until the next update, since others may still
        need it."""
        state = HeldShards(Partition(self.buckets, shards), held, self.optimizer)
        for shard in state.held:
            state.hold(shard, [self.place(lo, self.room(lo, hi)) for lo, hi in state.partition.spans(shard)])
        fill(state, sources)
        if self.state is not None:
            self.spare.append(self.state)
        self.state = state

    def shards_of(self, rank: int, ranks: int) -> tuple[int, ...]:
        return held_shards(rank, ranks, self.copies)

    @property
    def holdings(self) -> list[Holding]:
        """All that this rank holds."""
        states = [self.state, *self.spare] if self.state is not None else []
        return [Holding(state.partition.shards, shard) for state in states for shard in state.held]

    @property
    def pieces(self) -> list[Piece]:
        states = [self.state, *self.spare] if self.state is not None else []
        return [piece for state in states for piece in state.each()]

    def room(self, lo: int, hi: int) -> Flat:
        """Return memory for a part of a shard."""
        parameters = self.learner.replica.parameters
        if self.stage < 3 or self.learner.task.phantom:
            return part_of(parameters, lo, hi)
        return np.empty(hi - lo, np.float32)

    def first_values(self, bucket: Bucket) -> Flat:
        """Return the values with which the bucket's parameters begin."""
        replica = self.learner.replica
        if self.stage < 3 or (isinstance(replica.parameters, Phantom) and self.learner.task.phantom):
            return part_of(replica.parameters, bucket.lo, bucket.hi)
        drawn = [array_of(cast(BlockwiseReplica, replica).fresh(block)) for block in bucket.blocks]
        return np.concatenate([*drawn, np.empty(0, np.float32)])

    def place(self, lo: int, values: Flat) -> Flat:
        """Return where a part of a shard is kept that begins at `lo` of the flat array, with these values."""
        if isinstance(values, Phantom):
            return values
        if self.stage == 3:
            return np.array(values)
        kept = part_of(self.learner.replica.parameters, lo, lo + length_of(values))
        if not np.may_share_memory(array_of(kept), values):
            np.copyto(array_of(kept), values)
        return kept

    def _forget(self, run: Run) -> None:
        """Let go of parameters that were gathered to be evaluated."""
        if self.stage == 3:
            run.whole = Whole()

    # After a step.

    async def _find_scale(self, max_norm: float | None) -> None:
        """Find by what the averaged gradients are multiplied, for which all shards are needed."""
        self._scale = None
        if max_norm is None:
            return
        state, near = self._held, self._near
        moved_bytes = sum(each.nbytes for each in state.gradients.values())
        found = await self.learner.run(update_work(3.0 * moved_bytes / 4, 3.0 * moved_bytes), state.squares, "clip")
        with self.learner.ledger.spent_on("exchange", "norm"):
            told = await near.all_gather(np.array([found]))
        self._scale = clip_scale(sqrt(sum(float(array_of(each)[0]) for each in told)), max_norm)

    async def _update(self, run: Run, step: int) -> None:
        state = self._held
        self.spare = []
        work = replace(self.optimizer.work(state.length), steps=1)
        await self.learner.run(work, partial(state.step, run.lr(step), self._scale), "update")
        run.whole = Whole() if self.stage == 3 or self._near.size > 1 else None

    async def _assemble(self, run: Run, evaluates: bool) -> None:
        if self.stage < 3:
            await self._refresh(run)
        elif evaluates:
            await self._assemble_whole(run)

    async def _refresh(self, run: Run) -> None:
        """Gather the parameters where every rank has all of them."""
        if self.stage == 3 or run.whole is None:
            return
        state = self._held
        with self.learner.ledger.spent_on("exchange", "gather"):
            gathered = []
            for number, piece in enumerate(state.pieces[state.own]):
                bucket = state.partition.buckets[number]
                if bucket.hi > bucket.lo:
                    into = part_of(self.learner.replica.parameters, bucket.lo, bucket.hi)
                    gathered.append(self.gathered(number, piece.values, into, run.settings.algorithm))
            await asyncio.gather(*gathered)
        run.whole = None

    async def _assemble_whole(self, run: Run) -> None:
        """Gather the parameters on the rank that evaluates them, and compute their digest on all. This is not part of a
        step: neither its time nor what it sends counts."""
        if self.stage < 3 or self.learner.task.phantom:
            return
        replica = cast(BlockwiseReplica, self.learner.replica)
        state, sha256 = self._held, hashlib.sha256()
        kept = None if isinstance(replica.parameters, Phantom) else replica.parameters
        if kept is None and run.group.rank == run.lead:
            kept = np.empty(self.learner.layout.length, np.float32)
        with run.unaccounted():
            for number, bucket in enumerate(state.partition.buckets):
                if bucket.hi > bucket.lo:
                    into = replica.room(bucket.lo, bucket.hi) if kept is None else part_of(kept, bucket.lo, bucket.hi)
                    values = state.pieces[state.own][number].values
                    await self.gathered(number, values, into, run.settings.algorithm)
                    sha256.update(array_of(into).data)
        run.whole = Whole(kept, sha256.hexdigest())

    def gathered(self, number: int, values: Flat, into: Flat, algorithm: str) -> asyncio.Task[Any]:
        counts = self._held.partition.counts(number)
        return self._near.all_gather(values, counts, into=into, algorithm=algorithm, bucket=number)

    @property
    def parts(self) -> tuple[HeldShards, Ranks]:
        """The shards of this rank, and its groups."""
        assert self._ranks is not None
        return self._held, self._ranks

    @property
    def _held(self) -> HeldShards:
        assert self.state is not None
        return self.state

    @property
    def _near(self) -> Group:
        assert self._ranks is not None
        return self._ranks.near


class _Step:
    """The gradients of one step, from the forward pass until each rank has those of its shards."""

    def __init__(self, method: Sharded, run: Run, step: int) -> None:
        counts = run.batches.counts(step)
        self._method = method
        self._run = run
        self._step = step
        self._batch = run.batches.batch(step, run.group.rank)
        self._weight = counts[run.group.rank] / sum(counts)
        self._state, (self._near, self._far) = method.parts
        self._algorithm = run.settings.algorithm
        self._closing = {bucket.blocks[-1]: n for n, bucket in enumerate(self._state.partition.buckets)}
        self._tied = tied_blocks(run.task)
        self._kept: dict[int, Flat] = {}
        """The parameters of tied blocks, from the forward to the backward pass."""
        self._visits: Iterator[int] = iter(())
        """The blocks to come, in both passes."""
        self._ahead: Flat = Phantom(0)
        """The parameters of the block that comes next."""
        self._pending: list[asyncio.Task[Any]] = []
        self._under_way = asyncio.Semaphore(_UNDER_WAY if method.stage > 1 else len(self._closing))
        self._reducing: list[asyncio.Task[Any]] = []
        self._gathering: list[asyncio.Task[Any]] = []
        """The block that comes next, if it is not there yet."""

    async def reduced(self) -> float:
        """Return the loss once all gradients are averages."""
        try:
            if self._method.stage == 1:
                loss = await self._run.learner.gradients(self._batch, self._ready)
            else:
                loss = await self._block_by_block(cast(BlockwiseReplica, self._run.learner.replica))
            with self._run.learner.ledger.spent_on("exchange"):
                await all_of(self._pending, self._run, self._step)
        except BaseException:
            left = [*self._pending, *self._gathering]
            for each in left:
                each.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            raise
        return loss

    async def _ready(self, block: int) -> None:
        """Reduce a bucket of gradients that are there all the time."""
        if block in self._closing:
            bucket = self._state.partition.buckets[self._closing[block]]
            await self._reduce(self._closing[block], part_of(self._run.learner.replica.gradients, bucket.lo, bucket.hi))

    async def _block_by_block(self, replica: BlockwiseReplica) -> float:
        learner, task = self._run.learner, self._run.task
        samples, loss = len(self._batch), float("nan")
        if samples:
            replica.begin(self._batch)
        forward = range(len(task.blocks))
        self._visits = iter((*forward, *reversed(forward)))
        self._ahead = self._room_for(next(self._visits))
        for block in forward:
            parameters = await self._parameters()
            if samples:
                work = block_forward_work(task.blocks[block], samples)
                function = partial(replica.forward_block, block, parameters)
                loss = await learner.run(work, function, f"forward {block}")
                del function
            del parameters  # before room is made for the next one
        buckets = {block: bucket for bucket in self._state.partition.buckets for block in bucket.blocks}
        slopes_of: dict[int, Flat] = {}
        for block in self._tied:
            bucket, (lo, hi) = buckets[block], self._range(block)
            slopes_of[bucket.number] = gradients = replica.slopes(bucket.lo, bucket.hi)
            if samples:
                tied = partial(replica.gather_slopes, block, part_of(gradients, lo - bucket.lo, hi - bucket.lo))
                await learner.run(Work(kernels=0), tied)
                del tied
            del gradients
        for block in reversed(forward):
            bucket = buckets[block]
            if block == bucket.blocks[0] and bucket.number not in slopes_of:
                await self._reduced_but(_UNDER_WAY)
                slopes_of[bucket.number] = replica.slopes(bucket.lo, bucket.hi)
            gradients = slopes_of[bucket.number]
            parameters = await self._parameters()
            if samples:
                lo, hi = self._range(block)
                slopes = part_of(gradients, lo - bucket.lo, hi - bucket.lo)
                compute = partial(replica.backward_block, block, parameters, slopes)
                into = None if isinstance(slopes, Phantom) or lo == hi else slopes.data
                await learner.run(backward_work(task.blocks[block], samples), compute, f"backward {block}", into)
                del compute, slopes, into
            del parameters
            if block in self._closing:
                del slopes_of[bucket.number]
                await self._reduce(self._closing[block], gradients)
            del gradients
        return loss

    async def _parameters(self) -> Flat:
        """Return the parameters of the next block, and begin to gather those of the one after it."""
        if self._gathering:
            with self._run.learner.ledger.spent_on("exchange", "gather"):
                await self._gathering.pop()
        parameters, following = self._ahead, next(self._visits, None)
        self._ahead = Phantom(0) if following is None else self._room_for(following)
        return parameters

    def _room_for(self, block: int) -> Flat:
        """Return where the parameters of a block are, and begin to gather them."""
        lo, hi = self._range(block)
        replica = cast(BlockwiseReplica, self._run.learner.replica)
        if self._method.stage < 3 or lo == hi:
            whole = replica.parameters if self._method.stage < 3 else replica.room(0, 0)
            return part_of(whole, lo, hi)
        if block in self._kept:
            return self._kept.pop(block)
        number = self._closing[block]
        into = replica.room(lo, hi)
        if block in self._tied:
            self._kept[block] = into
        values = self._state.pieces[self._state.own][number].values
        self._gathering.append(self._method.gathered(number, values, into, self._algorithm))
        return into

    def _range(self, block: int) -> tuple[int, int]:
        tensors = self._run.learner.layout.blocks[block]
        return (tensors[0].offset, tensors[-1].span.stop) if tensors else (0, 0)

    async def _reduce(self, number: int, gradients: Flat) -> None:
        bucket = self._state.partition.buckets[number]
        await self._run.commit.admit(gradients, replace(bucket, lo=0, hi=bucket.hi - bucket.lo))
        name = f"gradients of step {self._step}, bucket {number}"
        self._pending.append(self._run.group.host.spawn(self._share_out(number, bucket, gradients), name=name))
        self._reducing.append(self._pending[-1])

    async def _reduced_but(self, most: int) -> None:
        """Wait until no more than so many buckets are under way."""
        while len(self._reducing) > most:
            with self._run.learner.ledger.spent_on("exchange"):
                await self._reducing.pop(0)

    async def _share_out(self, number: int, bucket: Bucket, gradients: Flat) -> None:
        """Bring the average of each part to those who hold its shard."""
        state, near = self._state, self._near
        async with self._under_way:
            await self._run.group.host.device.touch(2 * bucket.size_bytes)
            if not isinstance(gradients, Phantom):
                gradients *= np.float32(self._weight)
            mine = self._room(number, state.own, gradients)
            if bucket.hi > bucket.lo:
                counts = state.partition.counts(number)
                await near.reduce_scatter(
                    gradients, counts=counts, into=mine, algorithm=self._algorithm, bucket=number, spends=True
                )
        if self._far is not None and length_of(mine):
            await self._far.all_reduce(mine, bucket=number)
        if not isinstance(mine, Phantom):
            check_input(mine, bucket.tensors[0].name if bucket.tensors else "")
        state.gradients[state.own, number] = mine
        for back, shard in enumerate(state.held[1:], 1):
            into = self._room(number, shard, gradients)
            to, source = (near.rank + back) % near.size, (near.rank - back) % near.size
            await near.sendrecv(mine, to, into, source, tag=number * near.size + back)
            state.gradients[shard, number] = into

    def _room(self, number: int, shard: int, gradients: Flat) -> Flat:
        """Return a place for averages. Where all gradients are kept, it is that of this rank's own: they have been sent
        by the time that others come there."""
        lo, hi = self._state.partition.part(number, shard)
        return part_of(gradients, lo, hi) if self._method.stage == 1 else empty_like(gradients, hi - lo)
