"""The cells of the study: a plan, all candidates, or a training that learns; and how they are run and kept."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from time import perf_counter
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from experiments.study.cell import measured_with
from experiments.study.store import Store
from hcsim.config import Scenario, Training
from hcsim.errors import ConfigError
from hcsim.launch.virtual import simulate_training
from hcsim.plan.candidates import Candidate, candidates
from hcsim.plan.home import home_in_words
from hcsim.plan.methods import Method, learning_cost, methods
from hcsim.plan.plan import model_of
from hcsim.plan.search import Request, Search, simulation_of
from hcsim.plan.simulation import Simulator, simulated
from hcsim.training.fitting import Room, fits_of
from hcsim.training.run import leading
from hcsim.workers import starting


class _Cell(msgspec.Struct, frozen=True, tag_field="kind"):
    home: str
    task: str

    @property
    def key(self) -> str:
        """Under which its result is kept."""
        return hashlib.sha256(measured_with().encode() + msgspec.json.encode(self, order="deterministic")).hexdigest()


class Planned(_Cell, frozen=True, tag="planned"):
    """What a plan chooses."""


class Exhaustive(_Cell, frozen=True, tag="exhaustive"):
    """The best of all candidates, each simulated for long."""


class Learned(_Cell, frozen=True, tag="learned"):
    """A training with data."""

    strategy: str
    compressor: str
    seed: int
    steps: int
    look_every: int


class Choice(msgspec.Struct, frozen=True):
    """What came out."""

    quality_s: float = 0.0
    """Of a sample, for the same quality."""
    alone_s: float | None = None
    strategy: str = ""
    compressor: str = ""
    nodes: tuple[str, ...] = ()
    by_speed: bool = False
    candidates: int = 0
    simulated: int = 0
    ratios: tuple[float, ...] = ()
    """Of simulated times over their lower bounds."""
    curve: tuple[tuple[int, float], ...] = ()
    """Samples and held-out loss."""
    error: str | None = None


AnyCell: TypeAlias = Planned | Exhaustive | Learned


class Entry(msgspec.Struct, frozen=True):
    """One file."""

    cell: AnyCell
    result: Choice
    cost_s: float


def run_cell(cell: AnyCell) -> Choice:
    """Run one cell."""
    if isinstance(cell, Learned):
        return _learned(cell)
    home = home_in_words(cell.home)
    request = _request(home, cell.task)
    return _planned(request) if isinstance(cell, Planned) else _exhaustive(request)


def _request(home: Scenario, task: str) -> Request:
    chosen = tuple(methods(len(home.homes)))
    return Request(home, model_of(home, Training(task=task)), chosen)


def _planned(request: Request) -> Choice:
    try:
        found = Search(request, Simulator(1)).run()
    except ConfigError:  # nothing fits
        return Choice()
    each = found.best.candidate
    return Choice(
        found.best.quality_s, None if found.alone is None else found.alone.quality_s, each.method.strategy,
        each.method.compressor, each.nodes, each.by_speed, found.candidates, found.simulated,
        tuple(ranked.result.sample_s / ranked.bound_s for ranked in found.ranked),
    )  # fmt: skip


def _exhaustive(request: Request) -> Choice:
    """Simulate everything that may be chosen and fits."""
    model, rooms = request.model, {node.name: Room.of(node) for node in request.home.nodes}
    allowed = [method for method in request.methods if request.allows(method)]
    best: tuple[float, Candidate] | None = None
    count = 0
    for each in candidates(request.home, allowed, model.samples, [1.0] * len(rooms)):
        fits = fits_of(each.settings(model), [rooms[name] for name in each.nodes], model.task)
        if not all(fit.fits for fit in fits):
            continue
        count += 1
        quality_s = simulated(simulation_of(request, each, is_long=True)).sample_s * learning_cost(each.method).most
        if best is None or quality_s < best[0]:
            best = quality_s, each
    if best is None:
        return Choice()
    quality_s, each = best
    return Choice(
        quality_s, None, each.method.strategy, each.method.compressor, each.nodes, each.by_speed, count, count
    )


def _learned(cell: Learned) -> Choice:
    home = replace(home_in_words(cell.home), seed=cell.seed)
    settings = Training(
        task=cell.task, strategy=cell.strategy, compressor=cell.compressor, steps=cell.steps,
        evaluate_every=cell.look_every,
    )  # fmt: skip
    lead = leading(simulate_training(home, settings).values())
    samples, curve = 0, []
    for point in lead.points:
        samples += point.samples
        if point.score is not None:
            curve.append((samples, point.score.loss))
    return Choice(curve=tuple(curve), strategy=cell.strategy, compressor=cell.compressor)


def run_all(cells: Sequence[AnyCell], store: Store, jobs: int, tell: Callable[[int, int], None]) -> None:
    """Run the cells that are not finished, `jobs` at a time."""
    todo = [cell for cell in cells if store.get(cell) is None]
    tell(0, len(todo))
    with ProcessPoolExecutor(jobs or os.cpu_count(), get_context("spawn")) as pool:
        with starting():
            futures = {pool.submit(_timed, cell): cell for cell in todo}
        for number, future in enumerate(as_completed(futures), 1):
            store.put(futures[future], *future.result())
            tell(number, len(todo))


def _timed(cell: AnyCell) -> tuple[Choice, float]:
    began_s = perf_counter()
    try:
        result = run_cell(cell)
    except Exception as error:
        result = Choice(error=f"{type(error).__name__}: {error}")
    return result, perf_counter() - began_s


__all__ = ["AnyCell", "Choice", "Entry", "Exhaustive", "Learned", "Method", "Planned", "run_all", "run_cell"]
