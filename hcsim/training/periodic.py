"""Strategies that talk now and then: local SGD and DiLoCo.

Every rank takes H steps of its own. Then the ranks average how far they went, by the samples they saw, and an
outer optimizer takes that average as its gradient:

    Δ_r = θ_last − θ_r      Δ = Σ w_r Δ_r      θ ← outer(θ_last, Δ)

With an outer step of one and no momentum this is local SGD (Stich, "Local SGD Converges Fast and Communicates
Little", ICLR 2019): the parameters are averaged. With Nesterov momentum it is DiLoCo (Douillard et al., 2023,
arXiv 2311.08105). Compression is of Δ. What is left of a run that H does not divide is exchanged at the end.

A run counts the steps that were exchanged. An exchange that fails can be tried again, with other ranks too: each
still has the way that it went.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import cast

import numpy as np

from hcsim.compressors.base import Array
from hcsim.runtime.channel import Phantom
from hcsim.training.aggregation.aggregator import Aggregator
from hcsim.training.learner import Learner
from hcsim.training.optimizer import Optimizer
from hcsim.training.run import Run


class Journey:
    """Where all ranks last agreed, and how far this one has gone from there."""

    def __init__(self, learner: Learner, outer: Optimizer, inner: Optimizer | None = None) -> None:
        self.learner = learner
        self._inner = inner
        parameters = learner.replica.parameters
        self.anchor = parameters if isinstance(parameters, Phantom) else parameters.copy()
        self.outer = outer.open(self.anchor)
        self.outer_work = outer.work(learner.layout.length)
        self.step = 0
        """Steps taken, exchanged or not."""
        self.samples: list[int] = []
        """By rank, since the last exchange."""
        self.loss = float("nan")

    def again(self, step: int) -> None:
        """What somebody brought was of no use: all take the period again, from the anchor."""
        self.start(step)
        if self._inner is not None:  # it may remember what was of no use
            self.learner.stepper = self._inner.open(self.learner.replica.parameters)

    def start(self, step: int) -> None:
        """All are at the anchor now."""
        self.step = step
        self.samples = []
        parameters = self.learner.replica.parameters
        if not isinstance(parameters, Phantom) and not isinstance(self.anchor, Phantom):
            np.copyto(parameters, self.anchor)


async def periodic(run: Run, aggregator: Aggregator, every: int, journey: Journey) -> None:
    """Train with an exchange after each `every` steps."""
    for start in run.steps():
        end = min((start // every + 1) * every, run.settings.steps)
        journey.samples = journey.samples or [0] * run.group.size
        for step in range(journey.step, end):
            journey.loss = await run.learner.gradients(run.batches.batch(step, run.group.rank))
            await run.update(step)
            journey.samples = [sum(pair) for pair in zip(journey.samples, run.batches.counts(step), strict=True)]
            journey.step = step + 1
            if step + 1 < end:
                await run.note(step + 1, journey.loss)
        await _exchange(run, aggregator, journey, end - 1)
        if run.step < end:
            journey.again(start)


async def _exchange(run: Run, aggregator: Aggregator, journey: Journey, step: int) -> None:
    """Average how far everybody went; all go on from the same parameters."""
    total = sum(journey.samples)
    weight = journey.samples[run.group.rank] / total if total else 0.0
    parameters = run.learner.replica.parameters
    way = parameters if isinstance(parameters, Phantom) else cast(Array, journey.anchor) - parameters
    for bucket in run.buckets:
        await run.pact.admit(way, bucket)
    await run.group.host.device.touch(3 * parameters.nbytes)
    with run.learner.ledger.spent_on("exchange"):
        totals = [asyncio.ensure_future(aggregator.total(way, bucket, weight, step)) for bucket in run.buckets]
        try:
            await asyncio.gather(*totals)
        except BaseException:
            for each in totals:
                each.cancel()
            await asyncio.gather(*totals, return_exceptions=True)
            run.compressor.abandon(step)
            raise
    await run.settle(step, partial(_move, run, journey, way, step + 1), journey.loss)


async def _move(run: Run, journey: Journey, way: Array | Phantom, step: int) -> None:
    def move() -> None:
        journey.outer.step(way)
        journey.start(step)

    await run.learner.run(journey.outer_work, move)
    await run.group.host.device.touch(2 * run.learner.replica.parameters.nbytes)
