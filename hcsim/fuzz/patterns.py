"""Patterns of related faults: all at once, one machine after another, repeated, or soon after an earlier one.

Independent faults seldom amount to a power cut, and seldom coincide. But a protocol's behaviour depends on
recent events and on how many machines they concern. A checkpoint is only needed where all machines lost
their memory, a machine is only alone where all others have gone, and the formation of a view is only
disturbed by faults within a second or two. So some seeds draw such patterns, and in some all faults come in
a bunch.

None of these faults makes a machine forget. Faults that are drawn in addition may, but only on a minority.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from msgspec.structs import replace

from hcsim.config import AnyFault, ClockJump, Cluster, Crash, Leave, LinkChange, Misbehave, Restart, Scenario, Training
from hcsim.config.schedule import DECIMALS, Draw, draw_faults, without_end
from hcsim.units import PositiveSeconds, Seconds

FaultGroup: TypeAlias = tuple[AnyFault, ...]
"""Faults that are drawn together, and moved together."""
Pattern: TypeAlias = Callable[[Draw, Scenario], list[FaultGroup]]

INSTANT_S = Seconds(1e-3)
FORMING_S = 4.0
"""The time after the detection of a loss in which the next view forms and newcomers are admitted."""
ROUND_TRIPS = 10
"""The number of round trips added to `FORMING_S`."""
CONDITIONS = ("clock_jump", "clock_jump", "clock_drift", "link_change", "datagrams", "slow_disk", "throttle")
EARLY = 0.3
"""The start of conditions, as a share of the start that an ordinary draw gives."""
CULPRITS_KINDS = (*5 * ("misbehave",), "stuck_device", "blocked_port", "pause", "lid", "restart")


def draw_groups(draw: Draw, kinds: Sequence[str], wanted: int) -> list[FaultGroup]:
    """Return the wanted number of groups of faults of these kinds, or fewer where they cannot happen."""
    groups = (tuple(draw_faults(draw, kinds, 1)) for _ in range(wanted))
    return [group for group in groups if group]


def bunched(draw: Draw, groups: Sequence[FaultGroup], home: Scenario) -> list[FaultGroup]:
    """Return the same faults in the same order, each moved to strike while the cluster handles the one before."""
    moved: list[FaultGroup] = []
    for group in sorted(groups, key=_start_s):
        before = moved[-1] if moved else None
        moved.append(group if before is None else _moved(group, _soon_after(draw, before, home)))
    return moved


def _soon_after(draw: Draw, group: FaultGroup, home: Scenario) -> float:
    """Return a time just as these faults strike or end, as the others detect them, or as the others react."""
    rng, notice_s = draw.rng, _notice_s(home)
    fault = rng.choice(group)
    struck_s = rng.choice((fault.at_s, fault.at_s, fault.over_s))
    return struck_s + rng.choice(
        (rng.uniform(0.0, 0.2), notice_s * rng.uniform(0.8, 1.2), rng.uniform(0.0, notice_s + FORMING_S))
    )


def _notice_s(home: Scenario) -> float:
    """Return the time until a silent machine is suspected."""
    return (home.cluster or Cluster()).beat.timeout_s


def _start_s(group: FaultGroup) -> float:
    return min(fault.at_s for fault in group)


def _moved(group: FaultGroup, start_s: float) -> FaultGroup:
    by_s = start_s - _start_s(group)
    return tuple(_at(fault, fault.at_s + by_s) for fault in group)


def _at(fault: AnyFault, at_s: float) -> AnyFault:
    at_s = _rounded(at_s)
    if isinstance(fault, Restart) and fault.as_of_s is not None:
        return replace(fault, at_s=at_s, as_of_s=min(fault.as_of_s, at_s))
    return replace(fault, at_s=at_s)


def _rounded(time_s: float) -> Seconds:
    return Seconds(round(time_s, DECIMALS))


def conditions(draw: Draw, home: Scenario) -> list[FaultGroup]:
    """Draw conditions that hold from early on, for later faults to meet: a wrong clock (of one machine, or of all
    after a time server's change), a slow network or disk, lost announcements."""
    groups: list[FaultGroup] = []
    for group in draw_groups(draw, CONDITIONS, draw.rng.choice((1, 1, 2))):
        group = _moved(group, EARLY * _start_s(group))
        (fault,) = group
        if isinstance(fault, ClockJump) and draw.rng.random() < 0.5:
            group = tuple(replace(fault, node=name) for name in draw.names)
        groups.append(group)
    return groups


# Patterns.


def outages(draw: Draw, home: Scenario) -> list[FaultGroup]:
    """Draw a power failure: all machines, or many, go down at the same moment and come back with what they had
    saved, at once or one by one. It may happen again soon."""
    rng, names = draw.rng, draw.names
    at_s, _ = draw.span()
    groups: list[FaultGroup] = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        count = rng.choice((len(names), len(names), max(1, len(names) - 1), rng.randint(1, len(names))))
        apart_s, down_s = rng.choice((0.0, 0.0, 1.0)), rng.uniform(0.0, 6.0)
        each_its_own = rng.random() < 0.5
        cut: list[AnyFault] = []
        for name in rng.sample(names, count):
            own_s = down_s * rng.uniform(0.0, 2.0) if each_its_own else down_s
            cut.append(Restart(_rounded(at_s + rng.uniform(0.0, apart_s)), name, down_s=_rounded(own_s)))
        groups.append(tuple(cut))
        at_s = _rounded(max(fault.over_s for fault in cut) + rng.uniform(0.0, _notice_s(home) + 2 * FORMING_S))
    return groups


def attrition(draw: Draw, home: Scenario) -> list[FaultGroup]:
    """Stop one machine after another until one is left. That one is restarted, and the others may come back."""
    rng = draw.rng
    at_s, _ = draw.span()
    *going, last = rng.sample(draw.names, len(draw.names))
    groups: list[FaultGroup] = []
    for name in going:
        fault = Leave(at_s, name) if rng.random() < 0.4 else Crash(at_s, name, clean=rng.random() < 0.5)
        groups.append((fault,))
        at_s = _rounded(at_s + _notice_s(home) + rng.uniform(0.0, FORMING_S))
    for _ in range(rng.choice((1, 1, 2))):
        restart = Restart(at_s, last, down_s=_rounded(rng.choice((1e-3, rng.uniform(0.0, 5.0)))))
        groups.append((restart,))
        at_s = _rounded(restart.over_s + rng.uniform(0.0, FORMING_S))
    for name in going if rng.random() < 0.5 else ():
        at_s = _rounded(at_s + rng.uniform(0.0, FORMING_S))
        groups.append((Restart(at_s, name, down_s=INSTANT_S),))
    return groups


def churn(draw: Draw, home: Scenario) -> list[FaultGroup]:
    """Repeatedly start, end or kill the program on a machine, also while the others admit that machine or remove
    it. On a slow network both take longer. Sometimes it stays away until the others have given it up."""
    rng = draw.rng
    begun_s = _rounded(EARLY * draw.span()[0])
    latency_s, patience_s = rng.choice((0.0, 0.1, 0.3, 0.3)), (home.training or Training()).timeout_s
    kills = rng.random() < 0.6  # otherwise nothing is lost, which can then be told
    comers = rng.sample(draw.names, min(len(draw.names), rng.choice((1, 1, 2))))
    groups: list[FaultGroup] = []
    at_s = begun_s
    for _ in range(rng.randint(2, 4)):
        name = rng.choice(comers)
        here_s = rng.uniform(0.0, FORMING_S + ROUND_TRIPS * latency_s)
        away_s = rng.choice((INSTANT_S, rng.uniform(0.0, FORMING_S), rng.uniform(0.8, 1.5) * patience_s))
        anew = (Restart(_rounded(at_s), name, down_s=INSTANT_S),) if kills else ()
        leave = Leave(_rounded(at_s + here_s), name)
        back = Restart(_rounded(leave.at_s + away_s), name, down_s=INSTANT_S)
        groups.append((*anew, leave, back))
        at_s = back.at_s
    if latency_s:
        medium, lasts_s = rng.choice(list(draw.media)), PositiveSeconds(_rounded(at_s + FORMING_S - begun_s))
        groups.append((LinkChange(begun_s, medium, latency_s=Seconds(latency_s), duration_s=lasts_s),))
    return groups


def culprit(draw: Draw, home: Scenario) -> list[FaultGroup]:
    """Draw one or a few faults of a single machine, lasting or recurring, with no other faults. With more faulty
    machines, it would be unknown whether the others identified the right one."""
    rng, name = draw.rng, draw.node()
    wanted, lasts = rng.choice((1, 1, 2, 3)), rng.random() < 0.6
    groups: list[FaultGroup] = []
    while len(groups) < wanted:
        group = tuple(draw_faults(draw, CULPRITS_KINDS, 1))
        if any(getattr(fault, "node", "") != name or getattr(fault, "how", "") == "lie" for fault in group):
            continue
        group = tuple(replace(fault, to=None) if isinstance(fault, Misbehave) else fault for fault in group)
        groups.append(tuple(map(without_end, group)) if lasts else group)
    return groups


PATTERNS: Mapping[str, Pattern] = {
    "outages": outages,
    "attrition": attrition,
    "churn": churn,
    "culprit": culprit,
}
