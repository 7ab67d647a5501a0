"""The evidence of a run: the records of its trace, its observer, its census and its members."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from hcsim.compressors.base import Array
from hcsim.compressors.feedback import OWED, SUFFIX
from hcsim.config import Cluster, CopiedIdentity, Misbehave, Restart, Scenario, Training
from hcsim.errors import Diverged
from hcsim.fuzz.coverage import Tracker
from hcsim.fuzz.generate import forgets
from hcsim.fuzz.phases import HostHistories, Phases, ViewAdoption, WorkStart
from hcsim.runtime.channel import Phantom
from hcsim.telemetry.trace import Event
from hcsim.training.run import Point, Report, Run
from hcsim.virtual.loop import OWNER
from hcsim.virtual.world import Usage

KEPT = (
    "view", "follows", "synchronised", "voted", "applied", "view failed", "group failed", "fault", "accused",
    "parameter server",
)  # fmt: skip
"""The kinds of events that are relevant to the protocol."""
ONCE = ("flip", "resize", "repeat")
"""The trace's names for faults of one frame, when they strike."""


class HostMessage(msgspec.Struct, frozen=True):
    """A status message of a host."""

    time_s: float
    host: str
    text: str


class StepRecord(msgspec.Struct, frozen=True):
    """A host has done this many steps."""

    time_s: float
    host: str
    step: int


class Evidence(msgspec.Struct, frozen=True):
    """All records of a run that the invariants check."""

    scenario: Scenario
    phases: Phases
    excused: str = ""
    """Why the core need not finish; empty: it must."""
    events: Sequence[Event] = ()
    said: Sequence[HostMessage] = ()
    steps: Sequence[StepRecord] = ()
    results: Mapping[str, Report | BaseException] = {}
    """The result of each host's last life. Hosts that never end are missing."""
    parameters: Mapping[str, Array] = {}
    """The parameters of hosts that finished."""
    residuals: Mapping[str, Array] = {}
    """The residuals of their error feedback."""
    left: Sequence[tuple[float, str]] = ()
    """The times at which hosts had finished, or had left in order before."""
    usage: Mapping[str, Usage] = {}
    lost: Sequence[str] = ()
    """Errors of tasks that were never retrieved, as asyncio logged them."""
    limit_s: float = 0.0
    """The time at which hosts that had not ended were stopped."""

    @property
    def training(self) -> Training:
        return self.scenario.training or Training()

    @property
    def cluster(self) -> Cluster:
        return self.scenario.cluster or Cluster()

    @property
    def names(self) -> list[str]:
        return [node.name for node in self.scenario.nodes]

    @property
    def exact(self) -> bool:
        """Whether the parameters have a closed form: data parallel, no permanent loss in compression, no member that
        lies."""
        kinds = {fault.__struct_config__.tag for fault in self.scenario.faults}
        whole = self.training.compressor == "none" or self.training.compressor.endswith(SUFFIX)
        return self.training.strategy == "ddp" and whole and "misbehave" not in kinds

    @property
    def diverged(self) -> list[str]:
        """Hosts that ended because replicas differ, as they may where a machine sends noise."""
        if not any(isinstance(fault, Misbehave) and fault.how == "noise" for fault in self.scenario.faults):
            return []
        return [host for host, result in self.results.items() if isinstance(result, Diverged)]

    def of_kind(self, kind: str, fields: int) -> Iterator[Event]:
        """Yield the events of one kind that have this number of fields."""
        return (event for event in self.events if event[1] == kind and len(event) == 3 + fields)


def forgotten_s(scenario: Scenario) -> dict[str, float]:
    """Return the hosts that come back without their memory, and when each last goes down before that."""
    last: dict[str, float] = {}
    for fault in scenario.faults:
        if isinstance(fault, Restart | CopiedIdentity) and forgets(fault):
            last[fault.node] = max(last.get(fault.node, 0.0), fault.at_s)
    return last


class Recorder:
    """Gathers evidence during a run, as its observer, as a sink of its trace and as the receiver of status
    messages."""

    def __init__(self, scenario: Scenario) -> None:
        self.events: list[Event] = []
        self.said: list[HostMessage] = []
        self.steps: list[StepRecord] = []
        self.parameters: dict[str, Array] = {}
        self.residuals: dict[str, Array] = {}
        self.left: list[tuple[float, str]] = []
        self.tracker = Tracker(scenario)

    def sink(self, events: Sequence[Event]) -> None:
        self.tracker.follow(events)
        self.events += [event for event in events if event[1] in KEPT]

    def tell(self, host: str, text: str) -> None:
        self.said.append(HostMessage(asyncio.get_running_loop().time(), host, text))

    def point(self, rank: int, point: Point) -> None:
        self.steps.append(StepRecord(asyncio.get_running_loop().time(), _present(), point.step))

    def finished(self, run: Run) -> None:
        """Record that a member has finished, or leaves before the end."""
        host, parameters = run.group.host.name, run.learner.replica.parameters
        assert not isinstance(parameters, Phantom)
        self.left.append((asyncio.get_running_loop().time(), host))
        if run.step < run.settings.steps:
            return
        self.parameters[host] = parameters.copy()
        self.residuals[host] = _residual(run)
        self.tracker.ended(host)

    @property
    def views(self) -> list[ViewAdoption]:
        return [sighting(event) for event in self.events if event[1] == "view"]

    def lives(self, scenario: Scenario) -> HostHistories:
        worked = [
            WorkStart(_seconds(event), str(event[2]), int(event[3])) for event in self.events if event[1] == "follows"
        ]
        starts = [event for event in self.events if event[1:3] == ("fault", "start")]
        started_s = {str(event[3]).partition(" ")[0]: _seconds(event) for event in starts}
        ended_s = {host: time_s for time_s, host in self.left}
        steps = (scenario.training or Training()).steps
        done_s = min((each.time_s for each in self.steps if each.step >= steps), default=float("inf"))
        struck_s = max(
            (_seconds(event) for event in self.events if event[1] == "fault" and event[2] in ONCE), default=0.0
        )
        return HostHistories(
            self.views, worked, started_s, forgotten_s(scenario), ended_s, done_s=done_s, struck_s=struck_s
        )


def sighting(event: Event) -> ViewAdoption:
    time_ns, _, host, lineage, epoch, _, members = event
    names = tuple(member.partition("#")[0] for member in str(members).split(",") if member)
    return ViewAdoption(int(time_ns) / 1e9, str(host), str(lineage), int(epoch), names)


def _residual(run: Run) -> Array:
    """Return the residual of this member's error feedback as one flat array."""
    total = np.zeros(run.learner.layout.length, np.float32)
    state = run.compressor.state()
    for tensor in run.learner.layout.tensors:
        residual = state.get(f"{OWED}{tensor.name}")
        if isinstance(residual, np.ndarray):
            total[tensor.span] = residual.reshape(-1)
    return total


def _seconds(event: Event) -> float:
    return int(event[0]) / 1e9


def _present() -> str:
    """Return the host whose code is running."""
    return str(getattr(OWNER.get(), "name", ""))
