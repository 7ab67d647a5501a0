"""Agreement on the next view: one instance of Paxos per view (Lamport, "Paxos Made Simple", 2001).

The members of the present view are the acceptors, the next view is the value, and a quorum decides. So each
view has one successor, whatever proposes it and whatever fails meanwhile. A side without a quorum has none.

    proposer                            acceptor
    prepare(ballot, present view)  →    promises the ballot, and returns the view it accepted before, if any
    accept(ballot, next view)      →    accepts, unless it has promised a later ballot
    decided(next view)             →    adopts it

A proposer must propose a view that an acceptor has accepted already; otherwise it is free to choose. An
acceptor saves its `record` before it answers, so its answer survives a crash. An acceptor that cannot save (a
full disk) abstains, and the others decide without its vote. A decided view is adopted even if it cannot be
saved; after a crash other members send it again. The guarantee of one successor requires that no disk is
restored from an older backup.

Members may crash, be slow and lose messages. They are trusted not to lie about views: a trusted member that
sends a view that was never decided can split the cluster or block the next view. Expel such a machine (`hcsim
cluster expel`). Messages of a computation are checked separately: see `diagnosis`.

This module does no I/O: messages in, messages out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from hcsim.cluster.view import Member, Quorum, View, enough
from hcsim.errors import HcsimError

Ballot: TypeAlias = tuple[int, str]
"""A number and the node that uses it; unique."""

NEVER: Ballot = (0, "")
_PAST = 8


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Phase 1 request: promise this ballot."""

    ballot: Ballot
    after: View
    """The view whose successor is sought; a member that is behind learns of it here."""


class Promise(msgspec.Struct, frozen=True, tag="promise"):
    """A promise to reject earlier ballots."""

    ballot: Ballot
    us: Member
    reaches: tuple[str, ...] = ()
    """The nodes to which the sender has a live connection."""
    accepted: tuple[Ballot, View] | None = None


class Abstained(msgspec.Struct, frozen=True, tag="abstained"):
    """The sender is a member of the view but cannot save its vote; decide without it."""

    ballot: Ballot
    us: Member
    reaches: tuple[str, ...] = ()


class Accept(msgspec.Struct, frozen=True, tag="accept"):
    """Phase 2 request: accept this view as the successor."""

    ballot: Ballot
    lineage: str
    after: int
    view: View


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The sender accepted the view."""

    ballot: Ballot


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The sender has promised a later ballot."""

    ballot: Ballot
    promised: Ballot


class Declined(msgspec.Struct, frozen=True, tag="declined"):
    """The sender never was a member of that view and will not be; decide without it."""

    lineage: str
    epoch: int


class Absence(msgspec.Struct, frozen=True):
    """Members that cannot vote on the successor of the present view."""

    strangers: tuple[str, ...] = ()
    """Members that never took part in the view; the quorum is computed without them."""
    gone: tuple[str, ...] = ()
    """All absent members, strangers included. Those that took part and lost their record may have voted before,
    so they still count, as silent members. Only if no other member is missing can it be assumed that nothing
    was decided without this node."""


class AcceptorState(msgspec.Struct, frozen=True):
    """The persistent state of an acceptor."""

    view: View
    promised: Ballot = NEVER
    accepted: tuple[Ballot, View] | None = None
    past: tuple[View, ...] = ()
    """The last known view of each lineage that this node has left, newest first: other nodes may still ask for
    it."""


class Acceptor:
    """An acceptor of the successor of the present view."""

    def __init__(self, record: AcceptorState, save: Callable[[AcceptorState], None]) -> None:
        self.record = record
        self.votes = {"promised": 0, "accepted": 0, "refused": 0}
        """Counts of answers to proposers, including this node's own proposals."""
        self._save = save
        self._unsaved = False
        """Whether the record on disk is older than the one in memory."""

    def adopt(self, view: View) -> None:
        record = self.record
        left = (record.view,) if record.view.lineage and record.view.lineage != view.lineage else ()
        past = (*left, *(each for each in record.past if each.lineage != view.lineage))
        adopted = AcceptorState(view, record.promised, past=past[:_PAST])
        self._unsaved = not self._remember(adopted)
        self.record = adopted

    def prepare(self, asked: Prepare, us: Member, reaches: tuple[str, ...]) -> Promise | Refused | Abstained:
        """Answer a proposer whose proposal is for the present view."""
        record = self.record
        if asked.ballot < record.promised:
            self.votes["refused"] += 1
            return Refused(asked.ballot, record.promised)
        if not self._remember(msgspec.structs.replace(record, promised=asked.ballot)):
            return Abstained(asked.ballot, us, reaches)
        self.votes["promised"] += 1
        return Promise(asked.ballot, us, reaches, record.accepted)

    def accept(self, asked: Accept) -> Accepted | Refused | None:
        """Accept a view, unless a later ballot was promised. Return None if the vote cannot be saved."""
        record = self.record
        if asked.ballot < record.promised:
            self.votes["refused"] += 1
            return Refused(asked.ballot, record.promised)
        accepted = (asked.ballot, asked.view)
        if not self._remember(msgspec.structs.replace(record, promised=asked.ballot, accepted=accepted)):
            return None
        self.votes["accepted"] += 1
        return Accepted(asked.ballot)

    def write(self) -> None:
        """Save the record even if it is already on disk; raise an error if that fails."""
        self._save(self.record)
        self._unsaved = False

    def _remember(self, record: AcceptorState) -> bool:
        """Save the record and make it current. Return False if it cannot be saved."""
        if record != self.record or self._unsaved:
            try:
                self._save(record)
            except HcsimError:
                return False
            self.record = record
            self._unsaved = False
        return True


class Proposal:
    """One ballot, as seen by its proposer."""

    def __init__(self, ballot: Ballot, present: View, rule: Quorum, reason: str) -> None:
        self.ballot = ballot
        self.present = present
        self.reason = reason
        self.chosen: View | None = None
        """The view to propose, once it is determined."""
        self.promises: dict[str, Promise] = {}
        self.abstained: dict[str, Abstained] = {}
        """Members that answered without a vote."""
        self._accepted: list[str] = []
        self._rule = rule

    def heard(self, absence: Absence) -> bool:
        return self._enough([*self.promises], absence, self._rule)

    def bound(self, absence: Absence) -> View | None:
        """Return the view that must be proposed because it may have been decided already; None if any may be.

        Under the rule "any", a minority is not bound by what the others may decide, because it starts another
        lineage; nor are the others bound by the minority."""
        if self._rule == "any" and not self._enough([*self.promises], absence, "tiebreak"):
            return None
        before = [promise.accepted for promise in self.promises.values() if promise.accepted is not None]
        ours = [(ballot, view) for ballot, view in before if view.lineage == self.present.lineage]
        return max(ours, key=lambda each: each[0])[1] if ours else None

    def accepted(self, node: str, absence: Absence) -> bool:
        """Record that a member accepted; return whether the view is decided."""
        if node not in self._accepted:
            self._accepted.append(node)
        assert self.chosen is not None
        goes_on = self._rule == "any" and self.chosen.lineage == self.present.lineage
        return self._enough(self._accepted, absence, "tiebreak" if goes_on else self._rule)

    def _enough(self, nodes: list[str], absence: Absence, rule: Quorum) -> bool:
        left = tuple(member for member in self.present.members if member.node not in absence.strangers)
        missing = [member for member in left if member.node not in nodes and member.node not in absence.gone]
        if not missing:
            return bool(nodes)
        return enough(msgspec.structs.replace(self.present, members=left), nodes, rule)
