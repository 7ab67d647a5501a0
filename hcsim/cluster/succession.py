"""Which view should follow the present one, once its members have answered."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from hcsim.cluster.agreement import Abstained, Promise
from hcsim.cluster.view import Member, Quorum, View, branch, enough


class Situation(msgspec.Struct, frozen=True):
    """What the proposer knows."""

    promises: Mapping[str, Promise]
    """Who answered, by node; only those that are well."""
    abstained: Mapping[str, Abstained]
    """Who answered without a vote."""
    joiners: tuple[Member, ...]
    leavers: tuple[str, ...]
    reaches: Mapping[str, tuple[str, ...]]
    """Who has a living connection to whom."""
    epochs: Mapping[str, int]
    """How far each node has come, in whatever lineage."""
    failed: str
    """Why work failed in the view, if it did."""
    culprits: Mapping[str, str]
    """Members that kept it from working, and how."""
    needed: int
    quorum: Quorum


def successor(view: View, now: Situation, proposer: Member) -> View | None:
    """The next view; None where nothing would change.

    Members keep their order, so ranks are stable and seniority holds; newcomers follow by node id. Two that do not
    reach each other cannot compute together: the later one stays out."""
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
        lineage_of(view, [*now.promises], now.quorum, epoch, proposer),
        epoch,
        tuple(chosen),
        previous=view.epoch,
        formed=formed,
        abrupt=bool(lost or now.failed),
        left=now.leavers,
        reason=_told(view, now, lost, newcomers) or f"{proposer.name} proposed it",
    )


def dissolved(view: View, reason: str) -> View:
    """The end of a lineage: its members are free to join another."""
    return View(view.lineage, view.epoch + 1, (), view.epoch, reason=reason)


def lineage_of(view: View, deciders: list[str], rule: Quorum, epoch: int, proposer: Member) -> str:
    """The same line, unless two sides may go on at once: then each has its own."""
    if rule != "any" or enough(view, deciders, "tiebreak"):
        return view.lineage
    return branch(view, epoch, proposer)


def orphaned(view: View, answers: Mapping[str, Promise | Abstained], gone: tuple[str, ...]) -> str:
    """Which member's memory a formed cluster has to wait for: without it, what was learned would be lost.

    Empty when somebody who answered still has it, or when nobody of the view can have it any more."""
    if not view.formed or any(answers[m.node].us == m for m in view.members if m.node in answers):
        return ""
    absent = [m.name for m in view.members if m.node not in answers and m.node not in gone]
    return ", ".join(absent)


def _mutual(now: Situation, one: str, other: str) -> bool:
    return other in now.reaches.get(one, ()) and one in now.reaches.get(other, ())


def _told(view: View, now: Situation, lost: list[str], newcomers: list[Member]) -> str:
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
