"""How the members of a view agree on the next one: Paxos, once for each view (Lamport, "Paxos Made Simple", 2001).

The members of the present view are the acceptors, the next view is the value, and a quorum of them decides. So each
view has one successor, whoever proposes it and whoever fails meanwhile; a side without a quorum has none.

    proposer                            acceptor
    prepare(ballot, present view)  →    promises the ballot, and says what it has accepted before
    accept(ballot, next view)      →    accepts, unless it has promised a later ballot
    decided(next view)             →    adopts it

What a proposer must propose where somebody has accepted a view already is that view; otherwise it is free.
An acceptor's word outlives a crash: `record` is saved before it is given. One that cannot save it (a full disk) gives
none: it abstains, and the others decide without its vote. A view that was decided needs no word, so it is adopted also
where it cannot be saved; after a crash its members tell it again. So the promise of one successor stands on disks that
are not set back to an earlier day; a backup that is put in the place of a newer record may break it.

Members may crash, be slow and lose messages. They are not expected to lie about views: one that has the cluster's trust
and tells of a view that nobody decided can part the others or keep them from a next view. Expel such a machine
(`hcsim cluster expel`). What members send of a computation is checked all the same: see `diagnosis`.

Pure: messages in, messages out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from hcsim.cluster.view import Member, Quorum, View, enough
from hcsim.errors import HcsimError

Ballot: TypeAlias = tuple[int, str]
"""A number, and the node that uses it: no two are the same."""

NEVER: Ballot = (0, "")
_PAST = 8


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Will you hear my proposal?"""

    ballot: Ballot
    after: View
    """The view whose successor is sought; whoever is behind learns of it here."""


class Promise(msgspec.Struct, frozen=True, tag="promise"):
    """Yes, and no earlier one."""

    ballot: Ballot
    us: Member
    reaches: tuple[str, ...] = ()
    """The nodes that we have a living connection to."""
    accepted: tuple[Ballot, View] | None = None


class Abstained(msgspec.Struct, frozen=True, tag="abstained"):
    """We take part in the view, and our word would not outlive a crash: decide without it."""

    ballot: Ballot
    us: Member
    reaches: tuple[str, ...] = ()


class Accept(msgspec.Struct, frozen=True, tag="accept"):
    """Accept this view as the successor."""

    ballot: Ballot
    lineage: str
    after: int
    view: View


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """Done."""

    ballot: Ballot


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """No: we have promised a later ballot."""

    ballot: Ballot
    promised: Ballot


class Declined(msgspec.Struct, frozen=True, tag="declined"):
    """We are not of that view, have never been, and shall not be: decide without us."""

    lineage: str
    epoch: int


class Absence(msgspec.Struct, frozen=True):
    """Members that can say nothing for the present view."""

    strangers: tuple[str, ...] = ()
    """They never took part in it: it is as if they were no members."""
    gone: tuple[str, ...] = ()
    """All of them. Those that took part and forgot may have given their word before: they still count, as silent ones.
    Only when nobody else is missing is it certain enough that nothing was decided without us."""


class Record(msgspec.Struct, frozen=True):
    """What an acceptor must not forget."""

    view: View
    promised: Ballot = NEVER
    accepted: tuple[Ballot, View] | None = None
    past: tuple[View, ...] = ()
    """The last view that we know of each lineage that we have left, the newest first: others may still ask for it."""


class Acceptor:
    """A member's word on the successor of its view."""

    def __init__(self, record: Record, save: Callable[[Record], None]) -> None:
        self.record = record
        self.votes = {"promised": 0, "accepted": 0, "refused": 0}
        """How often we answered a proposer, our own proposals included."""
        self._save = save
        self._unsaved = False
        """Whether the disk has an older record than we."""

    def adopt(self, view: View) -> None:
        """Go on to a view that was decided."""
        record = self.record
        left = (record.view,) if record.view.lineage and record.view.lineage != view.lineage else ()
        past = (*left, *(each for each in record.past if each.lineage != view.lineage))
        adopted = Record(view, record.promised, past=past[:_PAST])
        self._unsaved = not self._remember(adopted)
        self.record = adopted

    def prepare(self, asked: Prepare, us: Member, reaches: tuple[str, ...]) -> Promise | Refused | Abstained:
        """Answer a proposer; it speaks of our present view."""
        record = self.record
        if asked.ballot < record.promised:
            self.votes["refused"] += 1
            return Refused(asked.ballot, record.promised)
        if not self._remember(msgspec.structs.replace(record, promised=asked.ballot)):
            return Abstained(asked.ballot, us, reaches)
        self.votes["promised"] += 1
        return Promise(asked.ballot, us, reaches, record.accepted)

    def accept(self, asked: Accept) -> Accepted | Refused | None:
        """Accept a view, unless we have promised not to. None: we cannot save that we did, and say nothing."""
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
        """Save what we remember, whether the disk has it already or not; an error where it cannot be."""
        self._save(self.record)
        self._unsaved = False

    def _remember(self, record: Record) -> bool:
        """Whether the record is on the disk, and counts from now on."""
        if record != self.record or self._unsaved:
            try:
                self._save(record)
            except HcsimError:
                return False
            self.record = record
            self._unsaved = False
        return True


class Proposal:
    """One ballot, from the proposer's side."""

    def __init__(self, ballot: Ballot, present: View, rule: Quorum, reason: str) -> None:
        self.ballot = ballot
        self.present = present
        self.reason = reason
        self.chosen: View | None = None
        """What we propose, once we know what we may."""
        self.promises: dict[str, Promise] = {}
        self.abstained: dict[str, Abstained] = {}
        """Members that are there and have no vote."""
        self._accepted: list[str] = []
        self._rule = rule

    def heard(self, absence: Absence) -> bool:
        """Whether enough members will hear us."""
        return self._enough([*self.promises], absence, self._rule)

    def bound(self, absence: Absence) -> View | None:
        """The view that must be proposed, since it may have been decided already; None: we are free.

        Where any side may go on, a few are not bound by what others may decide: theirs will be another line. Nor are
        the others by theirs."""
        if self._rule == "any" and not self._enough([*self.promises], absence, "tiebreak"):
            return None
        before = [promise.accepted for promise in self.promises.values() if promise.accepted is not None]
        ours = [(ballot, view) for ballot, view in before if view.lineage == self.present.lineage]
        return max(ours, key=lambda each: each[0])[1] if ours else None

    def accepted(self, node: str, absence: Absence) -> bool:
        """A member accepted; whether the view is decided."""
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
