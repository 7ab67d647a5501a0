"""What goes wrong in a run, as an explicit list: a failing one can be shortened."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, get_args

from msgspec import Meta

from hcsim.config.table import Count, Port, Table
from hcsim.errors import UsageError
from hcsim.registry import Registry
from hcsim.units import BitRate, PositiveBytes, PositiveSeconds, PositiveShare, Seconds, Share, SignedSeconds


class Fault(Table, frozen=True, tag_field="kind"):
    """An entry of a scenario's list: what happens, and when."""

    at_s: Seconds

    @property
    def is_for_good(self) -> bool:
        """Whether it could end and does not: it has a `duration`, and none is given."""
        return getattr(self, "duration_s", 0.0) is None

    @property
    def over_s(self) -> float:
        """When the last thing happens that the fault does by itself: its end, or its start if it never ends."""
        return self.at_s + sum(getattr(self, name, None) or 0.0 for name in ("duration_s", "down_s", "slow_for_s"))


# What happens to a machine.


class Crash(Fault, frozen=True, tag="crash"):
    """The node is gone; `clean`: its connections are reset and calls to it refused, otherwise it falls silent."""

    node: str
    clean: bool = False


class Restart(Fault, frozen=True, tag="restart"):
    """The node starts anew: at once if it has crashed, otherwise it crashes now and starts after `down`."""

    node: str
    state: Literal["kept", "lost", "stale"] = "kept"
    """What it finds in its store: all, nothing, or what was there at an earlier time."""
    down_s: Seconds = Seconds(1)
    clean: bool = False
    """As in a crash, if it has to crash first."""
    as_of_s: Seconds | None = None
    """The time that a stale store is from; left out, it is the start of the life before."""
    slow: PositiveShare = PositiveShare(1)
    """The part of its speed at which it computes at first."""
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
    """The node computes at a part of its speed."""

    node: str
    factor: PositiveShare
    duration_s: PositiveSeconds | None = None
    """None: for good."""


class Lid(Fault, frozen=True, tag="lid"):
    """The node sleeps, and wakes up with its clock ahead by the time that it slept."""

    node: str
    duration_s: PositiveSeconds
    connections: Literal["kept", "dead"] = "kept"
    """Whether its connections are still there when it wakes up."""


class StuckDevice(Fault, frozen=True, tag="stuck_device"):
    """The node's device takes work and does not finish it; all else of the node goes on."""

    node: str
    duration_s: PositiveSeconds | None = None
    """None: for good, also after a restart."""


class FullDisk(Fault, frozen=True, tag="full_disk"):
    """The node's disk is full: nothing can be saved; what was saved before can be read."""

    node: str
    duration_s: PositiveSeconds | None = None
    """None: for good, also after a restart."""


class SlowDisk(Fault, frozen=True, tag="slow_disk"):
    """Whatever the node saves takes that much longer.

    Where its device saves (a checkpoint), the device is busy for so long; else all of the node waits meanwhile."""

    node: str
    takes_s: PositiveSeconds
    """For each record."""
    duration_s: PositiveSeconds | None = None
    """None: for good, also after a restart."""


class Leave(Fault, frozen=True, tag="leave"):
    """Somebody ends the node's program in an orderly way (Ctrl-C): a member leaves after its step."""

    node: str


class FewDescriptors(Fault, frozen=True, tag="few_descriptors"):
    """The node can have only so many connections at once, those that it tries to make included.

    More calls of its own fail. Who calls it has a connection, and gets no answer until another one has ended."""

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

    Those of a medium hold for every node on it. A node's attachment to Thunderbolt are its cables, both ways; they
    lose nothing. The line of a home is its `Wan.ways`: a rate is that of both directions, or of the one that is named;
    latency and loss belong to both. A tunnel keeps its own figures."""

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
    """The first node has lost its connections to the second, which does not know until it sends."""

    between: tuple[str, str]


class Clog(Fault, frozen=True, tag="clog"):
    """What two nodes send to each other is taken, and arrives only when the clog is gone: if it stays, never."""

    between: tuple[str, str]
    duration_s: PositiveSeconds | None = None
    """None: for good."""


class Datagrams(Fault, frozen=True, tag="datagrams"):
    """Datagrams that cross a medium (announcements, questions who is there) are lost, late, doubled or overtaken."""

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
    """An access point's air is closed for a moment, then flushes."""

    medium: str
    duration_s: PositiveSeconds


class CablePulled(Fault, frozen=True, tag="cable_pulled"):
    """A node is off an Ethernet or Thunderbolt medium, until the cable is plugged in again, if ever.

    Connections over it stall; new ones go another way if there is one."""

    node: str
    medium: str
    duration_s: PositiveSeconds | None = None
    """None: for good."""
    to: str | None = None
    """Thunderbolt: where the cable leads; left out, all cables of the node are pulled."""


class InterfaceChange(Fault, frozen=True, tag="interface_change"):
    """A node leaves one medium for another: its connections over the old one are gone, and its peers are not told."""

    node: str
    medium: str
    to: str
    duration_s: PositiveSeconds | None = None
    """None: it does not go back."""

    def __post_init__(self) -> None:
        if self.medium == self.to:
            raise UsageError("an interface_change needs two different media")


class RouterReboot(Fault, frozen=True, tag="router_reboot"):
    """All Ethernet and Wi-Fi of a home are down for a while, and so is its way out; Thunderbolt is not."""

    home: str
    duration_s: PositiveSeconds | None = None
    """None: for good."""


class BlockedPort(Fault, frozen=True, tag="blocked_port"):
    """One port of a node is not reached by the others; whatever the node calls itself is.

    `closed`: calls to it are refused, and connections that were made to it are reset. `silent`: calls to it get no
    answer, and nothing passes on connections that were made to it, in both directions; nobody is told."""

    node: str
    port: Port | Literal["gradient", "discovery"]
    """A number, or which port of the scenario's `[cluster]`."""
    how: Literal["closed", "silent"]
    duration_s: PositiveSeconds | None = None
    """None: for good, also after a restart."""


# What happens to data: on their way, past every checksum of the network, or where they are computed.


_LONGEST_FRAME_BYTES = 2**32 - 1
"""Its header says its length in 32 bits."""


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
"""How a member can break the protocol; docs/reference/scenarios.md says what each one is."""


class Misbehave(Fault, frozen=True, tag="misbehave"):
    """A member breaks the protocol in what it sends: in frames of data, or for `lie` in messages about membership."""

    node: str
    how: Misbehaviour
    to: str | None = None
    """Who gets such frames; left out: everybody."""
    share: PositiveShare = PositiveShare(1)
    """How many of the frames that this can be done to."""
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
    """The oldest announcement of a node is back in its neighbours' view; then the truth is."""

    node: str
    duration_s: PositiveSeconds
    address: str | None = None
    """The address that the record has; left out, the one that it had."""


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
    """A machine on a home's network that is no node announces nodes that do not exist, or one that does."""

    home: str
    ghosts: Annotated[float, Meta(ge=0, le=10_000)] = 0.0
    """How many nodes that do not exist it announces in a second, each with an id of its own."""
    spoofs: str | None = None
    """A node under whose name, with whose id, it announces an address of its own, every second."""
    knows_namespace: bool = True
    """Whether its announcements have the cluster's namespace, as it hears it on the network; else another one."""
    addresses: Literal["refuse", "silent", "absent"] = "refuse"
    """What calls to the announced addresses come to: refused, not answered, or no such machine."""
    duration_s: PositiveSeconds | None = None
    """None: for good. At its end its records run out, and what is true is heard again."""

    def __post_init__(self) -> None:
        if not self.ghosts and self.spoofs is None:
            raise UsageError("a stranger needs ghosts (more than 0), or a node that it spoofs")


AnyFault: TypeAlias = (
    Crash | Restart | Pause | Lid | Throttle
    | Partition | Clog | HalfOpen | Reset | LinkChange | Datagrams
    | WifiGate | CablePulled | InterfaceChange | RouterReboot
    | FlippedBit | WrongSize | StaleStep | NanGradient
    | ClockJump | ClockDrift
    | MulticastLoss | StaleRecord | OneWayVisibility | CopiedIdentity
    | StuckDevice | BlockedPort | Misbehave
    | FullDisk | SlowDisk | FewDescriptors | Stranger
    | Leave
)  # fmt: skip

OWN_FAULTS: dict[str, type[AnyFault]] = {kind.__struct_config__.tag: kind for kind in get_args(AnyFault)}
FAULTS: Registry[type[Fault]] = Registry("fault", OWN_FAULTS)
"""All of them, by their names in a file."""
