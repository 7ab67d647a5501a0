"""Strategies that talk now and then: local SGD and DiLoCo.

Every rank takes H steps of its own. Then the ranks average how far they went, by the samples they saw, and an
outer optimizer takes that average as its gradient:

    Δ_r = θ_last − θ_r      Δ = Σ w_r Δ_r      θ ← outer(θ_last, Δ)

With an outer step of one and no momentum this is local SGD (Stich, "Local SGD Converges Fast and Communicates
Little", ICLR 2019): the parameters are averaged. With Nesterov momentum it is DiLoCo (Douillard et al., 2023,
arXiv 2311.08105). Compression is of Δ. What is left of a run that H does not divide is exchanged at the end.
"""

from __future__ import annotations

import asyncio
from typing import cast

import numpy as np

from hcsim.compressors.base import Array
from hcsim.runtime.channel import Phantom
from hcsim.training.aggregation.aggregator import Aggregator
from hcsim.training.optimizer import Optimizer
from hcsim.training.run import Run


async def periodic(run: Run, aggregator: Aggregator, every: int, outer: Optimizer) -> None:
    """Train with an exchange after each `every` steps."""
    sync = _Sync(run, aggregator, outer)
    for step in range(run.settings.steps):
        loss = await run.learner.gradients(run.batches.batch(step, run.group.rank))
        await run.update(step)
        sync.count(step)
        if (step + 1) % every == 0 or step + 1 == run.settings.steps:
            await sync.exchange(step)
        run.note(step + 1, loss)


class _Sync:
    """Where all ranks last agreed, and how they come to agree again."""

    def __init__(self, run: Run, aggregator: Aggregator, outer: Optimizer) -> None:
        self._run = run
        self._aggregator = aggregator
        parameters = run.learner.replica.parameters
        self._anchor = parameters if isinstance(parameters, Phantom) else parameters.copy()
        self._outer = outer.open(self._anchor)
        self._outer_work = outer.work(run.learner.layout.length)
        self._samples = [0] * run.group.size

    def count(self, step: int) -> None:
        """A step was taken."""
        for rank, count in enumerate(self._run.batches.counts(step)):
            self._samples[rank] += count

    async def exchange(self, step: int) -> None:
        """Average how far everybody went; all go on from the same parameters."""
        run = self._run
        weight = self._samples[run.group.rank] / sum(self._samples)
        self._samples = [0] * run.group.size
        parameters = run.learner.replica.parameters
        way = parameters if isinstance(parameters, Phantom) else cast(Array, self._anchor) - parameters
        await run.group.host.device.touch(3 * parameters.nbytes)
        with run.learner.ledger.spent_on("exchange"):
            await asyncio.gather(*(self._aggregator.total(way, bucket, weight, step) for bucket in run.buckets))
        run.compressor.commit(step)
        await run.learner.run(self._outer_work, lambda: self._move(way))
        await run.group.host.device.touch(2 * parameters.nbytes)

    def _move(self, way: Array | Phantom) -> None:
        self._outer.step(way)
        parameters = self._run.learner.replica.parameters
        if not isinstance(parameters, Phantom) and not isinstance(self._anchor, Phantom):
            np.copyto(parameters, self._anchor)
