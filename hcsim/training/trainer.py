"""One member's part in a training, and training with fixed ranks.

A `Trainer` goes from view to view: it enters each with its ranks and batches there, and trains on. Fixed ranks
have one view, which lasts to the end, so they neither vote nor hand over state. `hcsim.training.elastic` has
members that do, and follow a cluster's views.

All ranks must have the same settings and task. Ranks that differ are reported by name before training starts.
"""

from __future__ import annotations

from functools import cached_property

import msgspec
import numpy as np

from hcsim.collectives.buffers import array_of
from hcsim.collectives.group import Group
from hcsim.compressors.base import Compressor
from hcsim.config.training import Training
from hcsim.errors import UNDECODABLE, ConfigError
from hcsim.runtime.host import Host
from hcsim.training.balance import Balance, Division, predicted
from hcsim.training.data import Batches
from hcsim.training.learner import Learner
from hcsim.training.precision import compressor_of, prepared
from hcsim.training.recoverable import Recoverable
from hcsim.training.run import Observer, Report, Run
from hcsim.training.strategies import FixedRanks, completed, opened, optimizer, strategy
from hcsim.training.task import Task
from hcsim.training.tasks import task


class Trainer:
    """The settings, task and model of a member, in any view."""

    def __init__(self, host: Host, settings: Training, seed: int, what: Task | None, ranks: int) -> None:
        """`what` is a user-defined task; without it, the settings name one."""
        self.host = host
        self.seed = seed
        self.task = prepared(what or task(settings.task), settings)
        self.settings = completed(settings, self.task, ranks)
        self.part: Task | None = None
        """What this rank holds of the model, if not all of it."""
        self._run: Run | None = None

    def batch_sizes(self, ranks: int) -> tuple[int, ...]:
        """Return the batch sizes of the settings by rank; the task's, where they are to be found."""
        batch = self.settings.batch
        if isinstance(batch, tuple):
            return batch
        return (batch if isinstance(batch, int) else self.task.defaults.batch,) * ranks

    def intent(self, measure: str = "") -> Intent:
        """Return the settings that must be the same on all ranks."""
        return Intent(self.settings, self.seed, self.task.fingerprint, measure)

    @cached_property
    def learner(self) -> Learner:
        make = getattr(strategy(self.settings.strategy), "replica", None)
        return Learner(self.host, self.part or self.task, optimizer(self.settings), self.seed, make)

    def balance(self, method: object, ranks: int) -> Balance | None:
        """Return what finds the ranks' shares, if the settings or the strategy leave them to their speeds."""
        shared, samples = isinstance(self.settings.batch, str), self.settings.shared_samples
        period = getattr(method, "period", None)
        if not (shared or period is not None or getattr(method, "by_speed", False)):
            return None
        usual = self.task.defaults.batch
        own = predicted(self.learner.predicted_s, (samples or usual * ranks) // ranks)
        return Balance(own, samples=samples, per_rank=usual if shared else 0, every=period)

    @property
    def is_busy_as_usual(self) -> bool:
        """Whether this rank's device is known to work."""
        return "learner" in vars(self) and self.learner.ledger.pace.is_busy_as_usual()

    @property
    def has_begun(self) -> bool:
        return self._run is not None

    @property
    def run(self) -> Run:
        """Set from the first view on."""
        assert self._run is not None
        return self._run

    def enter(self, group: Group, batches: Batches, compressor: Compressor) -> Run:
        """Begin a view with its ranks."""
        if self._run is None:
            self._run = Run(group, self.settings, self.task, self.learner, batches, compressor)
        else:
            self._run.regroup(group, batches, compressor)
        return self._run


async def train(
    group: Group, settings: Training, seed: int, observer: Observer | None = None, what: Task | None = None
) -> Report:
    """Train this rank's part, and return its report. All ranks must give the same settings and seed.

    `what` is a user-defined task; without it, the settings name one."""
    us = Trainer(group.host, settings, seed, what, group.size)
    await agree(group, us.intent())
    method: Recoverable | FixedRanks
    if (part_of := getattr(strategy(us.settings.strategy), "part", None)) is not None:
        method = await part_of(group, us.settings, us.task)
        us.part = method.task  # type: ignore[union-attr]
    else:
        method = opened(us.settings, us.learner)
    division, balance = Division(us.batch_sizes(group.size)), us.balance(method, group.size)
    if balance is not None:
        told = await group.all_gather(balance.told())
        balance.agree([array_of(each) for each in told], group.rank)
        division = balance.best(division.sizes)
    follow = None if balance is None else getattr(method, "follow", None)
    if balance is not None and follow is not None:
        follow(balance.costs, sum(division.sizes))
    batches = Batches.of(us.task, division.sizes, seed, turns=division.turns)
    run = us.enter(group, batches, compressor_of(us.settings, seed, group.rank))
    run.balance = balance if balance is not None and follow is not None and balance.divides else None
    run.observer = observer
    run.keep_alive()
    await method.train(run)
    if observer is not None:
        observer.finished(run)
    return run.report()


class Intent(msgspec.Struct, frozen=True):
    """The inputs of a rank's training, compared before it starts."""

    settings: Training
    seed: int
    model: str
    """The fingerprint of the task's data and shapes."""
    measure: str = ""
    """What the collectives' choices depend on, beside the settings."""


_DEFAULTS: dict[str, object] = {name: getattr(Training(), name) for name in ("precision", "recompute")}
"""Settings that are left out where they have these values: so runs without them send what they always sent."""


def encoded(intent: msgspec.Struct) -> bytes:
    """Encode an intent; equal intents have equal bytes."""
    plain = msgspec.to_builtins(intent, enc_hook=float)
    settings = plain.get("settings", {})
    for name, default in _DEFAULTS.items():
        if settings.get(name) == default:
            del settings[name]
    return msgspec.json.encode(plain)


async def agree(group: Group, ours: msgspec.Struct) -> None:
    """Return if all ranks have the same intent; otherwise raise `ConfigError` on all of them."""
    text = np.frombuffer(encoded(ours), np.uint8)
    lengths = [int(array_of(length)[0]) for length in await group.all_gather(np.array([text.size]))]
    texts = [array_of(each).tobytes() for each in await group.all_gather(text, lengths)]
    for rank, theirs in enumerate(texts):
        if theirs != texts[0]:
            try:
                unlike = difference(texts[0], theirs, "rank 0", f"rank {rank}")
            except UNDECODABLE as error:
                unlike = f"what one of them has said cannot be read ({error})"
            raise ConfigError(f"ranks 0 and {rank} were started with unlike settings: {unlike}")


def difference(one: bytes, other: bytes, here: str, there: str) -> str:
    """Describe the differences between two encoded intents, by name; raise one of `UNDECODABLE` if they are invalid."""
    first, second = (_flat(msgspec.json.decode(text, type=dict[str, object])) for text in (one, other))
    both = [(name, *(each.get(name, _DEFAULTS.get(name)) for each in (first, second))) for name in {**first, **second}]
    return ", ".join(f"{name} is {one} on {here} and {other} on {there}" for name, one, other in both if one != other)


def _flat(intent: dict[str, object]) -> dict[str, object]:
    settings = intent.pop("settings", None)
    return {**settings, **intent} if isinstance(settings, dict) else intent
