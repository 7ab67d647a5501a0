"""What the runner has done in a copy of the tree: seeds, and the shrinking of what one of them broke.

    python -m experiments.mutants.hunt seeds 1 20       up to the first of these seeds that breaks an invariant
    python -m experiments.mutants.hunt every 1 20       all of them
    python -m experiments.mutants.hunt shrink 17 invariant 150
    python -m experiments.mutants.hunt replay FILE

The last line of the output is what came of it, as JSON (see `Outcome`). `python -m experiments.mutants` calls this.
"""

from __future__ import annotations

import sys
from pathlib import Path
from time import process_time

import msgspec

import hcsim
from hcsim.config import Scenario, load_scenario
from hcsim.fuzz.generate import scenario_of
from hcsim.fuzz.search import judge
from hcsim.fuzz.shrink import shrink
from hcsim.fuzz.trial import Trial, run_trial, write_finding


class Broken(msgspec.Struct, frozen=True):
    """A seed, or a file, and what did not hold."""

    seed: int
    invariants: tuple[str, ...]
    what: str
    """Of the first of them."""


class Shrunk(msgspec.Struct, frozen=True):
    """The smallest scenario that was found to break the same invariant."""

    invariant: str
    faults: int
    nodes: int
    steps: int
    what: str
    scenario: str
    """As a file."""
    also_unpatched: tuple[str, ...] = ()
    """Invariants that it breaks in the unpatched tree."""


class Outcome(msgspec.Struct, frozen=True):
    """What came of one call."""

    package: str
    """The folder that hcsim was imported from."""
    broken: tuple[Broken, ...] = ()
    ran: int = 0
    """How many seeds."""
    shrunk: Shrunk | None = None
    cpu_s: float = 0.0


def main(arguments: list[str]) -> Outcome:
    """Do what the arguments say."""
    began_s = process_time()
    what, *rest = arguments
    broken: list[Broken] = []
    shrunk, ran = None, 0
    if what in ("seeds", "every"):
        first, count = map(int, rest)
        for seed in range(first, first + count):
            ran += 1
            broken += _broken(judge(seed))
            if broken and what == "seeds":
                break
    elif what == "shrink":
        shrunk = _shrunk(scenario_of(int(rest[0])), rest[1], int(rest[2]))
    elif what == "replay":
        broken += _broken(run_trial(load_scenario(Path(rest[0]))))
    else:
        raise SystemExit(f"{what!r} is none of seeds, every, shrink, replay")
    package = str(Path(hcsim.__file__).resolve().parent)
    return Outcome(package, tuple(broken), ran, shrunk, round(process_time() - began_s, 2))


def _broken(trial: Trial) -> list[Broken]:
    return [Broken(trial.seed, tuple(trial.broken), trial.breaches[0].what)] if trial.breaches else []


def _shrunk(scenario: Scenario, invariant: str, runs: int) -> Shrunk:
    small = shrink(scenario, invariant, runs).scenario
    found = run_trial(small).breaches
    what = next((breach.what for breach in found if breach.invariant == invariant), "")
    steps = small.training.steps if small.training is not None else 0
    text = write_finding(small, found, invariant)
    return Shrunk(invariant, len(small.faults), len(small.nodes), steps, what, text)


if __name__ == "__main__":
    print(msgspec.json.encode(main(sys.argv[1:])).decode())
