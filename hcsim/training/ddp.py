"""Synchronous data parallelism: every step, all ranks apply the average of all ranks' gradients.

The gradient is exchanged in buckets, from the last layer to the first, and a bucket is on its way as soon as its
last block is computed: the network works while the backward pass goes on (Li et al., "PyTorch
Distributed", VLDB 2020). Averaging weighs ranks by their samples, so N ranks do what one process would
do with the joined batch; clipping comes after the average.
"""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np

from hcsim.training.aggregation.aggregator import Aggregator
from hcsim.training.run import Run


async def ddp(run: Run, aggregator: Aggregator) -> None:
    """Train all ranks together."""
    for step in run.steps():
        exchange = _StepExchange(run, aggregator, step)
        loss = await run.learner.gradients(run.batches.batch(step, run.group.rank), exchange.ready)
        with run.learner.ledger.spent_on("exchange"):
            await exchange.done()
        await run.settle(step, partial(run.update, step), loss)


async def single(run: Run) -> None:
    """The first rank alone, with everybody's batches: what the others are measured against."""
    if run.group.rank:
        return
    for step in run.steps():
        joined = [run.batches.batch(step, rank) for rank in range(run.group.size)]
        loss = await run.learner.gradients(np.concatenate(joined))
        await run.settle(step, partial(run.update, step), loss)


class _StepExchange:
    """The buckets of one step, each on its way once its blocks are computed."""

    def __init__(self, run: Run, aggregator: Aggregator, step: int) -> None:
        counts = run.batches.counts(step)
        self._run = run
        self._aggregator = aggregator
        self._step = step
        self._weight = counts[run.group.rank] / sum(counts)
        self._closing = {bucket.blocks[-1]: bucket for bucket in run.buckets}
        self._pending: list[asyncio.Task[None]] = []

    async def ready(self, block: int) -> None:
        """A block's gradients are in place."""
        if block in self._closing:
            bucket = self._closing[block]
            gradients = self._run.learner.replica.gradients
            await self._run.pact.admit(gradients, bucket)
            total = self._aggregator.total(gradients, bucket, self._weight, self._step)
            name = f"gradients of step {self._step}, bucket {bucket.number}"
            self._pending.append(self._run.group.host.spawn(total, name=name))

    async def done(self) -> None:
        """Return when all gradients are averages."""
        try:
            await asyncio.gather(*self._pending)
        except BaseException:
            for task in self._pending:
                task.cancel()
            await asyncio.gather(*self._pending, return_exceptions=True)
            self._run.compressor.abandon(self._step)
            raise
