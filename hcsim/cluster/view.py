"""Views: the members of one epoch, agreed on by the members of the previous one.

Views of one lineage follow each other without gaps, and each has one successor, on which its members agree (see
`agreement`). The order of the members gives their ranks. Members keep their order and newcomers come last, so
the first member is always the most senior, and it leads.

`MembershipRules` are the settings for forming views that all nodes of a cluster share. Terms are the start options that
all members must share. Each node sends its terms when it meets another: by name, and only where they differ
from the defaults. A node whose terms differ from those of the most senior member of its view can never compute
with it, so it ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

import msgspec

from hcsim.errors import ConfigError
from hcsim.transport.groups import MOST_EPOCHS

Quorum: TypeAlias = Literal["majority", "tiebreak", "any"]
"""How many members of a view must agree on the next one.

- majority: more than half. Two nodes cannot go on without each other.
- tiebreak: more than half, or exactly half including the leader.
- any: any members that are left. Both sides of a split cluster go on, and their models diverge."""

ClusterPrecedence: TypeAlias = tuple[bool, bool, int, str]
"""The precedence of a cluster: where clusters meet, the one with the least value goes on."""


class Member(msgspec.Struct, frozen=True):
    """A node with a specific boot: a restarted process is another member."""

    node: str
    """The node's id, proved by its key."""
    boot: int
    """Differs at every start of the node."""
    name: str
    address: str
    home: str = ""
    """Members with the same home are close to each other in the network."""

    def elsewhere(self, other: Member) -> bool:
        """Return whether another boot of this node is on another machine, to which its key must have been copied."""
        return self.name != other.name and self.address != other.address

    def in_place_of(self, other: Member) -> bool:
        """Return whether this is the machine of another node, by name, address and port, so that both cannot exist
        side by side.

        One common address is enough, since randomised addresses change."""
        (ours, _, port), (theirs, _, their_port) = (each.address.rpartition(":") for each in (self, other))
        common = any(host in theirs.split("|") for host in ours.split("|"))
        return self.node != other.node and self.name == other.name and port == their_port and common


class View(msgspec.Struct, frozen=True):
    """The members of one epoch."""

    lineage: str
    """The lineage of this view: the node that it started from, and its boot."""
    epoch: Annotated[int, msgspec.Meta(ge=0, lt=MOST_EPOCHS)]
    members: tuple[Member, ...]
    previous: int = -1
    formed: bool = False
    """Whether the required number of members has been present, in this view or an earlier one: work may begin."""
    abrupt: bool = False
    """Whether the previous view failed, so its current step is lost. Otherwise its members finish their step
    first."""
    left: tuple[str, ...] = ()
    reason: str = ""

    @property
    def standing(self) -> ClusterPrecedence:
        return standing(self.lineage, len(self.members), formed=self.formed)

    @property
    def leader(self) -> Member:
        return self.members[0]

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(member.node for member in self.members)

    def prevails(self, other: View) -> bool:
        """Return whether this view goes on, of two views of one lineage and epoch. There are two only after a disk
        was restored from a backup."""
        ours, theirs = ([(m.node, m.boot) for m in view.members] for view in (self, other))
        return self.epoch == other.epoch and (self.standing, ours) < (other.standing, theirs)

    def branched_from(self, lineage: str) -> bool:
        """Return whether some members of a view of that lineage went on in this one, under the rule "any"."""
        return self.lineage.startswith(f"{lineage}/")

    def member(self, node: str) -> Member | None:
        return next((member for member in self.members if member.node == node), None)

    def rank(self, member: Member) -> int | None:
        """Return the rank of a member with exactly this boot."""
        return next((r for r, m in enumerate(self.members) if (m.node, m.boot) == (member.node, member.boot)), None)


def standing(lineage: str, size: int, *, formed: bool, waits: bool = False) -> ClusterPrecedence:
    """Return the precedence: first clusters that work, then of those the ones that can change, then the larger,
    then the lower id."""
    return not formed, waits, -size, lineage


def branch(view: View, ballot: int, proposer: Member) -> str:
    """Return the lineage of members that branch off from a view by that ballot of the proposer.

    A proposer may end more than one ballot after the same view, since it is not in a branch that excludes it."""
    return f"{view.lineage}/{view.epoch}.{ballot}.{proposer.node[:8]}.{proposer.boot:x}"


def branched(lineage: str, other: str) -> int | None:
    """Return the epoch of the view of the other lineage from which this one branched; None if it did not."""
    epoch = lineage[len(other) + 1 :].partition(".")[0]
    return int(epoch) if lineage.startswith(f"{other}/") and epoch.isdecimal() else None


def enough(view: View, nodes: list[str], rule: Quorum) -> bool:
    """Return whether these nodes may decide the successor of the view. Any two such sets intersect (except under
    "any")."""
    count = sum(node in nodes for node in view.nodes)
    if rule == "any":
        return count > 0
    if rule == "tiebreak" and 2 * count == len(view.members):
        return view.leader.node in nodes
    return 2 * count > len(view.members)


PATIENCE_S = 1.0
"""How long a member waits for its seniors to propose, and a proposer before it tries again."""
ASTRAY_S = 5.0
"""How long a member may follow another view before it is excluded."""


DEPARTED_S = 5.0
"""How long members may continue in a view that a member has left, once it is gone: its last messages may
still arrive."""


class MembershipRules(msgspec.Struct, frozen=True):
    """The settings for forming views that the user chooses."""

    needed: int
    quorum: Quorum = "tiebreak"
    settle_s: float = 0.5
    """How long newcomers are collected before a view change."""
    answer_s: float = 15.0
    """How long a proposal waits for a member that seems healthy."""


JobTerms: TypeAlias = Mapping[str, str]
_USUAL = "left out"


def unlike(theirs: JobTerms, ours: JobTerms, there: str) -> str:
    """Return how the terms differ; empty if they do not."""
    names = sorted({*theirs, *ours})
    return ", ".join(
        f"{name} is {theirs.get(name, _USUAL)} on {there} and {ours.get(name, _USUAL)} here"
        for name in names
        if theirs.get(name) != ours.get(name)
    )


def refusal(leader: str, differences: str) -> ConfigError:
    return ConfigError(f"{leader} leads, and was started otherwise: {differences}. Start all nodes alike")
