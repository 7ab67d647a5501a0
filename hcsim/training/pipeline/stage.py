"""A rank's stage of a pipeline, and its steps.

A step ends alike on all stages: gradients are averaged among the replicas, those of shared parameters added up, the
loss and the norm of the whole gradient made known, and each stage's optimizer updates its own parameters.
"""

from __future__ import annotations

from functools import partial
from math import nan, sqrt
from typing import NamedTuple, cast

import numpy as np

from hcsim.collectives.buffers import array_of
from hcsim.collectives.group import Group
from hcsim.runtime.channel import Phantom
from hcsim.training.aggregation import OneLevel
from hcsim.training.layout import Layout
from hcsim.training.learner import digest
from hcsim.training.optimizer import Array, clip_scale, sum_of_squares, update_work
from hcsim.training.pipeline.partition import Cut
from hcsim.training.pipeline.passes import StagePasses, StagePorts, microbatches
from hcsim.training.pipeline.schedule import Schedule
from hcsim.training.recoverable import StepExchange
from hcsim.training.run import Run, Whole
from hcsim.training.task import Flat, Indices, StageReplica, Task, needs_gradients, sequential, stage_blocks

_PARAMETERS = 2
"""The tag of parameters that are put together."""
_SHA256_BYTES = 32


class StageRank:
    """A rank's stage."""

    def __init__(self, cut: Cut, stage: int, task: Task, method: tuple[Schedule, int]) -> None:
        """`method` is the schedule, and the number of microbatches."""
        self.task = task
        """Of the stage's blocks."""
        self.cut = cut
        self.stage = stage
        self.schedule, self.microbatches = method

    async def train(self, run: Run) -> None:
        """Train the stage in all steps."""
        run.whole = Whole()
        training = _StageTraining(self, run)
        run.assemble = training.assemble
        for step in run.steps():
            await training.step(step)


class _Shared(NamedTuple):
    """A parameter that other stages hold, too."""

    span: slice
    """Where it is here."""
    holders: Group
    is_copy: bool
    """Whether it counts as another stage's."""


class _StageTraining:
    """A stage in a run."""

    def __init__(self, of: StageRank, run: Run) -> None:
        self._of = of
        self._run = run
        self._learner = run.learner
        seats, group = of.cut.seats, run.group
        self._replica = seats[of.stage].index(group.rank)
        self._pipe = group.subgroup([seat[self._replica] for seat in seats])
        replica = cast("StageReplica", run.learner.replica)
        self._passes = StagePasses(run.learner, of.task, replica, self._ports(), of.schedule)
        self._averaging: OneLevel | None = None
        if len(seats[0]) > 1:
            peers = group.subgroup(seats[of.stage])
            self._averaging = OneLevel(peers, run.learner.ledger, run.compressor, run.settings.algorithm)
        self._shared = self._shared_parameters()

    async def step(self, step: int) -> None:
        run, parts = self._run, microbatches(self._batch(step), self._of.microbatches)
        if self._averaging is None:
            loss = await self._passes.run(parts, _nothing)
            for bucket in run.buckets:
                await run.commit.admit(self._learner.replica.gradients, bucket)
        else:
            weight = sum(map(len, parts)) / sum(run.batches.counts(step))
            exchange = StepExchange(run, self._averaging, step, weight)
            loss = await self._passes.run(parts, exchange.ready)
            with self._learner.ledger.spent_on("exchange", "gradients"):
                await exchange.done()
        with self._learner.ledger.spent_on("exchange", "shared parameters"):
            for each in self._shared:
                part = _part(self._learner.replica.gradients, each.span)
                await each.holders.all_reduce(part, algorithm=run.settings.algorithm)
        loss, norm = await self._compare(loss)
        await run.settle(step, partial(self._update, step, norm), loss)

    def _batch(self, step: int) -> Indices:
        """Return the samples of all ranks of this replica, in the order of the ranks."""
        ranks = sorted(seat[self._replica] for seat in self._of.cut.seats)
        return np.concatenate([self._run.batches.batch(step, rank) for rank in ranks])

    def _ports(self) -> StagePorts:
        whole, (first, end) = self._run.task, self._of.cut.span(self._of.stage)
        entering = sequential(whole).entering
        return StagePorts(
            self._pipe,
            whole.blocks[0].element_bytes,
            entering[first] if first else 0,
            entering[end] if end < len(entering) and needs_gradients(whole, end) else 0,
            phantom=whole.phantom,
        )

    def _shared_parameters(self) -> list[_Shared]:
        bounds, ours = self._of.cut.bounds, self._of.stage
        holders: dict[str, list[int]] = {}
        for tensor, owner, user in sequential(self._run.task).ties:
            for block in (owner, user):
                stage = next(stage for stage in range(self._of.cut.stages) if block < bounds[stage + 1])
                if stage not in holders.setdefault(tensor, []):
                    holders[tensor].append(stage)
        trained = {tensor.name: tensor.span for tensor in self._learner.layout.tensors}
        return [
            _Shared(trained[name], self._pipe.subgroup(stages), stages[0] != ours)
            for name, stages in holders.items()
            if len(stages) > 1 and ours in stages and name in trained
        ]

    async def _compare(self, loss: float) -> tuple[float, float]:
        """Return the loss, which the last stage knows, and the norm of the whole gradient if it is to be clipped."""
        squares = 0.0
        if self._run.settings.clip is not None:
            gradients = self._learner.replica.gradients
            work = update_work(gradients.nbytes / 2, gradients.nbytes)
            squares = await self._learner.run(work, partial(self._squares, gradients), "norm")
        with self._learner.ledger.spent_on("exchange", "loss"):
            told = [array_of(each) for each in await self._pipe.all_gather(np.array([loss, squares]))]
        total = sum(float(each[1]) for each in told)
        return float(told[-1][0]), sqrt(total) if total >= 0 else nan

    def _squares(self, gradients: Flat) -> float:
        """Return the sum of squares, without what counts as another stage's."""
        if isinstance(gradients, Phantom):
            return nan
        own, at = 0.0, 0
        for span in sorted((each.span for each in self._shared if each.is_copy), key=lambda span: span.start):
            own += sum_of_squares(gradients[at : span.start])
            at = span.stop
        return own + sum_of_squares(gradients[at:])

    async def _update(self, step: int, norm: float) -> None:
        limit, gradients = self._run.settings.clip, self._learner.replica.gradients
        if limit is not None:
            work = update_work(gradients.nbytes / 4, 2.0 * gradients.nbytes)
            await self._learner.run(work, partial(_clip, gradients, norm, limit), "clip")
        await self._learner.update(self._run.lr(step))

    # The whole model, to be evaluated and saved.

    async def assemble(self, evaluates: bool) -> None:
        """Send the lead the parameters of its replica's other stages; at the end, all learn the model's digest."""
        run, group = self._run, self._run.group
        if not evaluates:
            return
        with self._learner.ledger.spent_on("exchange", "evaluation"):
            await group.barrier()  # before it, so that what follows is not accounted, and no waiting for others
        if run.task.phantom:
            return
        assert run.whole is not None
        lead_stage = self._of.cut.stage_of(run.lead)
        with run.unaccounted():
            if self._of.cut.seats[lead_stage][self._replica] == run.lead:
                if group.rank == run.lead:
                    run.whole.parameters = await self._collected()
                else:
                    await self._pipe.send(self._learner.replica.parameters, lead_stage, tag=_PARAMETERS)
            if run.step == run.settings.steps:
                sha256 = np.zeros(_SHA256_BYTES, np.uint8)
                if run.whole.parameters is not None:
                    sha256[:] = np.frombuffer(bytes.fromhex(str(digest(run.whole.parameters))), np.uint8)
                await group.broadcast(sha256, run.lead)
                run.whole.sha256 = sha256.tobytes().hex()
            await group.barrier()

    async def _collected(self) -> Array:
        task, cut = self._run.task, self._of.cut
        places = Layout.of([block.shapes for block in task.blocks])
        whole: Array = np.empty(places.length, np.float32)
        spans = {tensor.name: tensor.span for tensor in places.tensors}
        for stage in range(cut.stages):
            layout = Layout.of([block.shapes for block in stage_blocks(task, *cut.span(stage))])
            flat = cast("Array", self._learner.replica.parameters)
            if stage != self._of.stage:
                flat = await self._pipe.recv(np.empty(layout.length, np.float32), stage, tag=_PARAMETERS)
            for tensor in layout.tensors:
                whole[spans[tensor.name]] = flat[tensor.span]
        return whole


def _part(flat: Flat, span: slice) -> Flat:
    if isinstance(flat, Phantom):
        return Phantom(flat.itemsize * (span.stop - span.start), flat.itemsize)
    return flat[span]


def _clip(gradients: Flat, norm: float, limit: float) -> None:
    if not isinstance(gradients, Phantom) and (scale := clip_scale(norm, limit)) is not None:
        gradients *= scale


async def _nothing(block: int) -> None:
    pass
