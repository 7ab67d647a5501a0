"""`--report FILE`: a page of a run that stands by itself, for whoever was not there.

The same run makes the same bytes: the page has no clock in it, but for what a real run has measured.
"""

from __future__ import annotations

import hashlib
import platform
import shlex
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from hcsim.cli import report_parts as parts
from hcsim.cli import screen
from hcsim.cli.recording import Recording, RecordingFiles
from hcsim.config import Job, Scenario, Training, write_scenario
from hcsim.errors import HcsimError
from hcsim.jobs import JobRepeat
from hcsim.launch.virtual import Outcome
from hcsim.report.chart import BarPart, bars
from hcsim.report.page import Facts, Figure, Page, Section, Table, Text, write_page
from hcsim.scripts.run import ScriptRun
from hcsim.training.fitting import Room, fits_of
from hcsim.training.observers import summary
from hcsim.training.run import Report, leading
from hcsim.training.strategies import strategy
from hcsim.twin.job_band import USUAL_VARIANTS
from hcsim.twin.ledger import Pair, phase_times
from hcsim.twin.prediction import PredictedRun, exchanges_every, is_quick, uncertainty
from hcsim.twin.speedup import ALONE, speedup

_LIBRARIES = ("hcsim", "simpy", "numpy", "torch")
_OUTPUTS = ("report", "timeline", "trace", "save", "dashboard")
"""Options that say what a run writes, and change nothing of it."""
_ARGUMENTS = ("what", "scenario")
"""Fields that are arguments without a name: the first field of a command."""


class RealRun(msgspec.Struct, frozen=True):
    """A real run, as one of its machines saw it."""

    settings: Training
    seed: int
    report: Report
    pair: Pair | None = None
    twin: str = ""


def command_of(name: str, options: msgspec.Struct) -> str:
    """Return the command that starts the same run: without the files that it writes."""
    words = ["hcsim", name]
    first, after = options.__struct_fields__[0], []
    for field, default in zip(options.__struct_fields__, options.__struct_defaults__, strict=True):
        value = getattr(options, field)
        if value == default or field in _OUTPUTS:
            continue
        if field == first:
            words.append(str(value))
        elif field == "arguments":
            after = ["--", *value]
        elif value is True:
            words.append(f"--{field}")
        else:
            for each in value if isinstance(value, list) else [value]:
                words += [f"--{field}", str(each)]
    return shlex.join([*words, *after])


def report_training(
    files: RecordingFiles,
    record: Recording,
    scenario: Scenario,
    run: PredictedRun,
    outcome: Outcome[Report],
    bands: int | None,
) -> None:
    """Write the page of a virtual training, if one was requested."""
    if files.report is None:
        return
    reports = [result for result in outcome.results if isinstance(result, Report)]
    failed = [
        (node.name, str(result))
        for node, result in zip(scenario.nodes, outcome.results, strict=True)
        if isinstance(result, BaseException)
    ]
    fits = fits_of(run.settings, [Room.of(node) for node in scenario.nodes], saves=run.forms_cluster)
    model = {"model": reports[0].sha256 if reports else None}
    facts = Section("", _headline(scenario, run, reports, outcome, bands))
    page = Page(
        summary(run.settings),
        f"{screen.counted(len(scenario.nodes), 'machine')}, {scenario.name}, simulated",
        (
            facts, *_failures(failed), parts.the_home(scenario), *_of_record(record),
            parts.links_used(outcome.loads), parts.memory(fits),
            _again(files, scenario.seed, outcome.trace_sha256, scenario, model),
        ),
    )  # fmt: skip
    _write(files.report, page)


def report_real(files: RecordingFiles, record: Recording, run: RealRun) -> None:
    """Write the page of a real training, as this machine saw it, if one was requested."""
    if files.report is None:
        return
    points = run.report.points
    phases = phase_times([point.spent_s for point in points], exchanges_every(run.settings))
    facts = _speed_facts(phases.get("step", 0.0), [point.samples for point in points], None)
    facts.append(("steps", str(run.report.steps), f"in {screen.duration(run.report.duration_s)}, on this machine"))
    page = Page(
        summary(run.settings),
        f"for real; this machine was rank {run.report.rank} at the end",
        (
            Section("", (Facts(tuple(facts)),)),
            parts.predicted_and_measured(run.pair, run.twin),
            *_of_record(record, real=True),
            _again(files, run.seed, None, None, {"model": run.report.sha256}),
        ),
    )
    _write(files.report, page)


def report_job(
    files: RecordingFiles, record: Recording, scenario: Scenario, laps: Sequence[JobRepeat], outcome: Outcome[None]
) -> None:
    """Write the page of a virtual job, if one was requested."""
    if files.report is None:
        return
    job = scenario.job
    failed = [
        (node.name, str(result))
        for node, result in zip(scenario.nodes, outcome.results, strict=True)
        if isinstance(result, BaseException)
    ]
    page = Page(
        screen.title(job, len(scenario.nodes), scenario.name),
        "simulated",
        (
            Section("", _job_facts(job, laps)), *_failures(failed), parts.the_home(scenario), *_of_record(record),
            parts.links_used(outcome.loads),
            _again(files, scenario.seed, outcome.trace_sha256, scenario, {}),
        ),
    )  # fmt: skip
    _write(files.report, page)


def report_script(files: RecordingFiles, record: Recording, script: Path, scenario: Scenario, run: ScriptRun) -> None:
    """Write the page of a script on a virtual cluster, if one was requested."""
    if files.report is None:
        return
    digest = hashlib.sha256(script.read_bytes()).hexdigest()
    facts = [("virtual time", screen.duration(run.seconds), f"{run.events:,} events")]
    laps_s = [
        (each.steps_s[-1] - each.steps_s[0]) / (len(each.steps_s) - 1) for each in run.ranks if len(each.steps_s) > 1
    ]
    if laps_s:
        facts.append(("a step", screen.duration(max(laps_s)), "on the slowest rank, mean"))
    rows = tuple(
        (
            f"{each.rank} {each.host}",
            "–" if each.ended_s is None else screen.duration(each.ended_s - each.began_s),
            screen.duration(each.compute_s), screen.duration(each.wait_s), str(each.calls),
            screen.size(each.sent_bytes), "crashed" if each.code is None else "ok" if each.code == 0 else "failed",
        )
        for each in run.ranks
    )  # fmt: skip
    ranks = Table(("rank", "time", "compute", "waiting", "calls", "sent", "end"), rows, left=("end",))
    drawn = [
        (each.host, [BarPart("compute", each.compute_s, "compute", screen.duration(each.compute_s)),
                     BarPart("waiting", each.wait_s, "wait", screen.duration(each.wait_s))])
        for each in run.ranks
    ]  # fmt: skip
    failed = [(f"rank {each.rank} ({each.host})", str(each.error)) for each in run.ranks if each.code != 0]
    page = Page(
        f"{script.name} on {scenario.name}",
        f"{screen.counted(len(run.ranks), 'rank')}, simulated",
        (
            Section("", (Facts(tuple(facts)),)), *_failures(failed),
            Section("The ranks", (Figure("", bars("time of the ranks", drawn), ranks, "ranks"), ranks)),
            parts.the_home(scenario), *_of_record(record), parts.links_used(run.loads),
            _again(files, scenario.seed, run.trace_sha256, scenario, {"script": digest}),
        ),
    )  # fmt: skip
    _write(files.report, page)


def _headline(
    scenario: Scenario, run: PredictedRun, reports: Sequence[Report], outcome: Outcome[Report], bands: int | None
) -> tuple[Facts | Text, ...]:
    """Return the speed, alone and against the fastest machine alone, with their bands."""
    lead = leading(reports) if reports else None
    if lead is None or not lead.points:
        return (Text("No machine has taken a step."),)
    phases = phase_times([point.spent_s for point in lead.points], exchanges_every(run.settings))
    step_s, samples = phases["step"], [point.samples for point in lead.points]
    if bands is None:
        bands = USUAL_VARIANTS if is_quick(scenario, outcome.events / len(lead.points), run.settings) else 0
    fixed = msgspec.structs.replace(run, forms_cluster=False)
    band, notes = None, []
    try:
        band = uncertainty(scenario, fixed, bands).band["step"] if bands else None
    except HcsimError as error:
        notes.append(Text(f"p10 and p90 are not known: {error}", soft=True))
    facts = _speed_facts(step_s, samples, band)
    facts += _against_alone(scenario, fixed, bands, notes)
    facts.append(("virtual time", screen.duration(outcome.seconds), f"{lead.steps} steps, {outcome.events:,} events"))
    busiest = max(reports, key=lambda report: report.sent_bytes)
    facts.append(("sent by the busiest", screen.size(busiest.sent_bytes), f"rank {busiest.rank}, headers included"))
    scores = [point.score for point in lead.points if point.score is not None]
    if scores:
        right = "" if scores[-1].accuracy is None else f"accuracy {scores[-1].accuracy:.1%}"
        facts.append(("held-out loss", f"{scores[-1].loss:.4g}", right))
    if exchanges_every(run.settings) > 1:
        words = (
            "Machines exchange what they learned only now and then: a step teaches less than one of data parallelism."
        )
        notes.append(Text(words, soft=True))
    return (Facts(tuple(facts)), *notes)


def _speed_facts(step_s: float, samples: Sequence[int], band: tuple[float, float] | None) -> list[tuple[str, str, str]]:
    """Return the speed in samples and in steps; the band is relative to the time of a step."""
    between_s = between = ""
    each = statistics.median(samples) if samples else 0
    if band is not None:
        low, high = band
        between_s = f"p10–p90 {screen.duration(low * step_s)} – {screen.duration(high * step_s)}"
        between = f"p10–p90 {_count(each / (high * step_s))} – {_count(each / (low * step_s))}"
    facts = [("a step", screen.duration(step_s), between_s or "median")]
    if each and step_s:
        facts.insert(0, ("samples a second", _count(each / step_s), between or f"{each:g} samples a step"))
    return facts


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _against_alone(scenario: Scenario, run: PredictedRun, bands: int, notes: list[Text]) -> list[tuple[str, str, str]]:
    if len(scenario.nodes) < 2 or strategy(run.settings.strategy) == strategy(ALONE):
        return []
    try:
        found = speedup(scenario, run, bands)
    except HcsimError as error:  # it does not fit, or the strategy needs what one machine has not
        notes.append(Text(f"Not compared with one machine alone: {error}", soft=True))
        return []
    below = f"p10–p90 {found.band[0]:.2f} – {found.band[1]:.2f}" if found.band else "for the same samples"
    alone = f"{screen.duration(found.alone_s)} for the same samples"
    verdict = "faster than" if found.times > 1 else "no faster than"
    notes.insert(0, Text(f"The cluster is {verdict} its fastest machine alone, which takes {alone}."))
    return [("against the fastest machine alone", f"{found.times:.2f} ×", below)]


def _job_facts(job: Job, laps: Sequence[JobRepeat]) -> tuple[Facts | Table | Text, ...]:
    if not laps:
        return (Text("No repeat has finished."),)
    times_s = [lap.seconds for lap in laps]
    facts = (("a repeat", screen.duration(statistics.median(times_s)), "median"),)
    rows = tuple((str(lap.number), lap.algorithm, screen.duration(lap.seconds), screen.size(lap.sent_bytes))
                 for lap in laps)  # fmt: skip
    return Facts(facts), Table(("repeat", "algorithm", "time", "sent by a rank"), rows, left=("algorithm",))


def _of_record(record: Recording, *, real: bool = False) -> tuple[Section, ...]:
    """Return what the events of the run say."""
    analysis = None if record.timeline is None else record.timeline.end()
    seen = None if record.run is None or not record.run.has_machines else record.run.at(record.run.end_s)
    steps = () if record.run is None else record.run.steps()
    return (
        parts.where_time_goes(analysis),
        parts.what_limits_it(analysis.path if analysis is not None else ()),
        parts.learning(steps),
        parts.events(seen, from_first=real),
    )


def _failures(failed: Sequence[tuple[str, str]]) -> tuple[Section, ...]:
    if not failed:
        return ()
    return (Section("What failed", (Table(("machine", "why"), tuple(failed), left=("why",)),)),)


def _again(
    files: RecordingFiles,
    seed: int,
    trace_sha256: str | None,
    scenario: Scenario | None,
    digests: Mapping[str, str | None],
) -> Section:
    facts = [("seed", str(seed))]
    if trace_sha256 is not None:
        facts.append(("trace sha256", trace_sha256))
    facts += [(f"{what} sha256", digest) for what, digest in digests.items() if digest]
    facts += [
        ("python", platform.python_version()),
        *((name, found) for name in _LIBRARIES if (found := _version(name))),
    ]
    file = write_scenario(scenario) if scenario is not None and not scenario.plugins else ""
    return parts.again([files.command], facts, file)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _write(path: Path, page: Page) -> None:
    write_page(path, page)
    screen.note(f"report in {path}")
