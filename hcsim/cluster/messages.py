"""Messages between nodes on their control connections.

Requests to join, to leave, or to replace a failed view are part of a node's `Status`, which is repeated with
every heartbeat: a lost message delays a request but does not lose it.

Messages are notifications, not calls: no sender waits for a reply. An answer names the message that it answers
by a ballot or a heartbeat number, and lost messages are repeated. Only a status client (`StatusRequest`) waits for its
answer.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from hcsim.cluster.agreement import Abstained, Accept, Accepted, Declined, Prepare, Promise, Refused
from hcsim.cluster.diagnosis import Findings
from hcsim.cluster.view import ClusterPrecedence, Member, View, standing
from hcsim.identity.trust_list import TrustRecord
from hcsim.runtime.host import Chip, Interface, MachineFacts, Readings
from hcsim.telemetry.history import HistoryMessage, HistoryStep
from hcsim.transport.groups import MOST_EPOCHS
from hcsim.transport.messages import Schema


class Status(msgspec.Struct, frozen=True):
    """The status of a node."""

    us: Member
    control: str
    """The address of its control connections."""
    lineage: str
    epoch: Annotated[int, msgspec.Meta(ge=0, lt=MOST_EPOCHS)]
    size: int
    formed: bool
    joins: str = ""
    """The lineage that it asks to join."""
    leaving: bool = False
    broken: int = -1
    reason: str = ""
    reaches: tuple[str, ...] = ()
    """The nodes to which it has a live connection."""
    contacts: tuple[str, ...] = ()
    """The control addresses of those nodes, in the same order, for receivers that missed an announcement."""

    past: tuple[tuple[str, int], ...] = ()
    """Lineages that it has left and remembers, with the epoch at which it left each."""
    outcome: str = ""
    """The outcome of its work, once all members of its view have finished."""
    waits: bool = False
    """Whether its view had to change, and the members present could not decide on a successor."""

    @property
    def standing(self) -> ClusterPrecedence:
        """Return the precedence of its cluster among others."""
        return standing(self.lineage, self.size, formed=self.formed, waits=self.waits)

    @property
    def anew(self) -> bool:
        """Whether it was restarted, and waits for the other members of its view."""
        return self.joins == self.lineage


class NodeHello(msgspec.Struct, frozen=True, tag="hello", omit_defaults=True):
    """The first message in each direction."""

    status: Status
    terms: dict[str, str] = {}
    """Start options that all members must share, where they differ from the defaults."""


class HeartbeatMessage(msgspec.Struct, frozen=True, tag="beat"):
    """A heartbeat; number 0 marks a status update between two heartbeats."""

    number: int
    status: Status


class HeartbeatReply(msgspec.Struct, frozen=True, tag="echo"):
    """The answer to a heartbeat."""

    number: int


class Decided(msgspec.Struct, frozen=True, tag="decided"):
    """This view was decided."""

    view: View


class TrustUpdate(msgspec.Struct, frozen=True, tag="trust"):
    """The cluster's trust list has changed."""

    record: TrustRecord


class Qualified(msgspec.Struct, frozen=True, tag="qualified"):
    """The sender's checks with the members of that lineage passed; it asks to be admitted."""

    lineage: str
    boot: int


class LastCall(msgspec.Struct, frozen=True, tag="last_call"):
    """All work of that lineage is done: nodes that prepare to join have to do so soon."""

    lineage: str


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The sender closes this channel, for that reason."""

    reason: str
    refused: bool = False
    """The sender stays in the cluster and rejects the receiver."""


class StatusRequest(msgspec.Struct, frozen=True, tag="ask"):
    """A status query, sent instead of a hello. The client does not become a node by it."""

    forget: str = ""
    """A node that the user declares gone for good."""
    since_s: float | None = None
    """Send the details too: the state of the machine, and what happened since that moment of the node's clock.
    Such a client may ask again over the same channel."""


class ProbeRequest(msgspec.Struct, frozen=True, tag="probe"):
    """A request to measure this link, sent instead of a hello; see `probe` for the protocol."""


class MeetingRequest(msgspec.Struct, frozen=True, tag="meet"):
    """A request, sent instead of a hello, to join a group with other members for a moment, to measure the links."""

    rank: Annotated[int, msgspec.Meta(ge=0)]
    world: Annotated[int, msgspec.Meta(ge=2)]


class MeetingPlace(msgspec.Struct, frozen=True, tag="meet_at"):
    """The answer: where this member listens for the others."""

    addresses: tuple[str, ...]


class MeetingBegin(msgspec.Struct, frozen=True, tag="meet_all"):
    """Where all members listen, and who they are, by rank."""

    addresses: tuple[tuple[str, ...], ...]
    nodes: tuple[str, ...]


class MeetingNews(msgspec.Struct, frozen=True, tag="meet_news"):
    """What the members do at the moment, or what this one has found so far."""

    text: str = ""
    data: bytes = b""


class MeetingResult(msgspec.Struct, frozen=True, tag="meet_result"):
    """What this member has found, or why there is nothing."""

    data: bytes = b""
    error: str = ""


class LinkStatus(msgspec.Struct, frozen=True):
    """The connection of a node to another one."""

    node: str
    name: str
    control: str
    address: str
    """The other's address of the present connection; empty if there is none."""
    latency_s: float | None
    """The round-trip time of heartbeats, as a moving average."""
    suspected: str
    """Why it is suspected; empty if it is healthy."""
    ends: tuple[str, str] = ("", "")
    """The addresses between which collectives run, this node's first; empty while none do."""
    there_Bps: float | None = None
    back_Bps: float | None = None


class Details(msgspec.Struct, frozen=True):
    """What a node says of itself to those who watch it."""

    now_s: float
    """The node's clock, which all times here are of."""
    chip: Chip
    readings: Readings
    title: str = ""
    """What it works on, in words."""
    total_steps: int = 0
    """How many steps there are to be; 0 if nobody knows."""
    needed: int = 0
    """With how many members work begins; 0 if it does not say."""
    steps: tuple[HistoryStep, ...] = ()
    messages: tuple[HistoryMessage, ...] = ()


class MemberFacts(MachineFacts, frozen=True):
    """What the machines of a cluster should have in common, and the time."""

    time_s: float
    """Of the wall clock, when it was asked."""


class StatusReply(msgspec.Struct, frozen=True, tag="told", omit_defaults=True):
    """The answer to a status query."""

    status: Status
    view: View
    links: tuple[LinkStatus, ...]
    interfaces: tuple[Interface, ...]
    details: Details | None = None
    """If they were asked for."""
    facts: MemberFacts | None = None
    """None where the machine is simulated, or runs an hcsim that does not tell."""
    heard: tuple[str, ...] | None = None
    """The nodes whose announcements come to it by multicast; None if it does not listen for them."""


ControlMessage: TypeAlias = (
    StatusRequest
    | StatusReply
    | ProbeRequest
    | MeetingRequest
    | MeetingPlace
    | MeetingBegin
    | MeetingNews
    | MeetingResult
    | NodeHello
    | HeartbeatMessage
    | HeartbeatReply
    | Decided
    | Goodbye
    | Prepare
    | Promise
    | Abstained
    | Accept
    | Accepted
    | Refused
    | Declined
    | Findings
    | Qualified
    | LastCall
    | TrustUpdate
)
SCHEMA: Schema[ControlMessage] = Schema(ControlMessage)


_FRAME_BYTES = 4096
"""Left free for what is around a message."""


def fitting(reply: StatusReply, most_bytes: int) -> StatusReply:
    """Return the reply, cut where its frame would be longer than this.

    The oldest messages are left out first, then the earliest steps, then links; a message says so."""
    whole = reply
    while len(SCHEMA.encode(reply)) > most_bytes - _FRAME_BYTES:
        details = reply.details
        if details is not None and details.messages:
            details = msgspec.structs.replace(details, messages=details.messages[len(details.messages) // 2 + 1 :])
        elif details is not None and details.steps:
            details = msgspec.structs.replace(details, steps=details.steps[len(details.steps) // 2 + 1 :])
        elif reply.links:
            reply = msgspec.structs.replace(reply, links=reply.links[: len(reply.links) // 2])
        else:
            break  # the rest is what the node also tells the other members
        reply = msgspec.structs.replace(reply, details=details)
    if reply is whole or reply.details is None or whole.details is None:
        return reply
    counts = {
        "messages": (len(reply.details.messages), len(whole.details.messages)),
        "steps": (len(reply.details.steps), len(whole.details.steps)),
        "links": (len(reply.links), len(whole.links)),
    }
    kept = ", ".join(f"{some} of {all_} {what}" for what, (some, all_) in counts.items() if some < all_)
    word = HistoryMessage(reply.details.now_s, f"too much to tell at once: {kept} are shown")
    details = msgspec.structs.replace(reply.details, messages=(*reply.details.messages, word))
    return msgspec.structs.replace(reply, details=details)
