"""A training run on one rank: its inputs and its records.

Strategies are `async def`s over a `Run`. Evaluation takes no virtual time, and its real time is subtracted from
that of the first rank, which evaluates. It runs on the rank's device, so that the rank still answers the
others; real ranks that wait for its part of the next step do not know the reason.

`StepMeter` computes the figures of a step.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Protocol

import msgspec

from hcsim.collectives.buffers import array_of
from hcsim.collectives.group import Group
from hcsim.compressors.base import Compressor
from hcsim.config.training import Training
from hcsim.runtime.host import Host, Work
from hcsim.training.balance import Balance, Division
from hcsim.training.data import Batches
from hcsim.training.layout import Bucket
from hcsim.training.learner import Learner, TimeAccounting, digest
from hcsim.training.optimizer import scaled_lr, warmup
from hcsim.training.task import Flat, Score, Task

_LABELS = {"compute": "compute", "encode": "encode", "exchange": "wait"}
"""The ledger's purposes, by their names in the metrics: time in exchanges is time in which training stood still."""


class StepProgress(Protocol):
    """The progress of training after a step."""

    @property
    def time_s(self) -> float:
        """Since the start."""

    @property
    def loss(self) -> float: ...

    @property
    def sent_bytes(self) -> int:
        """Since the start."""


class StepMeter:
    """Reports the duration of each step to a host's metrics."""

    def __init__(self, host: Host, ledger: TimeAccounting) -> None:
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
        """Return the seconds by purpose since the last step."""
        now, before = self._now(time_s), self._before
        self._before = now
        return {purpose: now[purpose] - before[purpose] for purpose in now}

    def note(self, reached: StepProgress, spent_s: dict[str, float]) -> None:
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
    """The progress of training after a step."""

    step: int
    time_s: float
    """Since the start, without evaluations."""
    loss: float
    """On this rank's last batch, before the step."""
    sent_bytes: int
    """By this rank since the start, headers included."""
    score: Score | None = None
    """On held-out data, if it was evaluated."""
    ranks: int = 1
    """The number of ranks that took part."""
    spent_s: dict[str, float] = {}
    """The seconds of this step, by purpose: compute, encode, network (an operation was in flight), wait
    (training stood still), and whole. The first three overlap."""
    samples: int = 0
    """Of all ranks together, in a step."""


class Share(msgspec.Struct, frozen=True):
    """What a rank does of the work of all."""

    samples: int
    """In one of its steps."""
    steps: int = 1
    """In a period of `every` steps of the fastest."""
    every: int = 1


class Report(msgspec.Struct, frozen=True):
    """The results of a run on one rank."""

    rank: int
    steps: int
    duration_s: float
    sent_bytes: int
    spent_s: dict[str, float]
    """Seconds by purpose, with the waiting for it: encoding waits while the backward pass has the device, and an
    exchange waits for the straggler. Where a strategy allows it, they overlap."""
    points: tuple[Point, ...]
    sha256: str | None
    """The digest of the final parameters; None for a task of shapes."""
    share: Share | None = None
    """This rank's share at the end, if shares follow the ranks' speeds."""


def leading(reports: Sequence[Report]) -> Report:
    """Return the report of the first rank that took steps: where one machine does all, the others take none."""
    return next((report for report in reports if report.points), reports[0])


class Observer(Protocol):
    """Receives the progress of a run."""

    def point(self, rank: int, point: Point) -> None:
        """Called after each step of a rank."""

    def finished(self, run: Run) -> None:
        """Called when a rank has finished training."""


class Update(msgspec.Struct, frozen=True):
    """An update to be applied once the ranks agree that it counts."""

    step: int
    apply: Callable[[], Awaitable[None]]
    loss: float


class Whole(msgspec.Struct):
    """A model of which ranks hold, or have updated, only parts: what was put together of them after the last step. None
    of both: nothing was."""

    parameters: Flat | None = None
    """On the rank that evaluates."""
    sha256: str | None = None
    """On all ranks, at the end."""


class Commit:
    """How the ranks of a run agree that a step counts. This base class serves fixed ranks: every exchanged update
    counts. Members of a cluster vote."""

    ends = False
    """Whether these ranks stop training together."""

    async def admit(self, gradients: Flat, bucket: Bucket) -> None:
        """Called before this rank's part of the bucket is exchanged. With fixed ranks, compressors reject what
        cannot be sent."""

    async def agreed(self, update: Update) -> bool:
        """Return whether all apply the update. Otherwise none does, and the step is retried."""
        return True

    async def applied(self) -> None:
        """Called when the update has been applied on this rank."""


class Run:
    """The inputs and state of a strategy on one rank."""

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
        """Steps done."""
        self.lead = 0
        """The rank that evaluates."""
        self.balance: Balance | None = None
        """What steps cost the ranks, if they take shares by it."""
        self.balanced_at = 0
        """The step at which they last compared these costs."""
        self.pending: Update | None = None
        """An update that was exchanged, and may already count on other ranks."""
        self.assemble: Callable[[bool], Awaitable[None]] | None = None
        """Called after every update where each rank updates a part of the parameters, with whether they are evaluated
        next: it puts the whole model together."""
        self.other_sent_bytes = 0
        """Bytes that a strategy sends over channels outside the group, headers included."""
        self.whole: Whole | None = None
        """The model, where ranks hold parts of it; None where this rank's replica is the whole model."""
        self._start_s = group.host.clock.elapsed()
        self._sent_before = group.wire_bytes
        self._evaluating_s = 0.0
        self._meter = StepMeter(group.host, learner.ledger)

    def regroup(self, group: Group, batches: Batches, compressor: Compressor) -> None:
        self._sent_before = group.wire_bytes - self.sent_bytes + self.other_sent_bytes
        self.group, self.batches, self.compressor = group, batches, compressor

    def keep_alive(self) -> None:
        """Tell the other ranks while this one computes, so that they wait for it however slow it is."""
        pace = self.learner.ledger.pace
        pace.begin(self.learner.predicted_s(max(self.batches.batch_sizes)))
        self.group.keep_alive(partial(pace.computes, self.settings.timeout_s))

    def steps(self) -> Iterator[int]:
        """Yield the remaining steps, each until it is done."""
        while self.step < self.settings.steps and not self.commit.ends:
            yield self.step

    async def rebalance(self, every: int) -> None:
        """Compare what steps cost the ranks, if they have taken `every` steps since the last time; take other shares if
        that is worth it. All ranks call this between the same steps."""
        balance, step = self.balance, self.step
        if balance is None or step - self.balanced_at < every:
            return
        with self.learner.ledger.spent_on("exchange"):
            told = await self.group.all_gather(balance.told())
        balance.agree([array_of(each) for each in told], self.group.rank)
        self.balanced_at = step
        if (better := balance.better(Division(self.batches.batch_sizes, self.batches.turns))) is not None:
            self.batches = self.batches.again(step, *better)
            self.group.host.trace("shares", step, *better.sizes, *(better.turns.counts if better.turns else ()))

    async def settle(self, step: int, apply: Callable[[], Awaitable[None]], loss: float) -> None:
        """Apply the exchanged result of a step, if all ranks agree."""
        self.pending = Update(step, apply, loss)
        if await self.commit.agreed(self.pending):
            await self.carry_out(self.pending)
            await self.commit.applied()
        else:
            self.drop()

    async def carry_out(self, update: Update) -> None:
        """Apply an update that counts."""
        self.compressor.commit(update.step)
        await update.apply()
        self.pending = None
        self.step = update.step + 1
        if self.assemble is not None:
            await self.assemble(self.is_due(self.step))
        await self.note(self.step, update.loss)

    def drop(self) -> None:
        if self.pending is not None:
            self.compressor.abandon(self.pending.step)
            self.pending = None

    def lr(self, step: int) -> float:
        s = self.settings
        assert s.lr is not None
        return scaled_lr(s.lr, self.group.size, step, s.warmup) if s.scale_lr else s.lr * warmup(step, s.warmup)

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The units of exchange."""
        return self.learner.layout.buckets(self.settings.bucket_bytes)

    async def update(self, step: int, share: float = 1.0) -> None:
        """Apply the gradients in place, with this share of the step's learning rate."""
        await self.learner.clip(self.settings.clip)
        await self.learner.update(self.lr(step) * share)

    async def note(self, step: int, loss: float) -> None:
        """Record that step number `step` (from 1) is done. The first rank evaluates periodically, and after the last
        step."""
        elapsed_s, sent_bytes = self.elapsed_s, self.sent_bytes
        due = self.is_due(step)
        score = await self._evaluate() if due and self.group.rank == self.lead else None
        spent_s = self._meter.lap(elapsed_s)
        if self.balance is not None:
            self.balance.observe(self.batches.counts(step - 1)[self.group.rank], spent_s["compute"])
        samples = self.batches.samples_per_step
        self.points.append(Point(step, elapsed_s, loss, sent_bytes, score, self.group.size, spent_s, samples))
        self._meter.note(self.points[-1], spent_s)
        if self.observer is not None:
            self.observer.point(self.group.rank, self.points[-1])

    def is_due(self, step: int) -> bool:
        """Return whether the model is evaluated after this many steps."""
        return step % self.settings.evaluate_every == 0 or step == self.settings.steps

    @contextmanager
    def unaccounted(self) -> Iterator[None]:
        """Leave out what this block takes and sends, as evaluations are."""
        before_s, before_bytes = self.group.host.clock.elapsed(), self.group.wire_bytes
        try:
            yield
        finally:
            self._evaluating_s += self.group.host.clock.elapsed() - before_s
            self._sent_before += self.group.wire_bytes - before_bytes

    @property
    def parameters(self) -> Flat | None:
        """The whole model's, on the rank that evaluates at least."""
        return self.learner.replica.parameters if self.whole is None else self.whole.parameters

    @property
    def sha256(self) -> str | None:
        """The digest of the whole model's parameters; None for phantoms, and until a model in parts is put together."""
        return digest(self.learner.replica.parameters) if self.whole is None else self.whole.sha256

    @property
    def elapsed_s(self) -> float:
        """Since the start, without evaluations."""
        return self.group.host.clock.elapsed() - self._start_s - self._evaluating_s

    @property
    def sent_bytes(self) -> int:
        """Since the start, headers included."""
        return self.group.wire_bytes - self._sent_before + self.other_sent_bytes

    def report(self) -> Report:
        last = self.points[-1] if self.points else None
        return Report(
            self.group.rank,
            max(self.step, last.step if last else 0),  # one that comes late may be given all steps by the others
            last.time_s if last else 0.0,
            self.sent_bytes,
            dict(self.learner.ledger.seconds),
            tuple(self.points),
            self.sha256,
            None if self.balance is None else self._share,
        )

    @property
    def _share(self) -> Share:
        batches, rank = self.batches, self.group.rank
        turns = batches.turns
        if turns is None:
            return Share(batches.batch_sizes[rank])
        return Share(batches.batch_sizes[rank], turns.counts[rank], turns.every)

    async def _evaluate(self) -> Score | None:
        before_s, parameters = self.group.host.clock.elapsed(), self.parameters
        if parameters is None:
            return None
        with self.learner.ledger.pace.work():
            score = await self.group.host.device.run(_NO_WORK, partial(self.task.score, parameters))
        self._evaluating_s += self.group.host.clock.elapsed() - before_s
        return score
