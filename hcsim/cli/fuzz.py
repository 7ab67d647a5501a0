"""`hcsim fuzz`: the output and the files of a search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from time import monotonic

import msgspec
from rich import box
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hcsim.cli import screen
from hcsim.cli.errors import INTERRUPTED
from hcsim.config import OWN_FAULTS, Scenario, load_scenario
from hcsim.errors import ConfigError
from hcsim.fuzz.coverage import PAIRS, PHASES, SHORT, Coverage
from hcsim.fuzz.evidence import Evidence
from hcsim.fuzz.generate import scenario_of
from hcsim.fuzz.invariants import breaches
from hcsim.fuzz.phases import phases_of
from hcsim.fuzz.search import Finding, TrialLog, TrialPool, cores, generator, reduce, save_finding
from hcsim.fuzz.trial import Trial, gather, in_words, timeline

SEEDS = 100
SMALL_EACH = 2
"""How many seeds are shrunk for each invariant. Further seeds mostly show the same defect."""


class FuzzOptions(msgspec.Struct, frozen=True):
    """The arguments of a search."""

    seeds: int | None
    first: int
    minutes: float | None
    workers: int | None
    shrink: bool
    state: Path | None
    out: Path
    json: Path | None
    dask: str | None = None
    """The Dask cluster that runs the trials."""


def search(asked: FuzzOptions) -> bool:
    """Run trials, report them and shrink what was found. Return whether every invariant held."""
    if asked.json is not None:
        _check_writable(asked.json)
    record = TrialLog(asked.state) if asked.state is not None else None
    trials = dict(record.trials) if record is not None else {}
    began_s, judged, interrupted = monotonic(), 0, False
    workers = asked.workers or cores()
    findings: list[Finding] = []
    with TrialPool(workers, asked.dask) as pool:
        try:
            for trial in _shown(pool.judged(_wanted(asked, trials)), asked, trials):
                judged += 1
                trials[trial.seed] = trial
                if record is not None:
                    record.add(trial)
        except KeyboardInterrupt:
            interrupted = True
        spent_s = monotonic() - began_s
        ordered = [trials[seed] for seed in sorted(trials)]
        coverage = _covered(ordered)
        try:
            _report(ordered, coverage, judged, spent_s)
            if asked.shrink and not interrupted:
                findings = _reduced(pool, ordered, asked.out)
        finally:
            if asked.json is not None:
                _write_json(asked.json, ordered, coverage, findings, judged / max(spent_s, 1e-9) * 60)
        if record is not None:
            record.close()
        if interrupted:
            again = "" if record is None else "; the same command goes on"
            screen.note(f"interrupted{again}")
            raise SystemExit(INTERRUPTED)
    return not any(trial.breaches for trial in ordered)


def _wanted(asked: FuzzOptions, known: dict[int, Trial]) -> Iterator[int]:
    """Yield the seeds without a trial so far."""
    ends_s = None if asked.minutes is None else monotonic() + 60 * asked.minutes
    seeds = asked.seeds if asked.seeds is not None or ends_s is not None else SEEDS
    numbers = count(asked.first) if seeds is None else iter(range(asked.first, asked.first + seeds))
    for seed in numbers:
        if ends_s is not None and monotonic() >= ends_s:
            return
        if seed not in known:
            yield seed


def _shown(trials: Iterator[Trial], asked: FuzzOptions, known: dict[int, Trial]) -> Iterator[Trial]:
    """Yield trials as they finish, with a progress line, and a line for each trial that broke an invariant."""
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    total = asked.seeds or (None if asked.minutes is not None else SEEDS)
    with Progress(*columns, console=Console(stderr=True, soft_wrap=True)) as progress:
        bar = progress.add_task("seeds", total=total)
        for trial in trials:
            progress.advance(bar)
            for breach in trial.breaches[:1]:
                more = f" (and {len(trial.breaches) - 1} more)" if len(trial.breaches) > 1 else ""
                progress.console.print(
                    f"seed {trial.seed} ({trial.nodes} nodes, {trial.method}): {breach.invariant}: {breach.what}{more}",
                    markup=False, highlight=False,
                )  # fmt: skip
            yield trial


def _covered(trials: Sequence[Trial]) -> Coverage:
    coverage = Coverage()
    for trial in trials:
        coverage.add(trial.pairs)
    return coverage


def _report(trials: Sequence[Trial], coverage: Coverage, judged: int, spent_s: float) -> None:
    table = Table("fault", "struck", *SHORT, box=box.SIMPLE, pad_edge=False)
    struck: Counter[str] = Counter()
    for trial in trials:
        struck.update(trial.struck)
    for kind in OWN_FAULTS:
        counts = [coverage.count(kind, phase) for phase in PHASES]
        table.add_row(kind, str(struck[kind]), *(str(each) if each else "·" for each in counts))
    screen.show(table)
    screen.say(f"coverage: {len(coverage.seen)} of {PAIRS} pairs of a fault and a phase in which it struck")
    if coverage.is_stale:
        screen.say(f"no new pair in the last {coverage.seeds - coverage.newest} seeds: more will hardly bring any")
    rate = f", {60 * judged / spent_s:.0f} a minute" if judged else ""
    excused = sum(bool(trial.excused) for trial in trials)
    hours = sum(trial.virtual_s for trial in trials) / 3600
    screen.say(f"{len(trials)} seeds{rate}, {hours:.1f} h of virtual time, {sum(struck.values())} faults")
    screen.say(f"{len(trials) - excused} of them had to come to the end in spite of what stayed broken")
    broken = Counter(invariant for trial in trials for invariant in trial.broken)
    for invariant, times in broken.most_common():
        seeds = [str(trial.seed) for trial in trials if invariant in trial.broken]
        more = f" and {len(seeds) - 10} more" if len(seeds) > 10 else ""
        screen.say(f"broken in {times} seeds: {invariant} ({', '.join(seeds[:10])}{more})")
    if not broken:
        screen.say("every invariant held in every seed")


def _reduced(pool: TrialPool, trials: Sequence[Trial], out: Path) -> list[Finding]:
    """Write the smallest scenarios that break the broken invariants into files."""
    wanted: list[tuple[int, str]] = []
    for invariant in dict.fromkeys(each for trial in trials for each in trial.broken):
        seeds = [(trial.nodes, trial.seed) for trial in trials if invariant in trial.broken and trial.trace_sha256]
        wanted += [(seed, invariant) for _, seed in sorted(seeds)[:SMALL_EACH]]
    found = []
    for finding in pool.reduced(wanted):
        path = save_finding(out, finding)
        screen.say(
            f"{finding.invariant}, seed {finding.seed}: {finding.faults} faults, {finding.nodes} nodes, "
            f"{finding.steps} steps are enough: {path}"
        )
        found.append(finding)
    return found


def _check_writable(path: Path) -> None:
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"--json {path}: it cannot be written there")


def _write_json(
    path: Path, trials: Sequence[Trial], coverage: Coverage, findings: Sequence[Finding], rate: float
) -> None:
    rows = [{**msgspec.to_builtins(trial), "broken": trial.broken} for trial in trials]
    whole = {
        "generator": generator(),
        "seeds_per_minute": round(rate, 1),
        "coverage": coverage.seen,
        "trials": rows,
        "findings": findings,
    }
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(whole)) + b"\n")
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written: {error.strerror}") from None


def replay_seed(seed: int, shrink: bool, out: Path) -> bool:
    """Replay one seed with its timeline. Return whether every invariant held."""
    broken = _replayed(scenario_of(seed))
    for invariant in broken if shrink else ():
        finding = reduce(seed, invariant)
        screen.say(f"{finding.faults} faults, {finding.nodes} nodes are enough: {save_finding(out, finding)}")
    return not broken


def replay_file(path: Path) -> bool:
    """Replay one scenario with its timeline. Return whether every invariant held."""
    scenario = load_scenario(path)
    if scenario.cluster is None or scenario.training is None:
        raise ConfigError(f"{path}: it has no [cluster] with a [training], which is what can be held to invariants")
    return not _replayed(scenario)


def _replayed(scenario: Scenario) -> list[str]:
    training = scenario.training
    assert training is not None
    screen.say(f"{len(scenario.nodes)} nodes, {training.steps} steps of {training.strategy}, {training.compressor}")
    for fault in scenario.faults:
        screen.say(f"  at {fault.at_s:.3f} s  {in_words(fault)}")
    screen.say(f"nothing changes any more from {phases_of(scenario).liveness_s:.3f} s on\n")
    evidence, _, (seconds, digest) = gather(scenario)
    for line in timeline(evidence):
        screen.say(line)
    return _verdict(evidence, seconds, digest)


def _verdict(evidence: Evidence, seconds: float, digest: str) -> list[str]:
    screen.say(f"\nvirtual time {seconds:.1f} s, trace sha256 {digest}")
    if evidence.excused:
        screen.say(f"the core need not come to the end: {evidence.excused}")
    found = breaches(evidence)
    for breach in found:
        screen.say(f"broken: {breach.invariant}: {breach.what}")
    if not found:
        screen.say("every invariant held")
    return list(dict.fromkeys(breach.invariant for breach in found))
