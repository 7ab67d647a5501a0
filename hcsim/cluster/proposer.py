"""A node as a proposer of the next view: one proposal at a time, from the first question to the decision.

Members of the next view are those that answer the proposal and reach each other: two that do not cannot compute
together, and the junior one stays out. Where another cluster goes before ours, the next view is empty.

Pure: what it says goes out through `send`, which also brings our own answers back at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hcsim.cluster.agreement import Absence, Abstained, Accept, Accepted, Ballot, Prepare, Promise, Proposal, Refused
from hcsim.cluster.diagnosis import Diagnosis
from hcsim.cluster.messages import Decided, Message
from hcsim.cluster.roster import Roster
from hcsim.cluster.rules import PATIENCE_S, Rules
from hcsim.cluster.stance import Stance
from hcsim.cluster.succession import Situation, dissolved, orphaned, successor
from hcsim.cluster.view import Member, View

HOPELESS_S = PATIENCE_S / 2
"""How long a proposal waits for those that could not answer when they were last heard."""
GONE_FOR_GOOD = "; for one that is gone for good, and only then: hcsim cluster forget NAME"


class Post(Protocol):
    """Where messages go."""

    def __call__(self, to: str, message: Message, now: float) -> None:
        """Send a message to a node, which may be ourselves."""


class Proposer:
    """Our proposals."""

    def __init__(
        self, us: Member, rules: Rules, roster: Roster, stance: Stance, diagnosis: Diagnosis, send: Post
    ) -> None:
        self.rounds = {"decided": 0, "given_up": 0, "overtaken": 0}
        """How our proposals ended: overtaken is what another view made pointless."""
        self.look_at_s = 0.0
        """When to pursue the present one, whatever happens."""
        self.not_before_s = 0.0
        """When the next one may begin."""
        self._us = us
        self._rules = rules
        self._roster = roster
        self._stance = stance
        self._diagnosis = diagnosis
        self._send = send
        self._proposal: Proposal | None = None
        self._asked_s = 0.0
        self._deadline_s = 0.0
        """When the present one has waited long enough."""
        self._highest = 0

    @property
    def busy(self) -> bool:
        """Whether there is a proposal under way."""
        return self._proposal is not None

    def saw(self, ballot: Ballot) -> None:
        """Somebody uses that ballot: our next one is to be higher."""
        self._highest = max(self._highest, ballot[0])

    def propose(self, view: View, reason: str, now: float) -> None:
        """Seek the successor of the present view."""
        self._highest += 1
        proposal = Proposal((self._highest, self._us.node), view, self._rules.quorum, reason)
        self._proposal = proposal
        self._asked_s = now
        self._deadline_s = now + self._rules.answer_s
        for node in view.nodes:
            self._send(node, Prepare(proposal.ballot, view), now)

    def remind(self, node: str, now: float) -> None:
        """Repeat to a node what it may have missed."""
        proposal = self._proposal
        if proposal is not None and proposal.present.member(node) is not None:
            if proposal.chosen is not None and node in proposal.promises:
                self._send(node, _acceptance(proposal, proposal.chosen), now)
            else:
                self._send(node, Prepare(proposal.ballot, proposal.present), now)

    def answered(self, source: str, answer: Promise | Abstained | Accepted | Refused, now: float) -> View | None:
        """A member answered; the view that is decided by that, if one is."""
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
            for node in dict.fromkeys((*proposal.present.nodes, *proposal.chosen.nodes)):
                if node != self._us.node:
                    self._send(node, Decided(proposal.chosen), now)
            return proposal.chosen
        return None

    def pursue(self, now: float) -> str:
        """Go on: choose once everybody who is well has answered, and give up in time. Returns what we wait for.

        For one that is well and in no position to answer we do not wait long, or the others would take their turns; and
        not at all for those that the next view does without, if the others may decide."""
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
        """Whether all who have not answered keep the view from working, and the others may decide."""
        proposal = self._proposal
        assert proposal is not None
        view = proposal.present
        if not self._stance.failure(view):
            return False
        culprits = self._culprits(view, view.nodes, now)
        return all(node in culprits for node in silent) and not self._obstacle(proposal)

    def _culprits(self, view: View, nodes: Sequence[str], now: float) -> dict[str, str]:
        """Of these members those that keep the view from working, and why."""
        return self._diagnosis.culprits(view.lineage, view.epoch, nodes, now)

    def overtaken(self) -> None:
        """Another view has taken the place of the one that we spoke of."""
        self.rounds["overtaken"] += self._proposal is not None
        self._proposal = None
        self.not_before_s = 0.0

    def _obstacle(self, proposal: Proposal) -> str:
        """Why those who answered may not decide."""
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
        if self._stance.better(view) is not None:
            return dissolved(view, proposal.reason)
        reaches = {node: peer.status.reaches for node, peer in roster.peers.items()}
        answers: dict[str, Promise | Abstained] = {**proposal.promises, **proposal.abstained}
        reaches |= {node: answer.reaches for node, answer in answers.items()}
        well = [node for node in answers if roster.well(node, view)]
        failed = self._stance.failure(view)
        staying = [m.node for m in view.members if m.node in well and answers[m.node].us == m]
        silent = [node for node in self._culprits(view, view.nodes, now) if node not in answers] if failed else []
        staying = [node for node in view.nodes if node in staying or node in silent]
        situation = Situation(
            {node: promise for node, promise in proposal.promises.items() if node in well},
            {node: answer for node, answer in proposal.abstained.items() if node in well},
            tuple(roster.joiners(view, now)),
            (*((self._us.node,) if self._stance.leaving else ()), *roster.leavers(view)),
            reaches | {self._us.node: roster.reaches()},
            {node: peer.status.epoch for node, peer in roster.peers.items()},
            failed,
            self._culprits(view, staying, now) if failed else {},
            self._stance.needed(now),
            self._rules.quorum,
        )
        return successor(view, situation, self._us)


def _acceptance(proposal: Proposal, chosen: View) -> Accept:
    return Accept(proposal.ballot, proposal.present.lineage, proposal.present.epoch, chosen)
