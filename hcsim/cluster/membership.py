"""Who is in the cluster: one node's part in forming views, as a state machine.

Every node begins alone, in a view of its own, which it leads. Where nodes meet, the cluster that stands lower
joins the other (see `View.standing`): a lone node asks to be taken in; a larger cluster that was not able to
begin dissolves first, and its members ask. From then on everything is a change of the view. Why it should change is
`Stance`'s matter. The most senior member that is well proposes the change (`Proposer`); if it does not, the next one
does after a while. How a proposal becomes a view is `agreement`'s matter. Here is what a node makes of what it hears:
whose questions it answers, and which view it adopts.

Pure: events and `now` in; `effects` out, for the driver to carry out. `wake_at_s` says when to call `tick` next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import msgspec

from hcsim.cluster.agreement import Abstained, Accept, Accepted, Acceptor, Declined, Prepare, Promise, Record, Refused
from hcsim.cluster.diagnosis import Accusation, Diagnosis, Failure, Findings
from hcsim.cluster.messages import Decided, Message, Qualified, Status
from hcsim.cluster.proposer import Proposer, Stance
from hcsim.cluster.roster import Peer, Roster
from hcsim.cluster.view import DEPARTED_S, PATIENCE_S, Member, Rules, View, branched


class Send(msgspec.Struct, frozen=True):
    """Send a message to a node, if it is connected."""

    to: str
    message: Message


class Adopted(msgspec.Struct, frozen=True):
    """A view takes effect here."""

    view: View


class Over(msgspec.Struct, frozen=True):
    """Nothing can be computed in that epoch any more."""

    epoch: int
    reason: str


class Waiting(msgspec.Struct, frozen=True):
    """We cannot go on, and why."""

    reason: str


class Check(msgspec.Struct, frozen=True):
    """Check our device and the other members of that epoch's view, and tell `Membership.checked` what was found."""

    epoch: int
    slow: bool = False
    """Whether members that are only slow are looked for."""


class Qualify(msgspec.Struct, frozen=True):
    """Check our device and the members of that lineage, and measure the ways to them, before we join them; then tell
    `Membership.qualified`."""

    lineage: str


Effect: TypeAlias = Send | Adopted | Over | Waiting | Check | Qualify


BEGUN_ANEW = (
    "{where} was in the cluster with our key: under another name and address we count as a new machine. If both are in "
    "use, give each its own node key"
)


class Membership:
    """One node's part."""

    def __init__(
        self, us: Member, control: str, rules: Rules, remembered: Record | None, save: Callable[[Record], None]
    ) -> None:
        self.us = us
        self._control = control
        self.effects: list[Effect] = []
        self.wake_at_s: float | None = None
        self.roster = Roster(us)
        self._rules = rules
        self._diagnosis = Diagnosis(us.node)
        self._told: Findings | None = None
        """What we have told the other members of what we found."""
        self._tried_without: list[str] = []
        """Members that the present view has left out: if it does not work either, they were not the reason."""
        self._left: dict[str, int] = {}
        """By node that has left in an orderly way, the epoch of the last view with it, which may still be at work."""
        self._departed: dict[int, tuple[float, str]] = {}
        """By epoch: when a view ends, and why, that a member has left which is gone now."""
        self._qualifying = ""
        """The lineage that we check whether we can work with, or know that we can."""
        self._is_qualified = False
        self._stance = Stance(us, rules, self.roster, self._diagnosis)
        self._proposer = Proposer(us, rules, self.roster, self._stance, self._diagnosis, self._send)
        self._acceptor = Acceptor(remembered or Record(View("", 0, ())), save)
        self._proposer.saw(self._acceptor.record.promised)
        self.votes = self._acceptor.votes
        self.write = self._acceptor.write
        self.rounds = self._proposer.rounds
        self._needed_since_s: float | None = None
        self._joins = ""
        self._lives = 0
        self._solitary: View | None = None
        """The view that we have last begun alone."""
        self._left_by = ""
        """The lineage that went on without us then, if one did."""
        self.outcome = ""
        """What came of our work, once it is finished."""
        self.outcomes: dict[str, str] = {}
        """What came of the work of others that have finished theirs, and which of them said so last."""
        self._entered: dict[tuple[str, int], None] = {}
        """The views that we have been in, in this life."""
        self._fellows: dict[str, dict[str, None]] = {}
        """By lineage, the nodes that were in views of it that we know of."""
        for known in (self.view, *self._acceptor.record.past):
            self._know_fellows(known)
        self._declined: dict[str, int] = {}
        """By lineage, the view that we said we shall never be in."""
        if not self._belongs_to(self.view) or (len(self.view.members) == 1 and not self.view.formed):
            self._alone()

    @property
    def view(self) -> View:
        """The view that counts here."""
        return self._acceptor.record.view

    @property
    def status(self) -> Status:
        """What the others should know."""
        view, stance = self.view, self._stance
        return Status(
            self.us, self._control, view.lineage, view.epoch, len(view.members), view.formed, self._joins,
            stance.leaving, stance.broken, stance.reason, self.roster.reaches(), self.roster.contacts(),
            tuple((each.lineage, each.epoch) for each in self._acceptor.record.past), self.outcome, stance.waits,
        )  # fmt: skip

    @property
    def left_behind(self) -> bool:
        """Whether we were left out, and see those who go on: whatever we did alone would part from what they do."""
        return self.view == self._solitary and bool(self.roster.working(self._left_by))

    @property
    def outside(self) -> bool:
        """Whether we have no part in any work, and see nobody who has."""
        at_work = self.view.formed and self.view.rank(self.us) is not None and self.view != self._solitary
        return not at_work and not self.roster.somebody_works()

    @property
    def deserted(self) -> bool:
        """Whether no other member of our view is there."""
        peers = self.roster.peers
        return all(m.node not in peers or peers[m.node].suspected for m in self.view.members if m.node != self.us.node)

    # Events.

    def started(self, now: float) -> None:
        """Our process was started. If it continues a view of an earlier process, that view has to change.

        No peer's message may ever come, so this does not wait for one. Other members get time to be found first."""
        if self.view.rank(self.us) is not None:
            return
        if len(self.view.members) == 1:
            self._review(now)
        else:
            self._wake(now + self._rules.answer_s)

    def heard(self, status: Status, now: float) -> None:
        """A node says how it stands."""
        if status.outcome:
            self.outcomes[status.outcome] = status.us.name
        self._bring_up_to_date(self.roster.heard(status), now)
        if complaint := self.roster.complaint(self.view):
            # Work here is in vain, too, and before the next view begins all have to say whom they waited for.
            self.effects.append(Over(self.view.epoch, complaint))
        self._review(now)

    def lost(self, node: str, why: str, now: float) -> None:
        """A node is suspected."""
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
        """A node that was suspected is well."""
        peer = self.roster.peers.get(node)
        if peer is not None and peer.suspected:
            peer.suspected = ""
            self._review(now)

    def connected(self, node: str, now: float) -> None:
        """A node can be reached (again)."""
        self._proposer.remind(node, now)
        if self._told is not None and self.view.member(node) is not None:
            self._send(node, self._told, now)
        if self._is_qualified:
            self._send(node, Qualified(self._qualifying, self.us.boot), now)

    def began(self, epoch: int, now: float) -> None:
        """Our work in the view of that epoch begins."""
        self._diagnosis.began(epoch, now)

    def surveyed(self, epoch: int) -> None:
        """We have measured the links of that view."""
        self._diagnosis.surveyed(epoch)

    def broken(self, epoch: int, failure: Failure | str, now: float) -> None:
        """Our work failed in the view of that epoch."""
        view = self.view
        if epoch == view.epoch:
            failure = Failure(failure) if isinstance(failure, str) else failure
            self._fail(failure.reason)
            if failure.progressed:
                self.roster.progressed()
            else:
                for node in self._tried_without:
                    self.roster.pardon(node)
            self._tried_without = []
            if self._diagnosis.failed(view.lineage, view.epoch, failure, now):
                self.effects.append(Check(view.epoch, self._diagnosis.is_slow))
            self._review(now)

    def checked(self, epoch: int, accusations: Iterable[Accusation], now: float) -> None:
        """The checks of the view of that epoch are over here."""
        if self._diagnosis.checked(epoch, accusations):
            self._review(now)

    def qualified(self, lineage: str, now: float) -> None:
        """We can work with the members of that lineage."""
        if lineage == self._qualifying and not self._is_qualified:
            self._is_qualified = True
            self._diagnosis.qualified()
            for node in self.roster.working(lineage):
                self._send(node, Qualified(lineage, self.us.boot), now)
            self._review(now)

    def to_qualify_with(self, lineage: str) -> tuple[str, ...]:
        """The members in sight that we have to be able to work with before we join that lineage; empty: no more."""
        return self.roster.working(lineage) if lineage == self._qualifying else ()

    @property
    def asks(self) -> bool:
        """Whether we are alone and ask a cluster that we know, or are about to know, that we can work with."""
        return self._qualifying not in ("", self.view.lineage)

    @property
    def will_be_let_in(self) -> bool:
        """Whether we ask a cluster that will let us in in the end: we can work with all its members, as we found."""
        return self.asks and self._is_qualified and self.roster.whole(self._qualifying)

    def disqualified(self, lineage: str, now: float) -> None:
        """We cannot work with the members of that lineage yet: ask again."""
        if lineage == self._qualifying:
            self._qualifying = ""
            self._review(now)

    def forget(self, node: str, now: float) -> None:
        """A person says that a node is gone for good."""
        if (member := self.view.member(node)) is not None:
            self.roster.give_up(member)
            self._review(now)

    def leave(self, now: float) -> None:
        """We would like to be in no view."""
        self._stance.leaving = True
        self._review(now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._review(now)

    def message(self, source: str, message: Message, now: float) -> None:
        """A message of the agreement."""
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
            self.effects += [Check(self.view.epoch, self._diagnosis.is_slow)] if checks else []
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
        """Say that nobody need wait for our word on that view, if so."""
        if self._stranger_to(view):
            self._declined[view.lineage] = max(self._declined.get(view.lineage, -1), view.epoch)
            self._send(source, Declined(view.lineage, view.epoch), now)

    def _stranger_to(self, view: View) -> bool:
        """Whether we are counted on in a view that we did not enter: we missed its news, and thought better of it."""
        return (
            view.lineage != self.view.lineage
            and view.rank(self.us) is not None
            and (view.lineage, view.epoch) not in self._entered
        )

    def _belongs_to(self, view: View) -> bool:
        """Whether we are a member, in this life or another; not where that is a machine that our key was copied to."""
        member = view.member(self.us.node)
        return member is not None and not member.elsewhere(self.us)

    def _concerns_us(self, source: str, lineage: str, epoch: int, now: float) -> bool:
        """Whether it is about the successor of our view; who is behind is told what that is."""
        view = self.view
        self._tell_past(source, lineage, epoch, now)
        if lineage != view.lineage or not self._belongs_to(view):
            return False
        if epoch < view.epoch:
            self._send(source, Decided(view), now)
        return epoch == view.epoch and source in self._fellows.get(lineage, ())

    def _tell_past(self, source: str, lineage: str, epoch: int, now: float) -> None:
        """What followed that view, if we know: we may be elsewhere now."""
        for past in self._acceptor.record.past:
            if past.lineage == lineage and past.epoch > epoch:
                self._send(source, Decided(past), now)

    def _answered(self, source: str, answer: Promise | Abstained | Accepted | Refused, now: float) -> None:
        decided = self._proposer.answered(source, answer, now)
        if decided is not None:
            self._learn(decided, now)

    def _send(self, to: str, message: Message, now: float) -> None:
        if to != self.us.node:
            self.effects.append(Send(to, message))
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
        self._joins = self._stance.joins(self.view)
        self._tell_findings(now)
        self._seek_qualification()
        proposer = self._proposer
        if not proposer.busy:
            self._consider(now)
        for _ in range(2):  # our own answers may carry a proposal from one phase into the next
            if obstacle := proposer.pursue(now):
                self.effects.append(Waiting(obstacle))
        if proposer.busy:
            self._wake(proposer.look_at_s)
        elif self._needed_since_s is not None and proposer.not_before_s > now:
            self._wake(proposer.not_before_s)

    def _consider(self, now: float) -> None:
        """Propose a change if there is a reason, and it is our turn."""
        need = self._stance.need(self.view, self._joins, now)
        if need.look_at_s is not None:
            self._wake(need.look_at_s)
        if need.waiting:
            self.effects.append(Waiting(need.waiting))
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
        """Nothing can be computed in a view whose member is gone, also if it left in an orderly way: it may have left
        before the others had a link to it, and they would wait for its call."""
        for epoch, (due_s, reason) in list(self._departed.items()):
            if now >= due_s:
                del self._departed[epoch]
                self.effects.append(Over(epoch, reason))
            else:
                self._wake(due_s)

    def _tell_findings(self, now: float) -> None:
        if self._diagnosis.ours is not None and self._diagnosis.ours != self._told:
            self._told = self._diagnosis.ours
            for node in self.view.nodes:
                if node != self.us.node:
                    self._send(node, self._told, now)

    def _seek_qualification(self) -> None:
        """Before we join members that work, we see whether we can work with them: they do not wait for us meanwhile."""
        wanted = self._joins if self.roster.working(self._joins) else ""
        if wanted != self._qualifying:
            self._qualifying, self._is_qualified = wanted, False
            if wanted:
                self.effects.append(Qualify(wanted))

    def _fail(self, reason: str) -> None:
        if self._stance.fail(self.view, reason):
            self.effects.append(Over(self.view.epoch, reason))

    def _wake(self, at_s: float) -> None:
        self.wake_at_s = at_s if self.wake_at_s is None else min(self.wake_at_s, at_s)

    # Which view counts.

    def _bring_up_to_date(self, peer: Peer, now: float) -> None:
        """Tell a member, or one that was, what it has missed; and note since when it follows something else."""
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
        """Whether a node may tell us that a view was decided.

        Members do not lie, and a view is decided by members of the one before it; others may know of it from them. So
        we believe nodes that were in a view of our lineage with us, as far as we know; members of a cluster that we
        asked to be taken in by; and when all others of our view are gone for good, whoever is left."""
        ours = self.view
        alone = len(ours.members) == 1 and ours.member(self.us.node) is not None
        if view.lineage != ours.lineage and not view.branched_from(ours.lineage):
            return alone and view.member(source) is not None
        if alone or source in self._fellows.get(ours.lineage, ()):
            return True
        gone = self.roster.gone(ours)
        return all(node in gone for node in ours.nodes if node != self.us.node)

    def _learn(self, view: View, now: float) -> None:
        """A view was decided: adopt it if it is for us."""
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
            self.effects.append(Over(ours.epoch, view.reason))
        for peer in self.roster.peers.values():
            peer.astray_since_s = None
        self._quarantine_left_out(view, now)
        self._note_arrivals(view, now)
        self._enter(view)

    def _quarantine_left_out(self, view: View, now: float) -> None:
        """Members that the next view does without, although they are well, kept the last one from working; not those
        that went on in a branch."""
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
                self.effects.append(Waiting(f"left out by the others: {view.reason}"))
            else:
                self.roster.quarantine(node, self._diagnosis.stalled_s, now)
                self._tried_without.append(node)

    def _note_arrivals(self, view: View, now: float) -> None:
        """Members that are lost soon after they were let in wait before they are let in again."""
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
        """Another view follows the one before ours, for somebody's disk was set back: join it, like any newcomer."""
        self._give_up(
            f"{', '.join(m.name for m in view.members)} went on without us from the view before this one, as happens "
            "when a node's state is set back to an earlier day: what was done here since is given up, and we join them"
        )

    def _follow_branch(self) -> None:
        """Where any side may go on and ours cannot, since it has no vote, join those who went on without us."""
        branch = self.roster.branch(self.view) if self._stance.waits else None
        if branch is not None:
            self._give_up(f"{branch.us.name} went on without us, and we cannot: we join it")

    def _give_up(self, reason: str) -> None:
        """Leave our view, since others go on without us."""
        self.effects += [Over(self.view.epoch, reason), Waiting(reason)]
        self._alone()

    def _alone(self) -> None:
        """Begin a lineage of our own."""
        if (member := self.view.member(self.us.node)) is not None and member.elsewhere(self.us):
            self.effects.append(Waiting(BEGUN_ANEW.format(where=f"{member.name} at {member.address}")))
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
            self.effects.append(Adopted(view))
