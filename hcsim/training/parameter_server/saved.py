"""A server's state between two updates: what a restarted one needs to go on as if nothing had been.

Pushes of a round that has not ended are not in it: nobody was told that they count, so their workers send
them again. Answers are in it: a worker that did not hear its answer asks again and gets the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from hcsim.errors import UsageError
from hcsim.runtime.channel import Phantom
from hcsim.training.learner import Learner
from hcsim.training.parameter_server.member import Member
from hcsim.training.parameter_server.messages import Verdict
from hcsim.training.parameter_server.rounds import Rounds

PARAMETERS = "parameters"
OPTIMIZER = "optimizer/"


class Record(msgspec.Struct, frozen=True):
    """What is remembered of a worker."""

    answered: int
    verdict: Verdict | None
    accepted: int
    samples: int | None
    contributes: bool
    answered_life: int | None = None


class Saved(msgspec.Struct, frozen=True):
    """A server's state."""

    version: int
    workers: dict[str, Record]
    arrays: dict[str, npt.NDArray[np.generic]]
    """Parameters, and the optimizer's state; none for phantoms."""


def save(rounds: Rounds, learner: Learner) -> Saved:
    """The state as it is now; copies."""
    arrays = {OPTIMIZER + name: array for name, array in learner.stepper.state().items()}
    if not isinstance(learner.replica.parameters, Phantom):
        arrays[PARAMETERS] = learner.replica.parameters.copy()
    return Saved(rounds.version, records(rounds), arrays)


def records(rounds: Rounds) -> dict[str, Record]:
    """What is remembered of all workers."""
    return {
        name: Record(m.answered, m.verdict, m.accepted, m.samples, m.contributes, m.answered_life)
        for name, m in rounds.members.items()
    }


def recall(workers: Mapping[str, Record], rounds: Rounds, now: float) -> None:
    """Remember that."""
    for name, record in workers.items():
        # As if we had heard it just now: if all is done, it may still want the final model.
        rounds.members[name] = Member(lost_s=now, heard_s=now, **msgspec.structs.asdict(record))


def restore(saved: Saved, rounds: Rounds, learner: Learner, now: float) -> None:
    """Go on from there, with a machine and a learner that are new."""
    parameters = learner.replica.parameters
    if not isinstance(parameters, Phantom):
        _refill(parameters, saved.arrays)
    learner.stepper.restore(
        {name.removeprefix(OPTIMIZER): array for name, array in saved.arrays.items() if name.startswith(OPTIMIZER)}
    )
    rounds.version = saved.version
    recall(saved.workers, rounds, now)


def _refill(parameters: npt.NDArray[np.float32], arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
    found = arrays.get(PARAMETERS)
    if found is None or found.shape != parameters.shape:
        there = "missing" if found is None else f"of shape {found.shape}"
        raise UsageError(f"this is another model's state: its parameters are {there}, not of shape {parameters.shape}")
    parameters[...] = found
