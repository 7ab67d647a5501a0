"""Strategies that can go on with other ranks: what their members hold in common, and how they train on from it.

With fixed ranks the same `train` runs once, from the first step to the last.

ddp, hierarchical   every member has the model and the optimizer's state, alike to the last bit.
single              the same: the first member computes with everybody's batches and tells the gradients to the
                    others, who stand by with replicas of their own. So much it costs not to depend on one machine.
local_sgd, diloco   alike are the anchor (where all last agreed) and the outer optimizer. The way since then and
                    the inner optimizer are each member's own. Whoever comes anew starts from the anchor, with
                    an inner optimizer that remembers nothing; in the middle of a period it has gone no way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from hcsim.collectives.group import Group
from hcsim.errors import UsageError
from hcsim.runtime.channel import Phantom
from hcsim.training.aggregation.aggregator import Aggregator
from hcsim.training.ddp import ddp, single
from hcsim.training.layout import Bucket
from hcsim.training.learner import Learner
from hcsim.training.optimizer import Optimizer, Stepper
from hcsim.training.periodic import Journey, periodic
from hcsim.training.run import Run
from hcsim.training.task import Flat

Held: TypeAlias = dict[str, "npt.NDArray[np.generic] | Phantom"]


class Tally(NamedTuple):
    """What a member has done since all last agreed."""

    samples: int = 0
    gone: int = 0
    """So many steps are taken, exchanged or not."""


class Recoverable(Protocol):
    """A strategy at work on one rank, which can go on with other members."""

    @property
    def alike(self) -> Flat:
        """What must be the same everywhere before every update."""

    def shared(self) -> Held:
        """All that a newcomer needs."""

    def adopt(self, held: Mapping[str, npt.NDArray[np.generic] | Phantom], step: int) -> None:
        """Go on from what another member holds after so many steps."""

    def tally(self, run: Run) -> Tally:
        """For the others."""

    def take_up(self, tallies: Sequence[Tally]) -> None:
        """What all members have done, by their new ranks."""

    def compresses(self, group: Group) -> bool:
        """Whether this member's compressor is used in the group, and has to know what the others' know."""

    def dealt(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Who computes with how many samples, given each member's batch size."""

    async def train(self, run: Run) -> None:
        """Go on from the run's step, until it ends or its pact does."""


class Replicated:
    """All members hold the model, and apply the same updates to it."""

    def __init__(self, learner: Learner, aggregator: Callable[[Run], Aggregator]) -> None:
        self._learner = learner
        self._aggregator = aggregator

    @property
    def alike(self) -> Flat:
        """The parameters."""
        return self._learner.replica.parameters

    def shared(self) -> Held:
        """The parameters, and what the optimizer remembers."""
        return {"parameters": self.alike, **_state(self._learner.stepper)}

    def adopt(self, held: Mapping[str, npt.NDArray[np.generic] | Phantom], step: int) -> None:
        """The parameters, and what the optimizer remembers."""
        _fill(self.alike, held["parameters"])
        _restore(self._learner.stepper, held)

    def tally(self, run: Run) -> Tally:
        """All that was done is agreed on."""
        return Tally(0, run.step)

    def take_up(self, tallies: Sequence[Tally]) -> None:
        """Nobody has anything of its own."""

    def compresses(self, group: Group) -> bool:
        """All do."""
        return True

    def dealt(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """To each its own."""
        return tuple(sizes)

    async def train(self, run: Run) -> None:
        """Step by step."""
        await ddp(run, self._aggregator(run))


class InHomes(Replicated):
    """One member of each home speaks for the others, to the other homes."""

    def compresses(self, group: Group) -> bool:
        """Those who speak."""
        return any(home[0] == group.rank for home in group.options.groups)


class OneComputes(Replicated):
    """The first member computes; the others do as it says."""

    def compresses(self, group: Group) -> bool:
        """Nothing is compressed."""
        return False

    def __init__(self, learner: Learner) -> None:
        super().__init__(learner, lambda run: _Told(run.group))

    def dealt(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Everything to the first."""
        return (sum(sizes), *(0 for _ in sizes[1:]))

    async def train(self, run: Run) -> None:
        """Fixed ranks need no replicas: there the first one is alone."""
        await (super().train(run) if run.group.options.conducted else single(run))


class Periodic:
    """Members go ways of their own, and agree now and then."""

    def __init__(
        self, learner: Learner, aggregator: Callable[[Run], Aggregator], every: int, inner: Optimizer, outer: Optimizer
    ) -> None:
        self._learner = learner
        self._aggregator = aggregator
        self._every = every
        self._inner = inner
        self._journey = Journey(learner, outer, inner)

    @property
    def alike(self) -> Flat:
        """The anchor."""
        return self._journey.anchor

    def shared(self) -> Held:
        """The anchor, and what the outer optimizer remembers."""
        return {"parameters": self.alike, **_state(self._journey.outer)}

    def adopt(self, held: Mapping[str, npt.NDArray[np.generic] | Phantom], step: int) -> None:
        """Start from the anchor."""
        _fill(self.alike, held["parameters"])
        _restore(self._journey.outer, held)
        self._learner.stepper = self._inner.open(self._learner.replica.parameters)
        self._journey.start(step)

    def tally(self, run: Run) -> Tally:
        """Our way."""
        samples = self._journey.samples
        return Tally(samples[run.group.rank] if samples else 0, self._journey.step)

    def take_up(self, tallies: Sequence[Tally]) -> None:
        """Everybody's ways. Whoever has gone none while others have sits this period out."""
        self._journey.samples = [tally.samples for tally in tallies]
        self._journey.step = max(tally.gone for tally in tallies)

    def compresses(self, group: Group) -> bool:
        """All do."""
        return True

    def dealt(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """To each its own."""
        return tuple(sizes)

    async def train(self, run: Run) -> None:
        """Period by period."""
        await periodic(run, self._aggregator(run), self._every, self._journey)


class _Told:
    """The first rank's gradients are everybody's."""

    def __init__(self, group: Group) -> None:
        self._group = group

    async def total(self, flat: Flat, bucket: Bucket, weight: float, step: int) -> None:
        """See `Aggregator.total`; the others weigh nothing."""
        part = Phantom(bucket.size_bytes, flat.itemsize) if isinstance(flat, Phantom) else flat[bucket.span]
        await self._group.broadcast(part, bucket=bucket.number)


def _state(stepper: Stepper) -> Held:
    return {f"optimizer/{name}": array for name, array in stepper.state().items()}


def _restore(stepper: Stepper, held: Mapping[str, npt.NDArray[np.generic] | Phantom]) -> None:
    prefix = "optimizer/"
    stepper.restore(
        {
            name.removeprefix(prefix): array
            for name, array in held.items()
            if name.startswith(prefix) and not isinstance(array, Phantom)
        }
    )


def _fill(place: Flat, found: npt.NDArray[np.generic] | Phantom) -> None:
    if isinstance(place, Phantom) != isinstance(found, Phantom) or place.nbytes != found.nbytes:
        raise UsageError(f"these are another model's parameters: {found.nbytes} bytes for {place.nbytes}")
    if not isinstance(place, Phantom) and not isinstance(found, Phantom):
        np.copyto(place, found.reshape(place.shape), casting="no")
