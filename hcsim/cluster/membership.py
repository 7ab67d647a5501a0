"""Cluster membership: one node's part in forming views, as a state machine.

Every node begins alone, in a view of its own, which it leads. Where nodes meet, the cluster with lower
precedence joins the other (see `View.standing`): a lone node asks to be admitted; a larger cluster that could
not begin dissolves first, and its members ask. From then on every change is a change of the view. `ViewChangePolicy`
decides why a view should change. The most senior healthy member proposes the change (`Proposer`); if it does
not, the next one does after a while. `agreement` turns a proposal into a view. This module handles what a node
receives: which requests it answers, and which view it adopts.

It does no I/O: events and `now` in, `effects` out, for the driver to execute. `wake_at_s` says when to call
`tick` next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import msgspec

from hcsim.cluster.agreement import (
    Abstained,
    Accept,
    Accepted,
    Acceptor,
    AcceptorState,
    Declined,
    Prepare,
    Promise,
    Refused,
)
from hcsim.cluster.diagnosis import Accusation, Diagnosis, Findings, ViewFailure
from hcsim.cluster.messages import ControlMessage, Decided, Qualified, Status
from hcsim.cluster.proposer import Proposer, ViewChangePolicy
from hcsim.cluster.roster import Peer, Roster
from hcsim.cluster.view import DEPARTED_S, PATIENCE_S, Member, MembershipRules, View, branched


class SendMessage(msgspec.Struct, frozen=True):
    """Effect: send a message to a node, if it is connected."""

    to: str
    message: ControlMessage


class AdoptView(msgspec.Struct, frozen=True):
    """Effect: a view takes effect at this node."""

    view: View


class EndEpoch(msgspec.Struct, frozen=True):
    """Effect: work in that epoch has failed."""

    epoch: int
    reason: str


class ReportWaiting(msgspec.Struct, frozen=True):
    """Effect: this node cannot continue, with the reason."""

    reason: str


class CheckMembers(msgspec.Struct, frozen=True):
    """Effect: check this node's device and the other members of that epoch's view, and call `Membership.checked`
    with the results."""

    epoch: int
    slow: bool = False
    """Whether to look also for stragglers."""


class CheckNewcomer(msgspec.Struct, frozen=True):
    """Effect: check this node's device and the members of that lineage, and measure the routes to them, before
    joining; then call `Membership.qualified`."""

    lineage: str


MembershipEffect: TypeAlias = SendMessage | AdoptView | EndEpoch | ReportWaiting | CheckMembers | CheckNewcomer


BEGUN_ANEW = (
    "{where} was in the cluster with our key: under another name and address we count as a new machine. If both are in "
    "use, give each its own node key"
)


class Membership:
    """The membership state machine of one node."""

    def __init__(
        self,
        us: Member,
        control: str,
        rules: MembershipRules,
        remembered: AcceptorState | None,
        save: Callable[[AcceptorState], None],
    ) -> None:
        self.us = us
        self._control = control
        self.effects: list[MembershipEffect] = []
        self.wake_at_s: float | None = None
        self.roster = Roster(us)
        self._rules = rules
        self._diagnosis = Diagnosis(us.node)
        self._told: Findings | None = None
        """The findings that were sent to the other members."""
        self._tried_without: list[str] = []
        """Members that the present view excluded: if it does not work either, they were not the cause."""
        self._left: dict[str, int] = {}
        """By node that has left in an orderly way, the epoch of the last view with it, which may still be working."""
        self._departed: dict[int, tuple[float, str]] = {}
        """By epoch: when and why a view ends from which a member has left that is gone now."""
        self._qualifying = ""
        """The lineage that is being checked, or has passed the checks."""
        self._is_qualified = False
        self._stance = ViewChangePolicy(us, rules, self.roster, self._diagnosis)
        self._proposer = Proposer(us, rules, self.roster, self._stance, self._diagnosis, self._send)
        self._acceptor = Acceptor(remembered or AcceptorState(View("", 0, ())), save)
        self._proposer.saw(self._acceptor.record.promised)
        self.votes = self._acceptor.votes
        self.write = self._acceptor.write
        self.rounds = self._proposer.rounds
        self._needed_since_s: float | None = None
        self._joins = ""
        self._lives = 0
        self._solitary: View | None = None
        """The last view that this node began alone."""
        self._left_by = ""
        """The lineage that went on without this node then, if any."""
        self.outcome = ""
        self.outcomes: dict[str, str] = {}
        """The outcomes of other nodes' finished work, each with the node that reported it last."""
        self._entered: dict[tuple[str, int], None] = {}
        """The views that this node has been in since it started."""
        self._fellows: dict[str, dict[str, None]] = {}
        """By lineage, the nodes known to have been in its views."""
        for known in (self.view, *self._acceptor.record.past):
            self._know_fellows(known)
        self._declined: dict[str, int] = {}
        """By lineage, the view that this node declined for good."""
        if not self._belongs_to(self.view) or (len(self.view.members) == 1 and not self.view.formed):
            self._alone()

    @property
    def view(self) -> View:
        return self._acceptor.record.view

    @property
    def status(self) -> Status:
        view, stance = self.view, self._stance
        return Status(
            self.us, self._control, view.lineage, view.epoch, len(view.members), view.formed, self._joins,
            stance.leaving, stance.broken, stance.reason, self.roster.reaches(), self.roster.contacts(),
            tuple((each.lineage, each.epoch) for each in self._acceptor.record.past), self.outcome, stance.waits,
        )  # fmt: skip

    @property
    def left_behind(self) -> bool:
        """Return whether this node was excluded and sees the members that continue: results of work alone would
        diverge from theirs."""
        return self.view == self._solitary and bool(self.roster.working(self._left_by))

    @property
    def outside(self) -> bool:
        """Return whether this node takes part in no work, and sees no node that does."""
        at_work = self.view.formed and self.view.rank(self.us) is not None and self.view != self._solitary
        return not at_work and not self.roster.somebody_works()

    @property
    def deserted(self) -> bool:
        peers = self.roster.peers
        return all(m.node not in peers or peers[m.node].suspected for m in self.view.members if m.node != self.us.node)

    # Events.

    def started(self, now: float) -> None:
        """Start the state machine. If it resumes the view of an earlier process, that view has to change.

        This does not wait for a peer's message, which may never come. Other members get time to be found first."""
        if self.view.rank(self.us) is not None:
            return
        if len(self.view.members) == 1:
            self._review(now)
        else:
            self._wake(now + self._rules.answer_s)

    def heard(self, status: Status, now: float) -> None:
        if status.outcome:
            self.outcomes[status.outcome] = status.us.name
        self._bring_up_to_date(self.roster.heard(status), now)
        if complaint := self.roster.complaint(self.view):
            # Work here is in vain, too, and before the next view begins all have to say whom they waited for.
            self.effects.append(EndEpoch(self.view.epoch, complaint))
        self._review(now)

    def lost(self, node: str, why: str, now: float) -> None:
        peer = self.roster.peers.get(node)
        if peer is not None and not peer.suspected:
            peer.suspected = why
            member = self.view.member(node)
            if member is not None and self.view.rank(self.us) is not None:
                self._fail(f"{member.name} was lost: {why}")
            elif node in self._left:
                self._departed[self._left.pop(node)] = now + DEPARTED_S, f"{peer.status.us.name} has left: {why}"
            self._review(now)

    def found(self, node: str, now: float) -> None:
        peer = self.roster.peers.get(node)
        if peer is not None and peer.suspected:
            peer.suspected = ""
            self._review(now)

    def connected(self, node: str, now: float) -> None:
        self._proposer.remind(node, now)
        if self._told is not None and self.view.member(node) is not None:
            self._send(node, self._told, now)
        if self._is_qualified:
            self._send(node, Qualified(self._qualifying, self.us.boot), now)

    def began(self, epoch: int, now: float) -> None:
        self._diagnosis.began(epoch, now)

    def surveyed(self, epoch: int) -> None:
        self._diagnosis.surveyed(epoch)

    def broken(self, epoch: int, failure: ViewFailure | str, now: float) -> None:
        view = self.view
        if epoch == view.epoch:
            failure = ViewFailure(failure) if isinstance(failure, str) else failure
            self._fail(failure.reason)
            if failure.progressed:
                self.roster.progressed()
            elif len(view.members) == 1 and not self._tried_without:  # for the second time in a row
                self.roster.pardon_all()
            else:
                for node in self._tried_without:
                    self.roster.pardon(node)
            self._tried_without = []
            if self._diagnosis.failed(view.lineage, view.epoch, failure, now):
                self.effects.append(CheckMembers(view.epoch, self._diagnosis.is_slow))
            self._review(now)

    def checked(self, epoch: int, accusations: Iterable[Accusation], now: float) -> None:
        if self._diagnosis.checked(epoch, accusations):
            self._review(now)

    def qualified(self, lineage: str, now: float) -> None:
        if lineage == self._qualifying and not self._is_qualified:
            self._is_qualified = True
            self._diagnosis.qualified()
            self.roster.suits(lineage)
            for node in self.roster.working(lineage):
                self._send(node, Qualified(lineage, self.us.boot), now)
            self._review(now)

    def to_qualify_with(self, lineage: str) -> tuple[str, ...]:
        """Return the visible members to check before joining that lineage; empty if that is no longer needed."""
        return self.roster.working(lineage) if lineage == self._qualifying else ()

    @property
    def asks(self) -> bool:
        """Return whether this node is alone and asks a cluster to admit it, having passed the checks or being about
        to."""
        return self._qualifying not in ("", self.view.lineage)

    @property
    def will_be_let_in(self) -> bool:
        """Return whether this node asks a cluster that will admit it eventually: all checks with its members passed."""
        return self.asks and self._is_qualified and self.roster.whole(self._qualifying)

    def disqualified(self, lineage: str, now: float) -> None:
        """Record that this node cannot work with the members of that lineage yet: check again, or ask others."""
        if lineage == self._qualifying:
            self._qualifying = ""
            self.roster.disqualify(lineage, now)
            self._review(now)

    def forget(self, node: str, now: float) -> None:
        """Record a user's statement that a node is gone for good."""
        if (member := self.view.member(node)) is not None:
            self.roster.give_up(member)
            self._review(now)

    def leave(self, now: float) -> None:
        self._stance.leaving = True
        self._review(now)

    def tick(self, now: float) -> None:
        self._review(now)

    def message(self, source: str, message: ControlMessage, now: float) -> None:
        if isinstance(message, Prepare):
            self._asked_to_promise(source, message, now)
        elif isinstance(message, Accept):
            concerns_us = self._concerns_us(source, message.lineage, message.after, now)
            if concerns_us and (answer := self._acceptor.accept(message)) is not None:
                self._send(source, answer, now)
        elif isinstance(message, Decided):
            if self._is_believed(source, message.view):
                self._learn(message.view, now)
        elif isinstance(message, Promise | Abstained | Accepted | Refused):
            self._answered(source, message, now)
        elif isinstance(message, Declined):
            self.roster.decline(source, message.lineage, message.epoch)
        elif isinstance(message, Qualified):
            self.roster.qualify(source, message.lineage, message.boot)
        elif isinstance(message, Findings) and self.view.member(source) is not None:
            checks = self._diagnosis.heard(source, message, self.view.lineage, self.view.epoch, now)
            self.effects += [CheckMembers(self.view.epoch, self._diagnosis.is_slow)] if checks else []
        self._review(now)

    # What we answer.

    def _asked_to_promise(self, source: str, asked: Prepare, now: float) -> None:
        if not self._is_believed(source, asked.after):
            self._tell_past(source, asked.after.lineage, asked.after.epoch, now)
            if asked.after.lineage not in self._fellows and asked.after.member(source) is not None:
                self._decline(source, asked.after, now)
            return
        self._proposer.saw(asked.ballot)
        self._learn(asked.after, now)
        proposer = self.roster.peers.get(source)
        if proposer is not None and self.us.node not in proposer.status.reaches:
            return  # it does not hear us, and would only keep others from being heard
        if self._concerns_us(source, asked.after.lineage, asked.after.epoch, now):
            self._send(source, self._acceptor.prepare(asked, self.us, self.roster.reaches()), now)
        else:
            self._decline(source, asked.after, now)

    def _decline(self, source: str, view: View, now: float) -> None:
        """Decline a view, if this node never entered it, so that no node waits for its vote."""
        if self._stranger_to(view):
            self._declined[view.lineage] = max(self._declined.get(view.lineage, -1), view.epoch)
            self._send(source, Declined(view.lineage, view.epoch), now)

    def _stranger_to(self, view: View) -> bool:
        """Return whether this node is a member of a view of another lineage that it never entered, because it missed
        the decision."""
        return (
            view.lineage != self.view.lineage
            and view.rank(self.us) is not None
            and (view.lineage, view.epoch) not in self._entered
        )

    def _belongs_to(self, view: View) -> bool:
        """Return whether this node is a member, with any boot; False if the member is a machine with a copy of the
        key."""
        member = view.member(self.us.node)
        return member is not None and not member.elsewhere(self.us)

    def _concerns_us(self, source: str, lineage: str, epoch: int, now: float) -> bool:
        """Return whether a message is about the successor of this node's view; a sender that is behind is sent the
        later view."""
        view = self.view
        self._tell_past(source, lineage, epoch, now)
        if lineage != view.lineage or not self._belongs_to(view):
            return False
        if epoch < view.epoch:
            self._send(source, Decided(view), now)
        return epoch == view.epoch and source in self._fellows.get(lineage, ())

    def _tell_past(self, source: str, lineage: str, epoch: int, now: float) -> None:
        """Send the last known view of that lineage, if it is later: this node may be in another lineage now."""
        for past in self._acceptor.record.past:
            if past.lineage == lineage and past.epoch > epoch:
                self._send(source, Decided(past), now)

    def _answered(self, source: str, answer: Promise | Abstained | Accepted | Refused, now: float) -> None:
        decided = self._proposer.answered(source, answer, now)
        if decided is not None:
            self._learn(decided, now)

    def _send(self, to: str, message: ControlMessage, now: float) -> None:
        if to != self.us.node:
            self.effects.append(SendMessage(to, message))
        elif isinstance(message, Prepare):
            self._answered(to, self._acceptor.prepare(message, self.us, self.roster.reaches()), now)
        elif isinstance(message, Accept) and (answer := self._acceptor.accept(message)) is not None:
            self._answered(to, answer, now)

    # What is to be done.

    def _review(self, now: float) -> None:
        self.wake_at_s = None
        self._end_deserted_views(now)
        self._follow_branch()
        if not self._belongs_to(self.view):
            self._alone()
        self._joins = self._stance.joins(self.view, now)
        self._tell_findings(now)
        self._seek_qualification()
        proposer = self._proposer
        if not proposer.busy:
            self._consider(now)
        for _ in range(2):  # our own answers may carry a proposal from one phase into the next
            if obstacle := proposer.pursue(now):
                self.effects.append(ReportWaiting(obstacle))
        if proposer.busy:
            self._wake(proposer.look_at_s)
        elif self._needed_since_s is not None and proposer.not_before_s > now:
            self._wake(proposer.not_before_s)

    def _consider(self, now: float) -> None:
        """Propose a change if there is a reason and it is this node's turn."""
        need = self._stance.need(self.view, self._joins, now)
        if need.look_at_s is not None:
            self._wake(need.look_at_s)
        if need.waiting:
            self.effects.append(ReportWaiting(need.waiting))
        if not need.reason:
            self._needed_since_s = None
            return
        if self._needed_since_s is None:
            self._needed_since_s = now
        turn_s = self._needed_since_s + need.delay_s + PATIENCE_S * self.roster.turn(self.view)
        due_s = max(turn_s, self._proposer.not_before_s)
        if now >= due_s:
            self._proposer.propose(self.view, need.reason, now)
        else:
            self._wake(due_s)

    def _end_deserted_views(self, now: float) -> None:
        """End views one of whose members is gone, even if it left in an orderly way: it may have left before the
        others connected to it, and they would wait for its call."""
        for epoch, (due_s, reason) in list(self._departed.items()):
            if now >= due_s:
                del self._departed[epoch]
                self.effects.append(EndEpoch(epoch, reason))
            else:
                self._wake(due_s)

    def _tell_findings(self, now: float) -> None:
        if self._diagnosis.ours is not None and self._diagnosis.ours != self._told:
            self._told = self._diagnosis.ours
            for node in self.view.nodes:
                if node != self.us.node:
                    self._send(node, self._told, now)

    def _seek_qualification(self) -> None:
        """Start the checks that are required before joining members that work; these do not wait meanwhile."""
        wanted = self._joins if self.roster.working(self._joins) else ""
        if wanted != self._qualifying:
            self._qualifying, self._is_qualified = wanted, False
            if wanted:
                self.effects.append(CheckNewcomer(wanted))

    def _fail(self, reason: str) -> None:
        if self._stance.fail(self.view, reason):
            self.effects.append(EndEpoch(self.view.epoch, reason))

    def _wake(self, at_s: float) -> None:
        self.wake_at_s = at_s if self.wake_at_s is None else min(self.wake_at_s, at_s)

    # Which view counts.

    def _bring_up_to_date(self, peer: Peer, now: float) -> None:
        """Send a present or former member what it has missed, and note since when it follows another view."""
        view, theirs = self.view, peer.status
        if view.member(theirs.us.node) is None and theirs.lineage == view.lineage and theirs.epoch <= view.epoch:
            self._send(theirs.us.node, Decided(view), now)
        if theirs.anew:
            for each in (view, *self._acceptor.record.past):
                if each.branched_from(theirs.lineage):
                    self._send(theirs.us.node, Decided(each), now)
        there = (theirs.lineage, theirs.epoch) == (view.lineage, view.epoch)
        ahead = theirs.lineage == view.lineage and theirs.epoch > view.epoch
        if view.rank(theirs.us) is None or there or ahead:
            peer.astray_since_s = None
            return
        self._send(theirs.us.node, Decided(view), now)
        if peer.astray_since_s is None:
            peer.astray_since_s = now

    def _is_believed(self, source: str, view: View) -> bool:
        """Return whether a node is trusted to report that a view was decided.

        Members do not lie, and a view is decided by members of the one before it; others may have learned of it
        from them. So this node trusts nodes known to have been in a view of its lineage together with it; members
        of a cluster that it asked to be admitted by; and, when all other members of its view are gone for good,
        any node."""
        ours = self.view
        alone = len(ours.members) == 1 and ours.member(self.us.node) is not None
        if view.lineage != ours.lineage and not view.branched_from(ours.lineage):
            return alone and view.member(source) is not None
        if alone or source in self._fellows.get(ours.lineage, ()):
            return True
        gone = self.roster.gone(ours)
        return all(node in gone for node in ours.nodes if node != self.us.node)

    def _learn(self, view: View, now: float) -> None:
        """Process a decided view: adopt it if it contains or concerns this node."""
        ours = self.view
        # One that was started anew has nothing of its own to go on with, however far the others have come since.
        # A branch that leaves us out is others' way; whoever has to follow it waits for them, and may wait in vain.
        concerns_us = view.rank(self.us) is not None or self._stance.leaving
        ready = (view.previous == ours.epoch and concerns_us) or ours.rank(self.us) is None
        successive = ready and view.branched_from(ours.lineage)
        if view.lineage == ours.lineage and view.prevails(ours) and not self._belongs_to(view):
            self._yield_to(view)
        if view.epoch <= max(ours.epoch, self._declined.get(view.lineage, -1)):
            return  # no node's epoch ever goes back; who counts on us in this one will have to ask again
        asked = view.rank(self.us) is not None and view.lineage == self._joins and len(ours.members) == 1
        if view.lineage != ours.lineage and not successive and not asked:
            return
        if view.abrupt or view.previous != ours.epoch or view.rank(self.us) is None:
            self.effects.append(EndEpoch(ours.epoch, view.reason))
        for peer in self.roster.peers.values():
            peer.astray_since_s = None
        self._quarantine_left_out(view, now)
        self._note_arrivals(view, now)
        self._enter(view)

    def _quarantine_left_out(self, view: View, now: float) -> None:
        """Quarantine healthy members that the next view excludes: they kept the last one from working. Members that
        continue in a branch are exempt."""
        ours, found = self.view, self._diagnosis.ours
        if found is None or not view.abrupt or view.previous != ours.epoch or view.lineage != ours.lineage:
            return
        for member in ours.members:
            node = member.node
            if view.member(node) is not None or node in view.left or not self.roster.well(node, ours):
                continue
            if node != self.us.node and branched(self.roster.peers[node].status.lineage, ours.lineage) is not None:
                continue
            if node == self.us.node:
                self.effects.append(ReportWaiting(f"left out by the others: {view.reason}"))
            else:
                self.roster.quarantine(node, self._diagnosis.stalled_s, now)
                self._tried_without.append(node)

    def _note_arrivals(self, view: View, now: float) -> None:
        """Make members that are lost soon after they were admitted wait before they are readmitted."""
        ours = self.view
        if not ours.formed or view.lineage != ours.lineage or ours.rank(self.us) is None:
            return
        for node in ours.nodes:
            if view.member(node) is None and node not in view.left and not self.roster.well(node, ours):
                self.roster.left_soon(node, self._rules.answer_s, now)
        for node in view.nodes:
            if ours.member(node) is None:
                self.roster.let_in(node, now)

    def _yield_to(self, view: View) -> None:
        """Another view follows the predecessor of this one, because a disk was restored from a backup: join it as a
        newcomer."""
        self._give_up(
            f"{', '.join(m.name for m in view.members)} went on without us from the view before this one, as happens "
            "when a node's state is set back to an earlier day: what was done here since is given up, and we join them"
        )

    def _follow_branch(self) -> None:
        """Join the members that went on without this node, if any side may go on and this one cannot, since it has
        no vote."""
        branch = self.roster.branch(self.view) if self._stance.waits else None
        if branch is not None:
            self._give_up(f"{branch.us.name} went on without us, and we cannot: we join it")

    def _give_up(self, reason: str) -> None:
        self.effects += [EndEpoch(self.view.epoch, reason), ReportWaiting(reason)]
        self._alone()

    def _alone(self) -> None:
        if (member := self.view.member(self.us.node)) is not None and member.elsewhere(self.us):
            self.effects.append(ReportWaiting(BEGUN_ANEW.format(where=f"{member.name} at {member.address}")))
        self._lives += 1
        self._left_by = self.view.lineage if self.view.formed and self.view.members else ""
        before = self.view.epoch
        lineage = f"{self.us.node}:{self.us.boot:x}.{self._lives}"
        formed = self._rules.needed == 1
        self._enter(View(lineage, before + 1, (self.us,), before, formed=formed, reason=f"{self.us.name} is alone"))
        self._solitary = self.view

    def _know_fellows(self, view: View) -> None:
        self._fellows.setdefault(view.lineage, {}).update(dict.fromkeys(view.nodes))

    def _enter(self, view: View) -> None:
        self._proposer.overtaken()
        self._diagnosis.entered()
        self._told = None
        self._needed_since_s = None
        self._left = {node: epoch for node, epoch in self._left.items() if view.member(node) is None}
        self._left |= dict.fromkeys(view.left, view.previous)
        self._stance.waits = False
        self._stance.begun = self._stance.begun or (view.formed and view.rank(self.us) is not None)
        self._acceptor.adopt(view)
        self._know_fellows(view)
        self._entered[view.lineage, view.epoch] = None
        if view.members:
            self.effects.append(AdoptView(view))
