"""Whether a cell can be run at all, found out before the first one is."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from experiments.clusters import cluster
from experiments.study.cell import AllReduce, AnyCell
from hcsim.collectives.algorithms import algorithms
from hcsim.collectives.cost import closed_form
from hcsim.errors import ConfigError, UsageError
from hcsim.units import did_you_mean


def check_cell(cell: AnyCell) -> None:
    """Refuse what is not known, with the names that are."""
    if isinstance(cell, AllReduce):
        _check_place(cell.link, cell.world, "equal")
        _check_algorithm(cell.algorithm, cell.link, cell.world)
        _check_formula(cell.algorithm, cell.link, cell.world)
        return
    _check_place(cell.link, cell.world, cell.variant)
    _check_algorithm(cell.algorithm, cell.link, cell.world)
    _check_training(cell.task, cell.strategy, cell.compressor)


@cache
def _check_place(link: str, world: int, variant: str) -> None:
    cluster(link, world, variant)


@cache
def _check_algorithm(algorithm: str, link: str, world: int) -> None:
    _check_known("algorithm", algorithm, ["auto", *algorithms("all_reduce")])
    if algorithm == "hierarchical" and not cluster(link, world).groups:
        raise ConfigError(f'algorithm = "hierarchical": it goes over several homes, and link = "{link}" has one')


@cache
def _check_formula(algorithm: str, link: str, world: int) -> None:
    """Where times stand beside the textbook's, there has to be a formula."""
    if alpha_beta := cluster(link, world).alpha_beta:
        try:
            closed_form(algorithm, world, 1, *alpha_beta)
        except UsageError as error:
            raise ConfigError(f'algorithm = "{algorithm}", link = "{link}": {error}') from None


@cache
def _check_training(task: str, strategy: str, compressor: str) -> None:
    # Behind these are the strategies and compressors, which a sweep of all-reduces need not load.
    from hcsim.compressors.registry import make
    from hcsim.training.strategies import strategy as strategy_named
    from hcsim.training.tasks import TASKS
    from hcsim.training.tasks import task as task_named

    name = task.partition(":")[0]
    _check_known("task", name, TASKS)
    if isinstance(TASKS[name], type):  # the others load their data
        task_named(task)
    strategy_named(strategy)
    make(compressor, seed=0, rank=0)


def _check_known(what: str, name: str, known: Iterable[str]) -> None:
    names = list(known)
    if name not in names:
        hint = did_you_mean(name, names)
        raise ConfigError(f'{what} = "{name}": there is no such {what}{hint}; known: {", ".join(names)}')
