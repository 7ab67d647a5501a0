"""A plan: what to do with a home and a model, and the file of the job that does it."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import msgspec
from msgspec.structs import replace

from hcsim.config import Cluster, Scenario, Training, write_scenario
from hcsim.config.training import read_spec
from hcsim.errors import ConfigError
from hcsim.plan.candidates import Candidate, Model
from hcsim.plan.methods import KNOWN, Method, learning_cost, methods
from hcsim.plan.outlook import Band, Change, Limits, finer, limits, purchases, sensitivity, speedup
from hcsim.plan.search import Found, Ranked, Request, Search
from hcsim.plan.simulation import Simulator
from hcsim.training.precision import prepared
from hcsim.training.tasks import TASKS, task
from hcsim.training.tasks.shapes import shapes_of
from hcsim.units import PositiveSeconds

_PATIENCE = 20
"""A job waits for an exchange as long as for so many steps."""


class Wishes(msgspec.Struct, frozen=True):
    """What is asked of a plan."""

    strategies: tuple[str, ...] = ()
    """Only these; empty: all that the registry has. If it is known of none of them how it learns, all may be chosen."""
    compressors: tuple[str, ...] = ()
    by_samples: bool = False
    ignore_memory: bool = False
    buys: tuple[str, ...] = ()


class Plan(msgspec.Struct, frozen=True):
    """What to do, and why."""

    request: Request
    found: Found
    speedup: Band | None
    """Over the fastest machine alone, for the same quality."""
    limits: Limits
    changes: tuple[Change, ...]
    purchases: tuple[Change, ...]
    finer: Change | None = None
    """What more samples a step would do, where there are few."""

    @property
    def best(self) -> Ranked:
        return self.found.best

    def alternatives(self, *, chosen: bool) -> list[Ranked]:
        """Return the best candidate of each other method, the best first: of those that might have been chosen, or of
        those of which too little is known."""
        first: dict[Method, Ranked] = {}
        for each in self.found.ranked:
            first.setdefault(each.candidate.method, each)
        others = [each for method, each in first.items() if method != self.best.candidate.method]
        return [each for each in others if self.request.allows(each.candidate.method) == chosen]


def model_of(home: Scenario, settings: Training) -> Model:
    """Return the model that these settings name, with the samples of a step: as many for each machine as the settings
    or the task say, of all machines together."""
    what = task(settings.task)
    prepared(what, settings)  # refuses what does not go together
    count, batch = len(home.nodes), settings.batch
    if isinstance(batch, tuple):
        raise ConfigError(f"batch = {list(batch)}: a plan shares out the samples itself: give one number for all")
    shared = settings.shared_samples if isinstance(batch, str) else None
    each = batch if isinstance(batch, int) else what.defaults.batch
    return Model(shapes_of(what), replace(settings, batch=None), shared or each * count)


def make_plan(home: Scenario, model: Model, wishes: Wishes, simulator: Simulator) -> Plan:
    """Search for the best way to train, and find out what it depends on."""
    chosen = tuple(methods(len(home.homes), wishes.strategies, wishes.compressors))
    is_asked = bool(wishes.strategies or wishes.compressors)
    known = any(learning_cost(each).evidence in KNOWN for each in chosen if each.family != "single")
    asked = frozenset(chosen) if is_asked and not known else frozenset()
    compared = tuple(dict.fromkeys((Method("single"), *chosen)))
    request = Request(home, model, compared, asked, wishes.by_samples, wishes.ignore_memory)
    found = Search(request, simulator).run()
    return Plan(
        request,
        found,
        speedup(found, request, simulator),
        limits(found.best.candidate, request),
        sensitivity(found.best, request, simulator),
        purchases(found, request, wishes.buys, simulator),
        finer(found, request, simulator),
    )


def job_of(plan: Plan) -> Scenario:
    """Return the job: the machines that take part, and the training."""
    candidate: Candidate = plan.best.candidate
    settings = candidate.settings(plan.request.model)
    patience_s = PositiveSeconds(max(settings.timeout_s, float(ceil(_PATIENCE * plan.best.result.step_s))))
    training = replace(settings, timeout_s=patience_s)
    there = candidate.scenario(plan.request.home)
    return replace(there, name="plan", description="", training=training, cluster=Cluster(nodes=len(there.nodes)))


def job_text(plan: Plan, why: Sequence[str]) -> str:
    """Return the file of the job, with these lines above it."""
    return "\n".join([*(f"# {line}".rstrip() for line in why), write_scenario(job_of(plan))])


def tokens_of(spec: str) -> int | None:
    """Return how many tokens a sample of a task has, if it has tokens."""
    name = spec.partition(":")[0]
    make = TASKS.get(name)
    if not isinstance(make, type) or "tokens" not in getattr(make, "__struct_fields__", ()):
        return None
    return int(read_spec(spec, {name: make}, "task").tokens)
