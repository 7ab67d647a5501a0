"""The scenario of a seed: a home, a training, and its faults.

Swarm testing (Groce, Zhang, Eide, Chen and Regehr, ISSTA 2012): many tests that each leave out features
find more than one test that has them all, because one feature can mask the effect of another. For example,
where machines crash all the time, none runs out of descriptors. So each seed first draws which kinds of
faults occur at all, their frequencies and their number. It draws numbers of machines, media, strategies,
compressors, quorums and timeouts in the same way. Small homes are more frequent than large ones: they run
quickly, and most defects need two or three machines. A lone machine is a home, too: no peer can help it to
recover its state.

The relation between the faults is also drawn. In most seeds each fault is drawn independently. In some seeds
all faults come in a bunch. Other seeds have a pattern of related faults, and seldom any other fault: all at once
(a power cut), one machine after another, repeated, or soon after an earlier one. Independent faults seldom
coincide, but a protocol's behaviour depends on recent events and on how many machines they concern. A checkpoint
is only needed where all machines lost their memory, a machine is only alone where all others have gone, and the
formation of a view is only disturbed by faults within a second or two. None of the faults of a pattern makes a
machine forget. Faults that are drawn in addition may, but only on a minority.

Independent faults come in two lots. Those of the first can strike any machine, and end. Those of the second
last for good and break only machines that were chosen to be sick, which are so few that the others are a
quorum: see `phases`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import TypeAlias, TypeVar

from msgspec.structs import replace

from hcsim.config import (
    OWN_FAULTS,
    AnyFault,
    Attachment,
    ClockJump,
    Cluster,
    CopiedIdentity,
    Crash,
    Ethernet,
    Heartbeat,
    Leave,
    LinkChange,
    Machine,
    Misbehave,
    Misbehaviour,
    Node,
    Restart,
    Scenario,
    Training,
    Wifi,
    parse_scenario,
    write_scenario,
)
from hcsim.config.cluster import PRESETS
from hcsim.config.home import WIFI_STANDARDS, AnyMedium
from hcsim.config.schedule import DECIMALS, HEALED_BY, Draw, draw_faults, without_end
from hcsim.fuzz.phases import breaks
from hcsim.rng import stream
from hcsim.training.parameter_server.rounds import ServerPolicy
from hcsim.training.strategies import DiLoCo, LocalSgd, strategy
from hcsim.units import BitRate, ByteRate, FlopRate, PositiveSeconds, Seconds

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
CULPRITS_WAYS: Sequence[Sequence[Misbehaviour]] = (
    ("duplicate", "other_epoch", "old_epoch", "unasked"),
    ("huge_operation", "huge_step", "huge_offset", "giant_total"),
    ("raw_bytes", "short", "noise"),
    ("wrong_signature",),
)
"""How a culprit misbehaves: frames of no operation, impossible headers, wrong contents, another operation than the
others'. Each is recognised in another way, so each is drawn as often."""
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
        group = tuple(_to_all(draw, fault) if isinstance(fault, Misbehave) else fault for fault in group)
        groups.append(tuple(map(without_end, group)) if lasts else group)
    return groups


def _to_all(draw: Draw, fault: Misbehave) -> Misbehave:
    return replace(fault, how=draw.rng.choice(draw.rng.choice(CULPRITS_WAYS)), to=None)


PATTERNS: Mapping[str, Pattern] = {
    "outages": outages,
    "attrition": attrition,
    "churn": churn,
    "culprit": culprit,
}


T = TypeVar("T")
Choices: TypeAlias = tuple[tuple[T, int], ...]
"""The options of a choice with their weights."""

KINDS = tuple(kind for kind in OWN_FAULTS if kind != "leave")
LONE_KINDS = tuple(
    kind for kind in KINDS if not {"between", "sides", "of", "to"} & {*OWN_FAULTS[kind].__struct_fields__}
)  # fmt: skip
"""The kinds that can happen to a lone machine."""
STYLES: Choices[str] = (("mixed", 10), ("culprit", 4), ("outages", 3), ("attrition", 2), ("churn", 5))
"""The relations between the faults: independent, or a pattern."""
BUNCHED_SHARE, CONDITIONS_SHARE = 0.4, 0.25
"""The shares of seeds in which all faults come in a bunch, and in which they meet earlier conditions."""
LEAVE_SHARE = 0.15
"""The share of the mixed seeds in which a member leaves."""
NODES: Choices[int] = ((1, 2), (2, 5), (3, 7), (4, 5), (5, 3), (6, 2), (7, 1), (8, 1))
FEW: Choices[int] = ((1, 1), (2, 5), (3, 4))
"""Numbers of machines for the style "churn": the fewer there are, the more each matters."""
MEDIA: Choices[str] = (("switch", 5), ("air", 2), ("both", 3))
STRATEGIES: Choices[str] = (
    ("ddp", 12), ("local_sgd:4", 2), ("diloco:4", 2), ("parameter_server", 3), ("parameter_server:async", 1),
    ("parameter_server:bounded,staleness=4", 1), ("single", 1),
)  # fmt: skip
COMPRESSORS: Choices[str] = (
    ("none", 6), ("int8+ef", 2), ("topk:0.1+ef", 2), ("randomk:0.1+ef", 1), ("powersgd:2+ef", 1), ("fp16", 1),
    ("onebit+ef", 1),
)  # fmt: skip
ALGORITHMS: Choices[str] = (("auto", 8), ("ring", 1), ("tree", 1), ("centralized", 1), ("halving_doubling", 1))
QUORUMS: Choices[str] = (("tiebreak", 5), ("majority", 3), ("any", 2))
HEARTBEATS: Choices[Heartbeat] = (
    (PRESETS["low_latency"], 6),
    (Heartbeat(interval_s=PositiveSeconds(0.25), timeout_s=PositiveSeconds(1.5)), 2),
    (Heartbeat(interval_s=PositiveSeconds(1), timeout_s=PositiveSeconds(4)), 3),
    (Heartbeat(interval_s=PositiveSeconds(2), timeout_s=PositiveSeconds(6), failures=2), 1),
    (PRESETS["home"], 1),
)
TIMEOUTS_S: Choices[float] = ((5.0, 3), (10.0, 4), (20.0, 3))
LONGEST_S = 20.0
"""The longest time limit of a collective. The style "churn" uses it, so that waiting for a departed member
stands out."""
LAUNCHES_S: Choices[float] = ((0.06, 3), (0.12, 4), (0.2, 2))
"""The duration of a kernel launch. A step takes about eight times that, and slow steps make a trial quick."""
LAUNCHES_OF_A_STEP = 8.5
LAUNCHES_OF_AN_UPDATE = 2
"""Launches of a parameter server's update, beside one for each push. The worker on its machine needs the
device as well."""
SAFETY_S: Choices[float] = ((15.0, 4), (30.0, 4), (45.0, 1))
MOST_STEPS = 300
CLOSEST = 12
"""The least number of steps that are left once nothing changes any more."""


def scenario_of(seed: int) -> Scenario:
    draw = stream(seed, "fuzz")
    style, heartbeat = _choose(draw, STYLES), _choose(draw, HEARTBEATS)
    safety_s = max(_choose(draw, SAFETY_S), 4 * heartbeat.timeout_s)
    media = _media(draw)
    launch_s = _choose(draw, LAUNCHES_S)
    count = _choose(draw, FEW if style == "churn" else NODES)
    nodes = tuple(_node(draw, number, media, launch_s) for number in range(1, count + 1))
    cluster = _cluster(draw, len(nodes), heartbeat)
    step_s = launch_s * LAUNCHES_OF_A_STEP
    training = _training(draw, safety_s / step_s)
    if style == "churn":
        training = replace(training, timeout_s=PositiveSeconds(LONGEST_S))
    training = _in_time(training, nodes)
    home = Scenario(f"seed-{seed}", nodes, seed=seed, media=media, training=training, cluster=cluster)
    home = parse_scenario(write_scenario(home), f"seed {seed}")
    faults = _schedule(draw, style, home, safety_s)
    last_s = max((fault.over_s for fault in faults), default=0.0)
    steps = max(training.steps, min(MOST_STEPS, CLOSEST + round(last_s / step_s)))
    return replace(home, faults=faults, training=replace(training, steps=steps, evaluate_every=steps))


def _choose(draw: Random, choices: Choices[T]) -> T:
    return draw.choices([choice for choice, _ in choices], [weight for _, weight in choices])[0]


def _media(draw: Random) -> tuple[AnyMedium, ...]:
    which = _choose(draw, MEDIA)
    media: list[AnyMedium] = []
    if which != "air":
        media.append(Ethernet("switch", BitRate(draw.choice((1e8, 1e9, 2.5e9)))))
    if which != "switch":
        standard = draw.choice(sorted(WIFI_STANDARDS))
        text = f'name = "air"\n[[medium]]\nkind = "wifi"\nname = "air"\nstandard = "{standard}"\n'
        medium = parse_scenario(text, "air").media[0]
        assert isinstance(medium, Wifi)
        media.append(replace(medium, fairness=draw.choice(("throughput", "airtime"))))
    return tuple(media)


def _node(draw: Random, number: int, media: tuple[AnyMedium, ...], launch_s: float) -> Node:
    names = [medium.name for medium in media]
    links = draw.choice((names, names, *([name] for name in names)))
    slower = draw.choice((1.0, 1.0, 1.0, 1.5, 2.0))
    machine = Machine("slow", FlopRate(1e12), ByteRate(1e11), overhead_s=Seconds(round(slower * launch_s, 3)))
    return Node(f"mac-{number}", machine, links=tuple(Attachment(name) for name in links))


def _cluster(draw: Random, count: int, heartbeat: Heartbeat) -> Cluster:
    return Cluster(
        nodes=draw.choice((count, count, count, draw.randint(1, count))),
        peer_timeout_s=PositiveSeconds(draw.choice((5.0, 15.0))),
        connection_timeout_s=PositiveSeconds(draw.choice((2.0, 5.0))),
        quorum=_choose(draw, QUORUMS),  # type: ignore[arg-type]
        heartbeat=heartbeat,
        settle_s=PositiveSeconds(draw.choice((0.1, 0.5, 2.0))),
        checkpoint_every=draw.choice((2, 10, 100)),
        measure=draw.choice(("nothing", "links", "links", "order")),
    )


def _training(draw: Random, steps: float) -> Training:
    """Return a training with enough steps that some remain when all faults are over, as far as this can be
    predicted."""
    wanted = min(MOST_STEPS, CLOSEST + round(steps * draw.uniform(1.0, 1.5)))
    spec = _choose(draw, STRATEGIES)
    return Training(
        task="slopes",
        strategy=spec,
        compressor=_choose(draw, COMPRESSORS),
        algorithm=_choose(draw, ALGORITHMS),
        steps=wanted,
        batch=draw.choice((1, 4, 8)),
        evaluate_every=wanted,
        timeout_s=PositiveSeconds(_choose(draw, TIMEOUTS_S)),
    )


def _in_time(training: Training, nodes: tuple[Node, ...]) -> Training:
    """Return the training with a time limit longer than members wait for each other without faults. Members wait
    for an update of a parameter server, whichever machine has it, and for a member that still computes the
    steps between two exchanges."""
    launches, chosen = LAUNCHES_OF_A_STEP, strategy(training.strategy)
    if isinstance(chosen, LocalSgd | DiLoCo):
        launches *= chosen.every
    elif isinstance(chosen, ServerPolicy):
        launches += LAUNCHES_OF_AN_UPDATE + len(nodes)
    slowest_s = max(node.machine.overhead_s for node in nodes if isinstance(node.machine, Machine))
    return replace(training, timeout_s=PositiveSeconds(max(training.timeout_s, math.ceil(slowest_s * launches))))


def _schedule(draw: Random, style: str, home: Scenario, safety_s: float) -> tuple[AnyFault, ...]:
    parts = Draw(draw, home.nodes, home.media, safety_s / HEALED_BY)
    pattern = PATTERNS.get(style)
    if pattern is None or (style == "culprit" and len(home.nodes) < 3):
        groups, sick = _mixed(draw, parts, home)
    else:
        groups, sick = pattern(parts, home), parts.names
        if style != "culprit":
            groups += draw_groups(parts, _kinds(draw, home), draw.choice((0, 0, 0, 1, 2)))
    if draw.random() < BUNCHED_SHARE:
        groups = bunched(parts, groups, home)
    if style != "culprit" and draw.random() < CONDITIONS_SHARE:
        groups += conditions(parts, home)
    faults = _remembering([fault for group in groups for fault in group], sick, home)
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _mixed(draw: Random, parts: Draw, home: Scenario) -> tuple[list[FaultGroup], list[str]]:
    """Return independent faults, and the machines that the lasting ones concern."""
    kinds = _kinds(draw, home)
    sick = _sick(draw, home)
    lasting = _lasting(parts, kinds, sick, draw.choice((1, 1, 2)))
    passing = draw_groups(parts, kinds, draw.randint(0 if lasting else 1, draw.choice((2, 5, 9))))
    if draw.random() < LEAVE_SHARE:
        passing += draw_groups(parts, ("leave",), draw.choice((1, 1, 2)))
    return [*passing, *((fault,) for fault in lasting)], sick


def _kinds(draw: Random, home: Scenario) -> list[str]:
    """Return the kinds of faults, each repeated according to its frequency."""
    possible = KINDS if len(home.nodes) > 1 else LONE_KINDS
    share = draw.choice((0.15, 0.4, 0.8))
    kinds = [kind for kind in possible if draw.random() < share] or [draw.choice(possible)]
    return [kind for kind in kinds for _ in range(draw.choice((1, 1, 2, 4)))]


def _sick(draw: Random, home: Scenario) -> list[str]:
    """Return the machines with lasting faults: few enough that the others are a quorum of a view of all."""
    count, cluster = len(home.nodes), home.cluster or Cluster()
    most = {"majority": (count - 1) // 2, "tiebreak": count // 2, "any": count - 1}[cluster.quorum]
    wanted = draw.choice((0, 1, 1, most)) if most else 0
    return sorted(draw.sample([node.name for node in home.nodes], min(wanted, most)))


def _lasting(parts: Draw, kinds: list[str], sick: list[str], each: int) -> list[AnyFault]:
    """Return faults that last for good: some that break only sick machines, and some that break none."""
    faults: list[AnyFault] = []
    for _ in range(40 * (len(sick) + 1)):
        if len(faults) >= each * max(1, len(sick)):
            break
        for fault in draw_faults(parts, kinds, 1):
            fault = without_end(fault)
            if not (fault.is_for_good or isinstance(fault, Crash)):
                continue
            broken = breaks(fault)
            if all(any(node in sick for node in one) for one in broken):
                faults.append(fault)
    return faults


def _remembering(faults: list[AnyFault], sick: list[str], home: Scenario) -> list[AnyFault]:
    """Remove faults that make machines forget their promises, where the rest would not be a quorum. Forgetful and
    sick machines together must be a minority, and `Draw` does not know the sick ones."""
    forgetful = {fault.node: None for fault in faults if isinstance(fault, Restart | CopiedIdentity) and forgets(fault)}
    unsound = [node.name for node in home.nodes if node.name in forgetful or node.name in sick]
    if 2 * len(unsound) < len(home.nodes):
        return faults
    kept = [fault for fault in faults if not isinstance(fault, CopiedIdentity)]
    return [replace(each, state="kept", as_of_s=None) if isinstance(each, Restart) else each for each in kept]


def forgets(fault: AnyFault) -> bool:
    """Return whether a machine comes back without its memory, or with an old state."""
    return (isinstance(fault, Restart) and fault.state != "kept") or isinstance(fault, CopiedIdentity)
