"""Messages between workers and the coordinator, and the policy that the user sets for both."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from msgspec import Meta

from hcsim.cluster.diagnosis import Findings
from hcsim.errors import ConfigError, UsageError
from hcsim.transport.groups import GroupMembership, Wire
from hcsim.transport.rpc import Procedure


class CoordinatorPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator's policy; workers receive it when they register."""

    workers: int
    """The maximum number of workers; ranks are below it."""
    begin: int | None = None
    """The number of workers with which work begins; None: all of them."""
    least: int = 1
    """The minimum number of workers with which work continues after losses."""
    heartbeat_s: float = 1.0
    """The interval between heartbeats of a worker."""
    silence_s: float = 5.0
    """A worker that is silent for this long is evicted."""
    form_s: float = 60.0
    """How long ready workers wait for workers that are registered but not ready."""
    leave_s: float = 10.0
    """How long a leaving worker waits for the others to acknowledge it."""
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
        """The number of workers with which the first generation begins."""
        return self.workers if self.begin is None else self.begin


Text = Annotated[str, Meta(min_length=1, max_length=256)]
Words = Annotated[str, Meta(max_length=4096)]
Number = Annotated[int, Meta(ge=0, lt=1 << 62)]


class Register(msgspec.Struct, frozen=True):
    """A registration request of a worker."""

    worker: Text
    """The worker's id, kept across restarts."""
    life: Number
    """Drawn at start: distinguishes a reconnect from a restart."""
    address: Text
    name: Words = ""
    """A readable name, if the id is not readable."""
    home: Words = ""
    """Workers with the same home are close to each other in the network."""
    generation: Number = 0
    """The last generation of the worker: a coordinator that lost its state continues from there."""
    terms: dict[str, str] = {}
    """Start options that all workers must share, where they differ from the defaults."""
    control: Words = ""
    """Where it tells status clients how it stands; empty if it does not."""


class Registered(msgspec.Struct, frozen=True):
    """The worker is registered under this rank."""

    rank: int
    policy: CoordinatorPolicy


class GenerationMember(msgspec.Struct, frozen=True):
    """A member of a generation."""

    rank: int
    """The rank, the same in all generations. Below the policy's number of workers, perhaps with gaps."""
    worker: str
    address: str
    life: int = 0
    name: str = ""
    home: str = ""
    node: str = ""
    """The authenticated node id; empty if nodes are not authenticated."""
    since: int = 0
    """The first of the consecutive generations, in this life, that contain this worker."""
    control: str = ""


class GenerationRoster(msgspec.Struct, frozen=True):
    """A generation: all workers that work together, ordered by rank. If it is empty, all work is done."""

    cluster: str
    generation: int
    peers: tuple[GenerationMember, ...]
    reason: str = ""
    """Why it replaces the previous generation, as readable text."""
    line: str = ""
    """Drawn when the coordinator began to count generations; a coordinator that lost its state draws a new one."""

    def place(self, worker: str) -> int:
        """Return the index of a worker in the order: its rank in the group, which has no gaps."""
        for place, peer in enumerate(self.peers):
            if peer.worker == worker:
                return place
        raise UsageError(f"{worker} is not in generation {self.generation} of {self.cluster}")

    def membership(self, worker: str, wire: Wire | None = None) -> GroupMembership:
        addresses = tuple(peer.address for peer in self.peers)
        return GroupMembership(self.place(worker), addresses, self.cluster, self.generation, wire or Wire())


class GenerationStatus(msgspec.Struct, frozen=True):
    """The status of a generation."""

    generation: int
    over: str = ""
    """Why it has failed; empty if it has not."""
    superseded: bool = False


class CommittedCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint that all workers of a generation have written."""

    step: int
    generation: int
    digests: tuple[tuple[int, str], ...]


REGISTER = Procedure("coordinator.register", {"who": Register}, Registered)
HEARTBEAT = Procedure("coordinator.heartbeat", {"generation": Number}, GenerationStatus)
READY = Procedure(
    "coordinator.ready",
    {"after": Number, "why": Words, "outcome": Words, "found": tuple[Findings, ...]},
    GenerationRoster,
)
LEAVE = Procedure("coordinator.leave", {"orderly": bool, "outcome": Words}, type(None))
BARRIER = Procedure("coordinator.barrier", {"generation": Number, "name": Text}, type(None))
BEGIN = Procedure("coordinator.begin", {"generation": Number, "step": Number}, type(None))
REPORT = Procedure("coordinator.report", {"generation": Number, "step": Number, "digest": Text}, CommittedCheckpoint)
COMMITTED = Procedure("coordinator.committed", {}, tuple[CommittedCheckpoint, ...])

NOTICE = Procedure("worker.notice", {"notice": GenerationStatus}, type(None))
