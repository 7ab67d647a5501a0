"""The scenario of a seed: a home, a training, and its faults.

Swarm testing (Groce, Zhang, Eide, Chen and Regehr, ISSTA 2012): many tests that each leave out features
find more than one test that has them all, because one feature can mask the effect of another. For example,
where machines crash all the time, none runs out of descriptors. So each seed first draws which kinds of
faults occur at all, their frequencies and their number. It draws numbers of machines, media, strategies,
compressors, quorums and timeouts in the same way. Small homes are more frequent than large ones: they run
quickly, and most defects need two or three machines. A lone machine is a home, too: no peer can help it to
recover its state.

The relation between the faults is also drawn. In most seeds each fault is drawn independently. Other seeds
have a pattern (see `patterns`), such as a power cut, and seldom any other fault. In some seeds all faults
come in a bunch.

Independent faults come in two lots. Those of the first can strike any machine, and end. Those of the second
last for good and break only machines that were chosen to be sick, which are so few that the others are a
quorum: see `phases`.
"""

from __future__ import annotations

import math
from random import Random
from typing import TypeAlias, TypeVar

from msgspec.structs import replace

from hcsim.config import (
    OWN_FAULTS,
    AnyFault,
    Attachment,
    Cluster,
    CopiedIdentity,
    Crash,
    Ethernet,
    Heartbeat,
    Machine,
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
from hcsim.config.schedule import HEALED_BY, Draw, draw_faults, without_end
from hcsim.fuzz.patterns import PATTERNS, FaultGroup, bunched, conditions, draw_groups
from hcsim.fuzz.phases import breaks
from hcsim.rng import stream
from hcsim.training.parameter_server.rounds import ServerPolicy
from hcsim.training.strategies import DiLoCo, LocalSgd, strategy
from hcsim.units import BitRate, ByteRate, FlopRate, PositiveSeconds, Seconds

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
