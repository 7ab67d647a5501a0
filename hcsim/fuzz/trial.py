"""One run of a scenario, checked against the invariants; its timeline, and the file of a finding: the scenario
with the violations as comments.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import msgspec

from hcsim.config import FAULTS, AnyFault, Restart, Scenario, Training, write_faults, write_scenario
from hcsim.fuzz.evidence import Evidence, Recorder
from hcsim.fuzz.generate import LAUNCHES_OF_A_STEP, scenario_of
from hcsim.fuzz.invariants import Breach, breaches
from hcsim.fuzz.phases import Phases, excuse, phases_of, settled
from hcsim.launch.virtual_cluster import simulate_cluster
from hcsim.training.run import Report
from hcsim.virtual.world import UsageMonitor

SLOWEST = 4.0
"""The longest duration of a step, as a multiple of its computation alone."""
ENDS_S = 60.0
"""Time to leave at the end, and for late machines."""


class Trial(msgspec.Struct, frozen=True):
    """The result of a seed, or of a file."""

    seed: int
    nodes: int
    method: str
    virtual_s: float
    views: int
    struck: dict[str, int]
    """How often each kind of fault struck."""
    pairs: list[str]
    """Pairs of a kind of fault and a phase of the protocol; see `coverage`."""
    excused: str
    """Why nothing was required in the liveness phase; empty: liveness was required."""
    breaches: list[Breach]
    trace_sha256: str

    @property
    def broken(self) -> list[str]:
        """The invariants that did not hold, each once."""
        return list(dict.fromkeys(breach.invariant for breach in self.breaches))


def trial_of(seed: int) -> Trial:
    return run_trial(scenario_of(seed))


def run_trial(scenario: Scenario, tell: Callable[[str, str], None] = lambda host, text: None) -> Trial:
    evidence, recorder, (seconds, digest) = gather(scenario, tell)
    training = evidence.training
    views = {(view.lineage, view.epoch) for view in recorder.views if len(view.members) > 1}
    return Trial(
        scenario.seed, len(scenario.nodes), f"{training.strategy}, {training.compressor}, {evidence.cluster.quorum}",
        round(seconds, 3), len(views), dict(sorted(recorder.tracker.struck.items())), list(recorder.tracker.pairs),
        evidence.excused, breaches(evidence), digest,
    )  # fmt: skip


def gather(
    scenario: Scenario, tell: Callable[[str, str], None] = lambda host, text: None
) -> tuple[Evidence, Recorder, tuple[float, str]]:
    """Run the scenario. Return the evidence, its recorder, the duration and the trace's digest."""
    phases, recorder = phases_of(scenario), Recorder(scenario)
    census = UsageMonitor(recorder.sink)
    training = scenario.training or Training()
    limit_s = _limit_s(scenario, training, phases)

    def heard(host: str, text: str) -> None:
        if not census.is_over:
            recorder.tell(host, text)
            tell(host, text)

    lost = _Complaints(census)
    logger = logging.getLogger("asyncio")
    logger.addHandler(lost)
    try:
        outcome = simulate_cluster(scenario, observer=recorder, tell=heard, limit_s=limit_s, census=census)
    finally:
        logger.removeHandler(lost)
    names = [node.name for node in scenario.nodes]
    results: dict[str, Report | BaseException] = dict(zip(names, outcome.results, strict=True))
    evidence = Evidence(
        scenario=scenario,
        phases=phases,
        events=recorder.events,
        said=recorder.said,
        steps=recorder.steps,
        results=results,
        parameters=recorder.parameters,
        residuals=recorder.residuals,
        left=recorder.left,
        usage=census.most,
        lost=lost.texts,
        limit_s=limit_s,
    )
    lives = msgspec.structs.replace(recorder.lives(scenario), diverged=evidence.diverged)
    phases = settled(phases, scenario, lives)
    excused = excuse(phases, evidence.cluster, lives) or _ended_early(scenario, phases, outcome.seconds)
    evidence = msgspec.structs.replace(evidence, phases=phases, excused=excused)
    return evidence, recorder, (outcome.seconds, outcome.trace_sha256)


def _ended_early(scenario: Scenario, phases: Phases, over_s: float) -> str:
    """Return why the core need not finish if all members had left before it was complete; empty: it must. The
    world ends when all have left, and later faults or restarts do not happen."""
    late = [each.node for each in scenario.faults if isinstance(each, Restart) and each.at_s > over_s]
    missing = [name for name in phases.core if name in late]
    return f"all had ended before {', '.join(missing)} could start again" if missing else ""


class _Complaints(logging.Handler):
    """Collects asyncio's log records of task errors that were never retrieved."""

    def __init__(self, census: UsageMonitor) -> None:
        super().__init__(logging.ERROR)
        self._census = census
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the record, unless it concerns a task that ended when the world was torn down."""
        if self._census.is_over:
            return
        error = record.exc_info[1] if record.exc_info else None
        self.texts.append(f"{record.getMessage().splitlines()[0]}: {error!r}")


def _limit_s(scenario: Scenario, training: Training, phases: Phases) -> float:
    """Return the time by which every host must have ended: all steps after the last fault, and twice `patience_s`
    for sick members."""
    launches_s = [each.machine.overhead_s for each in scenario.nodes if not isinstance(each.machine, str)]
    step_s = LAUNCHES_OF_A_STEP * max(launches_s, default=0.0)
    work_s = SLOWEST * training.steps * max(step_s, 0.05)
    return phases.liveness_s + work_s + 2 * phases.patience_s + ENDS_S


_LONGEST = 60
"""The number of lines of a timeline. Lines in the middle are omitted."""


def write_finding(scenario: Scenario, breaches: Sequence[Breach], invariant: str) -> str:
    """Return the scenario's file with the violations of its run as comments at the top."""
    evidence, _, _ = gather(scenario)
    found = [breach for breach in breaches if breach.invariant == invariant] or list(breaches)
    lines = [f"breaks {invariant}: {found[0].what if found else ''}", "", "What happens:"]
    lines += [f"  {line}" for line in _shortened(timeline(evidence))]
    lines += ["", "Again: hcsim fuzz --replay THIS_FILE"]
    head = [f"# {line}".rstrip() for text in lines for line in text.splitlines() or [""]]
    return "\n".join([*head, "", write_scenario(scenario)])


def timeline(evidence: Evidence) -> list[str]:
    """Return the events in the order of time. Hosts with the same message are combined."""
    lines: list[str] = []
    moments = sorted([*_faults(evidence), *_words(evidence), *_steps(evidence)], key=lambda each: each[0])
    for number, (time_s, who, what) in enumerate(moments):
        if number and moments[number - 1][1:] == (who, what):
            continue
        lines.append(f"{time_s:9.3f} s  {who + ':' if who else ''} {what}".rstrip())
    if evidence.phases.liveness_s:
        note = f"{evidence.phases.liveness_s:9.3f} s  from here on nothing changes any more: {_standing(evidence)}"
        lines.insert(sum(_time_s(line) <= evidence.phases.liveness_s for line in lines), note)
    return [*lines, *_ends(evidence)]


def _time_s(line: str) -> float:
    return float(line.partition(" s ")[0])


def _standing(evidence: Evidence) -> str:
    phases = evidence.phases
    sick = f"{', '.join(phases.sick)} may stay broken" if phases.sick else "all are well"
    return f"{sick}; {evidence.excused}" if evidence.excused else sick


def _shortened(lines: list[str]) -> list[str]:
    if len(lines) <= _LONGEST:
        return lines
    half = _LONGEST // 2
    return [*lines[:half], f"  … {len(lines) - 2 * half} lines …", *lines[-half:]]


def _faults(evidence: Evidence) -> Iterator[tuple[float, str, str]]:
    known = {repr(fault): fault for fault in evidence.scenario.faults}
    kinds = {kind.__name__ for kind in FAULTS.values()}
    for event in evidence.events:
        if event[1] != "fault":
            continue
        fault = known.get(str(event[3]))
        if fault is not None and event[2] in kinds:
            yield int(event[0]) / 1e9, "", f"FAULT {in_words(fault)}"
        elif event[2] in ("start", "heal", "thaw", "unclog", "recover", "unhang", "unblock", "mend", "give", "behave"):
            yield int(event[0]) / 1e9, "", f"{event[2]} {event[3]}"


def in_words(fault: AnyFault) -> str:
    given = [line for line in write_faults([fault]).splitlines()[1:] if line]
    kind, values = given[0].partition(" = ")[2].strip('"'), [line for line in given[1:] if not line.startswith("at ")]
    ends = "" if not fault.is_for_good else " for good"
    return f"{kind}{ends}: {', '.join(values)}"


def _words(evidence: Evidence) -> Iterator[tuple[float, str, str]]:
    """Yield messages, failed views and accusations. Hosts that send the same message in the same second are
    combined."""
    groups: dict[tuple[int, str], tuple[float, dict[str, None]]] = {}
    for said in evidence.said:
        _, hosts = groups.setdefault((int(said.time_s), said.text), (said.time_s, {}))
        hosts.setdefault(said.host)
    for (_, text), (time_s, hosts) in groups.items():
        yield time_s, ", ".join(hosts), text
    for event in evidence.events:
        if event[1] == "view failed":
            yield int(event[0]) / 1e9, str(event[2]), f"view {event[3]} failed: {event[4]}"
        elif event[1] == "accused":
            yield int(event[0]) / 1e9, str(event[2]), f"accuses {str(event[4])[:8]}: {event[5]}"


def _steps(evidence: Evidence) -> Iterator[tuple[float, str, str]]:
    """Yield the first step, the last one, and those before and after a pause."""
    done, before_s = 0, 0.0
    for each in evidence.steps:
        if each.step <= done:
            continue
        if not done or each.time_s > before_s + 5 or each.step >= evidence.training.steps:
            if done:
                yield before_s, "", f"step {done} is done"
            yield each.time_s, "", f"step {each.step} is done"
        done, before_s = each.step, each.time_s
    if done:
        yield before_s, "", f"step {done} is done, and no further one"


def _ends(evidence: Evidence) -> Iterator[str]:
    for host, result in evidence.results.items():
        if isinstance(result, Report):
            yield f"   at last  {host}: came to the end after {result.steps} steps"
        else:
            yield f"   at last  {host}: {type(result).__name__}: {result}"
