"""The strategies by name, their components, and the checks of their settings."""

from __future__ import annotations

from typing import Annotated, ClassVar, Protocol, TypeAlias, cast

from msgspec import Meta, Struct
from msgspec.structs import replace

from hcsim.collectives.algorithms import algorithms
from hcsim.compressors.registry import make
from hcsim.config.training import Training, read_spec
from hcsim.errors import ConfigError
from hcsim.registry import Registry
from hcsim.training.aggregation import Aggregator, Hierarchical, OneLevel
from hcsim.training.blockwise import BlockwiseReplica, blockwise_replica
from hcsim.training.learner import Learner
from hcsim.training.memory import Held
from hcsim.training.optimizer import AdamW, Optimizer, Sgd
from hcsim.training.parameter_server.rounds import ServerPolicy
from hcsim.training.parameter_server.strategy import check_place
from hcsim.training.parameter_server.strategy import train as serve_and_work
from hcsim.training.pipeline.strategy import Pipeline
from hcsim.training.precision import prepared
from hcsim.training.recoverable import HierarchicalReplicated, OneComputes, Pace, Periodic, Recoverable, Replicated
from hcsim.training.run import Run
from hcsim.training.sharded import Sharded, Stage
from hcsim.training.task import Task
from hcsim.training.tasks import task
from hcsim.units import did_you_mean

Every: TypeAlias = Annotated[int, Meta(ge=1)]


class FixedRanks(Protocol):
    """A strategy for ranks that never change: a struct whose fields a spec sets ("gossip:0.4")."""

    async def train(self, run: Run) -> None:
        """Train this rank's part of the run, from the first step to the last."""


class Strategy(Protocol):
    """How ranks train together, both fixed ranks and the members of a cluster: a struct whose fields a spec sets
    ("diloco:16,lr=0.5")."""

    def open(self, settings: Training, learner: Learner) -> Recoverable: ...


class SingleMachine(Struct, frozen=True):
    """One machine alone, the fastest, with the batches of all."""

    def held(self, rank: int, ranks: int) -> Held:
        return Held(computes="nothing" if rank else "all")

    def open(self, settings: Training, learner: Learner) -> Recoverable:
        return OneComputes(learner)


class DataParallel(Struct, frozen=True):
    """All ranks average their gradients in every step."""

    def open(self, settings: Training, learner: Learner) -> Recoverable:
        return Replicated(learner, one_level)


class HierarchicalParallel(Struct, frozen=True):
    """As data parallelism, first within each home, then between homes; exchanges between homes are compressed."""

    def open(self, settings: Training, learner: Learner) -> Recoverable:
        return HierarchicalReplicated(learner, hierarchical)


class LocalSgd(Struct, frozen=True):
    """Local steps, then all average their parameters. Higher `every`: fewer exchanges, more drift.

    With `pace=speed` the fastest machine takes `every` steps, and the others as many as they finish meanwhile."""

    every: Every = 8
    pace: Pace = "alike"

    def held(self, rank: int, ranks: int) -> Held:
        """Return that there are an anchor and a change."""
        return Held(copies=2)

    def open(self, settings: Training, learner: Learner) -> Recoverable:
        """Return local SGD: the average itself is the next anchor."""
        return Periodic(learner, one_level, self.every, optimizer(settings), Sgd(lr=1.0), self.pace)


class DiLoCo(Struct, frozen=True):
    """Local steps, then an outer optimizer with Nesterov momentum over the average of how far each went. `pace` is that
    of local SGD."""

    every: Every = 16
    lr: Annotated[float, Meta(gt=0)] = 0.7
    momentum: Annotated[float, Meta(gt=0, lt=1)] = 0.9
    pace: Pace = "alike"

    def held(self, rank: int, ranks: int) -> Held:
        """Return that there are an anchor, a change, and the outer momentum."""
        return Held(copies=3)

    def open(self, settings: Training, learner: Learner) -> Recoverable:
        """Return DiLoCo: the outer optimizer makes the next anchor."""
        outer = Sgd(lr=self.lr, momentum=self.momentum, nesterov=True)
        return Periodic(learner, one_level, self.every, optimizer(settings), outer, self.pace)


class ZeroStage(Struct, frozen=True):
    """What the sharded strategies have in common."""

    stage: ClassVar[Stage]
    shards: Every | None = None
    """Ranks that share a model out; as many others train beside them. None: all ranks."""
    copies: Annotated[int, Meta(ge=1, le=8)] = 1
    """Ranks that hold each shard."""

    def held(self, rank: int, ranks: int) -> Held:
        """Return the shares of a rank; gradients and parameters are there whole for one bucket or a few blocks."""
        shards = self.shards or ranks
        kept = min(self.copies, shards) / shards
        if self.stage == 1:
            return Held(optimizer=kept)
        weights = kept if self.stage == 3 else 1.0
        return Held(weights=weights, gradients=kept, optimizer=kept, passing=self.stage)

    def open(self, settings: Training, learner: Learner) -> Recoverable:
        return Sharded(learner, settings, optimizer(settings), self.stage, self.shards, self.copies)

    def check(self, settings: Training) -> None:
        """Reject settings that cannot be sharded."""
        name = settings.strategy.partition(":")[0]
        if settings.compressor != "none":
            raise ConfigError(
                f'compressor = "{settings.compressor}": {name} sends each sum of gradients to its owner alone, and '
                "parameters, in which an error would stay; ddp compresses"
            )
        names = ("auto", *(each for each in algorithms("all_gather") if each in algorithms("reduce_scatter")))
        if settings.algorithm not in names:
            raise ConfigError(
                f'algorithm = "{settings.algorithm}": {name} reduce-scatters and gathers; known: {", ".join(names)}'
            )


class Zero1(ZeroStage, frozen=True):
    """The optimizer's state is shared out among the ranks."""

    stage: ClassVar[Stage] = 1


class _Blockwise(ZeroStage, frozen=True):
    """A stage whose model is computed block by block."""

    def replica(self, what: Task, seed: int, device: str) -> BlockwiseReplica:
        return blockwise_replica(what, seed, device, whole=self.stage < 3)


class Zero2(_Blockwise, frozen=True):
    """As zero1, and gradients are shared out too."""

    stage: ClassVar[Stage] = 2


class Zero3(_Blockwise, frozen=True):
    """As zero2, and parameters are shared out too: each block is gathered when it is computed."""

    stage: ClassVar[Stage] = 3


class ParameterServer(ServerPolicy, frozen=True, kw_only=True):
    """A server on the first rank's machine keeps the model; workers pull it and push gradients."""

    def held(self, rank: int, ranks: int) -> Held:
        """Return what workers hold, and the first rank's server: the model, the model as it is sent, and the pushes of
        a round, as they came and decoded."""
        if rank:
            return Held(optimizer=0.0, payloads=2)
        pushes = ranks if self.mode == "sync" else 1
        return Held(weights=2, gradients=2, copies=1 + pushes, payloads=2 + pushes)

    async def train(self, run: Run) -> None:
        await serve_and_work(run, self)


_FIXED_RANKS = 'strategy = "{}": it trains fixed ranks only: a scenario without [cluster], or `hcsim rank`'

STRATEGIES: Registry[type[Struct]] = Registry(
    "strategy",
    {
        "single": SingleMachine,
        "ddp": DataParallel,
        "hierarchical": HierarchicalParallel,
        "local_sgd": LocalSgd,
        "diloco": DiLoCo,
        "parameter_server": ParameterServer,
        "pipeline": Pipeline,
        "zero1": Zero1,
        "zero2": Zero2,
        "zero3": Zero3,
    },
)
"""Each is a `Strategy` or a `FixedRanks`; a cluster has its own implementation of the parameter server."""


def held_by(chosen: Strategy | FixedRanks, rank: int, ranks: int) -> Held:
    """Return what a strategy makes the rank hold: the whole model, unless its method `held` says otherwise."""
    held = getattr(chosen, "held", None)
    return Held() if held is None else held(rank, ranks)


def strategy(spec: str) -> Strategy | FixedRanks:
    """Return the strategy for a spec such as "diloco:16"."""
    return cast("Strategy | FixedRanks", read_spec(spec, STRATEGIES, "strategy"))


def opened(settings: Training, learner: Learner) -> Recoverable | FixedRanks:
    chosen = strategy(settings.strategy)
    return chosen.open(settings, learner) if hasattr(chosen, "open") else chosen


def recoverable(settings: Training, learner: Learner) -> Recoverable:
    """Return the strategy of completed settings, for a cluster whose members change."""
    chosen = strategy(settings.strategy)
    if not hasattr(chosen, "open"):
        raise ConfigError(_FIXED_RANKS.format(settings.strategy))
    return chosen.open(settings, learner)


def check_elastic(settings: Training) -> None:
    """Reject, before anything is started, settings that cannot go on with other members."""
    chosen = strategy(settings.strategy)
    if not (hasattr(chosen, "open") or isinstance(chosen, ParameterServer | Pipeline)):
        raise ConfigError(_FIXED_RANKS.format(settings.strategy))
    if isinstance(chosen, ZeroStage) and chosen.shards:
        name = settings.strategy.partition(":")[0]
        raise ConfigError(f"shards={chosen.shards}: in a cluster all members share the model out; {name}:copies=2 "
                          "keeps each shard twice")  # fmt: skip


def check_training(settings: Training, ranks: int, homes: int) -> None:
    """Reject, before anything is started, settings that cannot be trained."""
    chosen = strategy(settings.strategy)
    if homes < 2 and (isinstance(chosen, HierarchicalParallel) or settings.algorithm == "hierarchical"):
        raise ConfigError("hierarchical goes over several homes, and here is only one")
    if isinstance(chosen, SingleMachine | ParameterServer) and settings.algorithm != "auto":
        raise ConfigError(f'algorithm = "{settings.algorithm}": {settings.strategy} does without all-reduces')
    if isinstance(chosen, ZeroStage) and chosen.shards and ranks % chosen.shards:
        raise ConfigError(f"shards={chosen.shards}: {ranks} ranks cannot be cut into groups of {chosen.shards}")
    make(settings.compressor, seed=0, rank=0)
    names = ("auto", *algorithms("all_reduce"))
    if settings.algorithm not in names:
        hint = did_you_mean(settings.algorithm, names)
        raise ConfigError(f'algorithm = "{settings.algorithm}": there is none such{hint}; known: {", ".join(names)}')
    completed(settings, prepared(task(settings.task), settings), ranks)


def completed(settings: Training, what: Task, ranks: int) -> Training:
    """Fill in missing settings from the task's defaults; reject settings that do not fit together."""
    usual = what.defaults
    if settings.optimizer == "adamw" and settings.momentum is not None:
        raise ConfigError(f"momentum = {settings.momentum}: adamw has its own two, which are fixed")
    chosen = strategy(settings.strategy)
    if isinstance(chosen, ZeroStage):
        chosen.check(settings)
    check_place(settings, has_server=isinstance(chosen, ParameterServer))
    if isinstance(settings.batch, tuple) and len(settings.batch) != ranks:
        raise ConfigError(f"batch = {list(settings.batch)}: {len(settings.batch)} batch sizes for {ranks} ranks")
    if isinstance(chosen := strategy(settings.strategy), Pipeline):
        chosen.check(settings, what, ranks)
    return replace(
        settings,
        batch=usual.batch if settings.batch is None else settings.batch,
        lr=usual.lr if settings.lr is None else settings.lr,
        momentum=usual.momentum if settings.momentum is None else settings.momentum,
    )


def optimizer(settings: Training) -> Optimizer:
    assert settings.lr is not None
    assert settings.momentum is not None
    if settings.optimizer == "adamw":
        return AdamW(lr=settings.lr)
    return Sgd(lr=settings.lr, momentum=settings.momentum)


def one_level(run: Run) -> Aggregator:
    """Return an aggregator over all ranks, with the algorithm of the settings."""
    return OneLevel(run.group, run.learner.ledger, run.compressor, run.settings.algorithm)


def hierarchical(run: Run) -> Aggregator:
    """Return an aggregator that sums within each home first."""
    group = run.group
    homes = group.options.groups
    if sum(map(len, homes)) != group.size:
        raise ConfigError("hierarchical goes over several homes, and none are given (in a program: Options(groups=…))")
    ours = next(home for home in homes if group.rank in home)
    near = group.subgroup(ours)
    far = None
    if group.rank == ours[0]:
        speakers = group.subgroup([home[0] for home in homes])
        far = OneLevel(speakers, run.learner.ledger, run.compressor, run.settings.algorithm)
    return Hierarchical(near, far)
