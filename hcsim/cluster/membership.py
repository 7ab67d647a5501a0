"""Who is in the cluster: one node's part in forming views, as a state machine.

Every node begins alone, in a view of its own, which it leads. Where nodes meet, the cluster that stands lower
joins the other (see `Status.standing`): a lone node asks to be taken in; a larger cluster that was not able to
begin dissolves first, and its members ask. From then on everything is a change of the view, for one of these reasons:

    a member is suspected, or came back from a crash without its memory  → it is left out (and may ask again)
    work failed in the view (a broken link, a stuck peer)                → the same members, a new epoch
    somebody asks to join or to leave                                    → a new view after the step under way
    a better cluster is near                                             → an empty view: all members ask there

The most senior member that is well proposes the change; if it does not, the next one does after a while. How
a proposal becomes a view is `agreement`'s matter. Members of the next view are those that answer the proposal and
reach each other: two that do not cannot compute together, and the junior one stays out.

Pure: events and `now` in; `effects` out. `wake_at_s` says when to call `tick` next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from hcsim.cluster.agreement import (
    Absence,
    Accept,
    Accepted,
    Acceptor,
    Declined,
    Prepare,
    Promise,
    Proposal,
    Record,
    Refused,
)
from hcsim.cluster.messages import Decided, Message, Status
from hcsim.cluster.roster import Peer, Roster
from hcsim.cluster.succession import Situation, dissolved, orphaned, successor
from hcsim.cluster.view import Member, Quorum, View

PATIENCE_S = 1.0
"""How long a member waits for those before it to propose, and a proposer before it tries again."""
ASTRAY_S = 5.0
"""How long a member may follow another view before it is left out."""


class Rules(msgspec.Struct, frozen=True):
    """What all nodes of a cluster hold alike."""

    needed: int
    """Members that work begins with."""
    quorum: Quorum = "tiebreak"
    settle_s: float = 0.5
    """How long newcomers are gathered."""
    answer_s: float = 15.0
    """How long a proposal waits for a member that seems to be well."""


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


Effect: TypeAlias = Send | Adopted | Over | Waiting


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
        self.rounds = {"decided": 0, "given_up": 0, "overtaken": 0}
        """How our proposals ended: overtaken is what another view made pointless."""
        self._rules = rules
        self._acceptor = Acceptor(remembered or Record(View("", 0, ())), save)
        self.votes = self._acceptor.votes
        self._proposal: Proposal | None = None
        self._deadline_s = 0.0
        self._highest = self._acceptor.record.promised[0]
        self._needed_since_s: float | None = None
        self._asking_since_s: float | None = None
        self._not_before_s = 0.0
        self._broken = -1
        self._reason = ""
        self._leaving = False
        self._joins = ""
        self._lives = 0
        self._entered: dict[tuple[str, int], None] = {}
        """The views that we have been in, in this life."""
        self._declined: dict[str, int] = {}
        """By lineage, the view that we said we shall never be in."""
        if self.view.member(us.node) is None or (len(self.view.members) == 1 and not self.view.formed):
            self._alone()

    @property
    def view(self) -> View:
        """The view that counts here."""
        return self._acceptor.record.view

    @property
    def status(self) -> Status:
        """What the others should know."""
        view = self.view
        return Status(
            self.us, self._control, view.lineage, view.epoch, len(view.members), view.formed, self._joins,
            self._leaving, self._broken, self._reason, self.roster.reaches(), self.roster.contacts(),
            tuple(each.lineage for each in self._acceptor.record.past),
        )  # fmt: skip

    # Events.

    def heard(self, status: Status, now: float) -> None:
        """A node says how it stands."""
        peer = self.roster.peers.setdefault(status.us.node, Peer(status))
        peer.status = status
        self._bring_up_to_date(peer, now)
        self._review(now)

    def lost(self, node: str, why: str, now: float) -> None:
        """A node is suspected."""
        peer = self.roster.peers.get(node)
        if peer is not None and not peer.suspected:
            peer.suspected = why
            member = self.view.member(node)
            if member is not None and self.view.rank(self.us) is not None:
                self._fail(f"{member.name} was lost: {why}")
            self._review(now)

    def found(self, node: str, now: float) -> None:
        """A node that was suspected is well."""
        peer = self.roster.peers.get(node)
        if peer is not None and peer.suspected:
            peer.suspected = ""
            self._review(now)

    def connected(self, node: str, now: float) -> None:
        """A node can be reached (again): repeat what it may have missed."""
        proposal = self._proposal
        if proposal is not None and proposal.present.member(node) is not None:
            promised = proposal.chosen is not None and node in proposal.promises
            self._send(node, self._acceptance(proposal) if promised else self._preparation(proposal), now)

    def broken(self, epoch: int, reason: str, now: float) -> None:
        """Our work failed in the view of that epoch."""
        if epoch == self.view.epoch:
            self._fail(reason)
            self._review(now)

    def leave(self, now: float) -> None:
        """We would like to be in no view."""
        self._leaving = True
        self._review(now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._review(now)

    def message(self, source: str, message: Message, now: float) -> None:
        """A message of the agreement."""
        if isinstance(message, Prepare):
            self._asked_to_promise(source, message, now)
        elif isinstance(message, Accept):
            if self._concerns_us(source, message.lineage, message.after, now):
                self._send(source, self._acceptor.accept(message), now)
        elif isinstance(message, Decided):
            self._learn(message.view)
        elif isinstance(message, Promise | Accepted | Refused):
            self._answered(source, message, now)
        elif isinstance(message, Declined):
            self.roster.decline(source, message.lineage, message.epoch)
        self._review(now)

    # As an acceptor.

    def _asked_to_promise(self, source: str, asked: Prepare, now: float) -> None:
        self._highest = max(self._highest, asked.ballot[0])
        self._learn(asked.after)
        proposer = self.roster.peers.get(source)
        if proposer is not None and self.us.node not in proposer.status.reaches:
            return  # it does not hear us, and would only keep others from being heard
        if self._concerns_us(source, asked.after.lineage, asked.after.epoch, now):
            self._send(source, self._acceptor.prepare(asked, self.us, self.roster.reaches()), now)
        elif self._stranger_to(asked.after):
            declined = max(self._declined.get(asked.after.lineage, -1), asked.after.epoch)
            self._declined[asked.after.lineage] = declined
            self._send(source, Declined(asked.after.lineage, asked.after.epoch), now)

    def _stranger_to(self, view: View) -> bool:
        """Whether we are counted on in a view that we did not enter: we missed its news, and thought better of it."""
        return (
            view.lineage != self.view.lineage
            and view.rank(self.us) is not None
            and (view.lineage, view.epoch) not in self._entered
        )

    def _concerns_us(self, source: str, lineage: str, epoch: int, now: float) -> bool:
        """Whether it is about the successor of our view; who is behind is told what that is."""
        view = self.view
        for past in self._acceptor.record.past:
            if past.lineage == lineage and past.epoch > epoch:
                self._send(source, Decided(past), now)
        if lineage != view.lineage or view.member(self.us.node) is None:
            return False
        if epoch < view.epoch:
            self._send(source, Decided(view), now)
        return epoch == view.epoch

    # As a proposer.

    def _propose(self, reason: str, now: float) -> None:
        self._highest += 1
        proposal = Proposal((self._highest, self.us.node), self.view, self._rules.quorum, reason)
        self._proposal = proposal
        self._deadline_s = now + self._rules.answer_s
        for node in self.view.nodes:
            self._send(node, self._preparation(proposal), now)

    def _preparation(self, proposal: Proposal) -> Prepare:
        return Prepare(proposal.ballot, proposal.present)

    def _acceptance(self, proposal: Proposal) -> Accept:
        assert proposal.chosen is not None
        present = proposal.present
        return Accept(proposal.ballot, present.lineage, present.epoch, proposal.chosen)

    def _answered(self, source: str, answer: Promise | Accepted | Refused, now: float) -> None:
        proposal = self._proposal
        if isinstance(answer, Refused):
            self._highest = max(self._highest, answer.promised[0])
        if proposal is None or answer.ballot != proposal.ballot:
            return
        if isinstance(answer, Promise):
            proposal.promises[source] = answer
        elif isinstance(answer, Refused):
            self._give_up(now)
        elif proposal.chosen is not None and proposal.accepted(source, self._absence(proposal.present)):
            self._proposal = None
            self.rounds["decided"] += 1
            for node in dict.fromkeys((*proposal.present.nodes, *proposal.chosen.nodes)):
                if node != self.us.node:
                    self._send(node, Decided(proposal.chosen), now)
            self._learn(proposal.chosen)

    def _pursue(self, proposal: Proposal, now: float) -> None:
        """Go on with a proposal: choose once everybody who is well has answered, and give up in time."""
        silent = [n for n in self.view.nodes if n not in proposal.promises and self.roster.well(n, self.view)]
        late = now >= self._deadline_s
        if proposal.chosen is None and (late or not silent):
            obstacle = self._obstacle(proposal)
            if obstacle:
                self.effects.append(Waiting(obstacle))
                self._give_up(now)
                return
            view = proposal.bound(self._absence(self.view)) or self._successor(proposal)
            if view is None:
                self._give_up(now)
                return
            proposal.chosen = view
            self._deadline_s = now + self._rules.answer_s
            for node in proposal.promises:
                self._send(node, self._acceptance(proposal), now)
        elif late:
            self._give_up(now)

    def _obstacle(self, proposal: Proposal) -> str:
        """Why those who answered may not decide."""
        view, gone = self.view, self.roster.gone(self.view)
        if proposal.heard(self._absence(view)):
            absent = orphaned(view, proposal.promises, gone)
            return f"waiting for {absent}, which may still have the model" if absent else ""
        here = ", ".join(m.name for m in view.members if m.node in proposal.promises) or "nobody"
        rest = ", ".join(m.name for m in view.members if m.node not in proposal.promises)
        return f"waiting for {rest}: {here} cannot decide alone (quorum = {self._rules.quorum})"

    def _absence(self, view: View) -> Absence:
        return Absence(self.roster.strangers(view), self.roster.gone(view))

    def _give_up(self, now: float) -> None:
        self._proposal = None
        self.rounds["given_up"] += 1
        self._not_before_s = now + PATIENCE_S * (1 + self.roster.turn(self.view))

    def _successor(self, proposal: Proposal) -> View | None:
        view, roster = self.view, self.roster
        if roster.better(self.status) is not None:
            return dissolved(view, proposal.reason)
        reaches = {node: peer.status.reaches for node, peer in roster.peers.items()}
        reaches |= {node: promise.reaches for node, promise in proposal.promises.items()}
        situation = Situation(
            {node: promise for node, promise in proposal.promises.items() if roster.well(node, view)},
            tuple(roster.joiners(view)),
            (*((self.us.node,) if self._leaving else ()), *roster.leavers(view)),
            reaches | {self.us.node: roster.reaches()},
            {node: peer.status.epoch for node, peer in roster.peers.items()},
            self._failure(),
            self._rules.needed,
            self._rules.quorum,
        )
        return successor(view, situation, self.us)

    # What is to be done.

    def _review(self, now: float) -> None:
        self.wake_at_s = None
        if self.view.member(self.us.node) is None:
            self._alone()
        self._joins = self._wish()
        if self._proposal is None:
            self._consider(now)
        for _ in range(2):  # our own answers may carry a proposal from one phase into the next
            if self._proposal is not None:
                self._pursue(self._proposal, now)
        if self._proposal is not None:
            self._wake(self._deadline_s)
        elif self._needed_since_s is not None and self._not_before_s > now:
            self._wake(self._not_before_s)

    def _consider(self, now: float) -> None:
        """Propose a change if there is a reason, and it is our turn."""
        reason, delay_s = self._need(now)
        if not reason:
            self._needed_since_s = None
            return
        if self._needed_since_s is None:
            self._needed_since_s = now
        due_s = max(self._needed_since_s + delay_s + PATIENCE_S * self.roster.turn(self.view), self._not_before_s)
        if now >= due_s:
            self._propose(reason, now)
        else:
            self._wake(due_s)

    def _need(self, now: float) -> tuple[str, float]:
        """Why the view should change, and how long that can wait."""
        view = self.view
        if len(view.members) == 1 and self._joins not in ("", view.lineage):
            self._ask(now)
            return "", 0.0
        self._asking_since_s = None
        if failed := self._failure():
            return failed, 0.0
        for member in view.members:
            if complaint := self._complaint_about(member, now):
                return complaint, 0.0
        if self._leaving and len(view.members) > 1:
            return f"{self.us.name} leaves", 0.0
        if len(view.members) > 1 and self.roster.better(self.status) is not None:
            return "a cluster that goes before ours is near", 0.0
        if joiners := self.roster.joiners(view):
            complete = len(view.members) + len(joiners) == self._rules.needed
            return f"{', '.join(m.name for m in joiners)} would like to join", 0.0 if complete else self._rules.settle_s
        return "", 0.0

    def _ask(self, now: float) -> None:
        """We would like to be in a cluster, and depend on it; a person should know if that takes long."""
        better = self.roster.better(self.status)
        if self._asking_since_s is None:
            self._asking_since_s = now
        if now < self._asking_since_s + ASTRAY_S:
            self._wake(self._asking_since_s + ASTRAY_S)
        elif better is not None:
            self.effects.append(Waiting(f"waiting to be taken in by the cluster of {better.us.name}"))

    def _complaint_about(self, member: Member, now: float) -> str:
        """Why a member cannot stay as it is."""
        if member.node == self.us.node:
            return "" if member == self.us else f"{member.name} was started anew"
        peer = self.roster.peers.get(member.node)
        if peer is None or peer.suspected:
            return f"{member.name} is not there: {peer.suspected if peer else 'no connection'}"
        if peer.status.us.boot != member.boot:
            return f"{member.name} was started anew"
        if peer.status.leaving:
            return f"{member.name} leaves"
        if peer.astray_since_s is not None:
            if now >= peer.astray_since_s + ASTRAY_S:
                return f"{member.name} follows another view"
            self._wake(peer.astray_since_s + ASTRAY_S)
        return ""

    def _wish(self) -> str:
        """The lineage that we would like to be in."""
        view = self.view
        if self._leaving:
            return ""
        if view.rank(self.us) is None:
            return view.lineage  # started anew: a member by our word, not by our memory
        better = self.roster.better(self.status) if len(view.members) == 1 else None
        return "" if better is None else better.lineage

    def _failure(self) -> str:
        """Why work failed in the present view, if it did for us or for another member."""
        return self._reason if self._broken == self.view.epoch else self.roster.complaint(self.view)

    def _fail(self, reason: str) -> None:
        if self._broken < self.view.epoch:
            self._broken, self._reason = self.view.epoch, reason
            self.effects.append(Over(self.view.epoch, reason))

    def _bring_up_to_date(self, peer: Peer, now: float) -> None:
        """Tell a member what it has missed, and note since when it follows something else."""
        view, theirs = self.view, peer.status
        there = (theirs.lineage, theirs.epoch) == (view.lineage, view.epoch)
        ahead = theirs.lineage == view.lineage and theirs.epoch > view.epoch
        if view.rank(theirs.us) is None or there or ahead:
            peer.astray_since_s = None
            return
        self._send(theirs.us.node, Decided(view), now)
        if peer.astray_since_s is None:
            peer.astray_since_s = now

    def _learn(self, view: View) -> None:
        """A view was decided: adopt it if it is for us."""
        ours = self.view
        successive = view.previous == ours.epoch and view.lineage.startswith(f"{ours.lineage}/")
        if view.epoch <= ours.epoch:
            return  # no node's epoch ever goes back; who counts on us in this one will have to ask again
        asked = view.rank(self.us) is not None and view.lineage == self._joins and len(ours.members) == 1
        asked = asked and view.epoch > self._declined.get(view.lineage, -1)
        if view.lineage != ours.lineage and not successive and not asked:
            return
        if view.abrupt or view.previous != ours.epoch or view.rank(self.us) is None:
            self.effects.append(Over(ours.epoch, view.reason))
        for peer in self.roster.peers.values():
            peer.astray_since_s = None
        self._enter(view)

    def _alone(self) -> None:
        """Begin a lineage of our own."""
        self._lives += 1
        before = self.view.epoch
        lineage = f"{self.us.node}:{self.us.boot:x}.{self._lives}"
        formed = self._rules.needed == 1
        self._enter(View(lineage, before + 1, (self.us,), before, formed=formed, reason=f"{self.us.name} is alone"))

    def _enter(self, view: View) -> None:
        self.rounds["overtaken"] += self._proposal is not None
        self._proposal = None
        self._needed_since_s = None
        self._not_before_s = 0.0
        self._acceptor.adopt(view)
        self._entered[view.lineage, view.epoch] = None
        if view.members:
            self.effects.append(Adopted(view))

    def _send(self, to: str, message: Message, now: float) -> None:
        if to != self.us.node:
            self.effects.append(Send(to, message))
        elif isinstance(message, Prepare):
            self._answered(to, self._acceptor.prepare(message, self.us, self.roster.reaches()), now)
        elif isinstance(message, Accept):
            self._answered(to, self._acceptor.accept(message), now)

    def _wake(self, at_s: float) -> None:
        self.wake_at_s = at_s if self.wake_at_s is None else min(self.wake_at_s, at_s)
