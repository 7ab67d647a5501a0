"""Diagnosis of the members that keep a view from working while they answer heartbeats.

Heartbeats show that a process runs, not that its work makes progress. A member whose link carries 30 kb/s,
whose collectives' port is closed, whose device does not finish, or that violates the protocol, is alive, and
every view with it fails. Such a member is found and excluded from the next view. The members exchange what they
know of a failed view (`Findings`). The evidence, strongest first:

1.  Violations. A peer broke the protocol: the receiver accuses it. If a peer and another member, the witness,
have sent contradictory data, the receiver cannot tell which of them is wrong. If a member sent different votes
to different members, these run different operations and accuse each other: the sender of the votes is accused
instead (`VotesSeen`).
2.  Checks. After a timeout, and after two views in a row without a step, each member checks its own device and
the collectives' port of every other member (`hcsim.transport.groups`), and accuses those that fail. A member
that does not finish its checks in time counts as accusing itself. While a step takes much longer than usual,
members check each other without ending the view (`hcsim.training.elastic.recovery`).
    If steps were done, but much slower than usual, the time of a check is compared with what was measured on the route
to that member before, and the members compare their own work per step.
3.  Waiting, if a deadline passed. Each member reports the member it waited for. Such chains end at a member
that waits for none: it has not reached the operation. Three kinds of members are not blamed: one that came to
the view later than others, since it may have been at the last step of the view before; one that was still
measuring links, which takes long if another is slow to answer, and ends in time; and one whose last operation
ended well after the other began to wait, since its connection may have recovered. In the last case no member is
excluded.
4.  Elimination. If none of this identifies a member, members are excluded in turn until a view works.

An accusation is an edge between two members, or three with a witness, and either end may be at fault: a
machine with a broken network card accuses all others. So the excluded members are a smallest vertex cover of
the edges; among equal covers, one of accused rather than of accusers, and of juniors rather than of seniors.
Edges are kept until a view makes progress, so a member that fails with one peer after another is found
although each time only one pair knows. Only what a member found about itself is withdrawn once it passes its
own check: of two machines with a device that hung, one of them briefly, both would be at fault for good, and
neither excluded. A member that was excluded and since passed the checks with all others starts with no edges:
its former evidence was perhaps its own fault, and would exclude it along with the faulty members once it is
readmitted.

An excluded member is in quarantine, longer each time, and is then readmitted if it qualifies: see `Roster`.

This module does no I/O: findings in, excluded members out.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import TypeAlias

import msgspec

FINDINGS_S = 1.0
"""How long a member may take to report findings without checks: a report may show that checks are needed."""
CHECKS_S = 6.0
"""How long a member may take to report the results of its checks."""
FRUITLESS = 2
"""Consecutive views without a step after which members are checked, whatever the reason of the failure."""
ELIMINATE = 3
"""Consecutive views without a step after which members are excluded in turn."""
SLOWER = 4.0
"""The factor over the expected time of a step's work, or of a check, from which on a member is a straggler."""
_CAME_LATE_S = 1.0
"""A member came late to a view, or to an operation, if others had been in it this much longer when it
failed."""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_FEW = 12
"""The number of members up to which all subsets are compared; in a larger view the most accused are taken,
one by one."""
_Edge: TypeAlias = tuple[str, ...]
"""Members of which one is at fault: the accuser, the witness if there is one, and last the accused."""


class VotesSeen(msgspec.Struct, frozen=True):
    """The votes that a member received in the last voting round of a view, each directly from its voter."""

    round: int
    digests: Mapping[str, int]
    """The digest of each voter's vote, by node."""


class ViewFailure(msgspec.Struct, frozen=True):
    """How this node's work in a view ended."""

    reason: str
    violator: str = ""
    late: bool = False
    waited_for: str = ""
    progressed: bool = False
    """Whether a step was done since the last failure of a view."""
    stalled_s: float = 0.0
    """How long no step had been done, or steps had been slow."""
    slow: bool = False
    """Whether steps were done, but took much longer than usual."""
    work_s: float = 0.0
    """The time that this node itself computed and encoded for a step."""
    accusations: tuple[Accusation, ...] = ()
    """The results of checks before the failure."""
    votes_seen: VotesSeen | None = None
    standing_s: float = 0.0
    """How long the waiting operation had been in progress; if none waited, how long ago the last one ended."""


class Accusation(msgspec.Struct, frozen=True):
    """A finding that the accuser cannot work with a member."""

    node: str
    reason: str
    witness: str = ""
    """The member that told the accuser, if the accuser did not see it itself: then the witness may be at fault,
    too."""


class Findings(msgspec.Struct, frozen=True, tag="findings"):
    """A member's report to the others about a view in which its work failed."""

    lineage: str
    epoch: int
    fruitless: int = 0
    """Consecutive views without a step, including this one."""
    checking: bool = False
    """Whether members have to be checked before the next view."""
    checked: bool = False
    """Whether the accusations include the results of its own checks."""
    ended: bool = False
    """Whether its own work in the view has ended; otherwise it was only told that the others' has."""
    waited_for: str = ""
    slow: bool = False
    work_s: float = 0.0
    """The time that it computed and encoded itself for a step."""
    accusations: tuple[Accusation, ...] = ()
    lasted_s: float = 0.0
    """How long it had been in the view when it learned of the failure; 0: it had not begun, or was still
    measuring links."""
    late: bool = False
    votes_seen: VotesSeen | None = None
    standing_s: float = 0.0


class Diagnosis:
    """The evidence about the view in which work failed, and about earlier ones since the last step."""

    def __init__(self, us: str) -> None:
        self._us = us
        self.ours: Findings | None = None
        self.stalled_s = 0.0
        self._theirs: dict[str, Findings] = {}
        self._since_s: float | None = None
        self._fruitless = 0
        self._accusations: tuple[Accusation, ...] = ()
        self._began: tuple[int, float] | None = None
        """The epoch of the current view, and when work in it began."""
        self._surveyed = -1

    def qualified(self) -> None:
        """Drop all earlier evidence: this node passed the checks with all members of the view that it is to join."""
        self._fruitless, self._accusations = 0, ()

    def began(self, epoch: int, now: float) -> None:
        self._began = epoch, now

    def surveyed(self, epoch: int) -> None:
        self._surveyed = epoch

    def failed(self, lineage: str, epoch: int, failure: ViewFailure, now: float) -> bool:
        """Record that this node's work in that view failed; return whether its checks have to begin."""
        if failure.progressed:
            self._fruitless, self._accusations = 0, ()
        self._fruitless += 1
        if failure.violator:
            self._accuse([Accusation(failure.violator, failure.reason)])
        self._accuse(failure.accusations)
        self.stalled_s = failure.stalled_s
        checking = (failure.late and not failure.violator) or self._fruitless >= FRUITLESS
        told = Findings(
            lineage, epoch, self._fruitless, checking, ended=True, waited_for=failure.waited_for, slow=failure.slow,
            work_s=failure.work_s, late=failure.late, votes_seen=failure.votes_seen, standing_s=failure.standing_s,
        )  # fmt: skip
        return self._tell(told, now)

    def heard(self, source: str, findings: Findings, lineage: str, epoch: int, now: float) -> bool:
        """Record a member's findings; return whether this node's checks have to begin. The lineage and epoch are
        those of this node's view."""
        self._theirs[source] = findings
        if (findings.lineage, findings.epoch) != (lineage, epoch):
            return False
        return self._tell(Findings(lineage, epoch, findings.fruitless, findings.checking, slow=findings.slow), now)

    def _tell(self, news: Findings, now: float) -> bool:
        """Update this node's own findings; return whether its checks have to begin."""
        before = self.ours or Findings(news.lineage, news.epoch, lasted_s=self._lasted_s(news.epoch, now))
        self._noticed(now)
        checking = news.checking or before.checking
        self.ours = Findings(
            news.lineage,
            news.epoch,
            max(news.fruitless, before.fruitless),
            checking,
            before.checked if before.checking else not checking,
            news.ended or before.ended,
            news.waited_for or before.waited_for,
            news.slow or before.slow,
            news.work_s or before.work_s,
            self._accusations,
            before.lasted_s,
            news.late or before.late,
            news.votes_seen or before.votes_seen,
            news.standing_s or before.standing_s,
        )
        self._reconcile()
        return checking and not before.checking

    def _reconcile(self) -> None:
        """Accuse a member that sent different votes to this node and another, instead of members that acted on them."""
        assert self.ours is not None
        ours = self.ours.votes_seen
        for source, findings in self._theirs.items():
            theirs, of = findings.votes_seen, (findings.lineage, findings.epoch)
            if ours is None or theirs is None or of != (self.ours.lineage, self.ours.epoch):
                continue
            if ours.round != theirs.round:
                continue
            unlike = [node for node, digest in ours.digests.items() if theirs.digests.get(node, digest) != digest]
            if unlike:
                self._accusations = tuple(each for each in self._accusations if each.node != source or each.witness)
                why = "it did not send all others the same vote"
                self._accuse(Accusation(node, why, "" if node == source else source) for node in unlike)
        self.ours = msgspec.structs.replace(self.ours, accusations=self._accusations)

    def _lasted_s(self, epoch: int, now: float) -> float:
        began, since_s = self._began or (-1, now)
        return now - since_s if began == self._surveyed == epoch else 0.0

    def _noticed(self, now: float) -> None:
        if self._since_s is None:
            self._since_s = now

    def checked(self, epoch: int, accusations: Iterable[Accusation]) -> bool:
        """Record the results of this node's checks; return whether they are news."""
        if self.ours is None or self.ours.epoch != epoch or self.ours.checked:
            return False
        self._accusations = tuple(each for each in self._accusations if each.node != self._us or each.witness)
        self._accuse(accusations)
        self.ours = msgspec.structs.replace(self.ours, checked=True, accusations=self._accusations)
        return True

    @property
    def is_slow(self) -> bool:
        return self.ours is not None and self.ours.slow

    @property
    def pause_s(self) -> float:
        """Return how long to wait for the next view: longer for each view without progress."""
        if self.ours is None or self.ours.fruitless < FRUITLESS:
            return 0.0
        return min(_FIRST_PAUSE_S * 2.0 ** (self.ours.fruitless - FRUITLESS), _LONGEST_PAUSE_S)

    def pending_until_s(self, lineage: str, epoch: int, nodes: Sequence[str], now: float) -> float | None:
        """Return the deadline for the findings of these members of a failed view; None if all have reported."""
        self._noticed(now)
        assert self._since_s is not None
        known = self._known(lineage, epoch, nodes)
        if self._unchecked(lineage, epoch, nodes):
            return self._since_s + CHECKS_S
        ended = sum(findings.ended for findings in known.values())
        return self._since_s + FINDINGS_S if ended < len(nodes) else None

    def culprits(self, lineage: str, epoch: int, nodes: Sequence[str], now: float) -> dict[str, str]:
        """Return the members of that view to exclude from the next one, with reasons; `nodes` is ordered by rank."""
        if self.ours is None or (self.ours.lineage, self.ours.epoch) != (lineage, epoch) or len(nodes) < 2:
            return {}
        known = self._known(lineage, epoch, nodes)
        edges: dict[_Edge, str] = {}
        for teller, findings in known.items():
            for each in findings.accusations:
                if each.node in nodes:
                    edges[(*dict.fromkeys((teller, each.witness or teller)), each.node)] = each.reason
        unchecked = self._unchecked(lineage, epoch, nodes)
        if unchecked and self._since_s is not None and now >= self._since_s + CHECKS_S:
            edges |= {(node, node): f"it did not finish its checks within {CHECKS_S:g} s" for node in unchecked}
        if any(findings.slow for findings in known.values()):
            edges |= _slowest(known)
        if not edges and not unchecked and any(findings.checking for findings in known.values()):
            edges = _waits(known) or _eliminated(known, nodes)
        covered = _smallest_cover([*edges], nodes)
        return {node: _told(node, edges) for node in covered} if len(covered) < len(nodes) else {}

    def entered(self) -> None:
        """Start a new view: further findings belong to it. Edges stay until there is progress."""
        self.ours, self._since_s = None, None
        self._theirs.clear()

    def _accuse(self, accusations: Iterable[Accusation]) -> None:
        by_pair = {(each.witness, each.node): each for each in (*self._accusations, *accusations)}
        self._accusations = tuple(by_pair.values())

    def _known(self, lineage: str, epoch: int, nodes: Sequence[str]) -> dict[str, Findings]:
        told = {**self._theirs, **({self._us: self.ours} if self.ours is not None else {})}
        return {
            node: told[node]
            for node in nodes
            if node in told and (told[node].lineage, told[node].epoch) == (lineage, epoch)
        }

    def _unchecked(self, lineage: str, epoch: int, nodes: Sequence[str]) -> list[str]:
        known = self._known(lineage, epoch, nodes)
        if not any(findings.checking for findings in known.values()):
            return []
        return [node for node in nodes if node not in known or not known[node].checked]


def _slowest(known: Mapping[str, Findings]) -> dict[_Edge, str]:
    """Return the stragglers: members whose own work for a step takes much longer than that of the others."""
    edges: dict[_Edge, str] = {}
    for node, findings in known.items():
        others_s = [other.work_s for other_node, other in known.items() if other_node != node and other.work_s]
        if others_s and findings.work_s > SLOWER * (median_s := statistics.median(others_s)):
            edges[node, node] = f"it works {findings.work_s:.3g} s for a step, and the others {median_s:.3g} s"
    return edges


def _waits(known: Mapping[str, Findings]) -> dict[_Edge, str]:
    """Return the ends of the chains of waiting: members that wait for none and had as much time as the others."""
    if not any(findings.late for findings in known.values()):
        return {}  # nobody has waited long
    longest_s = max(findings.lasted_s for findings in known.values())
    ends = [
        node
        for node, findings in known.items()
        if not findings.waited_for and findings.lasted_s > longest_s - _CAME_LATE_S
    ]
    return {
        (node, findings.waited_for): "the others waited for it, and it waited for nobody"
        for node, findings in known.items()
        if findings.waited_for in ends and not _was_held_up(known[findings.waited_for], findings.standing_s)
    }


def _was_held_up(findings: Findings, waited_s: float) -> bool:
    """Return whether a member was still in the previous operation when another one began to wait for it."""
    return findings.ended and findings.standing_s < waited_s - _CAME_LATE_S


def _eliminated(known: Mapping[str, Findings], nodes: Sequence[str]) -> dict[_Edge, str]:
    """Return the member to exclude in turn: first those that most members waited for, then juniors."""
    fruitless = max(findings.fruitless for findings in known.values())
    if fruitless < ELIMINATE:
        return {}
    waited = Counter(findings.waited_for for findings in known.values())
    order = sorted(nodes, key=lambda node: (-waited[node], -nodes.index(node)))
    chosen = order[(fruitless - ELIMINATE) % len(order)]
    return {(chosen, chosen): f"{fruitless} views in a row came to nothing: the others try without it"}


def _smallest_cover(edges: Sequence[_Edge], nodes: Sequence[str]) -> tuple[str, ...]:
    """Return a smallest set of nodes that covers every edge; the module docstring explains how ties are broken."""
    accused = Counter(edge[-1] for edge in edges)
    order = sorted(nodes, key=lambda node: (-accused[node], -nodes.index(node)))
    if len(nodes) <= _FEW:
        for size in range(len(nodes) + 1):
            for chosen in combinations(order, size):
                if all(any(node in chosen for node in edge) for edge in edges):
                    return chosen
    chosen_: list[str] = []
    left = list(edges)
    while left:
        degree = Counter(node for edge in left for node in dict.fromkeys(edge))
        worst = max(order, key=lambda node: degree[node])
        chosen_.append(worst)
        left = [edge for edge in left if worst not in edge]
    return tuple(chosen_)


def _told(node: str, edges: Mapping[_Edge, str]) -> str:
    """Return why a member is excluded: what was found about it, or else what it found about all others."""
    about = [reason for edge, reason in edges.items() if edge[-1] == node]
    return next(iter(about), "it cannot work with the others, and they can with each other")
