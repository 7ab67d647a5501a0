"""Where a node stands: what it wishes, what failed for it, and why the view should change as far as it can see.

A view changes for one of these reasons, the first that there is:

    work failed in it (a broken link, a stuck peer)                   → the same members, a new epoch; without those
                                                                        that keep it from working (see `diagnosis`)
    a member is suspected, was started anew, or follows another view  → it is left out (and may ask again)
    a member would like to leave                                      → a view without it after the step under way
    a better cluster is near                                          → an empty view: all members ask there
    somebody would like to join                                       → a view with it after the step under way
    any may go on, and nobody is left to ask                          → the same members, and work begins again

Where any side of a split may go on, this holds: who see each other end with the same parameters, and sides out of each
other's sight each with their own. So the lesser side is given up (`View.standing`), where the other one can take its
members in: not while that is still in the view that ours branched from, whose size counts us, nor while it cannot
decide anything. A side that cannot decide joins those that went on without it. A lone machine that asks a cluster does
not end before it is let in or that cluster is gone, unless they cannot work with each other.
"""

from __future__ import annotations

import msgspec

from hcsim.cluster.diagnosis import Diagnosis
from hcsim.cluster.messages import Status
from hcsim.cluster.roster import Roster
from hcsim.cluster.rules import ASTRAY_S, Rules
from hcsim.cluster.view import Member, View


class Need(msgspec.Struct):
    """What a look at the view found."""

    reason: str = ""
    """Why it should change; empty: it need not."""
    delay_s: float = 0.0
    """How long that can wait."""
    look_at_s: float | None = None
    """When to look again, whatever happens."""
    waiting: str = ""
    """What a person should know meanwhile."""

    def look_again(self, at_s: float) -> None:
        """Look again then, or earlier."""
        self.look_at_s = at_s if self.look_at_s is None else min(self.look_at_s, at_s)


class Stance:
    """One node's wishes and troubles."""

    def __init__(self, us: Member, rules: Rules, roster: Roster, diagnosis: Diagnosis) -> None:
        self.leaving = False
        self.broken = -1
        """The epoch in which our work failed."""
        self.reason = ""
        """Why it failed."""
        self.waits = False
        """Whether our view had to change when we last tried, and those who were there could not decide how."""
        self.begun = False
        """Whether we have been in a view that might work, in this life."""
        self._deserted_since_s: float | None = None
        """Since when there is nobody in sight in such a view, nor are we."""
        self._us = us
        self._rules = rules
        self._roster = roster
        self._diagnosis = diagnosis
        self._asking_since_s: float | None = None

    def joins(self, view: View) -> str:
        """The lineage that we would like to be in."""
        if self.leaving:
            return ""
        if view.rank(self._us) is None:
            return view.lineage  # started anew: a member by our word, not by our memory
        better = self.better(view) if len(view.members) == 1 else None
        return "" if better is None else better.lineage

    def better(self, view: View) -> Status | None:
        """The cluster in sight that ours should give way to: not one that cannot change, if we may go on without it."""
        better = self._roster.better(view, waits=self.waits)
        vain = better is not None and better.waits and self.begun and self._rules.quorum == "any"
        return None if vain else better

    def fail(self, view: View, reason: str) -> bool:
        """Our work failed in the view; whether that is news."""
        news = self.broken < view.epoch
        if news:
            self.broken, self.reason = view.epoch, reason
        return news

    def failure(self, view: View) -> str:
        """Why work failed in the view, if it did for us or for another member."""
        return self.reason if self.broken == view.epoch else self._roster.complaint(view)

    def need(self, view: View, joins: str, now: float) -> Need:
        """Whether the view should change."""
        need = Need()
        if len(view.members) == 1 and joins not in ("", view.lineage):
            self._ask(view, need, now)
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
        need.reason = need.reason or self._departure(view) or self._desertion(view, need, now)
        if not need.reason and (joiners := self._roster.joiners(view, now)):
            need.reason = f"{', '.join(m.name for m in joiners)} would like to join"
            complete = len(view.members) + len(joiners) == self._rules.needed
            need.delay_s = 0.0 if complete else self._rules.settle_s
        return need

    def _ask(self, view: View, need: Need, now: float) -> None:
        """We would like to be in a cluster, and depend on it; a person should know if that takes long."""
        better = self.better(view)
        if self._asking_since_s is None:
            self._asking_since_s = now
        if now < self._asking_since_s + ASTRAY_S:
            need.look_again(self._asking_since_s + ASTRAY_S)
        elif better is not None:
            need.waiting = f"waiting to be taken in by the cluster of {better.us.name}"

    def _complaint_about(self, member: Member, need: Need, now: float) -> str:
        """Why a member cannot stay as it is."""
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

    def _departure(self, view: View) -> str:
        """Why we, or all of us, should be elsewhere."""
        if len(view.members) == 1:
            return ""
        if self.leaving:
            return f"{self._us.name} leaves"
        return "" if self.better(view) is None else "a cluster that goes before ours is near"

    def needed(self, now: float) -> int:
        """How many members work begins with, as we see it now."""
        return 1 if self._is_deserted(now) else self._rules.needed

    def _desertion(self, view: View, need: Need, now: float) -> str:
        """Whether to go on with who is here: where any side may, one that was left out may too, once it sees no cluster
        that it could ask."""
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
