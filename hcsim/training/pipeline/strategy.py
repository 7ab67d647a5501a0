"""The strategy `pipeline`: a model cut into stages, through which a batch goes in microbatches.

    ranks          stages × replicas. A stage is a run of blocks, which `partition` chooses by the speed and the memory
                   of the machines. Rank 0 does so, and tells the others.
    batch          as with data parallelism, so many samples for each rank: a replica of the pipeline takes those of
                   its ranks, in nearly equal microbatches. So a step is over the same samples as one of `ddp`.
    gradients      are added up over the microbatches, in the same order with both schedules and any number of stages.
                   Those of a stage are averaged among its replicas in buckets, like those of `ddp`; compressors are
                   for these. The buckets of a stage leave while its last microbatch goes back.
    tied           a parameter that two stages compute with (an embedding's matrix, and the head's) is held by both,
                   which add up its gradients and apply the same updates.
    clipping       is by the norm of the whole gradient: stages exchange their sums of squares.
    evaluation     the first rank is sent the other stages' parameters. As evaluations are, that is not accounted.

GPipe: Huang et al., NeurIPS 2019. 1F1B: Narayanan et al., SOSP 2019 and SC 2021; stages are flushed after each step,
so that all microbatches of a step see the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf, isfinite, nan
from typing import Annotated, NamedTuple, Protocol

import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import replace

from hcsim.collectives.buffers import array_of
from hcsim.collectives.group import Group
from hcsim.config.machine import installed_bytes, usable_bytes
from hcsim.config.training import Training
from hcsim.errors import ConfigError
from hcsim.runtime.host import Host, Medium, Work
from hcsim.training.memory import Held, Place, StageHeld, memory_need
from hcsim.training.pipeline.partition import Cut, StageMachine, cut
from hcsim.training.pipeline.schedule import Schedule, most_kept
from hcsim.training.pipeline.stage import StageRank
from hcsim.training.task import Task, block_works, sequential

_BACKUPS = 4
_FLOPS_PS, _BYTES_PS = 1e12, 1e11
"""Of a machine that is not known: only their ratio counts."""


class Predicts(Protocol):
    """How long work takes on a machine, if that is known."""

    def __call__(self, work: Work) -> float | None: ...


class RankMachine(NamedTuple):
    """A rank's machine."""

    predict_s: Predicts
    usable_bytes: float = inf
    rate_Bps: float = inf


class Pipeline(Struct, frozen=True):
    """Machines compute runs of a model's blocks, and pass microbatches on: for models that do not fit into one.

    `stages`: as many as ranks, unless given; the rest are replicas. `schedule`: 1f1b keeps the activations of fewer
    microbatches than gpipe. In a cluster members keep a copy of their neighbour's stage, of every `backup` steps."""

    schedule: Schedule = "1f1b"
    microbatches: Annotated[int, Meta(ge=1, le=4096)] = 8
    stages: Annotated[int, Meta(ge=1)] | None = None
    backup: Annotated[int, Meta(ge=1)] = 16

    def stages_for(self, ranks: int, blocks: int) -> int:
        """Return the number of stages in a cluster whose members come and go: as many as wanted, or else more, which
        hold less each. Only if there are too few ranks or blocks for that there are fewer."""
        possible = [stages for stages in range(1, min(ranks, blocks) + 1) if ranks % stages == 0]
        wanted = self.stages or ranks
        return next((stages for stages in possible if stages >= wanted), possible[-1])

    def check(self, settings: Training, task: Task, ranks: int) -> None:
        """Reject settings and tasks that it cannot train."""
        stages = self.stages or ranks
        if ranks % stages:
            raise ConfigError(f'strategy = "{settings.strategy}": {ranks} ranks are no multiple of {stages} stages')
        chain = sequential(task)
        assert len(chain.entering) == len(task.blocks)
        if len(task.blocks) < stages:
            few = f"{task.name} has {len(task.blocks)} blocks, too few for {stages} stages"
            raise ConfigError(f'strategy = "{settings.strategy}": {few}')
        if isinstance(settings.batch, str):
            raise ConfigError(
                f'batch = "{settings.batch}": a pipeline shares out the blocks of the model by speed, and not samples; '
                "give a number"
            )
        if settings.algorithm == "hierarchical":
            raise ConfigError('algorithm = "hierarchical": the replicas of a stage exchange on one level')

    def cut(self, settings: Training, task: Task, machines: Sequence[RankMachine]) -> Cut:
        """Return the best cut that fits; where none does, the best one."""
        samples = self._samples(settings, task, len(machines))
        costs = _costs(task, machines, samples)
        known = [
            StageMachine(block_s, machine.usable_bytes, machine.rate_Bps)
            for block_s, machine in zip(costs, machines, strict=True)
        ]
        stages = self.stages or len(machines)
        width = task.blocks[0].element_bytes
        entering_bytes = [width * samples * elements for elements in sequential(task).entering]

        def fits(stage: int, first: int, end: int, usable: float) -> bool:
            held = self.held_at(settings, task, len(machines), (stage, first, end))
            return memory_need(task, settings, held, Place(len(machines), samples)).total <= usable

        def always(stage: int, first: int, end: int, usable: float) -> bool:
            return True

        overlaps = self.schedule == "gpipe"
        found = cut(known, stages, entering_bytes, fits, overlaps=overlaps)
        found = found or cut(known, stages, entering_bytes, always, overlaps=overlaps)
        assert found is not None
        return found

    def held_by_all(
        self, settings: Training, task: Task, machines: Sequence[RankMachine], *, elastic: bool = False
    ) -> list[Held]:
        """Return what each rank holds. Members of an elastic cluster have backups of two stages, the older ones until
        the newer ones are everywhere."""
        made = self.cut(settings, task, machines)
        if elastic:
            whole = self.held_by_all(settings, task, machines)
            return [replace(held, stage=replace(held.stage, backups=_BACKUPS)) for held in whole]  # type: ignore[type-var]
        stages = [made.stage_of(rank) for rank in range(len(machines))]
        return [self.held_at(settings, task, len(machines), (stage, *made.span(stage))) for stage in stages]

    def held_at(self, settings: Training, task: Task, ranks: int, part: tuple[int, int, int]) -> Held:
        """Return what a rank holds of a stage: its number, its first block and the one after its last."""
        stage, first, end = part
        stages, samples = self.stages or ranks, self._samples(settings, task, ranks)
        number = ceil(self._batch(settings, task, ranks) / samples)
        kept = most_kept(self.schedule, stage, stages, number)
        return Held(stage=StageHeld(first, end, samples, kept, ranks // stages))

    def _batch(self, settings: Training, task: Task, ranks: int) -> int:
        """Return the samples of a replica in a step: of unlike ones, the most that it could be."""
        batch = task.defaults.batch if settings.batch is None else settings.batch
        assert not isinstance(batch, str)
        stages = self.stages or ranks
        return sum(sorted(batch)[-stages:]) if isinstance(batch, tuple) else batch * stages

    def _samples(self, settings: Training, task: Task, ranks: int) -> int:
        """Return the samples of a microbatch."""
        return ceil(self._batch(settings, task, ranks) / self.microbatches)

    async def part(self, group: Group, settings: Training, task: Task) -> StageRank:
        """Agree on the stages of all ranks, and return this rank's."""
        samples = self._samples(settings, task, group.size)
        ours = [group.host.device.predict_s(work) for block in task.blocks for work in block_works(block, samples)]
        told = np.array([*(nan if each is None else each for each in ours), *_limits(group.host)], np.float64)
        everyone = [array_of(each) for each in await group.all_gather(told)]
        stages = self.stages or group.size
        numbers = np.zeros(stages + 1 + group.size, np.int64)
        if group.rank == 0:
            made = self.cut(settings, task, [_Told(each).machine for each in everyone])
            numbers[:] = [*made.bounds, *(rank for seat in made.seats for rank in seat)]
        await group.broadcast(numbers)
        bounds, ranks = numbers[: stages + 1].tolist(), numbers[stages + 1 :].reshape(stages, -1).tolist()
        made = Cut(tuple(bounds), tuple(map(tuple, ranks)), 0.0)
        stage = made.stage_of(group.rank)
        first, end = made.span(stage)
        group.host.trace("stage", stage, first, end)
        return StageRank(made, stage, sequential(task).stage(first, end), (self.schedule, self.microbatches))


def _costs(task: Task, machines: Sequence[RankMachine], samples: int) -> list[tuple[float, ...]]:
    """Return by rank what each block costs for a microbatch. A rank that is not known is taken for an average one."""
    works = [block_works(block, samples) for block in task.blocks]
    told = [[[machine.predict_s(work) for work in pair] for pair in works] for machine in machines]
    costs = [
        tuple(sum(each) for each in pairs)  # type: ignore[arg-type]
        if all(time_s is not None and isfinite(time_s) for each in pairs for time_s in each)
        else None
        for pairs in told
    ]
    known = [each for each in costs if each is not None]
    usual = (
        tuple(sum(each) / len(known) for each in zip(*known, strict=True))
        if known
        else tuple(sum(max(work.flops / _FLOPS_PS, work.moved_bytes / _BYTES_PS) for work in pair) for pair in works)
    )
    return [usual if each is None else each for each in costs]


def _limits(host: Host) -> tuple[float, float]:
    """Return the memory and the line rate of a host; infinite where they are not known."""
    chip = host.device.chip
    memory = installed_bytes(chip.name) if chip.memory_bytes is None else chip.memory_bytes
    rates = [
        each.rate_bps / 8 for each in host.interfaces() if each.rate_bps is not None and each.medium != Medium.LOOPBACK
    ]
    return inf if memory is None else usable_bytes(chip.name, memory), max(rates, default=inf)


class _Told:
    """What a rank says of its machine: the times of all works, in order, and its limits."""

    def __init__(self, figures: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> None:
        self._times = iter(figures[:-2].tolist())
        self.machine = RankMachine(lambda work: next(self._times), float(figures[-2]), float(figures[-1]))
