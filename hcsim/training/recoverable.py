"""Strategies that can go on with other ranks: the state that their members share, and how training goes on from it.

With fixed ranks the same `train` runs once, from the first step to the last.

ddp, hierarchical   every member has the model and the optimizer's state, alike to the last bit. In every step
                    all apply the average of all members' gradients. They are exchanged in buckets, from the
                    last layer to the first, and a bucket is sent as soon as its last block is computed:
                    communication overlaps with the backward pass (Li et al., "PyTorch Distributed", VLDB 2020).
                    The average is weighted by samples, so N members do what one process would do with the
                    joined batch; clipping comes after the average.
single              the same: the fastest member computes with all batches and broadcasts the gradients to the
                    others, which keep replicas. That is the price of not depending on one machine.
local_sgd, diloco   every member takes H steps of its own. Then they average their changes, weighted by samples,
                    and an outer optimizer takes that average as its gradient:

                        Δ_r = θ_last − θ_r      Δ = Σ w_r Δ_r      θ ← outer(θ_last, Δ)

                    With an outer step of one and no momentum this is local SGD (Stich, "Local SGD Converges
                    Fast and Communicates Little", ICLR 2019): the parameters are averaged. With Nesterov
                    momentum it is DiLoCo (Douillard et al., 2023, arXiv 2311.08105). Compression is of Δ. The
                    last steps of a run that H does not divide are exchanged at the end.

                    The anchor θ_last, where all last agreed, and the outer optimizer are shared. The changes
                    since then and the inner optimizer are local. A newcomer starts from the anchor, with a
                    fresh inner optimizer; in the middle of a period its change is zero. With pace=speed the
                    fastest member takes H steps, and the others as many as they finish meanwhile; weights are
                    still those of the samples, so each sample counts alike. A run counts the fastest one's steps
                    that were exchanged. A failed exchange can be tried again, with other members too: each
                    still has its change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple, Protocol, TypeAlias, cast

import numpy as np

from hcsim.collectives.failure_domain import TOLD
from hcsim.collectives.group import Group
from hcsim.compressors.base import Array
from hcsim.errors import CollectiveError, UsageError
from hcsim.runtime.channel import Phantom
from hcsim.training.aggregation import Aggregator
from hcsim.training.balance import EVERY_STEPS, StepCost, fastest
from hcsim.training.layout import Bucket
from hcsim.training.learner import Learner, StateArray
from hcsim.training.optimizer import Optimizer, Stepper
from hcsim.training.run import Run
from hcsim.training.task import Flat

SharedState: TypeAlias = dict[str, StateArray]
Pace: TypeAlias = Literal["alike", "speed"]
"""Whether members take the same number of steps in a period, or as many as they can."""


class LocalProgress(NamedTuple):
    """The progress of a member since the last exchange."""

    samples: int = 0
    gone: int = 0
    """Steps taken, exchanged or not."""


class Recoverable(Protocol):
    """A strategy on one rank that can go on with other members."""

    by_speed: bool = False
    """Whether it needs to know what steps cost the members."""
    period: int | None = None
    """The steps of a period, of which members take as many as they can."""

    @property
    def synchronised(self) -> Flat:
        """The array that must be the same on all members before every update."""

    def shared(self) -> SharedState:
        """Return the state that a newcomer needs."""

    def adopt(self, held: Mapping[str, StateArray], step: int) -> None:
        """Go on from the shared state of another member after `step` steps."""

    def progress(self, run: Run) -> LocalProgress:
        """Return this member's progress, for the other members."""

    def take_over(self, progress: Sequence[LocalProgress]) -> None:
        """Take over the progress of all members, by their new ranks."""

    def compresses(self, group: Group) -> bool:
        """Return whether this member's compressor is used in the group and needs the shared state."""
        return True

    def follow(self, costs: Sequence[StepCost], samples: int) -> None:
        """Take note of what steps cost the members, by rank, and of how many samples they share, if it needs that."""
        return

    def batch_sizes(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the number of samples for each member, given their batch sizes."""
        return tuple(sizes)

    async def train(self, run: Run) -> None:
        """Go on from the run's step, until training or the present view ends."""


class Replicated(Recoverable):
    """All members hold the model, and apply the same updates to it."""

    def __init__(self, learner: Learner, aggregator: Callable[[Run], Aggregator]) -> None:
        self._learner = learner
        self._aggregator = aggregator

    @property
    def synchronised(self) -> Flat:
        return self._learner.replica.parameters

    def shared(self) -> SharedState:
        return {"parameters": self.synchronised, **_state(self._learner.stepper)}

    def adopt(self, held: Mapping[str, StateArray], step: int) -> None:
        _fill(self.synchronised, held["parameters"])
        _restore(self._learner.stepper, held)

    def progress(self, run: Run) -> LocalProgress:
        """Return the run's step: every step taken is agreed on."""
        return LocalProgress(0, run.step)

    def take_over(self, progress: Sequence[LocalProgress]) -> None: ...

    async def train(self, run: Run) -> None:
        aggregator = self._aggregator(run)
        for step in run.steps():
            await run.rebalance(EVERY_STEPS)
            counts = run.batches.counts(step)
            exchange = StepExchange(run, aggregator, step, counts[run.group.rank] / sum(counts))
            loss = await run.learner.gradients(run.batches.batch(step, run.group.rank), exchange.ready)
            with run.learner.ledger.spent_on("exchange"):
                await exchange.done()
            await run.settle(step, partial(run.update, step), loss)


class HierarchicalReplicated(Replicated):
    """One member of each home represents it in the exchange between homes."""

    def compresses(self, group: Group) -> bool:
        """Only the representatives of the homes compress."""
        return any(home[0] == group.rank for home in group.options.groups)


class OneComputes(Replicated):
    """The fastest member computes; the others apply its gradients."""

    by_speed = True

    def compresses(self, group: Group) -> bool:
        return False

    def __init__(self, learner: Learner) -> None:
        super().__init__(learner, lambda run: _Told(run.group, self._fastest))
        self._fastest = 0

    def follow(self, costs: Sequence[StepCost], samples: int) -> None:
        self._fastest = fastest(costs, samples)

    def batch_sizes(self, sizes: Sequence[int]) -> tuple[int, ...]:
        one = self._fastest if self._fastest < len(sizes) else 0  # until the members of a view have compared
        return tuple(sum(sizes) if rank == one else 0 for rank in range(len(sizes)))

    async def train(self, run: Run) -> None:
        """With fixed ranks no replicas are needed: only the fastest rank trains, as the baseline."""
        run.lead = 0 if run.group.options.views_change else self._fastest
        if run.group.options.views_change:
            await super().train(run)
        elif run.group.rank == self._fastest:
            for step in run.steps():
                joined = [run.batches.batch(step, rank) for rank in range(run.group.size)]
                loss = await run.learner.gradients(np.concatenate(joined))
                await run.settle(step, partial(run.update, step), loss)


class Periodic(Recoverable):
    """Members take steps of their own, and exchange their changes after each `every` steps (of the fastest)."""

    def __init__(
        self,
        learner: Learner,
        aggregator: Callable[[Run], Aggregator],
        every: int,
        inner: Optimizer,
        outer: Optimizer,
        pace: Pace = "alike",
    ) -> None:
        self._learner = learner
        self._aggregator = aggregator
        self._every = every
        self.period = every if pace == "speed" else None
        self._inner = inner
        parameters = learner.replica.parameters
        self._anchor = parameters if isinstance(parameters, Phantom) else parameters.copy()
        self._outer = outer.open(self._anchor)
        self._outer_work = outer.work(learner.layout.length)
        self._step = 0
        """Steps taken, exchanged or not."""
        self._samples: list[int] = []
        """By rank, since the last exchange."""
        self._loss = float("nan")

    @property
    def synchronised(self) -> Flat:
        return self._anchor

    def shared(self) -> SharedState:
        """Return the anchor, and the state of the outer optimizer."""
        return {"parameters": self.synchronised, **_state(self._outer)}

    def adopt(self, held: Mapping[str, StateArray], step: int) -> None:
        _fill(self.synchronised, held["parameters"])
        _restore(self._outer, held)
        self._again(step)

    def progress(self, run: Run) -> LocalProgress:
        return LocalProgress(self._samples[run.group.rank] if self._samples else 0, self._step)

    def take_over(self, progress: Sequence[LocalProgress]) -> None:
        """Take over the progress of all members. A member that has taken no step, while others have, skips this
        period."""
        self._samples = [each.samples for each in progress]
        self._step = max(each.gone for each in progress)

    async def train(self, run: Run) -> None:
        aggregator = self._aggregator(run)
        for start in run.steps():
            await run.rebalance(1)
            end = min((start // self._every + 1) * self._every, run.settings.steps)
            self._samples = self._samples or [0] * run.group.size
            for step in range(self._step, end):
                if run.batches.takes_part(step, run.group.rank):
                    batch = run.batches.batch(step, run.group.rank)
                    self._loss = await run.learner.gradients(batch, _stops_with(run.group))
                    await run.update(step)
                self._samples = [sum(pair) for pair in zip(self._samples, run.batches.counts(step), strict=True)]
                self._step = step + 1
                if step + 1 < end:
                    await run.note(step + 1, self._loss)
            await self._exchange(run, aggregator, end - 1)
            if run.step < end:
                self._again(start)  # what somebody brought was of no use: all take the period again

    def _start(self, step: int) -> None:
        """Set the parameters to the anchor."""
        self._step = step
        self._samples = []
        parameters = self._learner.replica.parameters
        if not isinstance(parameters, Phantom) and not isinstance(self._anchor, Phantom):
            np.copyto(parameters, self._anchor)

    def _again(self, step: int) -> None:
        """Set the parameters to the anchor, with a fresh inner optimizer: the old state may come from useless steps."""
        self._start(step)
        self._learner.stepper = self._inner.open(self._learner.replica.parameters)

    async def _exchange(self, run: Run, aggregator: Aggregator, step: int) -> None:
        """Average the changes of all members; all go on from the same parameters."""
        total = sum(self._samples)
        weight = self._samples[run.group.rank] / total if total else 0.0
        parameters = run.learner.replica.parameters
        way = parameters if isinstance(parameters, Phantom) else cast(Array, self._anchor) - parameters
        for bucket in run.buckets:
            await run.commit.admit(way, bucket)
        await run.group.host.device.touch(3 * parameters.nbytes)
        with run.learner.ledger.spent_on("exchange"):
            totals = [asyncio.ensure_future(aggregator.total(way, bucket, weight, step)) for bucket in run.buckets]
            await all_of(totals, run, step)
        await run.settle(step, partial(self._move, run, way, step + 1), self._loss)

    async def _move(self, run: Run, way: Array | Phantom, step: int) -> None:
        def move() -> None:
            self._outer.step(way)
            self._start(step)

        await run.learner.run(self._outer_work, move)
        await run.group.host.device.touch(2 * run.learner.replica.parameters.nbytes)


class StepExchange:
    """The buckets of one step; each is exchanged once its blocks are computed."""

    def __init__(self, run: Run, aggregator: Aggregator, step: int, weight: float) -> None:
        """`weight` is this rank's share of the average."""
        self._run = run
        self._aggregator = aggregator
        self._step = step
        self._weight = weight
        self._closing = {bucket.blocks[-1]: bucket for bucket in run.buckets}
        self._pending: list[asyncio.Task[None]] = []

    async def ready(self, block: int) -> None:
        if block in self._closing:
            bucket = self._closing[block]
            gradients = self._run.learner.replica.gradients
            await self._run.commit.admit(gradients, bucket)
            total = self._aggregator.total(gradients, bucket, self._weight, self._step)
            name = f"gradients of step {self._step}, bucket {bucket.number}"
            self._pending.append(self._run.group.host.spawn(total, name=name))

    async def done(self) -> None:
        """Return when all gradients are averages."""
        await all_of(self._pending, self._run, self._step)


def _stops_with(group: Group) -> Callable[[int], Awaitable[None]]:
    """Return what ends a local step once its group has: the others wait for this rank in the next view."""

    async def check(block: int) -> None:
        if group.error is not None:
            raise CollectiveError(str(group.error), peer=getattr(group.error, "peer", None), phase=TOLD)

    return check


async def all_of(totals: Sequence[asyncio.Future[None]], run: Run, step: int) -> None:
    """Wait for the step's exchanges: all succeed, or the step fails."""
    try:
        await asyncio.gather(*totals)
    except BaseException:
        for total in totals:
            total.cancel()
        await asyncio.gather(*totals, return_exceptions=True)
        run.compressor.abandon(step)
        raise


class _Told:
    """Broadcasts one rank's gradients to all ranks."""

    def __init__(self, group: Group, root: int) -> None:
        self._group = group
        self._root = root

    async def total(self, flat: Flat, bucket: Bucket, weight: float, step: int) -> None:
        """Replace the bucket's part by that rank's; the weights are ignored."""
        part = Phantom(bucket.size_bytes, flat.itemsize) if isinstance(flat, Phantom) else flat[bucket.span]
        await self._group.broadcast(part, self._root, bucket=bucket.number)


def _state(stepper: Stepper) -> SharedState:
    return {f"optimizer/{name}": array for name, array in stepper.state().items()}


def _restore(stepper: Stepper, held: Mapping[str, StateArray]) -> None:
    prefix = "optimizer/"
    stepper.restore(
        {
            name.removeprefix(prefix): array
            for name, array in held.items()
            if name.startswith(prefix) and not isinstance(array, Phantom)
        }
    )


def _fill(place: Flat, found: StateArray) -> None:
    if isinstance(place, Phantom) != isinstance(found, Phantom) or place.nbytes != found.nbytes:
        raise UsageError(f"these are another model's parameters: {found.nbytes} bytes for {place.nbytes}")
    if not isinstance(place, Phantom) and not isinstance(found, Phantom):
        np.copyto(place, found.reshape(place.shape), casting="no")
