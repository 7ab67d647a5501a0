"""The two phases of a run: in the first anything may fail, in the second enough machines are well for good.

The schedule and the trace of its run determine what may be required of a cluster, so a file of faults is all
that a replay needs.

**Safety.** Until the last fault has struck and the last temporary one has ended, any fault of the model may
occur. Safety must hold: no two views of one epoch, no unlike replicas, no lost or doubled step. Progress is
not required.

**Liveness.** From then on nothing changes any more: what is broken now is broken for good. `breaks` returns
the nodes that each such fault breaks: a machine that is stuck, full, blocked or lying; of two that cannot
communicate, either. A smallest set of nodes with one of each of these pairs is called *sick*, and the
others are the *core*. Each machine of the core works fully, with disk and descriptors, and every two reach
each other. If several sets are as small, the cluster may decide which machines are sick: where all of the core
were left out of the lineage in which work has begun, and the whole core of another such set goes on there, this
other one is required to finish (`settled`). Those left out ask its members, and do not begin anew beside them.
Whether the core can go on without the sick depends on the views of that moment, so it is read from the trace
(`excuse`):

    quorum      A view decides its successor. So in the newest view of a lineage, those members of the core that have
                not lost their memory must satisfy the rule (majority: more than half; tiebreak: or half with the
                leader; any: one). The sick members may vote too, but need not.
    the model   One member of the core has it in memory, or no sick member of that view may still have it.
    forming     Work begins with `nodes` members at once. So either it has begun in a lineage with a member of the
                core, or the core has that many. If all of the core were left out of that lineage, only its members
                can admit them again; that may happen as the last fault is detected.
    ending      A machine that has finished is gone for one that starts later. It is also gone for one that was
                broken until then, if it has waited as long as members do at the end: it cannot know that a fault
                will end. A machine is gone, too, if it has ended because replicas differ, as they may where a
                machine sends noise.
    strategy    Any member of a view may be its first, which has the parameter server, and the standby is the
                second. All of the core can be either, so no strategy needs anything further.

A fault of one frame strikes when there is such a frame, which may be long after its time. If that is after
the last step, a machine that misses the final model because of it may find the others gone: nothing is
required then.

If these conditions hold, training must finish on all machines of the core that no lasting fault touches,
and on at least one machine. One is enough if a sick machine finished: it can work with some members, and
those that it cannot work with were left out instead of it, since two that cannot work together look alike.
If the core is a single machine, any machine is enough, for the same reason. Otherwise the run is *excused*
from liveness: members wait, and safety must still hold.

Where any side of a split may go on (`quorum = "any"`, see docs/howto/cluster.md), machines of the core must
end with the same parameters if they end after that moment and without a sick machine in their last view:
they see each other, so they are one cluster or ask to be. A machine that ended earlier, or with a machine
that others do not reach, may hold parameters of its own. With another quorum a lineage has one side that goes
on, and machines that end in it end alike. But machines that begin alone are lineages of their own until they
are admitted, and one that cannot work with a sick member of the others' view is not.

The time limit follows from the configuration. Each admission of a live sick member costs a view: until a
deadline passes (`timeout`, or the heartbeats'), until all members have reported the results of their
checks, and until the next view begins. Three such rounds are enough for the pair that cannot work together,
for the check, and for leaving one out in turn (`cluster.diagnosis`). Then it is in quarantine, and its
return costs the same once more; several sick members may come back one after the other. So at most
`patience_s` seconds pass between two steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations
from typing import TypeAlias

import msgspec

from hcsim.cluster.diagnosis import CHECKS_S, FINDINGS_S
from hcsim.cluster.membership_source import LAST_CALL_S
from hcsim.cluster.view import ASTRAY_S, DEPARTED_S, PATIENCE_S, Quorum
from hcsim.config import (
    AnyFault,
    Cluster,
    CopiedIdentity,
    Crash,
    Datagrams,
    Leave,
    LinkChange,
    Misbehave,
    Partition,
    Pause,
    Restart,
    RouterReboot,
    Scenario,
    Stranger,
    Training,
)

ROUNDS = 3
"""The number of views that a sick member may break before it is left out."""
GRACE_S = 5.0
"""A view may be decided as the last fault strikes, and become known slightly later."""
BENIGN_LOSS, BENIGN_DELAY_S, BENIGN_LATENCY_S, BENIGN_RATE_BPS = 0.5, 2.0, 0.05, 1e7
"""Lasting impairments of a network under which members still find each other and train."""

Broken: TypeAlias = tuple[str, ...]
"""Nodes of which at least one cannot be in the core. Empty: there is no core at all."""


class Phases(msgspec.Struct, frozen=True):
    """What may be required of a run, and from what time on."""

    liveness_s: float
    """The time after which nothing changes any more."""
    sick: tuple[str, ...]
    core: tuple[str, ...]
    untouched: tuple[str, ...]
    """Members of the core that no lasting fault concerns."""
    patience_s: float
    """The longest time without a step in the liveness phase."""


def phases_of(scenario: Scenario, at_work: Collection[str] = ()) -> Phases:
    """Return the phases of a schedule. If these machines at work are the core of one of the smallest sets of sick
    ones, it is this set."""
    names = [node.name for node in scenario.nodes]
    edges = list(_breakages(scenario.faults))
    covers = _smallest_covers(edges, names)
    sick = next((each for each in covers if {*names} - {*each} == {*at_work}), covers[0])
    core = tuple(name for name in names if name not in sick) if () not in edges else ()
    touched = {name for edge in edges for name in edge}
    return Phases(
        max((fault.over_s for fault in scenario.faults), default=0.0),
        tuple(name for name in names if name not in core),
        core,
        tuple(name for name in core if name not in touched),
        patience_s(scenario.cluster or Cluster(), scenario.training or Training(), max(1, len(names) - len(core))),
    )


def patience_s(cluster: Cluster, training: Training, sick: int) -> float:
    """Return the time limit of the core from one step to the next, with this number of sick members."""
    notice_s = max(training.timeout_s, cluster.beat.timeout_s)
    next_view_s = CHECKS_S + FINDINGS_S + ASTRAY_S + DEPARTED_S + 4 * PATIENCE_S + cluster.connection_timeout_s
    return ROUNDS * (1 + sick) * (notice_s + next_view_s)


def breaks(fault: AnyFault) -> list[Broken]:
    """Return what the fault alone breaks for good: see the module's documentation."""
    if isinstance(fault, Crash | Leave):
        return [(fault.node,)]
    if not fault.is_for_good or isinstance(fault, Stranger):  # who has to do without effect
        return []
    if isinstance(fault, Partition):
        return [(one, other) for one in fault.sides[0] for other in fault.sides[1]]
    if isinstance(fault, Datagrams):
        return [] if fault.loss <= BENIGN_LOSS and fault.delay_s <= BENIGN_DELAY_S else [()]
    if isinstance(fault, RouterReboot) or (isinstance(fault, LinkChange) and fault.node is None):
        return [] if isinstance(fault, LinkChange) and _is_benign(fault) else [()]
    if isinstance(fault, Misbehave) and fault.how == "lie":
        return [()]  # views are agreed among members that may fail, and do not lie: see `cluster.agreement`
    pair: tuple[str, str] | None = getattr(fault, "between", None)
    node: str | None = getattr(fault, "node", None)
    return [pair] if pair is not None else [(node,)] if node is not None else [()]


def _is_benign(fault: LinkChange) -> bool:
    slow = fault.rate_bps is not None and fault.rate_bps < BENIGN_RATE_BPS
    return not slow and (fault.latency_s or 0.0) <= BENIGN_LATENCY_S and (fault.loss or 0.0) <= BENIGN_LOSS / 10


def _breakages(faults: Sequence[AnyFault]) -> Iterator[Broken]:
    for fault in faults:
        if not (isinstance(fault, Crash | Leave) and _starts_again(fault, faults)):
            yield from breaks(fault)


def _starts_again(fault: Crash | Leave | Pause, faults: Sequence[AnyFault]) -> bool:
    return any(
        isinstance(other, Restart | CopiedIdentity) and other.node == fault.node and other.at_s >= fault.at_s
        for other in faults
    )


def _smallest_covers(edges: Sequence[Broken], names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the smallest sets of nodes with one of each edge, first those whose nodes occur in the most edges."""
    degree = {name: sum(name in edge for edge in edges) for name in names}
    order = sorted(names, key=lambda name: -degree[name])
    sizes = (
        [
            chosen
            for chosen in combinations(order, size)
            if all(not edge or any(name in chosen for name in edge) for edge in edges)
        ]
        for size in range(len(names) + 1)
    )
    return next(filter(None, sizes), [tuple(names)])


class ViewAdoption(msgspec.Struct, frozen=True):
    """The adoption of a view by a host."""

    time_s: float
    host: str
    lineage: str
    epoch: int
    members: tuple[str, ...]
    """The members' names, by rank."""


class WorkStart(msgspec.Struct, frozen=True):
    """The beginning of a host's work in a view."""

    time_s: float
    host: str
    epoch: int


class HostHistories(msgspec.Struct, frozen=True):
    """The records of the hosts' lives in the trace."""

    views: Sequence[ViewAdoption]
    """In the order of time."""
    worked: Sequence[WorkStart]
    """In the order of time."""
    started_s: Mapping[str, float]
    """The time of each host's last restart."""
    forgot_s: Mapping[str, float]
    """The time of each host's last loss of its memory on disk."""
    ended_s: Mapping[str, float] = {}
    """The time at which each host last finished, or left before the end."""
    diverged: Sequence[str] = ()
    """Hosts that ended because replicas differ, as they may where a machine sends noise."""
    done_s: float = float("inf")
    """The time at which a host first finished the last step."""
    struck_s: float = 0.0
    """The time of the last fault that had waited for a frame."""


def settled(phases: Phases, scenario: Scenario, lives: HostHistories) -> Phases:
    """Return the phases with those sick machines that the cluster has left out, where others are as few and all of
    the core was left out instead."""
    until_s = phases.liveness_s + GRACE_S
    ours, _ = _known(lives.views, phases.core, until_s)
    if any(_has_begun(lineage, lives, until_s) for lineage in ours.values()):
        return phases
    begun = [(work.host, work.epoch) for work in lives.worked if work.time_s <= until_s][-1:]
    at_work = [name for view in lives.views if (view.host, view.epoch) in begun for name in view.members]
    return phases_of(scenario, at_work)


def excuse(phases: Phases, cluster: Cluster, lives: HostHistories) -> str:
    """Return why the core need not finish, given the views of the moment; empty: it must."""
    phases = _without_those_who_ended(phases, lives)
    if not phases.core:
        return "nothing is left that could go on"
    if lives.struck_s > max(phases.liveness_s, lives.done_s):
        return "a fault has waited until after the last step"
    has_begun = False
    for until_s in (phases.liveness_s, phases.liveness_s + GRACE_S):
        ours, newest = _known(lives.views, phases.core, until_s)
        has_begun = any(_has_begun(lineage, lives, until_s) for lineage in ours.values())
        for lineage in dict.fromkeys(ours.values()):
            view = newest[lineage]
            voters = [name for name in phases.core if _knows(name, view, lives, until_s)]
            if not _enough(view.members, voters, cluster.quorum):
                return f"of the view {view.epoch} of {', '.join(view.members)} too few are in the core"
            if missing := _owners_of_the_model(view, phases, lives, until_s):
                return f"only {', '.join(missing)} may still have the model"
    if not has_begun and cluster.needed > len(phases.core):
        return f"work has not begun where the core is, and {cluster.needed} machines are needed for that"
    return ""


def _without_those_who_ended(phases: Phases, lives: HostHistories) -> Phases:
    """Return the phases without machines of the core that ended because replicas differ, or that had finished
    before another one of it was last started, or before the liveness phase although they waited after the last
    step."""
    last_s = max((lives.started_s.get(name, 0.0) for name in phases.core), default=0.0)
    done = [n for n in phases.core if lives.started_s.get(n, 0.0) < lives.ended_s.get(n, last_s) < last_s]
    waited = [n for n in phases.core if lives.done_s + LAST_CALL_S <= lives.ended_s.get(n, 0.0) < phases.liveness_s]
    if len(waited) < len(phases.core):
        done += waited
    core = tuple(name for name in phases.core if name not in (*done, *lives.diverged))
    ended = [name for name in phases.core if name not in core]
    return msgspec.structs.replace(phases, core=core, sick=(*phases.sick, *ended))


def _has_begun(lineage: str, lives: HostHistories, until_s: float) -> bool:
    """Return whether any host has worked in this lineage, or in one that it branched from."""
    lineages = {(view.host, view.epoch): view.lineage for view in lives.views}
    return any(
        f"{lineage}/".startswith(f"{lineages[work.host, work.epoch]}/")
        for work in lives.worked
        if work.time_s <= until_s
    )


def _knows(host: str, view: ViewAdoption, lives: HostHistories, until_s: float) -> bool:
    """Return whether the host's disk still has its promises as a member of that view."""
    forgot_s = lives.forgot_s.get(host)
    return forgot_s is None or any(
        each.host == host and (each.lineage, each.epoch) == (view.lineage, view.epoch)
        for each in lives.views
        if forgot_s < each.time_s <= until_s
    )


def _owners_of_the_model(view: ViewAdoption, phases: Phases, lives: HostHistories, until_s: float) -> list[str]:
    """Return the sick members of a view that are needed because no member of the core has the model in memory."""
    until = [work for work in lives.worked if work.time_s <= until_s]
    has_it = [work.host for work in until if work.time_s >= lives.started_s.get(work.host, 0.0)]
    worked = [work.host for work in until]
    if not worked or any(name in has_it for name in view.members if name in phases.core):
        return []
    return [name for name in view.members if name in phases.sick and name in worked]


def _known(
    views: Sequence[ViewAdoption], core: Sequence[str], until_s: float
) -> tuple[Mapping[str, str], Mapping[str, ViewAdoption]]:
    """Return, by host of the core, its lineage at that time; and by lineage, the newest view that any of them
    knew."""
    ours: dict[str, str] = {}
    newest: dict[str, ViewAdoption] = {}
    for view in views:
        if view.time_s > until_s:
            break
        if view.host in core:
            ours[view.host] = view.lineage
        if view.lineage not in newest or view.epoch > newest[view.lineage].epoch:
            newest[view.lineage] = view
    return ours, newest


def _enough(members: Sequence[str], able: Sequence[str], rule: Quorum) -> bool:
    count = sum(name in able for name in members)
    if rule == "any":
        return count > 0 or not members
    if rule == "tiebreak" and 2 * count == len(members):
        return not members or members[0] in able
    return 2 * count > len(members)
