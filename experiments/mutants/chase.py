"""Which run comes next: seeds of each mutant in order, until one breaks an invariant that the unpatched tree keeps.

Seeds of one mutant may run side by side, and what counts is the first that breaks something, whichever ends first. So
the same seeds are reported with one worker and with many.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from experiments.mutants.hunt import Broken, Shrunk
from experiments.mutants.ledger import Known

UNPATCHED = "unpatched"
"""The tree without a planted bug."""


class Job(NamedTuple):
    """A call of `hunt` in one of the trees."""

    tree: str
    seed: int
    many: int = 1
    shrink: str = ""
    """The invariant, if that seed is to be shrunk."""

    @property
    def seeds(self) -> range:
        """Those that it runs."""
        return range(self.seed, self.seed + self.many)


Running: TypeAlias = Mapping[Job, object]


class Chase:
    """The search for one mutant."""

    def __init__(self, name: str, known: Known, unpatched: Known, seeds: range, *, shrinks: bool) -> None:
        self.name = name
        self.known = known
        self._unpatched = unpatched
        self._seeds = seeds
        self._shrinks = shrinks

    @property
    def found(self) -> Broken | None:
        """The first seed that shows the bug, once it is certain."""
        for seed in self._seeds:
            broken = self.known.broken.get(seed)
            if broken is not None and seed in self._unpatched.clean:
                return broken
            if broken is None and seed not in self.known.clean:
                return None
        return None

    @property
    def shrunk(self) -> Shrunk | None:
        """What is left of it."""
        found = self.found
        return None if found is None else self.known.shrunk.get(found.seed)

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to find out."""
        found = self.found
        if found is not None:
            return not self._shrinks or found.seed in self.known.shrunk
        return all(seed in self.known.clean or seed in self._unpatched.broken for seed in self._seeds)

    @property
    def tried(self) -> int:
        """How many seeds it took, or did not suffice."""
        found = self.found
        last = self._seeds.stop - 1 if found is None else found.seed
        return last - self._seeds.start + 1

    def next(self, running: Running, chunk: int) -> Job | None:
        """What to run now beside what is running; None: nothing."""
        under_way = _under_way(self.name, running)
        waits = False
        for seed in self._seeds:
            broken = self.known.broken.get(seed)
            if broken is not None:
                if seed in self._unpatched.broken:
                    continue  # no evidence
                if seed not in self._unpatched.clean:
                    return _unless_running(Job(UNPATCHED, seed), running)
                if waits or not self._shrinks or seed in self.known.shrunk:
                    return None
                return _unless_running(Job(self.name, seed, shrink=broken.invariants[0]), running)
            if seed in under_way:
                waits = True
            elif seed not in self.known.clean:
                return Job(
                    self.name, seed, _gap(self.known, under_way, range(seed, min(seed + chunk, self._seeds.stop)))
                )
        return None


def _unless_running(job: Job, running: Running) -> Job | None:
    """The job, unless what it finds out is being found out."""
    twin = any(job.tree == each.tree and job.shrink == each.shrink and job.seed in each.seeds for each in running)
    return None if twin else job


def next_unpatched(known: Known, until: int, first: int, running: Running, chunk: int) -> Job | None:
    """Further seeds of the unpatched tree, which all have to be clean."""
    under_way = _under_way(UNPATCHED, running)
    for seed in range(first, until + 1):
        if seed not in known.clean and seed not in known.broken and seed not in under_way:
            return Job(UNPATCHED, seed, _gap(known, under_way, range(seed, min(seed + chunk, until + 1))))
    return None


def _under_way(tree: str, running: Running) -> set[int]:
    return {seed for job in running if job.tree == tree and not job.shrink for seed in job.seeds}


def _gap(known: Known, under_way: set[int], seeds: range) -> int:
    """How many of these seeds, from the first on, nobody has run or runs."""
    taken = (seed for seed in seeds if seed in under_way or seed in known.clean or seed in known.broken)
    return next(taken, seeds.stop) - seeds.start
