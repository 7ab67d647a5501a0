"""One seed: a home, what goes wrong in it, and what came of the training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from experiments.faults.laws import Evidence, violations
from experiments.faults.slopes import Slopes
from hcsim.compressors.base import Array
from hcsim.config import (
    FAULTS,
    AnyFault,
    Cluster,
    CopiedIdentity,
    Restart,
    Scenario,
    Training,
    parse_scenario,
)
from hcsim.config.schedule import DEFAULT_KINDS, random_faults
from hcsim.launch import simulate_cluster
from hcsim.rng import stream
from hcsim.runtime.channel import Phantom
from hcsim.telemetry.trace import Event
from hcsim.training.run import Point, Report, Run
from hcsim.units import PositiveSeconds

DURATION_S = 60.0
"""Faults strike and heal within the first part of this."""
LIMIT_S = 600.0
STEPS = 200
BATCH = 4
SLOW = '{ name = "slow", peak = "1 TFLOPS", memory = "100 GB/s", overhead = "30 ms" }'
"""A step takes about a quarter of a second, so that training outlasts the faults."""
SWITCH = '[[medium]]\nkind = "ethernet"\nname = "switch"\nrate = "1 Gb/s"\n'
AIR = '[[medium]]\nkind = "wifi"\nname = "air"\nstandard = "wifi6"\n'
METHODS = (
    ("ddp", "none", 6),
    ("ddp", "int8+ef", 2),
    ("ddp", "topk:0.1+ef", 2),
    ("ddp", "powersgd:2+ef", 1),
    ("local_sgd:4", "none", 2),
    ("diloco:4", "int8+ef", 1),
    ("parameter_server", "none", 1),
    ("single", "none", 1),
)
"""Strategy, compressor, and how often they are drawn."""


class Trial(msgspec.Struct, frozen=True):
    """What came of a seed."""

    seed: int
    nodes: int
    method: str
    virtual_s: float
    views: int
    fired: dict[str, int]
    """How often each kind of fault struck."""
    wrong: list[str]
    """Laws that did not hold."""
    trace_sha256: str


def scenario_of(seed: int, kinds: tuple[str, ...] = DEFAULT_KINDS) -> Scenario:
    """A home, its training, and a schedule of faults."""
    draw = stream(seed, "trial")
    count = draw.randint(2, 8)
    media = draw.choice([SWITCH, SWITCH, AIR, SWITCH + AIR])
    links = ", ".join(f'"{name}"' for name in ("switch", "air") if f'"{name}"' in media)
    home = parse_scenario(
        f"""
        name = "trial-{seed}"
        seed = {seed}
        node = [{{ name = "mac", count = {count}, machine = {SLOW}, links = [{links}] }}]
        {media}
        """,
        f"trial {seed}",
    )
    strategy, compressor, _ = draw.choices(METHODS, [method[2] for method in METHODS])[0]
    training = Training(
        task="slopes", strategy=strategy, compressor=compressor, steps=STEPS, batch=BATCH, evaluate_every=STEPS,
        timeout_s=PositiveSeconds(20),
    )  # fmt: skip
    cluster = Cluster(nodes=count, preset="low_latency", peer_timeout_s=PositiveSeconds(5))
    faults = random_faults(seed, home.nodes, home.media, DURATION_S, kinds)
    return replace(home, training=training, cluster=cluster, faults=faults)


class _Witness:
    """Keeps what each member ends with."""

    def __init__(self) -> None:
        self.parameters: dict[str, Array] = {}

    def point(self, rank: int, point: Point) -> None:
        """Nothing to note."""

    def finished(self, run: Run) -> None:
        """A member came to the end."""
        parameters = run.learner.replica.parameters
        assert not isinstance(parameters, Phantom)
        self.parameters[run.group.host.name] = parameters.copy()


def run_trial(scenario: Scenario, tell: Callable[[str, str], None] = lambda host, what: None) -> Trial:
    """Run it, and hold it to the laws."""
    events: list[Event] = []
    witness = _Witness()
    training = scenario.training
    assert training is not None
    outcome = simulate_cluster(
        scenario, sink=events.extend, observer=witness, tell=tell, what=Slopes(), limit_s=LIMIT_S
    )
    names = [node.name for node in scenario.nodes]
    results: dict[str, Report | BaseException] = dict(zip(names, outcome.results, strict=True))
    evidence = Evidence(
        seed=scenario.seed,
        steps=training.steps,
        batch=BATCH,
        exact=(training.strategy, training.compressor) == ("ddp", "none"),
        events=events,
        results=results,
        parameters=witness.parameters,
        kept={name: not any(_forgets(fault, name) for fault in scenario.faults) for name in names},
    )
    kinds = {kind.__name__: tag for tag, kind in FAULTS.items()}
    struck = Counter(kinds[str(event[2])] for event in events if event[1] == "fault" and event[2] in kinds)
    views = {(event[3], event[4]) for event in events if event[1] == "view" and "," in str(event[6])}
    return Trial(
        scenario.seed, len(names), f"{training.strategy}, {training.compressor}", outcome.seconds, len(views),
        dict(sorted(struck.items())), violations(evidence), outcome.trace_sha256,
    )  # fmt: skip


def trial_of(seed: int) -> Trial:
    """What comes of a seed."""
    return run_trial(scenario_of(seed))


def _forgets(fault: AnyFault, name: str) -> bool:
    return (isinstance(fault, Restart) and fault.node == name and fault.state != "kept") or (
        isinstance(fault, CopiedIdentity) and fault.node == name
    )


def shortened(scenario: Scenario) -> Scenario:
    """The same with fewer faults, if a law still fails without some: they are taken out one by one."""
    faults = list(scenario.faults)
    for fault in list(faults):
        fewer = [each for each in faults if each is not fault]
        if run_trial(replace(scenario, faults=tuple(fewer))).wrong:
            faults = fewer
    return replace(scenario, faults=tuple(faults))
