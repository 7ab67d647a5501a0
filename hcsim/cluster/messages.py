"""What nodes tell each other over their control channels.

Wishes (to join, to leave, to have a failed view replaced) are part of a node's `Status`, which is repeated with
every heartbeat: a message that is lost delays a wish and does not lose it.

These are notices, not requests: nothing waits for a reply to one. What answers another message names it, by a ballot or
the number of a heartbeat, and what is lost is said again. Only who asks from outside (`Ask`) waits for what it is told.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from hcsim.cluster.agreement import Abstained, Accept, Accepted, Declined, Prepare, Promise, Refused
from hcsim.cluster.diagnosis import Findings
from hcsim.cluster.view import Member, Standing, View, standing
from hcsim.identity.trust_list import TrustRecord
from hcsim.runtime.host import Interface
from hcsim.transport.hello import MOST_EPOCHS
from hcsim.transport.messages import Schema


class Status(msgspec.Struct, frozen=True):
    """How a node stands."""

    us: Member
    control: str
    """Where it takes calls about membership."""
    lineage: str
    epoch: Annotated[int, msgspec.Meta(ge=0, lt=MOST_EPOCHS)]
    size: int
    """Of its view."""
    formed: bool
    joins: str = ""
    """The lineage it would like to be in."""
    leaving: bool = False
    broken: int = -1
    """The epoch in which its work failed."""
    reason: str = ""
    """Why it failed."""
    reaches: tuple[str, ...] = ()
    """The nodes that it has a living connection to."""
    contacts: tuple[str, ...] = ()
    """Where those take calls about membership, in the same order: who missed an announcement learns of it here."""

    past: tuple[tuple[str, int], ...] = ()
    """Lineages that it has left and remembers, and the epoch that it left each in."""
    outcome: str = ""
    """What came of its work, once all of its view have finished that."""
    waits: bool = False
    """Whether its view had to change, and those who were there could not decide how."""

    @property
    def standing(self) -> Standing:
        """Where its cluster stands among others."""
        return standing(self.lineage, self.size, formed=self.formed, waits=self.waits)

    @property
    def anew(self) -> bool:
        """Whether it was started anew, and waits for the others of its view."""
        return self.joins == self.lineage


class Hello(msgspec.Struct, frozen=True, tag="hello", omit_defaults=True):
    """The first message in each direction."""

    status: Status
    terms: dict[str, str] = {}
    """What it was started with that all must have alike, where that is not as usual."""


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A heartbeat; with number 0, news between two of them."""

    number: int
    status: Status


class Echo(msgspec.Struct, frozen=True, tag="echo"):
    """The answer to a heartbeat."""

    number: int


class Decided(msgspec.Struct, frozen=True, tag="decided"):
    """This view was agreed on."""

    view: View


class TrustUpdate(msgspec.Struct, frozen=True, tag="trust"):
    """The cluster's trust list has changed."""

    record: TrustRecord


class Qualified(msgspec.Struct, frozen=True, tag="qualified"):
    """We can work with the members of that lineage, as our checks found: take us in."""

    lineage: str
    boot: int


class LastCall(msgspec.Struct, frozen=True, tag="last_call"):
    """All work of that lineage is done: whoever prepares to join it has to come soon."""

    lineage: str


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """We close this channel, for that reason."""

    reason: str
    refused: bool = False
    """We stay, and do not want to hear from you."""


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Instead of a hello: how do you stand? Whoever asks is told, and is no node for that."""

    forget: str = ""
    """A node that is gone for good, as a person says."""


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Instead of a hello: we want to measure this line; see `probe` for what follows."""


class Link(msgspec.Struct, frozen=True):
    """How a node is connected to another."""

    node: str
    name: str
    control: str
    """Where the other takes calls."""
    address: str
    """The other's address that the connection really goes to; empty: there is none."""
    latency_s: float | None
    """Round trip of heartbeats, as a moving average."""
    suspected: str
    """Why it is taken for lost; empty while it is well."""
    ends: tuple[str, str] = ("", "")
    """The addresses that what is computed goes between, ours first; empty while nothing does."""
    there_Bps: float | None = None
    """Bandwidth to the other when it was last measured."""
    back_Bps: float | None = None


class Told(msgspec.Struct, frozen=True, tag="told"):
    """The answer."""

    status: Status
    view: View
    links: tuple[Link, ...]
    interfaces: tuple[Interface, ...]
    """Of its machine."""


Message: TypeAlias = (
    Ask
    | Told
    | Probe
    | Hello
    | Beat
    | Echo
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
SCHEMA: Schema[Message] = Schema(Message)
