"""The invariants, as checks of the evidence of a run. Each yields a description of every violation.

There are two groups: safety, which must hold whatever goes wrong; and liveness, which must hold in the
liveness phase of a run whose core can go on (see `phases`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from hcsim.cluster.view import DEPARTED_S
from hcsim.config import (
    AnyFault,
    BlockedPort,
    CablePulled,
    Crash,
    FullDisk,
    Lid,
    Misbehave,
    Pause,
    Restart,
    StuckDevice,
)
from hcsim.errors import HcsimError
from hcsim.fuzz.evidence import Evidence, StepRecord, forgotten_s
from hcsim.fuzz.phases import GRACE_S
from hcsim.telemetry.trace import Event
from hcsim.training.run import Report
from hcsim.training.tasks.convex import SLOPES_LR, expected_slopes
from hcsim.virtual.world import HostCrashed

_BITS_AWAY = 1e-3
"""The limit of the accumulated rounding error."""


class Breach(msgspec.Struct, frozen=True):
    """A violation of an invariant."""

    invariant: str
    what: str


def breaches(evidence: Evidence) -> list[Breach]:
    return [Breach(check.__name__, what) for check in INVARIANTS for what in check(evidence)]


# Safety: what must never happen.


def one_view_per_epoch(evidence: Evidence) -> Iterator[str]:
    """Each epoch of a lineage has at most one view, and so one leader. Each view has at most one successor.

    This does not hold where a disk was rolled back, or where a member lies about views: see
    `cluster.agreement`."""
    faults = evidence.scenario.faults
    if any(isinstance(fault, Restart) and fault.state == "stale" for fault in faults):
        return
    if _lies(evidence):
        return
    views: dict[tuple[object, ...], object] = {}
    for _, _, host, lineage, epoch, previous, members in evidence.of_kind("view", 4):
        if views.setdefault((lineage, epoch), members) != members:
            yield f"{host} has {members} in epoch {epoch}, others have {views[lineage, epoch]}"
        after = (lineage, "after", previous)
        if "," in str(members) and views.setdefault(after, epoch) != epoch:
            yield f"{host} has epoch {epoch} after {previous}, others have {views[after]}"


def _lies(evidence: Evidence) -> bool:
    return any(isinstance(fault, Misbehave) and fault.how == "lie" for fault in evidence.scenario.faults)


def epochs_never_go_back(evidence: Evidence) -> Iterator[str]:
    """A host's epoch never decreases, even after a restart. Excepted are hosts that have lost their memory, or
    could not write their epoch to disk: these had no vote, and join the others where they are."""
    forgetful = {*forgotten_s(evidence.scenario)}
    forgetful |= {fault.node for fault in evidence.scenario.faults if isinstance(fault, FullDisk)}
    newest: dict[object, int] = {}
    for _, _, host, _, epoch, _, _ in evidence.of_kind("view", 4):
        if host in forgetful:
            continue
        if int(epoch) <= newest.get(host, -1):
            yield f"{host} went from epoch {newest[host]} to {epoch}"
        newest[host] = int(epoch)


def replicas_are_alike(evidence: Evidence) -> Iterator[str]:
    """All members that vote on a step in an epoch hold the same model."""
    prints: dict[tuple[object, ...], tuple[object, object]] = {}
    for _, _, host, lineage, epoch, step, fingerprint in evidence.of_kind("voted", 4):
        first = prints.setdefault((lineage, epoch, step), (host, fingerprint))
        if first[1] != fingerprint:
            yield f"{host} and {first[0]} differ before step {step} in epoch {epoch}"


def steps_are_applied_in_order(evidence: Evidence) -> Iterator[str]:
    """A host applies each step once, starting where it was last synchronised with the others."""
    one_by_one = evidence.training.strategy == "ddp"
    at: dict[object, int] = {}
    for event in evidence.events:
        if event[1] == "synchronised":
            at[event[2]] = int(event[4])
        elif event[1] == "applied":
            host, step = event[2], int(event[4])
            if step <= at.get(host, 0) or (one_by_one and step != at.get(host, 0) + 1):
                yield f"{host} applied step {step} after step {at.get(host, 0)}"
            at[host] = step


def nothing_is_lost_or_doubled(evidence: Evidence) -> Iterator[str]:
    """The parameters are the sum of exactly the participants' contributions, each once per step, less the
    residuals of their error feedback.

    This is checked only where gradients are averaged unchanged or with error feedback, and one lineage did all
    the work. When two lineages meet, the steps of one of them are given up, and the trace does not tell which.
    A lost member's residual is lost with it, so with error feedback no member may have been lost."""
    if not evidence.exact or not evidence.parameters:
        return
    way = _way(evidence)
    if way is None or (evidence.training.compressor != "none" and _something_owed_was_lost(evidence, way)):
        return
    sizes = [stretch.members for stretch in way for _ in range(stretch.steps)]
    batch = evidence.training.batch
    assert isinstance(batch, int)
    residual = np.sum([*evidence.residuals.values()], axis=0, dtype=np.float64)
    want = expected_slopes(evidence.scenario.seed, [batch * members for members in sizes]) + SLOPES_LR * residual
    for host, parameters in evidence.parameters.items():
        away = float(np.abs(parameters - want).max())
        if not away <= _BITS_AWAY:
            yield f"{host} is {away:.3g} away from the sum of what its members computed"


LEAVES_S = 5.0
"""The longest time between a member's report that it has left and the view without it."""


def _something_owed_was_lost(evidence: Evidence, way: Sequence[ViewSteps]) -> bool:
    """Return whether a member's residual may be lost. This is so if a member was left out or restarted, if it left
    while its group failed, or if a whole view's work was given up because the others went on from an earlier
    one.

    A member is one life of a host. A crashed life loses its residual, even if the host's next life soon leaves
    in order."""
    counted = {stretch.epoch for stretch in way}
    if any(int(event[3]) not in counted for event in evidence.events if event[1] == "applied"):
        return True
    members: dict[tuple[object, object], tuple[str, ...]] = {}
    failed = [(int(event[0]) / 1e9, event[2]) for event in evidence.events if event[1] == "group failed"]
    left = _lives_that_left(evidence)
    for time_ns, _, _, lineage, epoch, previous, names in evidence.of_kind("view", 4):
        now = members[lineage, epoch] = tuple(str(names).split(","))
        time_s = int(time_ns) / 1e9
        for member in [name for name in members.get((lineage, previous), ()) if name not in now]:
            left_s = [at_s for at_s, life in left if life == member and abs(at_s - time_s) < LEAVES_S]
            host = member.partition("#")[0]
            if not left_s or any(who == host and abs(at_s - time_s) < LEAVES_S for at_s, who in failed):
                return True
    return any(host not in evidence.residuals for host in evidence.names)


def _lives_that_left(evidence: Evidence) -> list[tuple[float, str]]:
    """Return when each life of a host finished or left. A life is named as in the last view in which the host had
    worked."""
    names: dict[tuple[object, object], tuple[str, ...]] = {}
    worked: dict[str, list[tuple[float, str]]] = {}
    for event in evidence.events:
        if event[1] == "view":
            names[event[2], event[4]] = tuple(str(event[6]).split(","))
        elif event[1] == "follows":
            life = names[event[2], event[3]][int(event[4])]
            worked.setdefault(str(event[2]), []).append((int(event[0]) / 1e9, life))
    return [(at_s, [life for began_s, life in worked[host] if began_s <= at_s][-1]) for at_s, host in evidence.left]


class ViewSteps(msgspec.Struct, frozen=True):
    """Consecutive steps in one view."""

    epoch: int
    members: int
    steps: int


def _way(evidence: Evidence) -> list[ViewSteps] | None:
    """Return the steps that count: those of the newest view that did any, and those of its predecessors before it.
    Return None if several lineages did steps, or if the predecessors lead through another lineage."""
    lineages = {(event[2], event[4]): event[3] for event in evidence.events if event[1] == "view"}
    worked = dict.fromkeys(lineages[event[2], event[3]] for event in evidence.events if event[1] == "applied")
    if len(worked) > 1:
        return None
    of_it = [event for event in evidence.events if lineages.get((event[2], event[3])) in worked or event[1] == "fault"]
    sizes = {int(event[3]): int(event[5]) for event in of_it if event[1] == "follows"}
    began = _beginnings(of_it)
    done = [(int(event[3]), int(event[4])) for event in of_it if event[1] == "applied"]
    epoch, steps = max(done, default=(-1, 0))
    way: list[ViewSteps] = []
    while epoch in began:
        step, before = began[epoch]
        way.insert(0, ViewSteps(epoch, sizes[epoch], steps - step))
        epoch, steps = before, step
    return way if epoch < 0 else None


def _beginnings(events: Sequence[Event]) -> dict[int, tuple[int, int]]:
    """Return, by epoch, the number of steps at which its view began, and the epoch that last held that state (-1:
    none).

    If all members have lost their memory, that state may be an old checkpoint. But a step that a member did in
    its present life is in its memory: it counts, whatever the members of the view report."""
    began: dict[int, tuple[int, int]] = {}
    holds: dict[str, int] = {}
    """By host, the epoch of the last step in its present life."""
    for event in events:
        host = str(event[2])
        if event[1:3] == ("fault", "start"):
            holds.pop(str(event[3]).partition(" ")[0], None)
        elif event[1] == "applied":
            holds[host] = int(event[3])
        elif event[1] == "synchronised":
            epoch, step, before = map(int, event[3:])
            began[epoch] = step, max(before, holds.get(host, -1), began.get(epoch, (step, -1))[1])
    return began


def errors_are_ours(evidence: Evidence) -> Iterator[str]:
    """A machine that cannot go on reports the reason. None ends with a Python error of another library, and no
    task's error goes unretrieved."""
    for host, result in evidence.results.items():
        if isinstance(result, BaseException) and not isinstance(result, HcsimError) and not _was_stopped(result):
            yield f"{host} ended with {result!r}"
    for text in evidence.lost:
        yield f"nobody looked at: {text}"


def _was_stopped(result: BaseException) -> bool:
    return isinstance(result, TimeoutError) and not str(result)


# Messages.


_TOLD_VIEW = re.compile(r"view (\d+): ([^()]*) \((.*)\)", re.DOTALL)


_ABOUT_VIEW = re.compile(r"view \d+: ")


_LEFT_OUT = re.compile(r"\b([\w-]+) is left out\b")


def _names(text: str, machine: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(machine)}(?![\w-])", text) is not None


def views_name_a_machine(evidence: Evidence) -> Iterator[str]:
    """Each message about a new view names the machine that caused it, also where an operation failed."""
    for said in evidence.said:
        match = _TOLD_VIEW.fullmatch(said.text)
        if match is not None and not any(_names(match[3], name) for name in evidence.names):
            yield f"{said.host} is told of no machine: {said.text}"


def departures_are_named(evidence: Evidence) -> Iterator[str]:
    """The message about a new view names each member that is no longer in it."""
    started_s: dict[str, list[float]] = {}
    for event in evidence.events:
        if event[1:3] == ("fault", "start"):
            started_s.setdefault(str(event[3]).partition(" ")[0], []).append(int(event[0]) / 1e9)

    def life(host: str, time_s: float) -> tuple[str, int]:
        """Identify a life of a host: a restarted one receives no messages about the views of its earlier life."""
        return host, sum(each_s <= time_s for each_s in started_s.get(host, ()))

    follows = {
        (life(str(host), int(time_ns) / 1e9), int(epoch)): (str(lineage), int(previous))
        for time_ns, _, host, lineage, epoch, previous, _ in evidence.of_kind("view", 4)
    }
    before: dict[tuple[str, int], tuple[int, tuple[str, ...]]] = {}
    for said in evidence.said:
        match = _TOLD_VIEW.fullmatch(said.text)
        if match is None:
            continue
        who, epoch, members = life(said.host, said.time_s), int(match[1]), tuple(match[2].split(", "))
        last, gone = before.get(who, (-1, ()))
        before[who] = epoch, members
        lineage, previous = follows.get((who, epoch), ("", -2))
        if previous != last or follows.get((who, last), ("", -2))[0] != lineage:
            continue
        for name in gone:
            if name not in members and not _names(match[3], name):
                yield f"{said.host} is not told why {name} is gone: {said.text}"


def the_innocent_stay(evidence: Evidence) -> Iterator[str]:
    """If a single machine is faulty, no other one is left out of a view of three or more.

    This is checked only where all others can observe the fault. With two machines, neither can know which one
    is faulty."""
    guilty = _only_culprit(evidence.scenario.faults)
    if guilty is None or len(evidence.names) < 3:
        return
    told: dict[str, None] = {}
    views = [
        (host, int(epoch), int(before), names) for _, _, host, _, epoch, before, names in evidence.of_kind("view", 4)
    ]
    sizes = {(host, epoch): str(names).count(",") + 1 for host, epoch, _, names in views}
    of_two = {(host, epoch) for host, epoch, before, _ in views if sizes.get((host, before)) == 2}
    for said in evidence.said:
        match = _TOLD_VIEW.fullmatch(said.text)
        if match is None or (said.host, int(match[1])) in of_two:
            continue
        for name in _LEFT_OUT.findall(match[3]):
            if name != guilty and said.host != guilty and name in evidence.names:
                told.setdefault(f"{name} is left out, and only {guilty} is at fault: {said.text}")
    yield from told


_SEEN_BY_ALL = (Crash, Pause, Lid, StuckDevice, BlockedPort, CablePulled, Restart)


def _only_culprit(faults: Sequence[AnyFault]) -> str | None:
    nodes = {getattr(fault, "node", None) for fault in faults}
    plain = all(isinstance(each, _SEEN_BY_ALL) or (isinstance(each, Misbehave) and each.to is None) for each in faults)
    return nodes.pop() if plain and len(nodes) == 1 else None


# Resources.

DIALS = 16
"""Announced addresses that are dialled concurrently; see docs/howto/cluster.md."""
LINES_PER_MINUTE = 120
TASKS_PER_MEMBER = 40
BUFFERED_BYTES = (4 << 20) + (64 << 10)
"""Per member: one window while a link is measured, and a small margin."""


def descriptors_are_bounded(evidence: Evidence) -> Iterator[str]:
    """The number of connections depends on the number of members only."""
    most = DIALS + 8 * len(evidence.names)
    for host, used in evidence.usage.items():
        if used.descriptors > most:
            yield f"{host} had {used.descriptors} connections, {most} are enough"


def tasks_are_bounded(evidence: Evidence) -> Iterator[str]:
    """The number of tasks depends on the number of members only."""
    most = 2 * DIALS + TASKS_PER_MEMBER * len(evidence.names)
    for host, used in evidence.usage.items():
        if used.tasks > most:
            yield f"{host} had {used.tasks} tasks, {most} are enough"


def buffers_are_bounded(evidence: Evidence) -> Iterator[str]:
    """The bytes buffered in a machine's connections are bounded.

    The bound has one window more than there are members: data in flight to a machine that stops reading still
    arrives."""
    most = BUFFERED_BYTES * (1 + len(evidence.names))
    for host, used in evidence.usage.items():
        if used.buffered_bytes > most:
            yield f"{host} had {used.buffered_bytes} bytes in its connections"


def lines_are_bounded(evidence: Evidence) -> Iterator[str]:
    """The number of status messages per minute is small enough to read.

    Messages about views are not counted where a member lies about views: it makes as many as it likes, all of which
    take effect (see `cluster.agreement`)."""
    lies = _lies(evidence)
    recent: dict[str, list[float]] = {}
    told: dict[str, None] = {}
    for said in evidence.said:
        if lies and _ABOUT_VIEW.match(said.text):
            continue
        times = recent.setdefault(said.host, [])
        times.append(said.time_s)
        while times[0] < said.time_s - 60:
            times.pop(0)
        if len(times) > LINES_PER_MINUTE and said.host not in told:
            told[said.host] = None
            yield f"{said.host} said {len(times)} lines in the minute before {said.time_s:.1f} s, last: {said.text}"


# Liveness: what must happen.


def the_core_makes_progress(evidence: Evidence) -> Iterator[str]:
    """In the liveness phase, steps go on until the end, on the core or on a machine that may stand in for it.

    A step that a member takes over from others counts: it may be admitted after they have done the last one."""
    phases, able = evidence.phases, _able(evidence)
    if evidence.excused:
        return
    before_s, done = phases.liveness_s, 0
    ended = False
    taken_over = [
        StepRecord(int(time_ns) / 1e9, str(host), int(step))
        for time_ns, _, host, _, step, _ in evidence.of_kind("synchronised", 3)
    ]
    for each in sorted([*evidence.steps, *taken_over], key=lambda each: each.time_s):
        if each.host in able and each.step > done:
            done = each.step
            ended = done >= evidence.training.steps
            if each.time_s > before_s + phases.patience_s and each.time_s > phases.liveness_s:
                yield _idle(each.time_s - before_s, done, phases.patience_s)
            before_s = max(before_s, each.time_s)
    if not ended and evidence.limit_s > before_s + phases.patience_s:
        yield _idle(evidence.limit_s - before_s, done, phases.patience_s)


def _idle(idle_s: float, done: int, patience_s: float) -> str:
    return f"no step for {idle_s:.0f} s before or after step {done}, where {patience_s:.0f} s are enough"


_IN_VAIN = re.compile(r"took longer than|did not (?:call|answer) within")
_GONE = re.compile(r"([\w-]+) has gone: .*")


def the_departed_are_not_waited_for(evidence: Evidence) -> Iterator[str]:
    """No member waits out a deadline for a machine that has announced its departure, unless that machine has come
    back.

    A machine that is held up by its disk, or whose device does not return from a computation, cannot end its waits
    before it goes on."""
    gone_s: dict[tuple[str, str], float] = {}
    went_on_s: dict[str, float] = {}
    for said in evidence.said:
        if match := _GONE.fullmatch(said.text):
            gone_s.setdefault((said.host, match[1]), said.time_s)
    ranks: dict[tuple[str, int], list[str]] = {}
    for event in evidence.events:
        host, time_s = str(event[2]), int(event[0]) / 1e9
        if event[1] == "fault" and event[2] in ("thaw", "unhang"):
            went_on_s[str(event[3])] = time_s
        elif event[1] == "view":
            names = [name.partition("#")[0] for name in str(event[6]).split(",")]
            ranks[host, int(event[4])] = names
            for name in names:
                if gone_s.get((host, name), time_s) < time_s:
                    del gone_s[host, name]
        elif event[1] == "view failed" and _IN_VAIN.search(text := str(event[4])):
            names = ranks.get((host, int(event[3])), [])
            for rank in map(int, re.findall(r"\brank (\d+)", text)):
                name = names[rank] if rank < len(names) else ""
                late_s = time_s - max(gone_s.get((host, name), time_s), went_on_s.get(host, 0.0))
                if late_s > DEPARTED_S + GRACE_S:
                    yield f"{host} waited for {name}, which had been gone for {late_s:.0f} s: {text}"


def the_core_comes_to_the_end(evidence: Evidence) -> Iterator[str]:
    """All machines of the core that no lasting fault concerns train to the end and hold the same parameters. If a
    sick machine has finished, one machine of the core is enough (see `phases`).

    A machine whose replica differs from the others' ends with `Diverged`. This is the only sign of a machine
    that sends noise. Where any side of a split may go on, machines that ended during the split may hold
    parameters of their own. Otherwise a lineage has one side that goes on, so those that end in it end alike. A
    machine of another lineage may have asked in vain to be admitted if a sick machine is in that one: it cannot
    work with all its members, so it ends with its own parameters (see `cluster.proposer`)."""
    if evidence.excused:
        return
    phases, steps = evidence.phases, evidence.training.steps
    reports = {host: result for host, result in evidence.results.items() if isinstance(result, Report)}
    done = [host for host, report in reports.items() if report.steps == steps]
    together = [host for host in phases.untouched if host in done and not _ended_apart(host, evidence)]
    lineages: dict[str, list[str]] = {}
    for host in together:
        lineage, members = _last_view(host, evidence)
        lineages.setdefault(lineage, []).append(host)
        if not any(name in phases.sick for name in members):
            lineages.setdefault("", []).append(host)
    if not any(host in phases.sick for host in done):
        for host in phases.untouched:
            if host not in (*done, *evidence.diverged):
                yield f"{host} {_end_of(evidence.results.get(host), steps)}"
    if not any(host in _able(evidence) for host in done):
        yield "nobody of the core came to the end"
    unlike = [{reports[host].sha256: host for host in reversed(hosts)} for hosts in lineages.values()]
    for names in dict.fromkeys(" and ".join(digests.values()) for digests in unlike if len(digests) > 1):
        yield f"{names} ended with unlike parameters"


def _ended_apart(host: str, evidence: Evidence) -> bool:
    """Return whether the host may have ended without all others in sight, where the quorum permits it: before the
    liveness phase, or in a view with a sick machine, which others of the core need not reach."""
    phases = evidence.phases
    apart = any(name in phases.sick for name in _last_view(host, evidence)[1])
    return evidence.cluster.quorum == "any" and (apart or _ended_s(host, evidence) < phases.liveness_s + GRACE_S)


def _ended_s(host: str, evidence: Evidence) -> float:
    return max((time_s for time_s, who in evidence.left if who == host), default=evidence.limit_s)


def _last_view(host: str, evidence: Evidence) -> tuple[str, list[str]]:
    """Return the lineage and the members of the view in which the host ended."""
    ended_s, last = _ended_s(host, evidence), ("", list[str]())
    for time_ns, _, who, lineage, _, _, members in evidence.of_kind("view", 4):
        if who == host and int(time_ns) / 1e9 <= ended_s:
            last = str(lineage), [name.partition("#")[0] for name in str(members).split(",")]
    return last


def _able(evidence: Evidence) -> Sequence[str]:
    """Return the machines that may go on for the core. If the core is a single machine, a sick one may replace it:
    of two machines that cannot work together, neither can be identified as the cause."""
    return evidence.phases.core if len(evidence.phases.core) > 1 else evidence.names


def _end_of(result: Report | BaseException | None, steps: int) -> str:
    if result is None or (isinstance(result, BaseException) and _was_stopped(result)):
        return "never came to an end"
    if isinstance(result, Report):
        return f"ended after {result.steps} of {steps} steps"
    if isinstance(result, HostCrashed):
        return "was down at the end"
    return f"ended with {type(result).__name__}: {result}"


INVARIANTS = (
    one_view_per_epoch,
    epochs_never_go_back,
    replicas_are_alike,
    steps_are_applied_in_order,
    nothing_is_lost_or_doubled,
    errors_are_ours,
    views_name_a_machine,
    departures_are_named,
    the_innocent_stay,
    descriptors_are_bounded,
    tasks_are_bounded,
    buffers_are_bounded,
    lines_are_bounded,
    the_core_makes_progress,
    the_departed_are_not_waited_for,
    the_core_comes_to_the_end,
)
