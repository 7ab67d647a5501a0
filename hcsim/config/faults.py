"""The faults of a run, as an explicit list, so that a failing list can be shortened."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, get_args

from msgspec import Meta

from hcsim.config.table import Count, Port, Table
from hcsim.errors import UsageError
from hcsim.registry import Registry
from hcsim.units import BitRate, PositiveBytes, PositiveSeconds, PositiveShare, Seconds, Share, SignedSeconds


class Fault(Table, frozen=True, tag_field="kind"):
    """An entry of a scenario's fault list: the kind and the time."""

    at_s: Seconds

    @property
    def is_for_good(self) -> bool:
        """Whether the fault could end and does not: it has a `duration`, and none is given."""
        return getattr(self, "duration_s", 0.0) is None

    @property
    def over_s(self) -> float:
        """The time of the last change that the fault makes by itself: its end, or its start if it never ends."""
        return self.at_s + sum(getattr(self, name, None) or 0.0 for name in ("duration_s", "down_s", "slow_for_s"))


# What happens to a machine.


class Crash(Fault, frozen=True, tag="crash"):
    """The node stops; `clean`: its connections are reset and calls to it refused, otherwise it falls silent."""

    node: str
    clean: bool = False


class Restart(Fault, frozen=True, tag="restart"):
    """The node restarts: at once if it has crashed, otherwise it crashes now and starts after `down`."""

    node: str
    state: Literal["kept", "lost", "stale"] = "kept"
    """The content of its store after the restart: all, nothing, or the state of an earlier time."""
    down_s: Seconds = Seconds(1)
    clean: bool = False
    """Whether the crash is clean, if the node has to crash first."""
    as_of_s: Seconds | None = None
    """The time of a stale store's content; left out, the start of the previous life."""
    slow: PositiveShare = PositiveShare(1)
    """The share of its speed at which it computes at first."""
    slow_for_s: Seconds = Seconds(0)

    def __post_init__(self) -> None:
        if self.as_of_s is not None and (self.state != "stale" or self.as_of_s > self.at_s):
            raise UsageError('as_of is for a restart with state = "stale", and cannot be later than at')
        if (self.slow < 1) != (self.slow_for_s > 0):
            raise UsageError("a slow start needs both slow (less than 1) and slow_for (more than 0 s)")


class Pause(Fault, frozen=True, tag="pause"):
    """The node is alive and does nothing."""

    node: str
    duration_s: PositiveSeconds | None = None
    """None: for good."""


class Throttle(Fault, frozen=True, tag="throttle"):
    """The node computes at a share of its speed."""

    node: str
    factor: PositiveShare
    duration_s: PositiveSeconds | None = None
    """None: for good."""


class Lid(Fault, frozen=True, tag="lid"):
    """The node sleeps, and wakes up with its clock ahead by the time that it slept."""

    node: str
    duration_s: PositiveSeconds
    connections: Literal["kept", "dead"] = "kept"
    """Whether its connections still exist when it wakes up."""


class StuckDevice(Fault, frozen=True, tag="stuck_device"):
    """The node's device accepts work and does not finish it; the rest of the node goes on."""

    node: str
    duration_s: PositiveSeconds | None = None
    """None: for good, also after a restart."""


class FullDisk(Fault, frozen=True, tag="full_disk"):
    """The node's disk is full: nothing can be saved; what was saved before can be read."""

    node: str
    duration_s: PositiveSeconds | None = None
    """None: for good, also after a restart."""


class SlowDisk(Fault, frozen=True, tag="slow_disk"):
    """Each write of the node takes longer by a fixed time.

    Where its device saves (a checkpoint), the device is busy for that time; otherwise the whole node waits."""

    node: str
    takes_s: PositiveSeconds
    """The extra time for each record."""
    duration_s: PositiveSeconds | None = None
    """None: for good, also after a restart."""


class Leave(Fault, frozen=True, tag="leave"):
    """The node's program is ended in order (Ctrl-C): a member leaves after its step."""

    node: str


class FewDescriptors(Fault, frozen=True, tag="few_descriptors"):
    """The node has a limit on its connections, including those that it tries to make.

    Further connections that it tries to make fail. A peer that dials it gets a connection, but no answer until
    another connection has ended."""

    node: str
    connections: Count
    duration_s: PositiveSeconds | None = None
    """None: for good, also after a restart."""


# What happens between machines.


class Partition(Fault, frozen=True, tag="partition"):
    """Nothing passes between the two sides; `oneway`: nothing from the first to the second."""

    sides: tuple[tuple[str, ...], tuple[str, ...]]
    duration_s: PositiveSeconds | None = None
    """None: for good."""
    oneway: bool = False

    def __post_init__(self) -> None:
        if not all(self.sides) or any(node in self.sides[1] for node in self.sides[0]):
            raise UsageError("the two sides of a partition need nodes, and no node can be on both")


class LinkChange(Fault, frozen=True, tag="link_change"):
    """A medium, one node's attachment to it, or a home's line to the internet gets other properties.

    Those of a medium hold for every node on it. A node's attachment to Thunderbolt consists of its cables, in
    both directions; they lose nothing. The line of a home is named in its `Wan.ways`: a rate applies to both
    directions, or to the one that is named; latency and loss apply to both. A tunnel keeps its own figures."""

    medium: str
    node: str | None = None
    rate_bps: BitRate | None = None
    latency_s: Seconds | None = None
    loss: Share | None = None
    duration_s: PositiveSeconds | None = None
    """None: for good."""

    def __post_init__(self) -> None:
        if self.rate_bps is None and self.latency_s is None and self.loss is None:
            raise UsageError("a link_change needs at least one of rate, latency and loss")


class Reset(Fault, frozen=True, tag="reset"):
    """The connections between two nodes are reset; `mid_frame`: when part of a frame has arrived."""

    between: tuple[str, str]
    mid_frame: bool = True


class HalfOpen(Fault, frozen=True, tag="half_open"):
    """The first node has lost its connections to the second, which does not notice until it sends."""

    between: tuple[str, str]


class Clog(Fault, frozen=True, tag="clog"):
    """Data that two nodes send to each other is accepted, and arrives only when the clog ends, or never."""

    between: tuple[str, str]
    duration_s: PositiveSeconds | None = None
    """None: for good."""


class Datagrams(Fault, frozen=True, tag="datagrams"):
    """Datagrams that cross a medium (announcements and discovery queries) are lost, delayed, duplicated or
    reordered."""

    medium: str
    duration_s: PositiveSeconds | None = None
    """None: for good."""
    loss: Share = Share(0)
    delay_s: Seconds = Seconds(0)
    duplicate: Share = Share(0)
    reorder: Share = Share(0)

    def __post_init__(self) -> None:
        if not (self.loss or self.delay_s or self.duplicate or self.reorder):
            raise UsageError("datagrams needs at least one of loss, delay, duplicate and reorder")


class WifiGate(Fault, frozen=True, tag="wifi_gate"):
    """An access point stops transmitting for a while, then flushes."""

    medium: str
    duration_s: PositiveSeconds


class CablePulled(Fault, frozen=True, tag="cable_pulled"):
    """A node loses an Ethernet or Thunderbolt medium, until the cable is plugged in again, if ever.

    Connections over it stall; new ones take another route if there is one."""

    node: str
    medium: str
    duration_s: PositiveSeconds | None = None
    """None: for good."""
    to: str | None = None
    """Thunderbolt: the node at the other end; left out, all cables of the node are pulled."""


class InterfaceChange(Fault, frozen=True, tag="interface_change"):
    """A node leaves one medium for another: its connections over the old one are lost, and its peers are not
    notified."""

    node: str
    medium: str
    to: str
    duration_s: PositiveSeconds | None = None
    """None: it does not go back."""

    def __post_init__(self) -> None:
        if self.medium == self.to:
            raise UsageError("an interface_change needs two different media")


class RouterReboot(Fault, frozen=True, tag="router_reboot"):
    """All Ethernet and Wi-Fi of a home are down for a while, and so is its internet line; Thunderbolt is not."""

    home: str
    duration_s: PositiveSeconds | None = None
    """None: for good."""


class BlockedPort(Fault, frozen=True, tag="blocked_port"):
    """One port of a node cannot be reached by the others; connections that the node itself makes are not affected.

    `closed`: calls to the port are refused, and connections that were made to it are reset. `silent`: calls to
    it get no answer, and nothing passes in either direction on connections that were made to it; neither side
    is notified."""

    node: str
    port: Port | Literal["gradient", "discovery"]
    """A port number, or the name of a port of the scenario's `[cluster]`."""
    how: Literal["closed", "silent"]
    duration_s: PositiveSeconds | None = None
    """None: for good, also after a restart."""


# What happens to data: on their way, past every checksum of the network, or where they are computed.


_LONGEST_FRAME_BYTES = 2**32 - 1
"""A frame's header has 32 bits for the length."""


class FlippedBit(Fault, frozen=True, tag="flipped_bit"):
    """One bit of the next payload from the first node to the second is changed on its way."""

    between: tuple[str, str]
    of: Literal["data", "control", "any"] = "data"
    """Which frames: segments of tensors, messages of other components, or whichever comes next."""


class WrongSize(Fault, frozen=True, tag="wrong_size"):
    """The first node sends the second one a segment that is shorter than it should be, or `longer`."""

    between: tuple[str, str]
    by_bytes: PositiveBytes = PositiveBytes(4)
    longer: bool = False

    def __post_init__(self) -> None:
        if self.by_bytes > _LONGEST_FRAME_BYTES:
            raise UsageError(f"by ({self.by_bytes} B) is more than any segment has: at most {_LONGEST_FRAME_BYTES} B")


class StaleStep(Fault, frozen=True, tag="stale_step"):
    """The first node sends the second one a segment of an earlier step again, instead of the right one."""

    between: tuple[str, str]


class NanGradient(Fault, frozen=True, tag="nan_gradient"):
    """One number among the gradients that the node computes is not a number."""

    node: str
    nth: Count = 1
    """Which block's gradients, counted from the time of the fault."""


Misbehaviour: TypeAlias = Literal[
    "duplicate", "other_epoch", "old_epoch", "huge_operation", "huge_step", "huge_offset", "giant_total", "unasked",
    "raw_bytes", "wrong_signature", "short", "noise", "lie",
]  # fmt: skip
"""The ways in which a member can break the protocol; docs/reference/scenarios.md describes each."""


class Misbehave(Fault, frozen=True, tag="misbehave"):
    """A member breaks the protocol in what it sends: in frames of data, or for `lie` in messages about membership."""

    node: str
    how: Misbehaviour
    to: str | None = None
    """The receiver of such frames; left out: every member."""
    share: PositiveShare = PositiveShare(1)
    """The share of the suitable frames that are affected."""
    duration_s: PositiveSeconds | None = None
    """None: for good, also after a restart."""


# What happens to a machine's clock.


class ClockJump(Fault, frozen=True, tag="clock_jump"):
    """The node's clock is set forwards or backwards; at 0 s: it is wrong from the start."""

    node: str
    by_s: SignedSeconds


class ClockDrift(Fault, frozen=True, tag="clock_drift"):
    """The node's clock runs at another rate: 1.01 gains a second in a hundred."""

    node: str
    rate: Annotated[float, Meta(ge=0.5, le=2.0)]
    duration_s: PositiveSeconds | None = None
    """None: for good."""


# What happens to the knowledge of who is there.


class MulticastLoss(Fault, frozen=True, tag="multicast_loss"):
    """A share of the announcements and questions from and to a node is lost."""

    node: str
    share: PositiveShare
    duration_s: PositiveSeconds | None = None
    """None: for good."""
    direction: Literal["both", "from", "to"] = "both"


class StaleRecord(Fault, frozen=True, tag="stale_record"):
    """The neighbours see the oldest announcement of a node again, and then the current one."""

    node: str
    duration_s: PositiveSeconds
    address: str | None = None
    """The address in the record; left out, the one that it had."""


class OneWayVisibility(Fault, frozen=True, tag="one_way_visibility"):
    """The first node sees the second one's announcements; the second one does not see the first's."""

    between: tuple[str, str]
    duration_s: PositiveSeconds | None = None
    """None: for good."""


class CopiedIdentity(Fault, frozen=True, tag="copied_identity"):
    """The node goes down and starts from a copy of another node's store, its key included."""

    node: str
    of: str
    down_s: Seconds = Seconds(1)


class Stranger(Fault, frozen=True, tag="stranger"):
    """A machine on a home's network that is not a node announces nodes that do not exist, or one that does."""

    home: str
    ghosts: Annotated[float, Meta(ge=0, le=10_000)] = 0.0
    """How many nodes that do not exist it announces in a second, each with an id of its own."""
    spoofs: str | None = None
    """A node whose name and id it announces every second with an address of its own."""
    knows_namespace: bool = True
    """Whether its announcements have the cluster's namespace, which it hears on the network, or another one."""
    addresses: Literal["refuse", "silent", "absent"] = "refuse"
    """The result of dialling the announced addresses: refused, not answered, or no such machine."""
    duration_s: PositiveSeconds | None = None
    """None: for good. At its end its records expire, and correct announcements take effect again."""

    def __post_init__(self) -> None:
        if not self.ghosts and self.spoofs is None:
            raise UsageError("a stranger needs ghosts (more than 0), or a node that it spoofs")


class BackgroundLoad(Fault, frozen=True, tag="background_load"):
    """Other programs of the node's owner use its cores, one each.

    Each works for a share of a period and sleeps for the rest. Work is counted in processor time: a program that has to
    share a core works longer. Periods are between half and one and a half of the given one, at random."""

    node: str
    share: PositiveShare = PositiveShare(1)
    """1: they always work."""
    programs: Count = 1
    period_s: PositiveSeconds = PositiveSeconds(0.1)
    duration_s: PositiveSeconds | None = None
    """None: for good."""


AnyFault: TypeAlias = (
    Crash | Restart | Pause | Lid | Throttle
    | Partition | Clog | HalfOpen | Reset | LinkChange | Datagrams
    | WifiGate | CablePulled | InterfaceChange | RouterReboot
    | FlippedBit | WrongSize | StaleStep | NanGradient
    | ClockJump | ClockDrift
    | MulticastLoss | StaleRecord | OneWayVisibility | CopiedIdentity
    | StuckDevice | BlockedPort | Misbehave
    | FullDisk | SlowDisk | FewDescriptors | Stranger
    | Leave | BackgroundLoad
)  # fmt: skip

OWN_FAULTS: dict[str, type[AnyFault]] = {kind.__struct_config__.tag: kind for kind in get_args(AnyFault)}
FAULTS: Registry[type[Fault]] = Registry("fault", OWN_FAULTS)
"""All kinds of faults, by their names in a file."""
