"""All that is known of a run: what its trace, its observer, its census and its members say."""

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
from hcsim.fuzz.phases import Lives, Phases, Sighting, Work
from hcsim.runtime.channel import Phantom
from hcsim.telemetry.trace import Event
from hcsim.training.run import Point, Report, Run
from hcsim.virtual.loop import OWNER
from hcsim.virtual.world import Usage

KEPT = (
    "view", "follows", "synchronised", "voted", "applied", "view failed", "group failed", "fault", "accused",
    "parameter server",
)  # fmt: skip
"""The kinds of events that say something about the protocol."""
ONCE = ("flip", "resize", "repeat")
"""What the trace calls faults of one frame, when they strike."""


class Said(msgspec.Struct, frozen=True):
    """What a host told its people."""

    time_s: float
    host: str
    text: str


class Step(msgspec.Struct, frozen=True):
    """A host has done so many steps."""

    time_s: float
    host: str
    step: int


class Evidence(msgspec.Struct, frozen=True):
    """All that is known of a run."""

    scenario: Scenario
    phases: Phases
    excused: str = ""
    """Why the core need not finish; empty: it must."""
    events: Sequence[Event] = ()
    said: Sequence[Said] = ()
    steps: Sequence[Step] = ()
    results: Mapping[str, Report | BaseException] = {}
    """By host, of its last life; those of hosts that never end are missing."""
    parameters: Mapping[str, Array] = {}
    """Of hosts that came to the end."""
    owed: Mapping[str, Array] = {}
    """What their error feedback had not sent yet."""
    left: Sequence[tuple[float, str]] = ()
    """When hosts had come to the end, or had left in an orderly way before it."""
    usage: Mapping[str, Usage] = {}
    lost: Sequence[str] = ()
    """What asyncio complained about: errors that nobody looked at."""
    limit_s: float = 0.0
    """When hosts were stopped that had not ended."""

    @property
    def training(self) -> Training:
        """What was to be learned."""
        return self.scenario.training or Training()

    @property
    def cluster(self) -> Cluster:
        """How the members hold together."""
        return self.scenario.cluster or Cluster()

    @property
    def names(self) -> list[str]:
        """Of all hosts."""
        return [node.name for node in self.scenario.nodes]

    @property
    def exact(self) -> bool:
        """Whether the parameters are those of a closed form: data parallel, nothing lost in compression for good,
        nobody lies."""
        kinds = {fault.__struct_config__.tag for fault in self.scenario.faults}
        whole = self.training.compressor == "none" or self.training.compressor.endswith(SUFFIX)
        return self.training.strategy == "ddp" and whole and "misbehave" not in kinds

    @property
    def diverged(self) -> list[str]:
        """Hosts that ended since replicas differ, as they may where a machine sends noise."""
        if not any(isinstance(fault, Misbehave) and fault.how == "noise" for fault in self.scenario.faults):
            return []
        return [host for host, result in self.results.items() if isinstance(result, Diverged)]

    def of_kind(self, kind: str, fields: int) -> Iterator[Event]:
        """The events of one kind, with so many fields."""
        return (event for event in self.events if event[1] == kind and len(event) == 3 + fields)


def forgotten_s(scenario: Scenario) -> dict[str, float]:
    """The hosts that come back without their memory, and when they last go down for that."""
    last: dict[str, float] = {}
    for fault in scenario.faults:
        if isinstance(fault, Restart | CopiedIdentity) and forgets(fault):
            last[fault.node] = max(last.get(fault.node, 0.0), fault.at_s)
    return last


class Recorder:
    """Gathers evidence while a run goes on: an observer, a sink of its trace, and whom its members tell."""

    def __init__(self, scenario: Scenario) -> None:
        self.events: list[Event] = []
        self.said: list[Said] = []
        self.steps: list[Step] = []
        self.parameters: dict[str, Array] = {}
        self.owed: dict[str, Array] = {}
        self.left: list[tuple[float, str]] = []
        self.tracker = Tracker(scenario)

    def sink(self, events: Sequence[Event]) -> None:
        """Keep what says something."""
        self.tracker.follow(events)
        self.events += [event for event in events if event[1] in KEPT]

    def tell(self, host: str, text: str) -> None:
        """A host says something."""
        self.said.append(Said(asyncio.get_running_loop().time(), host, text))

    def point(self, rank: int, point: Point) -> None:
        """A step is done."""
        self.steps.append(Step(asyncio.get_running_loop().time(), _present(), point.step))

    def finished(self, run: Run) -> None:
        """A member came to the end, or leaves before it."""
        host, parameters = run.group.host.name, run.learner.replica.parameters
        assert not isinstance(parameters, Phantom)
        self.left.append((asyncio.get_running_loop().time(), host))
        if run.step < run.settings.steps:
            return
        self.parameters[host] = parameters.copy()
        self.owed[host] = _owed(run)
        self.tracker.ended(host)

    @property
    def views(self) -> list[Sighting]:
        """The views that were adopted, in the order of time."""
        return [sighting(event) for event in self.events if event[1] == "view"]

    def lives(self, scenario: Scenario) -> Lives:
        """What the trace says of the lives of the hosts."""
        worked = [Work(_seconds(event), str(event[2]), int(event[3])) for event in self.events if event[1] == "follows"]
        starts = [event for event in self.events if event[1:3] == ("fault", "start")]
        started_s = {str(event[3]).partition(" ")[0]: _seconds(event) for event in starts}
        ended_s = {host: time_s for time_s, host in self.left}
        steps = (scenario.training or Training()).steps
        done_s = min((each.time_s for each in self.steps if each.step >= steps), default=float("inf"))
        struck_s = max(
            (_seconds(event) for event in self.events if event[1] == "fault" and event[2] in ONCE), default=0.0
        )
        return Lives(self.views, worked, started_s, forgotten_s(scenario), ended_s, done_s=done_s, struck_s=struck_s)


def sighting(event: Event) -> Sighting:
    """A "view" event."""
    time_ns, _, host, lineage, epoch, _, members = event
    names = tuple(member.partition("#")[0] for member in str(members).split(",") if member)
    return Sighting(int(time_ns) / 1e9, str(host), str(lineage), int(epoch), names)


def _owed(run: Run) -> Array:
    """What this member's error feedback has not sent yet, as one flat array."""
    owed = np.zeros(run.learner.layout.length, np.float32)
    state = run.compressor.state()
    for tensor in run.learner.layout.tensors:
        residual = state.get(f"{OWED}{tensor.name}")
        if isinstance(residual, np.ndarray):
            owed[tensor.span] = residual.reshape(-1)
    return owed


def _seconds(event: Event) -> float:
    return int(event[0]) / 1e9


def _present() -> str:
    """The host whose code runs now."""
    return str(getattr(OWNER.get(), "name", ""))
