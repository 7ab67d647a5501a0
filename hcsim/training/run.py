"""A training run as one rank sees it: what it is given, and what it notes down.

Strategies are `async def`s over a `Run`. Evaluation looks at the model from outside: it takes no virtual time, and its
real time is taken off the first rank's, which evaluates. It does so on its device, so that it still answers the
others; real ranks that wait for its part of the next step do not know why.

`StepMeter` says what a step comes to, in figures.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import cached_property, partial
from typing import Protocol

import msgspec

from hcsim.collectives.group import Group
from hcsim.compressors.base import Compressor
from hcsim.config.training import Training
from hcsim.runtime.host import Host, Work
from hcsim.training.data import Batches
from hcsim.training.layout import Bucket
from hcsim.training.learner import Learner, Ledger, digest
from hcsim.training.optimizer import scaled_lr, warmup
from hcsim.training.task import Flat, Score, Task

_LABELS = {"compute": "compute", "encode": "encode", "exchange": "wait"}
"""The ledger's purposes, as the metrics call them: what is booked as exchange is time in which training stood still."""


class Reached(Protocol):
    """How far training had come after a step."""

    @property
    def time_s(self) -> float:
        """Since the start."""

    @property
    def loss(self) -> float:
        """On the last batch."""

    @property
    def sent_bytes(self) -> int:
        """Since the start."""


class StepMeter:
    """Tells a host's metrics what each step took."""

    def __init__(self, host: Host, ledger: Ledger) -> None:
        metrics = host.metrics
        self._spent_s = ledger.seconds
        self._busy = metrics.counter("hcsim_collectives_busy_seconds_total")
        self._steps = metrics.counter("hcsim_training_steps_total")
        self._sent = metrics.counter("hcsim_training_sent_bytes_total")
        self._loss = metrics.gauge("hcsim_training_loss")
        self._seconds = {
            purpose: metrics.histogram("hcsim_training_step_seconds", purpose=purpose)
            for purpose in (*_LABELS.values(), "network", "whole")
        }
        self._before = self._now(0.0)
        self._sent_before = 0

    def lap(self, time_s: float) -> dict[str, float]:
        """Seconds by purpose since the step before."""
        now, before = self._now(time_s), self._before
        self._before = now
        return {purpose: now[purpose] - before[purpose] for purpose in now}

    def note(self, reached: Reached, spent_s: dict[str, float]) -> None:
        """A step is done."""
        for purpose, series in self._seconds.items():
            series.observe(spent_s[purpose])
        # Not by its number: that goes on while this node is away, and back where training does.
        self._steps.add(1)
        self._sent.add(max(0, reached.sent_bytes - self._sent_before))
        self._loss.set(reached.loss)
        self._sent_before = reached.sent_bytes

    def _now(self, time_s: float) -> dict[str, float]:
        spent_s = {label: self._spent_s[purpose] for purpose, label in _LABELS.items()}
        return {**spent_s, "network": self._busy.value, "whole": time_s}


_NO_WORK = Work(kernels=0)


class Point(msgspec.Struct, frozen=True):
    """How far training had come after a step."""

    step: int
    time_s: float
    """Since the start, without evaluations."""
    loss: float
    """On this rank's last batch, before the step."""
    sent_bytes: int
    """By this rank since the start, headers included."""
    score: Score | None = None
    """On held-out data, where it was looked at."""
    ranks: int = 1
    """How many took part."""
    spent_s: dict[str, float] = {}
    """Of this step, by purpose: compute, encode, network (an operation was under way), wait (training stood still), and
    whole. The first three overlap."""


class Report(msgspec.Struct, frozen=True):
    """What a run came to on one rank."""

    rank: int
    steps: int
    duration_s: float
    sent_bytes: int
    spent_s: dict[str, float]
    """Seconds by purpose, with the waiting for it: encoding waits for the device where the backward pass has it, and an
    exchange for the slowest rank. Where a strategy lets them, they overlap."""
    points: tuple[Point, ...]
    sha256: str | None
    """Of the final parameters; None for a task of shapes."""


class Observer(Protocol):
    """Somebody who looks on."""

    def point(self, rank: int, point: Point) -> None:
        """A rank has come this far."""

    def finished(self, run: Run) -> None:
        """A rank has come to the end."""


class Update(msgspec.Struct, frozen=True):
    """What is to be applied once the ranks agree that it counts."""

    step: int
    apply: Callable[[], Awaitable[None]]
    loss: float


class Commit:
    """How the ranks of a run agree that a step counts. Those that were started together end together: what was
    exchanged always counts. Members of a cluster vote."""

    ends = False
    """Whether these ranks go no further together."""

    async def admit(self, gradients: Flat, bucket: Bucket) -> None:
        """Our own part of the bucket is about to be exchanged. Compressors refuse what cannot be sent."""

    async def agreed(self, update: Update) -> bool:
        """Whether all apply it. Otherwise nobody does, and the step is tried again."""
        return True

    async def applied(self) -> None:
        """The update is applied here."""


class Run:
    """Everything a strategy works with, on one rank."""

    def __init__(
        self, group: Group, settings: Training, task: Task, learner: Learner, batches: Batches, compressor: Compressor
    ) -> None:
        self.group = group
        self.settings = settings
        self.task = task
        self.learner = learner
        self.batches = batches
        self.compressor = compressor
        self.points: list[Point] = []
        self.observer: Observer | None = None
        self.commit = Commit()
        self.step = 0
        """So many are done."""
        self.pending: Update | None = None
        """What was exchanged, and may already count elsewhere."""
        self.other_sent_bytes = 0
        """What a strategy sends beside the group, over channels of its own, headers included."""
        self._start_s = group.host.clock.elapsed()
        self._sent_before = group.wire_bytes
        self._evaluating_s = 0.0
        self._meter = StepMeter(group.host, learner.ledger)

    def regroup(self, group: Group, batches: Batches, compressor: Compressor) -> None:
        """Go on with other ranks."""
        self._sent_before = group.wire_bytes - self.sent_bytes + self.other_sent_bytes
        self.group, self.batches, self.compressor = group, batches, compressor

    def steps(self) -> Iterator[int]:
        """The steps that are left, each as often as it takes."""
        while self.step < self.settings.steps and not self.commit.ends:
            yield self.step

    async def settle(self, step: int, apply: Callable[[], Awaitable[None]], loss: float) -> None:
        """What the step came to is exchanged: apply it, if all agree."""
        self.pending = Update(step, apply, loss)
        if await self.commit.agreed(self.pending):
            await self.carry_out(self.pending)
            await self.commit.applied()
        else:
            self.drop()

    async def carry_out(self, update: Update) -> None:
        """The update counts."""
        self.compressor.commit(update.step)
        await update.apply()
        self.pending = None
        self.step = update.step + 1
        await self.note(self.step, update.loss)

    def drop(self) -> None:
        """What is pending, if anything is, does not count."""
        if self.pending is not None:
            self.compressor.abandon(self.pending.step)
            self.pending = None

    def lr(self, step: int) -> float:
        """The learning rate of a step."""
        s = self.settings
        assert s.lr is not None
        return scaled_lr(s.lr, self.group.size, step, s.warmup) if s.scale_lr else s.lr * warmup(step, s.warmup)

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """What is exchanged together."""
        return self.learner.layout.buckets(self.settings.bucket_bytes)

    async def update(self, step: int, share: float = 1.0) -> None:
        """Apply the gradients that are in place, with this share of the step's learning rate."""
        await self.learner.clip(self.settings.clip)
        await self.learner.update(self.lr(step) * share)

    async def note(self, step: int, loss: float) -> None:
        """Step number `step` (from 1) is done. The first rank evaluates now and then, and after the last one."""
        elapsed_s, sent_bytes = self.elapsed_s, self.sent_bytes
        due = step % self.settings.evaluate_every == 0 or step == self.settings.steps
        score = await self._evaluate() if due and self.group.rank == 0 else None
        spent_s = self._meter.lap(elapsed_s)
        self.points.append(Point(step, elapsed_s, loss, sent_bytes, score, self.group.size, spent_s))
        self._meter.note(self.points[-1], spent_s)
        if self.observer is not None:
            self.observer.point(self.group.rank, self.points[-1])

    @property
    def elapsed_s(self) -> float:
        """Since the start, without evaluations."""
        return self.group.host.clock.elapsed() - self._start_s - self._evaluating_s

    @property
    def sent_bytes(self) -> int:
        """Since the start, headers included."""
        return self.group.wire_bytes - self._sent_before + self.other_sent_bytes

    def report(self) -> Report:
        """What it came to."""
        last = self.points[-1] if self.points else None
        return Report(
            self.group.rank,
            max(self.step, last.step if last else 0),  # one that comes late may be given all steps by the others
            last.time_s if last else 0.0,
            self.sent_bytes,
            dict(self.learner.ledger.seconds),
            tuple(self.points),
            digest(self.learner.replica.parameters),
        )

    async def _evaluate(self) -> Score | None:
        before_s = self.group.host.clock.elapsed()
        score = await self.group.host.device.run(_NO_WORK, partial(self.task.score, self.learner.replica.parameters))
        self._evaluating_s += self.group.host.clock.elapsed() - before_s
        return score
