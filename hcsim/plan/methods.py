"""The ways to train that a plan compares, and what each costs in learning.

A step of one strategy is not worth a step of another. What is known:

    exact       the same arithmetic as one machine that learns from the same samples, but for rounding: gradients of all
                samples are averaged before every update. Such steps are worth the same wherever they are taken.
    measured    steps to a target loss, relative to data parallelism, in results/time_to_target.csv: a small
                convolutional network on digits, four machines, a look every four steps. How far it holds for another
                model is not known; that is said where such a method is recommended.
    unknown     nothing was measured. Such a method is only listed, unless it is asked for.
    failed      it did not reach the target.

A method that took fewer steps than data parallelism is taken for one that takes as many: what a small model gains so,
another need not. Nothing is known finer than between two looks, so that an exact method is preferred to a measured one
which is hardly faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from hcsim.training.strategies import STRATEGIES, strategy

Evidence: TypeAlias = Literal["exact", "measured", "unknown", "failed"]
KNOWN: tuple[Evidence, ...] = ("exact", "measured")
"""What may be chosen without being asked for."""


class Method(NamedTuple):
    """A strategy and a compressor, by their specs."""

    strategy: str
    compressor: str = "none"

    @property
    def family(self) -> str:
        """The strategy's name."""
        return self.strategy.partition(":")[0]

    def __str__(self) -> str:
        return self.strategy if self.compressor == "none" else f"{self.strategy} {self.compressor}"


class LearningCost(NamedTuple):
    """How many samples a method needs for the same quality, relative to one machine alone."""

    evidence: Evidence
    least: float = 1.0
    most: float = 1.0
    """What plans count with."""


_TO_TARGET_STEPS = 64
_LOOK_STEPS = 4
"""Between two evaluations: a target that was seen at step 64 was reached after step 60."""

MEASURED_STEPS: dict[Method, tuple[int, int] | None] = {
    Method("ddp", "int8+ef"): (64, 64),
    Method("ddp", "powersgd:2+ef"): (80, 80),
    Method("ddp", "topk:0.01+ef"): None,
    Method("local_sgd:8"): (64, 64),
    Method("diloco:8"): None,
    Method("diloco:8,momentum=0.5"): (64, 64),
    Method("diloco:8,momentum=0.5", "int8"): (48, 48),
    Method("parameter_server:bounded,staleness=4"): (56, 68),
    Method("parameter_server:async"): (52, 76),
}
"""Fewest and most steps to the target over all links, where data parallelism took 64; None: it was not reached in 120.
tests/plan/test_methods.py holds these to the table."""

_EXACT = ("single", "ddp", "hierarchical", "zero1", "zero2", "zero3", "pipeline")
_EXACT_SPECS = ("parameter_server:sync",)
_SPECS: dict[str, tuple[str, ...]] = {
    "local_sgd": (
        "local_sgd:8", "local_sgd:8,pace=speed", "local_sgd:32", "local_sgd:32,pace=speed", "local_sgd:64",
    ),
    "diloco": (
        "diloco:8,momentum=0.5", "diloco:8,momentum=0.5,pace=speed", "diloco:32,momentum=0.5", "diloco:64,momentum=0.5",
    ),
    "pipeline": ("pipeline", "pipeline:schedule=gpipe", "pipeline:microbatches=32"),
    "parameter_server": (
        "parameter_server:sync", "parameter_server:bounded,staleness=4", "parameter_server:async",
    ),
}  # fmt: skip
"""Candidates of a strategy with arguments; those of any other are its name."""
_COMPRESSORS: dict[str, tuple[str, ...]] = {
    "ddp": ("none", "bf16", "int8+ef", "powersgd:2+ef"),
    "hierarchical": ("none", "int8+ef"),
    "local_sgd": ("none", "int8"),
    "diloco": ("none", "int8"),
}


def learning_cost(method: Method) -> LearningCost:
    """Return what is known of how a method learns."""
    if method.compressor == "none" and (method.family in _EXACT or method.strategy in _EXACT_SPECS):
        return LearningCost("exact")
    if method not in MEASURED_STEPS:
        return LearningCost("unknown")
    steps = MEASURED_STEPS[method]
    if steps is None:
        return LearningCost("failed")
    least, most = steps
    before = _TO_TARGET_STEPS - _LOOK_STEPS
    return LearningCost(
        "measured", max(1.0, (least - _LOOK_STEPS) / _TO_TARGET_STEPS), max(most, _TO_TARGET_STEPS) / before
    )


def methods(homes: int, strategies: Sequence[str] = (), compressors: Sequence[str] = ()) -> Iterator[Method]:
    """Yield the methods to compare, in so many homes: those of every strategy of the registry, or of these specs, with
    their usual compressors, or with these."""
    chosen = list(strategies) or [spec for name in STRATEGIES for spec in _SPECS.get(name, (name,))]
    for spec in chosen:
        strategy(spec)  # refuses what is unknown
        family = spec.partition(":")[0]
        if family == "hierarchical" and homes < 2:
            continue
        for compressor in ("none",) if family == "single" else compressors or _COMPRESSORS.get(family, ("none",)):
            yield Method(spec, compressor)
