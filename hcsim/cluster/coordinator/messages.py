"""What workers and the coordinator call at each other, and what a person decides about both."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from msgspec import Meta

from hcsim.cluster.diagnosis import Findings
from hcsim.errors import ConfigError, UsageError
from hcsim.transport.hello import Membership, Wire
from hcsim.transport.rpc import Procedure


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator's; workers learn it when they register."""

    workers: int
    """How many there are to be at most: no rank is as high."""
    begin: int | None = None
    """With how many work begins; None: with all of them."""
    least: int = 1
    """With how many work goes on when others are lost."""
    heartbeat_s: float = 1.0
    """How often a worker says that it is alive."""
    silence_s: float = 5.0
    """A worker that says nothing for so long is evicted."""
    form_s: float = 60.0
    """How long workers that are ready wait for those that are registered and do something else."""
    leave_s: float = 10.0
    """How long somebody who leaves waits for the others to take notice."""
    barrier_s: float = 300.0
    checkpoint_s: float = 300.0
    """How long a round waits for its last worker."""

    def __post_init__(self) -> None:
        for key in ("heartbeat_s", "silence_s", "form_s", "leave_s", "barrier_s", "checkpoint_s"):
            value = getattr(self, key)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{key} = {value:g}: the coordinator needs a time above zero")
        if not 1 <= self.workers <= 65535:
            raise ConfigError(f"workers = {self.workers}: a cluster has 1 to 65535 workers")
        if self.begin is not None and not 1 <= self.begin <= self.workers:
            raise ConfigError(f"begin = {self.begin}: work begins with 1 to {self.workers} workers")
        if not 1 <= self.least <= self.needed:
            raise ConfigError(f"least = {self.least}: work goes on with 1 to {self.needed} workers")
        if self.silence_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"silence_s = {self.silence_s:g}: at least two heartbeats ({2 * self.heartbeat_s:g} s) "
                "have to fit in, or healthy workers are evicted"
            )

    @property
    def needed(self) -> int:
        """With how many the first generation begins."""
        return self.workers if self.begin is None else self.begin


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
    """The first generation that it was in, in this life, of those without a gap."""


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
READY = Procedure(
    "coordinator.ready", {"after": Number, "why": Words, "outcome": Words, "found": tuple[Findings, ...]}, Roster
)
LEAVE = Procedure("coordinator.leave", {"orderly": bool, "outcome": Words}, type(None))
BARRIER = Procedure("coordinator.barrier", {"generation": Number, "name": Text}, type(None))
BEGIN = Procedure("coordinator.begin", {"generation": Number, "step": Number}, type(None))
REPORT = Procedure("coordinator.report", {"generation": Number, "step": Number, "digest": Text}, Checkpoint)
COMMITTED = Procedure("coordinator.committed", {}, tuple[Checkpoint, ...])
"""The last committed checkpoint, if there is one."""

NOTICE = Procedure("worker.notice", {"notice": Notice}, type(None))
