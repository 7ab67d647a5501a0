"""One member's part in a training, and how it goes with ranks that never change.

A `Trainer` goes from view to view: it enters each with the ranks and the batches that it has there, and trains on. For
ranks that were started together there is one view, which lasts to the end, so they neither vote nor hand anything over;
`hcsim.training.elastic` has members that do, and follows a cluster's views.

All must be about to do the same; those that are not say so, by name, before anything is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import msgspec
import numpy as np

from hcsim.collectives.buffers import array_of
from hcsim.collectives.group import Group
from hcsim.compressors.base import Compressor
from hcsim.compressors.registry import make
from hcsim.config.training import Training
from hcsim.errors import UNDECODABLE, ConfigError
from hcsim.runtime.host import Host
from hcsim.training.data import Batches
from hcsim.training.learner import Learner
from hcsim.training.run import Observer, Report, Run
from hcsim.training.strategies import completed, opened, optimizer
from hcsim.training.task import Task
from hcsim.training.tasks import task


class Trainer:
    """What a member trains, and with what, whichever view it is in."""

    def __init__(self, host: Host, settings: Training, seed: int, what: Task | None, ranks: int) -> None:
        """`what` is a task of one's own; without it, the settings name one."""
        self.host = host
        self.seed = seed
        self.task = what or task(settings.task)
        self.settings = completed(settings, self.task, ranks)
        self._run: Run | None = None

    def intent(self, measure: str = "") -> Intent:
        """What must be the same for all."""
        return Intent(self.settings, self.seed, self.task.fingerprint, measure)

    @cached_property
    def learner(self) -> Learner:
        """With the model."""
        return Learner(self.host, self.task, optimizer(self.settings), self.seed)

    @property
    def has_begun(self) -> bool:
        """Whether there has been a view."""
        return self._run is not None

    @property
    def run(self) -> Run:
        """From the first view on."""
        assert self._run is not None
        return self._run

    def enter(self, group: Group, batches: Batches, compressor: Compressor) -> Run:
        """A view is here: go on with its ranks."""
        if self._run is None:
            self._run = Run(group, self.settings, self.task, self.learner, batches, compressor)
        else:
            self._run.regroup(group, batches, compressor)
        return self._run


async def train(
    group: Group, settings: Training, seed: int, observer: Observer | None = None, what: Task | None = None
) -> Report:
    """Train this rank's part, and say what came of it. All ranks give the same settings and seed.

    `what` is a task of one's own; without it, the settings name one."""
    us = Trainer(group.host, settings, seed, what, group.size)
    await agree(group, us.intent())
    method = opened(us.settings, us.learner)
    batches = Batches.of(us.task, _batch_sizes(us.settings, group.size), seed)
    run = us.enter(group, batches, make(us.settings.compressor, seed=seed, rank=group.rank))
    run.observer = observer
    await method.train(run)
    if observer is not None:
        observer.finished(run)
    return run.report()


def _batch_sizes(settings: Training, ranks: int) -> Sequence[int]:
    assert settings.batch is not None
    return settings.batch if isinstance(settings.batch, tuple) else (settings.batch,) * ranks


class Intent(msgspec.Struct, frozen=True):
    """What a rank is about to do."""

    settings: Training
    seed: int
    model: str
    """Fingerprint of the task's data and shapes."""
    measure: str = ""
    """What the collectives' choices depend on beside these."""


async def agree(group: Group, ours: msgspec.Struct) -> None:
    """Return if all ranks intend the same; otherwise it is a `ConfigError` on all of them."""
    text = np.frombuffer(msgspec.json.encode(ours, enc_hook=float), np.uint8)
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
    """Between what two of them are about to do, with the names of both; raises one of `UNDECODABLE`."""
    first, second = (_flat(msgspec.json.decode(text, type=dict[str, object])) for text in (one, other))
    unlike = [name for name in first if first[name] != second.get(name)]
    return ", ".join(f"{name} is {first[name]} on {here} and {second.get(name)} on {there}" for name in unlike)


def _flat(intent: dict[str, object]) -> dict[str, object]:
    settings = intent.pop("settings", None)
    return {**settings, **intent} if isinstance(settings, dict) else intent
