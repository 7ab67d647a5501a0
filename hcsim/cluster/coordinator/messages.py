"""What workers and the coordinator call at each other."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from hcsim.cluster.coordinator.policy import Policy
from hcsim.errors import UsageError
from hcsim.transport.hello import Membership
from hcsim.transport.rpc import Procedure
from hcsim.transport.wire import Wire

Text = Annotated[str, Meta(min_length=1, max_length=256)]
Words = Annotated[str, Meta(max_length=4096)]
Number = Annotated[int, Meta(ge=0, lt=1 << 62)]


class Register(msgspec.Struct, frozen=True):
    """Who registers."""

    worker: Text
    """Its id, which it keeps when it starts again."""
    life: Number
    """Drawn when it starts: tells one that calls again from one that starts again."""
    address: Text
    """Where its collectives listen."""
    name: Words = ""
    """For people, where its id is not."""
    home: Words = ""
    """Workers of one home are close to each other."""
    generation: Number = 0
    """The last one that it was in: a coordinator that lost its memory goes on from there."""
    terms: dict[str, str] = {}
    """What it was started with that all must have alike, where that is not as usual."""


class Registered(msgspec.Struct, frozen=True):
    """It is known from now on, under this rank."""

    rank: int
    policy: Policy


class Peer(msgspec.Struct, frozen=True):
    """A member of a generation."""

    rank: int
    """Stable: the same in all generations. Below the policy's number of workers, perhaps with gaps."""
    worker: str
    address: str
    life: int = 0
    name: str = ""
    home: str = ""
    node: str = ""
    """The node that it has proved to be; empty where nobody proves that."""
    since: int = 0
    """The first generation that it was in, in this life."""


class Roster(msgspec.Struct, frozen=True):
    """A generation: all who work together, in the order of their ranks. With nobody in it: all work is done."""

    cluster: str
    generation: int
    peers: tuple[Peer, ...]
    reason: str = ""
    """Why it follows the one before; for people."""
    line: str = ""
    """Drawn when the coordinator began to count generations: whoever lost its memory begins another line."""

    def place(self, worker: str) -> int:
        """Where in the order a worker stands: its rank in the group, which has no gaps."""
        for place, peer in enumerate(self.peers):
            if peer.worker == worker:
                return place
        raise UsageError(f"{worker} is not in generation {self.generation} of {self.cluster}")

    def membership(self, worker: str, wire: Wire | None = None) -> Membership:
        """For `Group.open`."""
        addresses = tuple(peer.address for peer in self.peers)
        return Membership(self.place(worker), addresses, self.cluster, self.generation, wire or Wire())


class Notice(msgspec.Struct, frozen=True):
    """How a generation stands."""

    generation: int
    over: str = ""
    """Why it cannot work any more, if so."""
    superseded: bool = False
    """Whether somebody waits to be in the next one."""


class Checkpoint(msgspec.Struct, frozen=True):
    """A checkpoint that all workers of a generation have written."""

    step: int
    generation: int
    digests: tuple[tuple[int, str], ...]
    """Of each rank's shard."""


REGISTER = Procedure("coordinator.register", {"who": Register}, Registered)
HEARTBEAT = Procedure("coordinator.heartbeat", {"generation": Number}, Notice)
READY = Procedure("coordinator.ready", {"after": Number, "why": Words, "outcome": Words}, Roster)
LEAVE = Procedure("coordinator.leave", {"orderly": bool, "outcome": Words}, type(None))
BARRIER = Procedure("coordinator.barrier", {"generation": Number, "name": Text}, type(None))
BEGIN = Procedure("coordinator.begin", {"generation": Number, "step": Number}, type(None))
REPORT = Procedure("coordinator.report", {"generation": Number, "step": Number, "digest": Text}, Checkpoint)
COMMITTED = Procedure("coordinator.committed", {}, tuple[Checkpoint, ...])
"""The last committed checkpoint, if there is one."""

NOTICE = Procedure("worker.notice", {"notice": Notice}, type(None))
