"""A node's knowledge of its peers, and the consequences for a view."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from hcsim.cluster.messages import Status
from hcsim.cluster.view import ASTRAY_S, Member, View, branched, standing

QUARANTINE_S = 5.0
STALL_SHARE = 4.0
"""A quarantine lasts this many times as long as the member stalled the others."""
LONGEST_QUARANTINE_S = 600.0
SETTLES_S = 5.0
"""A member has settled if its loss is noticed later than this, plus the detection time, after it was
admitted."""


class Peer(msgspec.Struct):
    """Another node that is, or was, connected."""

    status: Status
    suspected: str = ""
    """Why it is suspected; empty if it is healthy."""
    astray_since_s: float | None = None
    """Since when it has followed another view than expected."""


class Quarantine(msgspec.Struct, frozen=True):
    """The time for which a member that kept a view from working is not readmitted."""

    lasts_s: float
    until_s: float

    @classmethod
    def after(cls, before: Quarantine | None, stalled_s: float, now: float) -> Quarantine:
        """Return the quarantine after an exclusion: longer than the stall, and twice the previous one if that was
        recent."""
        lasts_s = max(QUARANTINE_S, STALL_SHARE * stalled_s)
        if before is not None and before.counts(now):
            lasts_s = max(lasts_s, 2 * before.lasts_s)
        lasts_s = min(lasts_s, LONGEST_QUARANTINE_S)
        return cls(lasts_s, now + lasts_s)

    def counts(self, now: float) -> bool:
        """Return whether another exclusion now is to last longer because of this one."""
        return now < self.until_s + STALL_SHARE * self.lasts_s


class Roster:
    """All known peers."""

    def __init__(self, us: Member) -> None:
        self._us = us
        self.peers: dict[str, Peer] = {}
        self._declined: dict[str, tuple[str, int]] = {}
        self._given_up: dict[str, Member] = {}
        """Members that the user declared gone for good: until they are heard again, their votes are not waited for."""
        self._quarantined: dict[str, Quarantine] = {}
        self._pardoned: dict[str, None] = {}
        """Nodes that were readmitted at once since there was progress."""
        self._let_in_s: dict[str, float] = {}
        self._released: dict[str, Quarantine] = {}
        self._unsuited: dict[str, Quarantine] = {}
        """By lineage that this node could not work with: for how long it prefers others."""
        self._qualified: dict[str, tuple[str, int]] = {}
        """By node: the lineage that it can work with, and its boot when it passed the checks."""

    def heard(self, status: Status) -> Peer:
        """Record a node's status. A node that was given up is present again, unless this is a copy of it."""
        if self._is_given_up(status.us):
            del self._given_up[status.us.node]
        peer = self.peers.setdefault(status.us.node, Peer(status))
        peer.status = status
        return peer

    def give_up(self, member: Member) -> None:
        """Record that the user declared a member gone for good."""
        self._given_up[member.node] = member

    def quarantine(self, node: str, stalled_s: float, now: float) -> Quarantine:
        """Quarantine a member that kept a view from working; return for how long.

        If its last quarantine was ended early, the rest of that one applies: it may have recovered by then."""
        early = self._released.get(node)
        if early is None or now >= early.until_s:
            early = Quarantine.after(self._quarantined.get(node), stalled_s, now)
        self._quarantined[node] = early
        return early

    def let_in(self, node: str, now: float) -> None:
        """Record that a node has become a member of a view that worked before."""
        self._let_in_s[node] = now

    def left_soon(self, node: str, noticed_s: float, now: float) -> None:
        """Record the loss of a member whose silence is noticed after `noticed_s`. One that was admitted just before
        has to wait, or it could rejoin and fail repeatedly, at the cost of a view each time."""
        if node in self._let_in_s and now < self._let_in_s.pop(node) + SETTLES_S + noticed_s:
            self.quarantine(node, 0.0, now)

    def release(self, now: float) -> None:
        """End all quarantines, once per node: a node that blocks another view serves its quarantine after all."""
        for node, quarantine in self._quarantined.items():
            if node not in self._released and now < quarantine.until_s:
                self._released[node] = quarantine
                self._quarantined[node] = msgspec.structs.replace(quarantine, until_s=now)

    def pardon(self, node: str) -> None:
        """Lift a quarantine because a view did not work without the node either. This applies once until there is
        progress: with several faulty nodes, each would be the pardon of another."""
        if node not in self._pardoned:
            self._pardoned[node] = None
            self._quarantined.pop(node, None)

    def pardon_all(self) -> None:
        """Lift all quarantines because this node does not get on alone either: no other one can make that worse."""
        self._quarantined.clear()

    def progressed(self) -> None:
        self._pardoned.clear()

    def qualify(self, node: str, lineage: str, boot: int) -> None:
        self._qualified[node] = lineage, boot

    def disqualify(self, lineage: str, now: float) -> None:
        """Record that this node cannot work with the members of that lineage, and asks others for a while: longer
        each time in a row."""
        self._unsuited = {name: each for name, each in self._unsuited.items() if each.counts(now)}
        self._unsuited[lineage] = Quarantine.after(self._unsuited.get(lineage), 0.0, now)

    def suits(self, lineage: str) -> None:
        """Record that this node can work with the members of that lineage after all."""
        self._unsuited.pop(lineage, None)

    def unsuited(self, now: float) -> tuple[str, ...]:
        """Return the lineages with whose members this node could not work when it last checked them."""
        return tuple(lineage for lineage, each in self._unsuited.items() if now < each.until_s)

    def decline(self, node: str, lineage: str, epoch: int) -> None:
        """Record that a node takes no part in a view that lists it as a member."""
        self._declined[node] = lineage, epoch

    def reaches(self) -> tuple[str, ...]:
        return tuple(sorted([node for node, peer in self.peers.items() if not peer.suspected]))

    def contacts(self) -> tuple[str, ...]:
        return tuple([self.peers[node].status.control for node in self.reaches()])

    def well(self, node: str, view: View) -> bool:
        """Return whether a member of the view can be expected to answer for it."""
        peer = self.peers.get(node)
        if node == self._us.node:
            return True
        return peer is not None and not peer.suspected and node not in self.gone(view)

    def answers(self, node: str, now: float) -> bool:
        """Return whether a node's status leaves hope for an answer: it reaches this node, and has not followed
        another view for long."""
        peer = self.peers.get(node)
        if peer is None or self._us.node not in peer.status.reaches:
            return False
        return peer.astray_since_s is None or now < peer.astray_since_s + ASTRAY_S

    def gone(self, view: View) -> tuple[str, ...]:
        """Return the members that cannot vote on the view: they lost its record, never took part in it, or are gone
        for good."""
        strangers = self.strangers(view)
        return tuple(m.node for m in view.members if m.node in strangers or self._forgot(m, view))

    def turn(self, view: View) -> int:
        """Return how many healthy members are senior to this node."""
        nodes = [node for node in view.nodes if self.well(node, view)]
        return nodes.index(self._us.node) if self._us.node in nodes else len(nodes)

    def joiners(self, view: View, now: float) -> list[Member]:
        """Return the nodes outside the view that want to join it and that all its members reach.

        A view that works takes only nodes that qualified, and none in quarantine."""
        return [
            peer.status.us
            for node, peer in sorted(self.peers.items())
            if not peer.suspected
            and peer.status.joins == view.lineage
            and not peer.status.leaving
            and view.member(node) is None
            and self._is_reached(node, view)
            and (not view.formed or self._may_work(peer.status.us, view, now))
        ]

    def preparing(self, view: View, by_s: float) -> list[str]:
        """Return the nodes that want to join the view and do not know yet whether they qualify, or have just been
        excluded and are about to ask; without those that will still be in quarantine at `by_s`."""
        return [
            node
            for node, peer in self.peers.items()
            if not peer.suspected and not peer.status.leaving and view.member(node) is None
            if not self._is_quarantined(node, by_s)
            if peer.status.joins == view.lineage
            or (peer.status.lineage == view.lineage and peer.status.epoch < view.epoch)
        ]

    def _is_quarantined(self, node: str, now: float) -> bool:
        return node in self._quarantined and now < self._quarantined[node].until_s

    def _may_work(self, member: Member, view: View, now: float) -> bool:
        if self._is_quarantined(member.node, now):
            return False
        return self._qualified.get(member.node) == (view.lineage, member.boot)

    def working(self, lineage: str) -> tuple[str, ...]:
        """Return the visible nodes in a view of that lineage which may work."""
        return tuple(
            node
            for node, peer in sorted(self.peers.items())
            if not peer.suspected and peer.status.lineage == lineage and peer.status.formed and not peer.status.anew
        )

    def somebody_works(self) -> bool:
        """Return whether a visible node is in a view which may work, and stays there."""
        there = [peer.status for peer in self.peers.values() if not peer.suspected]
        return any(status.formed and not status.anew and not status.leaving for status in there)

    def any_formed(self) -> bool:
        """Return whether a visible node is in a view that may work, and change."""
        statuses = [peer.status for peer in self.peers.values() if not peer.suspected]
        return any(status.formed and not status.waits for status in statuses)

    def whole(self, lineage: str) -> bool:
        """Return whether all members of a view of that lineage are visible, and reach this node."""
        members = [self.peers[node].status for node in self.working(lineage)]
        return any(len(members) >= status.size for status in members) and all(
            self._us.node in status.reaches for status in members
        )

    def _is_reached(self, node: str, view: View) -> bool:
        """Return whether a node and all members of a view have live connections to each other, according to their
        status."""
        others = [other for other in view.nodes if other in self.peers]
        theirs = self.peers[node].status.reaches
        return all(other in theirs and node in self.peers[other].status.reaches for other in others)

    def leavers(self, view: View) -> list[str]:
        return [node for node in view.nodes if node in self.peers and self.peers[node].status.leaving]

    def complaint(self, view: View) -> str:
        for node in view.nodes:
            peer = self.peers.get(node)
            if peer is not None and (peer.status.lineage, peer.status.broken) == (view.lineage, view.epoch):
                return peer.status.reason
        return ""

    def better(self, ours: View, without: Collection[str] = (), *, waits: bool) -> Status | None:
        """Return the visible cluster with precedence over this one, as a status of one of its nodes; `waits` says
        whether this cluster cannot change. Instead of a cluster in `without`, by lineage, only one that works counts.

        Nodes that have yet to find their cluster again do not count for a cluster that works. Nor do nodes that
        are still in the view that this one branched from: the size that they report includes this side."""
        others = [
            peer.status
            for peer in self.peers.values()
            if not peer.suspected and not peer.status.leaving and peer.status.lineage != ours.lineage
            if not (ours.formed and peer.status.anew) and not _is_behind(peer.status, ours.lineage)
        ]
        if any(status.lineage in without for status in others):
            others = [status for status in others if status.formed and status.lineage not in without]
        best = min(others, key=lambda status: status.standing, default=None)
        us = standing(ours.lineage, len(ours.members), formed=ours.formed, waits=waits)
        return best if best is not None and best.standing < us else None

    def branch(self, ours: View) -> Status | None:
        """Return the status of a visible node of this view that went on without this node."""
        branches = [
            peer.status
            for peer in self.peers.values()
            if not peer.suspected and peer.status.formed and not peer.status.anew
            if branched(peer.status.lineage, ours.lineage) == ours.epoch
        ]
        return min(branches, key=lambda status: status.standing, default=None)

    def strangers(self, view: View) -> tuple[str, ...]:
        """Return the members that never took part in the view and never will: they have not voted on it."""
        return tuple(m.node for m in view.members if self._declined.get(m.node) == (view.lineage, view.epoch))

    def _forgot(self, member: Member, view: View) -> bool:
        peer = self.peers.get(member.node)
        if peer is None or member.elsewhere(peer.status.us):
            return self._will_not_come(member)  # whatever a copy knows or not, the member's word may stand
        if peer.suspected and self._will_not_come(member):
            return True
        left = dict(peer.status.past).get(view.lineage, -1)  # later than the view: it knows what followed
        return peer.status.us.boot != member.boot and view.lineage != peer.status.lineage and left <= view.epoch

    def _will_not_come(self, member: Member) -> bool:
        return member.node != self._us.node and (self._is_given_up(member) or self._replaced(member))

    def _is_given_up(self, member: Member) -> bool:
        given_up = self._given_up.get(member.node)
        return given_up is not None and not given_up.elsewhere(member)

    def _replaced(self, member: Member) -> bool:
        """Return whether another node has its name and address: the machine lost its disk, and its key with it."""
        return any(other.status.us.in_place_of(member) for other in self.peers.values() if not other.suspected)


def _is_behind(status: Status, lineage: str) -> bool:
    """Return whether a node is in a view that the lineage branched from, or in an earlier one."""
    epoch = branched(lineage, status.lineage)
    return epoch is not None and status.epoch <= epoch
