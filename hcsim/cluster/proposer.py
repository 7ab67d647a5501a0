"""View-change policy and proposer: when a view should change, which view comes next, and the proposals of one
node.

A view changes for one of these reasons, the first that applies:

    work failed in it (a broken link, a stuck peer)                  → the same members, a new epoch; without those
                                                                       that keep it from working (see `diagnosis`)
    a member is suspected, was restarted, or follows another view    → it is excluded (and may ask again)
    a member wants to leave                                          → a view without it after the current step
    a cluster with precedence is near                                → an empty view: all members ask there
    a node wants to join                                             → a view with it after the current step
    any side may go on, and no other is left to ask                  → the same members, and work begins again

If any side of a split may go on, connected nodes end with the same parameters, and sides that do not see each
other each with their own. So the side with lower precedence is given up (`View.standing`), if the other can
admit its members. It is not given up while the other is still in the view that this one branched from, whose
size counts this side, nor while the other cannot decide anything. A side that cannot decide joins the members
that went on without it. A lone machine that asks a cluster does not end before it is admitted or that cluster
is gone, unless they cannot work with each other: then it asks the next one that works, and admits those that ask it.

A node proposes one view at a time, from the first request to the decision. Members of the next view are those
that answer the proposal and reach each other: two that do not cannot compute together, and the junior one stays
out. If another cluster has precedence, the next view is empty.

This module does no I/O: messages of a proposer go out through `send`, which also returns this node's own
answers at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from hcsim.cluster.agreement import Absence, Abstained, Accept, Accepted, Ballot, Prepare, Promise, Proposal, Refused
from hcsim.cluster.diagnosis import Diagnosis
from hcsim.cluster.messages import ControlMessage, Decided, Status
from hcsim.cluster.roster import Roster
from hcsim.cluster.view import ASTRAY_S, PATIENCE_S, Member, MembershipRules, Quorum, View, branch, enough


class ViewChangeNeed(msgspec.Struct):
    """The result of examining a view: whether it should change."""

    reason: str = ""
    """Why the view should change; empty if it need not."""
    delay_s: float = 0.0
    look_at_s: float | None = None
    """When to examine the view again, whatever happens."""
    waiting: str = ""
    """What to tell the user meanwhile."""

    def look_again(self, at_s: float) -> None:
        """Examine the view again at that time, or earlier."""
        self.look_at_s = at_s if self.look_at_s is None else min(self.look_at_s, at_s)


class ViewChangePolicy:
    """The view-change policy of one node: its requests and failures, and what follows for its view."""

    def __init__(self, us: Member, rules: MembershipRules, roster: Roster, diagnosis: Diagnosis) -> None:
        self.leaving = False
        self.broken = -1
        """The epoch in which this node's work failed."""
        self.reason = ""
        self.waits = False
        """Whether the view had to change at the last attempt, and the members present could not decide on a
        successor."""
        self.begun = False
        """Whether this node has been in a view that may work, since it started."""
        self._deserted_since_s: float | None = None
        """Since when no visible node is in such a view, nor is this one."""
        self._us = us
        self._rules = rules
        self._roster = roster
        self._diagnosis = diagnosis
        self._asking_since_s: float | None = None

    def joins(self, view: View, now: float) -> str:
        if self.leaving:
            return ""
        if view.rank(self._us) is None:
            return view.lineage  # started anew: a member by our word, not by our memory
        asked = self._asked(view, now) if len(view.members) == 1 else None
        return "" if asked is None else asked.lineage

    def better(self, view: View, now: float) -> Status | None:
        """Return the visible cluster to which this one should give way. One that cannot change does not count if
        this node may go on without it."""
        return self._unless_vain(self._roster.better(view, self._roster.unsuited(now), waits=self.waits))

    def _asked(self, view: View, now: float) -> Status | None:
        """Return the cluster that a lone node asks: one that it cannot work with yet, if there is no other."""
        return self.better(view, now) or self._unless_vain(self._roster.better(view, waits=self.waits))

    def _unless_vain(self, better: Status | None) -> Status | None:
        vain = better is not None and better.waits and self.begun and self._rules.quorum == "any"
        return None if vain else better

    def fail(self, view: View, reason: str) -> bool:
        """Record that this node's work failed in the view; return whether that is news."""
        news = self.broken < view.epoch
        if news:
            self.broken, self.reason = view.epoch, reason
        return news

    def failure(self, view: View) -> str:
        """Return why work failed in the view, for this node or another member; empty if it did not."""
        return self.reason if self.broken == view.epoch else self._roster.complaint(view)

    def need(self, view: View, joins: str, now: float) -> ViewChangeNeed:
        need = ViewChangeNeed()
        joiners = self._roster.joiners(view, now)
        if len(view.members) == 1 and joins not in ("", view.lineage):
            self._ask(view, need, now)
            if not (view.formed and joiners) or self.better(view, now) is not None:
                return need
        self._asking_since_s = None
        absence = next(filter(None, [self._complaint_about(member, need, now) for member in view.members]), "")
        failure = self.failure(view)
        if failure and not absence:
            findings_until_s = self._diagnosis.pending_until_s(view.lineage, view.epoch, view.nodes, now)
            if findings_until_s is not None and now < findings_until_s:
                need.look_again(findings_until_s)
                return need
            need.delay_s = self._diagnosis.pause_s
        need.reason = failure or absence
        need.reason = need.reason or self._departure(view, now) or self._desertion(view, need, now)
        if not need.reason and joiners:
            need.reason = f"{', '.join(m.name for m in joiners)} would like to join"
            complete = len(view.members) + len(joiners) == self._rules.needed
            need.delay_s = 0.0 if complete else self._rules.settle_s
        return need

    def _ask(self, view: View, need: ViewChangeNeed, now: float) -> None:
        """Ask a cluster to admit this node; tell the user if that takes long."""
        better = self._asked(view, now)
        if self._asking_since_s is None:
            self._asking_since_s = now
        if now < self._asking_since_s + ASTRAY_S:
            need.look_again(self._asking_since_s + ASTRAY_S)
        elif better is not None:
            need.waiting = f"waiting to be taken in by the cluster of {better.us.name}"

    def _complaint_about(self, member: Member, need: ViewChangeNeed, now: float) -> str:
        """Return why a member cannot stay as it is."""
        if member.node == self._us.node:
            return "" if member == self._us else f"{member.name} was started anew"
        peer = self._roster.peers.get(member.node)
        if peer is None or peer.suspected:
            return f"{member.name} is not there: {peer.suspected if peer else 'no connection'}"
        if peer.status.us.boot != member.boot:
            return f"{member.name} was started anew"
        if peer.status.leaving:
            return f"{member.name} leaves"
        if peer.astray_since_s is not None:
            if now >= peer.astray_since_s + ASTRAY_S:
                return f"{member.name} follows another view"
            need.look_again(peer.astray_since_s + ASTRAY_S)
        return ""

    def _departure(self, view: View, now: float) -> str:
        """Return why this node, or all members, should leave the view."""
        if len(view.members) == 1:
            return ""
        if self.leaving:
            return f"{self._us.name} leaves"
        return "" if self.better(view, now) is None else "a cluster that goes before ours is near"

    def needed(self, now: float) -> int:
        """Return the number of members with which work begins, as it applies now."""
        return 1 if self._is_deserted(now) else self._rules.needed

    def _desertion(self, view: View, need: ViewChangeNeed, now: float) -> str:
        """Return why to go on with the members present, if any side may go on: an excluded node may too, once it
        sees no cluster that it could ask."""
        if self._rules.quorum != "any" or view.formed or not self.begun or self._roster.any_formed():
            self._deserted_since_s = None
        elif self._deserted_since_s is None:
            self._deserted_since_s = now
        if self._is_deserted(now):
            return "all others have gone"
        if self._deserted_since_s is not None:
            need.look_again(self._deserted_since_s + ASTRAY_S)
        return ""

    def _is_deserted(self, now: float) -> bool:
        return self._deserted_since_s is not None and now >= self._deserted_since_s + ASTRAY_S


class ProposalInputs(msgspec.Struct, frozen=True):
    """The input for choosing the next view."""

    ballot: int
    """The number of the proposer's ballot."""
    promises: Mapping[str, Promise]
    """The promises of healthy members, by node."""
    abstained: Mapping[str, Abstained]
    """The answers without a vote, by node."""
    joiners: tuple[Member, ...]
    leavers: tuple[str, ...]
    reaches: Mapping[str, tuple[str, ...]]
    epochs: Mapping[str, int]
    """The latest epoch of each node, in any lineage."""
    failed: str
    culprits: Mapping[str, str]
    """Members that kept it from working, with reasons."""
    needed: int
    quorum: Quorum


def successor(view: View, now: ProposalInputs, proposer: Member) -> View | None:
    """Return the next view; None if nothing would change.

    Members keep their order, so ranks are stable and seniority holds; newcomers follow by node id. Two that
    do not reach each other cannot compute together: the later one stays out."""
    answers: Mapping[str, Promise | Abstained] = {**now.promises, **now.abstained}
    stay = [m for m in view.members if m.node in answers and answers[m.node].us == m]
    anew = [answer.us for answer in answers.values() if answer.us not in stay]
    chosen: list[Member] = []
    for member in (*stay, *sorted([*anew, *now.joiners], key=lambda m: m.node)):
        if member.node in now.culprits:
            continue
        if member.node not in now.leavers and all(_mutual(now, member.node, other.node) for other in chosen):
            chosen.append(member)
    formed = view.formed or len(chosen) >= now.needed
    if tuple(chosen) == view.members and formed == view.formed and not now.failed:
        return None
    lost = [m.name for m in view.members if m not in chosen and m.node not in now.leavers]
    newcomers = [m for m in chosen if m not in view.members]
    epoch = max([view.epoch, *(now.epochs.get(m.node, 0) for m in newcomers)]) + 1
    return View(
        lineage_of(view, [*now.promises], now.quorum, now.ballot, proposer),
        epoch,
        tuple(chosen),
        previous=view.epoch,
        formed=formed,
        abrupt=bool(lost or now.failed),
        left=now.leavers,
        reason=_told(view, now, lost, newcomers) or f"{proposer.name} proposed it",
    )


def dissolved(view: View, reason: str) -> View:
    """Return the end of a lineage, an empty view: its members are free to join another."""
    return View(view.lineage, view.epoch + 1, (), view.epoch, reason=reason)


def lineage_of(view: View, deciders: list[str], rule: Quorum, ballot: int, proposer: Member) -> str:
    """Return the lineage of the next view: the same, unless two sides may go on at once, in which case each has
    its own."""
    if rule != "any" or enough(view, deciders, "tiebreak"):
        return view.lineage
    return branch(view, ballot, proposer)


def orphaned(view: View, answers: Mapping[str, Promise | Abstained], gone: tuple[str, ...]) -> str:
    """Return the members whose memory a formed cluster has to wait for, because the training state would be lost
    without it.

    Empty if a member that answered still has it, or if no member of the view can have it any more."""
    if not view.formed or any(answers[m.node].us == m for m in view.members if m.node in answers):
        return ""
    absent = [m.name for m in view.members if m.node not in answers and m.node not in gone]
    return ", ".join(absent)


def _mutual(now: ProposalInputs, one: str, other: str) -> bool:
    return other in now.reaches.get(one, ()) and one in now.reaches.get(other, ())


def _told(view: View, now: ProposalInputs, lost: list[str], newcomers: list[Member]) -> str:
    left = [m.name for m in view.members if m.node in now.leavers]
    culprits = [(m.name, now.culprits[m.node]) for m in view.members if m.node in now.culprits]
    out = [f"{name} is left out" + (f": {why}" if why not in now.failed else "") for name, why in culprits]
    said = "; ".join([now.failed, *out])
    # What failed is often about the one that is lost.
    untold = [name for name in lost if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", said)]
    parts = [now.failed] if now.failed else []
    parts += [f"{', '.join(untold)} lost"] if untold else []
    parts += out
    parts += [f"{', '.join(m.name for m in newcomers)} joined"] if newcomers else []
    parts += [f"{', '.join(left)} left"] if left else []
    return "; ".join(parts)


HOPELESS_S = PATIENCE_S / 2
"""How long a proposal waits for members that could not answer according to their last status."""
GONE_FOR_GOOD = "; for one that is gone for good, and only then: hcsim cluster forget NAME"


class MessageSender(Protocol):
    """Sends messages."""

    def __call__(self, to: str, message: ControlMessage, now: float) -> None: ...


class Proposer:
    """The proposals of this node."""

    def __init__(
        self,
        us: Member,
        rules: MembershipRules,
        roster: Roster,
        stance: ViewChangePolicy,
        diagnosis: Diagnosis,
        send: MessageSender,
    ) -> None:
        self.rounds = {"decided": 0, "given_up": 0, "overtaken": 0}
        """Counts of the ends of proposals; overtaken means that another view made the proposal obsolete."""
        self.look_at_s = 0.0
        """When to pursue the present proposal, whatever happens."""
        self.not_before_s = 0.0
        self._us = us
        self._rules = rules
        self._roster = roster
        self._stance = stance
        self._diagnosis = diagnosis
        self._send = send
        self._proposal: Proposal | None = None
        self._asked_s = 0.0
        self._deadline_s = 0.0
        self._highest = 0

    @property
    def busy(self) -> bool:
        return self._proposal is not None

    def saw(self, ballot: Ballot) -> None:
        """Record a ballot of another node: the next one of this node has to be higher."""
        self._highest = max(self._highest, ballot[0])

    def propose(self, view: View, reason: str, now: float) -> None:
        self._highest += 1
        proposal = Proposal((self._highest, self._us.node), view, self._rules.quorum, reason)
        self._proposal = proposal
        self._asked_s = now
        self._deadline_s = now + self._rules.answer_s
        for node in view.nodes:
            self._send(node, Prepare(proposal.ballot, view), now)

    def remind(self, node: str, now: float) -> None:
        """Repeat to a node the messages that it may have missed."""
        proposal = self._proposal
        if proposal is not None and proposal.present.member(node) is not None:
            if proposal.chosen is not None and node in proposal.promises:
                self._send(node, _acceptance(proposal, proposal.chosen), now)
            else:
                self._send(node, Prepare(proposal.ballot, proposal.present), now)

    def answered(self, source: str, answer: Promise | Abstained | Accepted | Refused, now: float) -> View | None:
        """Process a member's answer; return the view that is decided by it, if any."""
        proposal = self._proposal
        if isinstance(answer, Refused):
            self.saw(answer.promised)
        if proposal is None or answer.ballot != proposal.ballot:
            return None
        if isinstance(answer, Promise):
            member = proposal.present.member(source)
            if member is not None and not member.elsewhere(answer.us):  # a copy does not speak for it
                proposal.promises[source] = answer
                proposal.abstained.pop(source, None)
        elif isinstance(answer, Abstained):
            if proposal.present.member(source) is not None:
                proposal.abstained[source] = answer
        elif isinstance(answer, Refused):
            self._give_up(proposal, now)
        elif proposal.chosen is not None and proposal.accepted(source, self._absence(proposal.present)):
            self._proposal = None
            self.rounds["decided"] += 1
            self.not_before_s = now + PATIENCE_S  # others begin the next view, perhaps without this node
            for node in dict.fromkeys((*proposal.present.nodes, *proposal.chosen.nodes)):
                if node != self._us.node:
                    self._send(node, Decided(proposal.chosen), now)
            return proposal.chosen
        return None

    def pursue(self, now: float) -> str:
        """Continue: choose a view once all healthy members have answered, and give up at the deadline. Return what
        is waited for.

        The wait for a healthy member that cannot answer is short, or the others would propose in turn. Members
        that the next view excludes are not waited for, if the others may decide."""
        proposal = self._proposal
        if proposal is None:
            return ""
        view, roster = proposal.present, self._roster
        answered = (*proposal.promises, *proposal.abstained)
        silent = [node for node in view.nodes if node not in answered and roster.well(node, view)]
        hopeless = silent and not any(roster.answers(node, now) for node in silent)
        late = now >= self._deadline_s
        enough_s = self._asked_s + HOPELESS_S if hopeless else self._deadline_s
        self.look_at_s = enough_s if now < enough_s else self._deadline_s
        if proposal.chosen is None and (not silent or now >= enough_s or self._is_enough_without(silent, now)):
            obstacle = self._obstacle(proposal)
            self._stance.waits = bool(obstacle)
            chosen = None if obstacle else proposal.bound(self._absence(view)) or self._successor(proposal, now)
            if chosen is None:
                self._give_up(proposal, now)
                return obstacle
            proposal.chosen = chosen
            self.look_at_s = self._deadline_s = now + self._rules.answer_s
            for node in proposal.promises:
                self._send(node, _acceptance(proposal, chosen), now)
        elif late:
            self._give_up(proposal, now)
        return ""

    def _is_enough_without(self, silent: Sequence[str], now: float) -> bool:
        """Return whether all silent members keep the view from working, and the others may decide."""
        proposal = self._proposal
        assert proposal is not None
        view = proposal.present
        if not self._stance.failure(view):
            return False
        culprits = self._culprits(view, view.nodes, now)
        return all(node in culprits for node in silent) and not self._obstacle(proposal)

    def _culprits(self, view: View, nodes: Sequence[str], now: float) -> dict[str, str]:
        return self._diagnosis.culprits(view.lineage, view.epoch, nodes, now)

    def overtaken(self) -> None:
        """Drop the proposal: another view has replaced the one that it was for."""
        self.rounds["overtaken"] += self._proposal is not None
        self._proposal = None
        self.not_before_s = 0.0

    def _obstacle(self, proposal: Proposal) -> str:
        view = proposal.present
        answers: dict[str, Promise | Abstained] = {**proposal.promises, **proposal.abstained}
        if proposal.heard(self._absence(view)):
            absent = orphaned(view, answers, self._roster.gone(view))
            return f"waiting for {absent}, which may still have the model{GONE_FOR_GOOD}" if absent else ""
        here = ", ".join(m.name for m in view.members if m.node in proposal.promises) or "nobody"
        rest = ", ".join(m.name for m in view.members if m.node not in answers)
        if full := ", ".join(m.name for m in view.members if m.node in proposal.abstained):
            rest = rest or "room on its disk"
            here = f"{full} cannot write to its disk and has no vote, and {here}"
        return f"waiting for {rest}: {here} cannot decide alone (quorum = {self._rules.quorum}){GONE_FOR_GOOD}"

    def _absence(self, view: View) -> Absence:
        return Absence(self._roster.strangers(view), self._roster.gone(view))

    def _give_up(self, proposal: Proposal, now: float) -> None:
        self._proposal = None
        self.rounds["given_up"] += 1
        self.not_before_s = now + PATIENCE_S * (1 + self._roster.turn(proposal.present))

    def _successor(self, proposal: Proposal, now: float) -> View | None:
        view, roster = proposal.present, self._roster
        if self._stance.better(view, now) is not None:
            return dissolved(view, proposal.reason)
        reaches = {node: peer.status.reaches for node, peer in roster.peers.items()}
        answers: dict[str, Promise | Abstained] = {**proposal.promises, **proposal.abstained}
        reaches |= {node: answer.reaches for node, answer in answers.items()}
        well = [node for node in answers if roster.well(node, view)]
        failed = self._stance.failure(view)
        staying = [m.node for m in view.members if m.node in well and answers[m.node].us == m]
        silent = [node for node in self._culprits(view, view.nodes, now) if node not in answers] if failed else []
        staying = [node for node in view.nodes if node in staying or node in silent]
        culprits = self._culprits(view, staying, now) if failed else {}
        if all(node in culprits for node in well):
            culprits = {}  # nobody would be left to go on
        situation = ProposalInputs(
            proposal.ballot[0],
            {node: promise for node, promise in proposal.promises.items() if node in well},
            {node: answer for node, answer in proposal.abstained.items() if node in well},
            tuple(roster.joiners(view, now)),
            (*((self._us.node,) if self._stance.leaving else ()), *roster.leavers(view)),
            reaches | {self._us.node: roster.reaches()},
            {node: peer.status.epoch for node, peer in roster.peers.items()},
            failed,
            culprits,
            self._stance.needed(now),
            self._rules.quorum,
        )
        return successor(view, situation, self._us)


def _acceptance(proposal: Proposal, chosen: View) -> Accept:
    return Accept(proposal.ballot, proposal.present.lineage, proposal.present.epoch, chosen)
