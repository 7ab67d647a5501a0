"""A view: who computes together from one moment to the next, agreed by those who did before.

Views of one lineage follow each other without gaps, and each has one successor: the members of a view
agree on it (see `agreement`). The order of the members is their ranks. Members keep their order and newcomers
come last, so the first member is always the most senior, and it leads.

`Rules` are what all nodes of a cluster hold alike when they form views. Terms are what all members must have been
started with alike. Each node tells its terms when it meets another: by name, and only those that are not as usual.
Whoever differs from the most senior member of its view could never compute with it, whatever is tried again, and so
ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

import msgspec

from hcsim.errors import ConfigError
from hcsim.transport.hello import MOST_EPOCHS

Quorum: TypeAlias = Literal["majority", "tiebreak", "any"]
"""How many members of a view must agree on the next one.

- majority: more than half. Two nodes cannot go on without each other.
- tiebreak: more than half, or just half with the leader among them.
- any: whoever is left. Both sides of a split cluster go on, and their models part.
"""

Standing: TypeAlias = tuple[bool, bool, int, str]
"""Where clusters meet, the least of these goes on."""


class Member(msgspec.Struct, frozen=True):
    """A node in one of its lives: a process that was started anew is another member."""

    node: str
    """The node's id, proved by its key."""
    boot: int
    """Tells a node's lives apart."""
    name: str
    """For people."""
    address: str
    """Where its collectives listen."""
    home: str = ""
    """Members of one home are close to each other."""

    def elsewhere(self, other: Member) -> bool:
        """Whether another life of this node is on another machine, to which its key must have been copied."""
        return self.name != other.name and self.address != other.address

    def in_place_of(self, other: Member) -> bool:
        """Whether this is the machine of another node, which it cannot be beside this one: by name, address and port.

        One address of several is enough, since those that are made from random numbers change."""
        (ours, _, port), (theirs, _, their_port) = (each.address.rpartition(":") for each in (self, other))
        common = any(host in theirs.split("|") for host in ours.split("|"))
        return self.node != other.node and self.name == other.name and port == their_port and common


class View(msgspec.Struct, frozen=True):
    """Who computes together in one epoch."""

    lineage: str
    """The line of views that this one belongs to: the node that it started from, and its boot."""
    epoch: Annotated[int, msgspec.Meta(ge=0, lt=MOST_EPOCHS)]
    members: tuple[Member, ...]
    previous: int = -1
    """The epoch of the view that this one follows."""
    formed: bool = False
    """Whether as many members as were asked for have been there, in this view or before it: work may begin."""
    abrupt: bool = False
    """The previous view failed: what was under way in it is lost. Otherwise its members finish their step first."""
    left: tuple[str, ...] = ()
    """Nodes that left in an orderly way."""
    reason: str = ""
    """For people."""

    @property
    def standing(self) -> Standing:
        """Where this view's cluster stands among others."""
        return standing(self.lineage, len(self.members), formed=self.formed)

    @property
    def leader(self) -> Member:
        """The most senior member."""
        return self.members[0]

    @property
    def nodes(self) -> tuple[str, ...]:
        """The members' ids, by rank."""
        return tuple(member.node for member in self.members)

    def prevails(self, other: View) -> bool:
        """Of two views of one lineage and epoch, as there are only after a disk was set back: whether this goes on."""
        ours, theirs = ([(m.node, m.boot) for m in view.members] for view in (self, other))
        return self.epoch == other.epoch and (self.standing, ours) < (other.standing, theirs)

    def branched_from(self, lineage: str) -> bool:
        """Whether some members of a view of that lineage went on in this one, where any may."""
        return self.lineage.startswith(f"{lineage}/")

    def member(self, node: str) -> Member | None:
        """The member of that id, if there is one."""
        return next((member for member in self.members if member.node == node), None)

    def rank(self, member: Member) -> int | None:
        """The rank of a node in this very life of its."""
        return next((r for r, m in enumerate(self.members) if (m.node, m.boot) == (member.node, member.boot)), None)


def standing(lineage: str, size: int, *, formed: bool, waits: bool = False) -> Standing:
    """First comes a cluster that works, before those that work and cannot change; then the larger one, then the one
    with the lower id."""
    return not formed, waits, -size, lineage


def branch(view: View, epoch: int, proposer: Member) -> str:
    """The lineage of those who go on from a view on a line of their own, beginning with that epoch."""
    return f"{view.lineage}/{view.epoch}.{epoch}.{proposer.node[:8]}"


def branched(lineage: str, other: str) -> int | None:
    """The epoch of the view of another lineage that this one branched from; None: from none."""
    epoch = lineage[len(other) + 1 :].partition(".")[0]
    return int(epoch) if lineage.startswith(f"{other}/") and epoch.isdecimal() else None


def enough(view: View, nodes: list[str], rule: Quorum) -> bool:
    """Whether these nodes may decide what follows the view. Any two such sets have a node in common (but for `any`)."""
    count = sum(node in nodes for node in view.nodes)
    if rule == "any":
        return count > 0
    if rule == "tiebreak" and 2 * count == len(view.members):
        return view.leader.node in nodes
    return 2 * count > len(view.members)


PATIENCE_S = 1.0
"""How long a member waits for those before it to propose, and a proposer before it tries again."""
ASTRAY_S = 5.0
"""How long a member may follow another view before it is left out."""


DEPARTED_S = 5.0
"""How long members may go on with a view that a member has left, once it is gone: what it sent last may still come."""


class Rules(msgspec.Struct, frozen=True):
    """What a person may choose."""

    needed: int
    """Members that work begins with."""
    quorum: Quorum = "tiebreak"
    settle_s: float = 0.5
    """How long newcomers are gathered."""
    answer_s: float = 15.0
    """How long a proposal waits for a member that seems to be well."""


Terms: TypeAlias = Mapping[str, str]
_USUAL = "left out"


def unlike(theirs: Terms, ours: Terms, there: str) -> str:
    """In what the terms differ; empty if they do not."""
    names = sorted({*theirs, *ours})
    return ", ".join(
        f"{name} is {theirs.get(name, _USUAL)} on {there} and {ours.get(name, _USUAL)} here"
        for name in names
        if theirs.get(name) != ours.get(name)
    )


def refusal(leader: str, differences: str) -> ConfigError:
    """Why a node cannot be a member."""
    return ConfigError(f"{leader} leads, and was started otherwise: {differences}. Start all nodes alike")
