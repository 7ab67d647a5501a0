"""The search for the best way to train: branch and bound.

Every candidate has a lower bound of its time (`bounds.py`), which costs microseconds. In the order of their bounds they
are simulated, a few steps each, until the next bound is above the best time that was simulated: what is left is slower.
The best few are then simulated for longer. Times are those for the same quality: a sample's time, times the samples
that the method needs relative to one machine alone. Of every method one candidate is simulated in any case, so that
alternatives can be shown.

What does not fit into the memory of its machines is left out before. A method whose learning is unknown is simulated
once, and never chosen, unless it was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec
from msgspec.structs import replace

from hcsim.config import Scenario
from hcsim.config.machine import GIB
from hcsim.errors import ConfigError
from hcsim.plan.bounds import Bounds
from hcsim.plan.candidates import Candidate, Model, candidates, homes_of
from hcsim.plan.methods import KNOWN, LearningCost, Method, learning_cost
from hcsim.plan.simulation import WIDTH, Simulated, Simulation, Simulator
from hcsim.training.fitting import Fit, Room, alternatives, fits_of, smallest_mac_gib
from hcsim.training.strategies import check_training

MARGIN = 0.95
"""Bounds may be too high by so much: what a compressor costs is only known roughly. The study `experiments.planning`
shows how near bounds and simulations are."""
MOST_SIMULATED = 160
_FINALISTS = 4
_FAR = 3.0
"""A method that takes at least so many times as long as the best is not simulated."""
_SHOWN = 3
_NEAR = 1.1
"""Those within this ratio of the best, by a short simulation, are simulated for longer, unless there is one only."""


class Ranked(msgspec.Struct, frozen=True):
    """A candidate, and what is known of it."""

    candidate: Candidate
    result: Simulated
    learning: LearningCost
    bound_s: float
    """The least time of a sample."""

    @property
    def quality_s(self) -> float:
        """The time for as much learning as one machine alone has from a sample."""
        return self.result.sample_s * self.learning.most

    @property
    def failed(self) -> bool:
        return bool(self.result.failure)


class Request(msgspec.Struct, frozen=True):
    """What is searched for."""

    home: Scenario
    model: Model
    methods: tuple[Method, ...]
    asked: frozenset[Method] = frozenset()
    """Methods that may be chosen although nothing is known of how they learn."""
    by_samples: bool = False
    """Whether samples a second count, however much is learned from them."""
    ignore_memory: bool = False

    def learning(self, method: Method) -> LearningCost:
        """Return what a method's learning counts for."""
        known = learning_cost(method)
        return LearningCost(known.evidence) if self.by_samples else known

    def allows(self, method: Method) -> bool:
        """Return whether the method may be chosen."""
        return self.by_samples or method in self.asked or learning_cost(method).evidence in KNOWN


class Found(msgspec.Struct, frozen=True):
    """The outcome of a search."""

    best: Ranked
    alone: Ranked | None
    """The fastest machine by itself; None: the model fits into none of them."""
    ranked: tuple[Ranked, ...]
    """All that were simulated and did not fail, the best first, whether they may be chosen or not."""
    excluded: tuple[tuple[Candidate, Fit], ...]
    """Of each method for which memory left nothing: the candidate with the least bound, and where it does not fit."""
    candidates: int
    simulated: int


class Search:
    """One search."""

    def __init__(self, request: Request, simulator: Simulator) -> None:
        self._request = request
        self._simulator = simulator
        self._bounds = Bounds(request.home, request.model)
        found = candidates(request.home, request.methods, request.model.samples, self._bounds.speeds())
        known = {method: request.learning(method) for method in request.methods}
        ordered = [
            (self._bounds.sample_s(each), known[each.method], each) for each in found if _is_valid(request, each)
        ]
        self._ordered = sorted(ordered, key=lambda each: each[0] * each[1].most)
        self._fits: dict[Candidate, Fit | None] = {}
        self._ranked: dict[Candidate, Ranked] = {}
        self._unfit: dict[Method, tuple[Candidate, Fit]] = {}

    def run(self) -> Found:
        """Search, and return what was found."""
        before = self._simulator.count
        self._simulate_first_of_each()
        alone = self._fastest_alone()
        if not any(map(self._may_be_chosen, self._ranked.values())):
            raise self._nothing_fits()
        self._branch_and_bound()
        self._simulate([each.candidate for each in self._finalists()], is_long=True)
        ranked = sorted((each for each in self._ranked.values() if not each.failed), key=lambda each: each.quality_s)
        best = self._best()
        if alone is not None:
            alone = self._ranked.get(alone.candidate, alone)
        fitting = {each.method for _, _, each in self._ordered if self._fits.get(each, True) is None}
        excluded = tuple(each for method, each in self._unfit.items() if method not in fitting)
        return Found(best, alone, tuple(ranked), excluded, len(self._ordered), self._simulator.count - before)

    def _simulate_first_of_each(self) -> None:
        """Simulate every machine alone, and the most promising candidate of each method, of those that fit. What cannot
        be anywhere near the best is left out."""
        taken: dict[Method, tuple[float, Candidate]] = {}
        alone = []
        for bound_s, learning, each in self._ordered:
            if each.method.family == "single":
                alone += [each] if self._fit(each) is None else []
            elif each.method not in taken:
                if (unfit := self._fit(each)) is None:
                    taken[each.method] = bound_s * learning.most, each
                else:
                    self._unfit.setdefault(each.method, (each, unfit))
        self._simulate(alone)
        waiting = list(taken.values())
        while waiting:
            known = [each.quality_s for each in self._ranked.values() if self._may_be_chosen(each)]
            limit_s = _FAR * min(known, default=float("inf"))
            self._simulate([each for bound_s, each in waiting[:WIDTH] if bound_s <= limit_s])
            waiting = waiting[WIDTH:]

    def _branch_and_bound(self) -> None:
        waiting = self._waiting()
        while len(self._ranked) < MOST_SIMULATED:
            limit_s = self._best().quality_s
            todo = [each for bound_s, each in islice(waiting, WIDTH) if MARGIN * bound_s <= limit_s]
            if not todo:
                return
            self._simulate(todo)

    def _waiting(self) -> Iterator[tuple[float, Candidate]]:
        """Yield what may be chosen, with its bound for the same quality, in the order of the bounds."""
        for bound_s, learning, each in self._ordered:
            if each not in self._ranked and self._request.allows(each.method) and self._fit(each) is None:
                yield bound_s * learning.most, each

    def _finalists(self) -> list[Ranked]:
        """Return what has to be told apart, and the best machine alone."""
        best_s = self._best().quality_s
        allowed = sorted(filter(self._may_be_chosen, self._ranked.values()), key=lambda each: each.quality_s)
        finalists = [each for each in allowed if each.quality_s <= _NEAR * best_s][:_FINALISTS]
        alone = [each for each in allowed if each.candidate.method.family == "single"][:1]
        compared = [*finalists, *(each for each in alone if each not in finalists)]
        return compared if len(compared) > 1 else []

    def _best(self) -> Ranked:
        return min(filter(self._may_be_chosen, self._ranked.values()), key=lambda each: each.quality_s)

    def _simulate(self, chosen: Sequence[Candidate], *, is_long: bool = False) -> None:
        results = self._simulator.all([simulation_of(self._request, each, is_long=is_long) for each in chosen])
        for each, result in zip(chosen, results, strict=True):
            bound_s = self._bounds.sample_s(each)
            self._ranked[each] = Ranked(each, result, self._request.learning(each.method), bound_s)

    def _may_be_chosen(self, each: Ranked) -> bool:
        return not each.failed and self._request.allows(each.candidate.method)

    def _fit(self, each: Candidate) -> Fit | None:
        """Return the machine for which a candidate is too large, or None if it fits everywhere."""
        if each not in self._fits:
            self._fits[each] = _unfit(self._request, each)
        return self._fits[each]

    def _fastest_alone(self) -> Ranked | None:
        """Return the fastest machine by itself. Where a step's samples do not fit at once into any, it takes fewer at a
        time, as many as do."""
        alone = [each for each in self._ranked.values() if each.candidate.method.family == "single" and not each.failed]
        samples = self._request.model.samples
        while not alone and samples > 1:
            samples //= 2
            request = replace(self._request, model=self._request.model._replace(samples=samples))
            less = [Candidate(Method("single"), (node.name,)) for node in request.home.nodes]
            fitting = [each for each in less if _unfit(request, each) is None]
            results = self._simulator.all([simulation_of(request, each) for each in fitting])
            alone = [Ranked(each, result, LearningCost("exact"), result.sample_s)
                     for each, result in zip(fitting, results, strict=True) if not result.failure]  # fmt: skip
        return min(alone, key=lambda each: each.quality_s, default=None)

    def _nothing_fits(self) -> ConfigError:
        """Return what to say where no candidate is left: what would fit, or why simulations failed."""
        unfit = [fit for fit in self._fits.values() if fit is not None]
        if not unfit:
            failures = [each.result.failure for each in self._ranked.values() if each.failed]
            return ConfigError(f"nothing could be simulated: {failures[0] if failures else 'there is no candidate'}")
        model, least = self._request.model, min(unfit, key=_missing)
        rooms = list(map(Room.of, self._request.home.nodes))
        batch = max(1, model.samples // len(rooms))
        found = alternatives(replace(model.base, strategy="ddp", batch=batch), rooms, model.task)
        would = [f"{each.words} ({_gib(each.most_bytes)})" for each in found[:_SHOWN]]
        if (size := smallest_mac_gib(least.need.total)) is not None:
            would.append(f"a Mac with {size} GiB")
        return ConfigError(
            f"{model.base.task} fits into none of these machines: of {least.room.name} ({least.room.machine}) it needs "
            f"{_gib(least.need.total)} at least, and that can use {_gib(least.room.usable_bytes or 0)}; "
            f"what would do: {'; or '.join(would) or 'no smaller batch, and no Mac'}"
        )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.3g} GiB"


def _is_valid(request: Request, each: Candidate) -> bool:
    """Return whether the settings of a candidate go together."""
    try:
        check_training(each.settings(request.model), len(each.nodes), len(homes_of(request.home, each.nodes)))
    except ConfigError:
        return False
    return True


def _missing(fit: Fit) -> int:
    return fit.need.total - (fit.room.usable_bytes or 0)


def is_possible(request: Request, each: Candidate) -> bool:
    """Return whether the settings of a candidate go together, and fit into its machines."""
    return _is_valid(request, each) and _unfit(request, each) is None


def _unfit(request: Request, each: Candidate) -> Fit | None:
    """Return the machine for which a candidate is too large, or None if it fits everywhere."""
    if request.ignore_memory:
        return None
    return max((fit for fit in memory_of(request, each) if not fit.fits), key=_missing, default=None)


def memory_of(request: Request, each: Candidate) -> list[Fit]:
    """Return what each machine of a candidate needs, and has."""
    model, nodes = request.model, {node.name: node for node in request.home.nodes}
    return fits_of(each.settings(model), [Room.of(nodes[name]) for name in each.nodes], model.task)


def simulation_of(request: Request, each: Candidate, *, is_long: bool = False) -> Simulation:
    """Return the simulation of a candidate."""
    return Simulation(each.scenario(request.home), each.settings(request.model), request.model.task, is_long)
