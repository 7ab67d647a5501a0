"""What a parameter server knows, and who holds it: the first two members of a view, alike to the last bit.

When a view begins, whoever has the newest state hands it to those of the first two who lack it. Where nobody has any
(server and standby were lost at once), the newest model that a worker has pulled is what is left.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from hcsim.cluster.view import View
from hcsim.collectives.group import Group
from hcsim.errors import Diverged
from hcsim.runtime.channel import Phantom
from hcsim.training.elastic.pact import gather_echoed
from hcsim.training.elastic.parcel import Parcel, relay
from hcsim.training.elastic.standing import Era, Header, lineage_digest, most_right
from hcsim.training.elastic.synchronise import same_intent
from hcsim.training.learner import Learner, fingerprint
from hcsim.training.optimizer import Optimizer
from hcsim.training.parameter_server.server import Record
from hcsim.training.recoverable import Replicated
from hcsim.training.strategies import one_level
from hcsim.training.task import Flat

PULLED = -1
"""The generation of what a worker has pulled: anything that a server or standby holds is better."""


class Start(NamedTuple):
    """Where a view begins."""

    version: int = 0
    position: int = 0
    """How many samples were dealt out before this version; of no meaning in modes where each has its own."""
    step: int = 0
    """This version's."""


class State(msgspec.Struct):
    """What a server knows beside the model."""

    era: Era = Era()
    version: int = 0
    workers: dict[str, Record] = {}
    since: tuple[int, int] = (0, 0)
    """The version that this view began with, and how many samples were dealt out before it."""
    step: int = 0
    """That version's."""

    def begin(self, start: Start) -> None:
        """A view begins there."""
        self.since, self.step = (start.version, start.position), start.step


class Met(NamedTuple):
    """How the members of a view stand."""

    done: list[str]
    """Nodes whose workers have the final model."""
    current: bool
    """Whether what we held was the newest."""


class Pulled(NamedTuple):
    """What a worker has of the server's."""

    version: int
    parameters: Flat
    start: Start
    """Of the view that it was pulled in."""


class Keeper:
    """One member's copy of the server's model and state."""

    def __init__(self, learner: Learner, optimizer: Optimizer) -> None:
        self.learner = learner
        self.state: State | None = None
        """None where we are neither the server nor its standby."""
        self.reloaded = False
        """Whether it is from a checkpoint."""
        self._optimizer = optimizer

    async def synchronise(self, group: Group, view: View, intent: bytes, pulled: Pulled, done: bool) -> Met:
        """Return when the first two hold the newest state."""
        ours = self._header(intent, pulled.version)
        mark = fingerprint(self.learner.replica.parameters)
        gathered = await gather_echoed(group, np.array([*ours.numbers(), mark, done], np.int64))
        headers, marks = [Header.read(each[:-2]) for each in gathered], [int(each[-2]) for each in gathered]
        right = most_right(headers, lineage_digest(view))
        await same_intent(group, intent, [header.intent for header in headers], right, view)
        if headers[right].generation == PULLED:
            if group.rank == right:
                self._inherit(pulled)
            headers[right] = headers[right]._replace(generation=0)
        keepers = range(min(2, group.size))
        _check_alike(
            view, [rank for rank in keepers if headers[rank].standing == headers[right].standing], right, marks
        )
        routes = [(right, r) for r in keepers if r != right and headers[r].standing != headers[right].standing]
        giving = {taker: self._parcel() for giver, taker in routes if giver == group.rank}
        for parcel in await relay(group, routes, giving) if routes else ():
            self.adopt(parcel)
        await group.barrier()
        if group.rank in keepers:
            assert self.state is not None
            self.state.era = self.state.era.next(view)
            self.reloaded = False
        else:
            self.state = None
        current = headers[group.rank].standing == headers[right].standing
        return Met([view.nodes[rank] for rank, each in enumerate(gathered) if each[-1]], current)

    def _header(self, intent: bytes, pulled: int) -> Header:
        held = self.state
        if held is None:
            return Header.of(Era(PULLED), pulled, -1, intent, live=False)
        return Header.of(held.era, held.version, -1, intent, live=held.version > 0 and not self.reloaded)

    def _inherit(self, pulled: Pulled) -> None:
        """Nobody knows more than we as a worker do: the model that we pulled, or the first one."""
        self.state = State()
        if pulled.version >= 0:
            self.state.version = pulled.version
            self.state.begin(pulled.start)
            place = self.learner.replica.parameters
            if not isinstance(pulled.parameters, Phantom) and not isinstance(place, Phantom):
                np.copyto(place, pulled.parameters)
            self.learner.stepper = self._optimizer.open(place)
            self.learner.host.trace("parameter server", "went back to", pulled.version)

    def saved(self, start: Start, workers: dict[str, Record]) -> Parcel:
        """All that a server needs to go on from that start, which is where it is now."""
        assert self.state is not None
        state = State(self.state.era, start.version, workers)
        state.begin(start)
        return Parcel(msgspec.msgpack.encode(state), self._model.shared())

    def _parcel(self) -> Parcel:
        return Parcel(msgspec.msgpack.encode(self.state), self._model.shared())

    def adopt(self, parcel: Parcel) -> None:
        """Hold what another keeper did, or we ourselves before we were started anew."""
        self.state = parcel.told(State)
        self._model.adopt(parcel.arrays, self.state.step)

    @property
    def _model(self) -> Replicated:
        return Replicated(self.learner, one_level)


def _check_alike(view: View, alike: list[int], right: int, marks: list[int]) -> None:
    for rank in alike:
        if marks[rank] != marks[right]:
            names = view.members[right].name, view.members[rank].name
            raise Diverged(f"the server's state is not the same on {names[0]} and {names[1]}: memory failed there")
