"""Whether a training fits into the memory of its machines, and what would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from hcsim.config import CATALOGUE, Machine
from hcsim.config.machine import GIB, SIZES_GIB, installed_bytes, usable_bytes
from hcsim.config.scenario import Node
from hcsim.config.training import Training
from hcsim.errors import ConfigError
from hcsim.runtime.work_time import seconds
from hcsim.training.balance import UNKNOWN, StepCost, assumed, fastest, predicted, shares
from hcsim.training.blockwise import Divisible
from hcsim.training.learner import step_work
from hcsim.training.memory import Held, MemoryNeed, Place, memory_need
from hcsim.training.pipeline.strategy import Pipeline, RankMachine
from hcsim.training.precision import prepared
from hcsim.training.strategies import SingleMachine, completed, held_by, strategy
from hcsim.training.task import Task
from hcsim.training.tasks import figures_of, task


class Room(msgspec.Struct, frozen=True):
    """The memory of a machine."""

    name: str
    """Of the node."""
    machine: str
    installed_bytes: int | None
    """None: not known, and not bounded."""
    usable_bytes: int | None
    profile: Machine | None = None
    """How fast the machine is, where that is known."""
    rate_Bps: float = inf
    """At which it sends and receives."""

    @classmethod
    def of(cls, node: Node, rate_Bps: float = inf) -> Room:
        profile = CATALOGUE.named(node.machine) if isinstance(node.machine, str) else node.machine
        memory = installed_bytes(node.machine) if node.memory_bytes is None else node.memory_bytes
        usable = None if memory is None else usable_bytes(profile.name, memory)
        return cls(node.name, profile.name, memory, usable, profile, rate_Bps)


class Fit(msgspec.Struct, frozen=True):
    """What a rank needs, and what its machine has."""

    room: Room
    need: MemoryNeed

    @property
    def fits(self) -> bool:
        return self.room.usable_bytes is None or self.need.total <= self.room.usable_bytes


class _Change(NamedTuple):
    words: str
    """On the command line."""
    fields: dict[str, Any]
    """Of the training."""


class Alternative(msgspec.Struct, frozen=True):
    """Settings that fit, and what they need on the machine that has least to spare."""

    words: str
    """As they are given on the command line."""
    most_bytes: int


def fits_of(
    settings: Training, rooms: Sequence[Room], what: Task | None = None, *, saves: bool = False, mirrored: bool = False
) -> list[Fit]:
    """Return for each rank what it needs, with these settings on these machines. `saves`: the first one saves
    checkpoints."""
    own = prepared(what or task(settings.task), settings)
    chosen, ranks = strategy(settings.strategy), len(rooms)
    settings = completed(settings, own, ranks)
    batches = _batches(settings, own, rooms)
    costs = _costs(own, rooms, sum(batches) // ranks)
    computing = fastest(costs, sum(batches)) if isinstance(chosen, SingleMachine) else 0
    found, known = [], dict[tuple[object, ...], MemoryNeed]()
    if isinstance(chosen, Pipeline):
        helds = chosen.held_by_all(settings, own, [_machine(room) for room in rooms], elastic=saves)
    else:
        helds = [_as_computed(own, held_by(chosen, (rank - computing) % ranks, ranks)) for rank in range(ranks)]
    for rank, (room, held) in enumerate(zip(rooms, helds, strict=True)):
        samples = {"own": batches[rank], "all": sum(batches), "nothing": 0}[held.computes]
        place = Place(ranks, samples, saves and not rank, mirrored)
        if (held, place) not in known:
            known[held, place] = memory_need(own, settings, held, place)
        found.append(Fit(room, known[held, place]))
    return found


def _as_computed(what: Task, held: Held) -> Held:
    """Return what is held of this task: if it is not divisible, its replicas are whole all the time."""
    if not held.passing or isinstance(what, Divisible):
        return held
    return replace(held, weights=1.0 + held.weights, gradients=1.0, passing=0)


def _machine(room: Room) -> RankMachine:
    profile = room.profile
    usable = inf if room.usable_bytes is None else room.usable_bytes
    return RankMachine(lambda work: None if profile is None else seconds(profile, work), usable, room.rate_Bps)


def _batches(settings: Training, what: Task, rooms: Sequence[Room]) -> tuple[int, ...]:
    """Return the samples of each rank, as they are shared out at first."""
    ranks, batch = len(rooms), settings.batch
    if isinstance(batch, str):
        total = settings.shared_samples or what.defaults.batch * ranks
        return shares(_costs(what, rooms, total // ranks), total)
    return batch if isinstance(batch, tuple) else (batch or 1,) * ranks


def _costs(what: Task, rooms: Sequence[Room], samples: int) -> tuple[StepCost, ...]:
    """Return what steps with about so many samples cost, by the machines' profiles."""

    def cost(machine: Machine | None) -> StepCost:
        if machine is None:
            return UNKNOWN
        return predicted(lambda count: sum(seconds(machine, work) for work in step_work(what, count)), samples)

    return assumed([cost(room.profile) for room in rooms])


def alternatives(settings: Training, rooms: Sequence[Room], what: Task | None = None) -> list[Alternative]:
    """Return what else would fit, the smallest change first."""
    found: list[Alternative] = []
    for words, changed in _changes(settings, what or task(settings.task)):
        try:
            fits = fits_of(changed, rooms, None if changed.task != settings.task else what)
        except ConfigError:
            continue  # these settings do not go together
        if all(fit.fits for fit in fits) and words not in [each.words for each in found]:
            found.append(Alternative(words, max(fit.need.total for fit in fits)))
    return found


def _changes(settings: Training, what: Task) -> Iterator[tuple[str, Training]]:
    """Yield other settings, with their words: one change, and then several together."""
    batch = what.defaults.batch if settings.batch is None else settings.batch
    most = max(batch) if isinstance(batch, tuple) else what.defaults.batch if isinstance(batch, str) else batch
    smaller = [_Change(f"--set batch={size}", {"batch": size}) for size in (most // 2, most // 4, 1) if 0 < size < most]
    again = [_Change("--set recompute=true", {"recompute": True})] * (not settings.recompute)
    narrow = [_Change("--set precision=bf16", {"precision": "bf16"})] * (settings.precision == "fp32" and what.phantom)
    staged = [_Change("--strategy pipeline", {"strategy": "pipeline"})] * ("pipeline" not in settings.strategy)
    plain = [_Change("--set optimizer=sgd", {"optimizer": "sgd"})] * (settings.optimizer != "sgd")
    whole = [_Change("--strategy ddp", {"strategy": "ddp"})] * (settings.strategy not in ("ddp", "hierarchical"))
    sharded = [_Change("--strategy zero3", {"strategy": "zero3"})]
    sharded *= settings.strategy == "ddp" and settings.compressor == "none" and settings.algorithm == "auto"
    thin = []
    if "lora" in figures_of(settings.task) and "lora=" not in settings.task:
        adapted = f"{settings.task}{',' if ':' in settings.task else ':'}lora=16"
        thin = [_Change(f"--task {adapted}", {"task": adapted})]
    least = smaller[-1:]
    together = ([*again, *narrow], [*sharded, *again], [*sharded, *again, *narrow],
                [*staged, *again], [*staged, *again, *narrow], [*least, *again], [*least, *again, *narrow],
                [*thin, *again], [*thin, *again, *narrow], [*thin, *least, *again, *narrow])  # fmt: skip
    each = [[change] for change in (*smaller, *again, *narrow, *whole, *plain, *sharded, *staged, *thin)]
    for changes in (*each, *(several for several in together if len(several) > 1)):
        fields = {name: value for change in changes for name, value in change.fields.items()}
        yield " ".join(change.words for change in changes), replace(settings, **fields)


def smallest_mac_gib(need_bytes: int) -> int | None:
    """Return the memory of the smallest Mac into which it fits; None if there is none."""
    return next((size for size in SIZES_GIB if usable_bytes("Apple", size * GIB) >= need_bytes), None)
