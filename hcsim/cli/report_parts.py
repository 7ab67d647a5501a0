"""The parts of a run's report, each from what one source knows; a source that knows nothing leaves its part out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from hcsim.cli import screen
from hcsim.cli.timeline import CAUSE_WORDS, FASTER, KIND_WORDS, gains, percent, time_by_kind, what_limits
from hcsim.cluster.overview import Overview
from hcsim.config import Scenario
from hcsim.report import home
from hcsim.report.chart import Axis, BarPart, Line, bars, lines
from hcsim.report.page import Commands, Figure, Part, Section, Table, Text
from hcsim.telemetry.breakdown import StepBreakdown
from hcsim.telemetry.critical_path import COMPUTE, ENCODE, FAULT, NETWORK, PathSegment
from hcsim.telemetry.history import HistoryStep
from hcsim.telemetry.timeline import TimelineAnalysis
from hcsim.training.fitting import Fit
from hcsim.twin.ledger import Pair
from hcsim.virtual.link_load import LinkLoad

_PARTS = (
    ("compute", "compute_ns", "compute"),
    ("encode", "encode_ns", "encode"),
    ("exposed communication", "exposed_ns", "network"),
    ("idle", "idle_ns", "idle"),
)
_COLOURS = {COMPUTE: "compute", ENCODE: "encode", NETWORK: "network", FAULT: "fault"}
_MOST_MACHINES, _MOST_CAUSES, _MOST_LINKS, _MOST_EVENTS, _MOST_GAINS = 32, 4, 16, 200, 8
_IN_TONE = {"plain": "", "good": "", "warn": "warning", "bad": "trouble"}


def where_time_goes(analysis: TimelineAnalysis | None) -> Section:
    """Return how each machine's steps divide up, and what it waits for."""
    title = "Where the time of a step goes"
    if analysis is None or not analysis.steps:
        return Section(title, ())
    machines: dict[str, list[StepBreakdown]] = {}
    for step in analysis.steps:
        machines.setdefault(step.machine, []).append(step)
    drawn, rows, waits = [], [], []
    for name, taken in list(machines.items())[:_MOST_MACHINES]:
        whole_ns = sum(step.whole_ns for step in taken)
        spent_ns = {words: sum(getattr(step, field) for step in taken) for words, field, _ in _PARTS}
        each_s = whole_ns / len(taken) / 1e9
        parts = [
            BarPart(words, spent_ns[words] / len(taken), colour, f"{percent(spent_ns[words], whole_ns)} of a step")
            for words, _, colour in _PARTS
        ]
        drawn.append((name, parts))
        hidden = percent(sum(step.hidden_ns for step in taken), whole_ns)
        shares = (percent(spent_ns[words], whole_ns) for words, _, _ in _PARTS)
        rows.append((name, str(len(taken)), screen.duration(each_s), *shares, hidden))
        waits.append((name, _waits(taken, whole_ns)))
    longest = max(sum(part.length for part in parts) for _, parts in drawn)
    headings = ("machine", "steps", "a step", *(words for words, _, _ in _PARTS), "hidden communication")
    words = "Communication is exposed while a device waits for what is on its way, and hidden while it works."
    if analysis.is_cut:
        last = max(step.number for step in analysis.steps)
        words += f" Counted up to step {last} (--set timeline_steps=N counts more)."
    if len(machines) > _MOST_MACHINES:
        words += f" {len(machines) - _MOST_MACHINES} more machines are left out."
    picture = bars("the parts of a step by machine", drawn, f"{screen.duration(longest / 1e9)}, the longest step")
    return Section(
        title,
        (
            Figure("A step on each machine (mean)", picture, Table(headings, tuple(rows)), "breakdown", words),
            Table(("machine", "waits for"), tuple(waits), left=("waits for",)),
        ),
    )


def _waits(taken: Sequence[StepBreakdown], whole_ns: int) -> str:
    causes: Counter[str] = Counter()
    for step in taken:
        for (kind, where), spent_ns in step.causes:
            causes[CAUSE_WORDS[kind].format(where)] += spent_ns
    most = [f"{what} ({percent(spent_ns, whole_ns)})" for what, spent_ns in causes.most_common(_MOST_CAUSES)]
    return ", ".join(most) or "nothing"


def what_limits_it(path: Sequence[PathSegment]) -> Section:
    """Return the shares of the critical path, and what a faster part would save."""
    title = "What limits it"
    if not path:
        return Section(title, ())
    by_kind, by_place = time_by_kind(path)
    rows = [
        (KIND_WORDS[kind], place, screen.duration(spent_ns / 1e9), percent(spent_ns, by_kind.total()))
        for kind, places in by_place.items()
        for place, spent_ns in places.most_common(_MOST_CAUSES)
    ]
    parts = [
        BarPart(KIND_WORDS[kind], spent_ns, _COLOURS.get(kind, "wait"), percent(spent_ns, by_kind.total()))
        for kind, spent_ns in by_kind.most_common()
    ]
    figure = Figure(
        "The critical path: the chain of work and transfers that leads to the end",
        bars("the critical path by kind", [("all of it", parts)]),
        Table(("kind", "where", "time", "share"), tuple(rows), left=("where",)),
        "critical_path",
    )
    found = gains(path)[:_MOST_GAINS]
    faster = f"{FASTER - 1:.0%} faster".replace("%", " %")
    if not found:
        return Section(title, (Text(what_limits(path)), figure))
    saved = Table((faster, "may save"), tuple((what, percent(gain, 1.0)) for what, gain in found), title="What if")
    note = "If transfers take as long as before; simulate the faster machine to know."
    return Section(title, (Text(what_limits(path)), figure, saved, Text(note, soft=True)))


def learning(steps: Iterable[HistoryStep]) -> Section:
    """Return the loss, if anything was learned."""
    taken = [step for step in steps if step.loss == step.loss]
    training = tuple((float(step.step), step.loss) for step in taken)
    held_out = tuple((float(step.step), step.held_out) for step in taken if step.held_out is not None)
    if not training:
        return Section("Loss", ())
    curves = [Line("training, on this rank's batches", training, is_faint=bool(held_out)), Line("held-out", held_out)]
    rows = tuple(
        (str(step.step), f"{step.loss:.6g}", _optional(step.held_out, ".6g"), _optional(step.accuracy, ".2%"))
        for step in taken
    )
    table = Table(("step", "training loss", "held-out loss", "accuracy"), rows)
    picture = lines("loss by step", curves, Axis("step", "{:,.0f}".format), Axis(from_zero=True))
    return Section("Loss", (Figure("", picture, table, "loss"),))


def _optional(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def links_used(loads: Sequence[LinkLoad]) -> Section:
    """Return what the links carried, the busiest first."""
    busiest = sorted(loads, key=lambda load: -load.share)
    if not busiest:
        return Section("How busy the links are", ())
    table = Table(
        ("link", "carried", "used"),
        tuple((load.name, screen.size(load.sent_bytes), percent(load.share, 1.0)) for load in busiest),
    )
    drawn = [
        (load.name, [BarPart("used", load.share, "network", percent(load.share, 1.0))])
        for load in busiest[:_MOST_LINKS]
    ]
    most = "all that it can carry over the whole run"
    more = f"{len(busiest) - _MOST_LINKS} less busy ones are in the table." if len(busiest) > _MOST_LINKS else ""
    return Section(
        "How busy the links are", (Figure("", bars("use of the links", drawn, most, full=1.0), table, "links", more),)
    )


def events(seen: Overview | None, *, from_first: bool) -> Section:
    """Return what happened, in words; `from_first`: times count from the first event, as clocks of real machines begin
    at any time."""
    if seen is None or not seen.events:
        return Section("What happened", ())
    begin_s = seen.events[0].at_s if from_first else 0.0
    shown = seen.events[-_MOST_EVENTS:]
    rows = tuple(
        (
            screen.duration(event.at_s - begin_s) if event.at_s > begin_s else "0 s",
            event.who,
            _IN_TONE.get(event.tone, ""),
            event.text,
        )
        for event in shown
    )
    cut = len(seen.events) - len(shown)
    left_out = (Text(f"The first {cut} are left out.", soft=True),) if cut else ()
    table = Table(("time", "who", "", "what"), rows, left=("time", "who", "", "what"))
    return Section("What happened", (*left_out, table))


def memory(fits: Sequence[Fit]) -> Section:
    """Return what each machine needs and has."""
    if not fits:
        return Section("Memory", ())
    names = [name for name in fits[0].need.parts if any(fit.need.parts[name] for fit in fits)]
    rows = tuple(
        (
            fit.room.name, fit.room.machine, *(screen.size(fit.need.parts[name]) for name in names),
            screen.size(fit.need.total),
            "unknown" if fit.room.usable_bytes is None else screen.size(fit.room.usable_bytes),
            "yes" if fit.fits else "no",
        )
        for fit in fits[:_MOST_MACHINES]
    )  # fmt: skip
    note = "Predicted from the shapes of the model and the settings; what a machine can use is what macOS lets it wire."
    table = Table(("machine", "kind", *names, "together", "can use", "fits"), rows, left=("kind",))
    return Section("Memory", (Text(note, soft=True), table))


def predicted_and_measured(pair: Pair | None, twin: str) -> Section:
    """Return the phases of a real run beside what its twin had predicted."""
    title = "Predicted and measured"
    if pair is None:
        return Section(title, ())
    rows = []
    for phase, predicted_s in pair.predicted.items():
        error, band = pair.error(phase), pair.band.get(phase)
        between = "–" if band is None else f"{screen.duration(band[0])} – {screen.duration(band[1])}"
        measured_s = pair.measured.get(phase, 0.0)
        shown = "–" if error is None else f"{error:+.1%}"
        rows.append((phase, screen.duration(predicted_s), between, screen.duration(measured_s), shown))
    table = Table(("a step", "predicted", "p10–p90", "measured", "error"), tuple(rows))
    return Section(title, (Text(f"By the twin {twin}, which was not fitted to this run.", soft=True), table))


def the_home(scenario: Scenario) -> Section:
    """Return a picture of the machines and what joins them."""
    if not scenario.nodes:
        return Section("The machines", ())
    figure = Figure("", home.picture(scenario), home.machines_table(scenario), "machines")
    return Section("The machines", (figure,))


def again(command: Sequence[str], facts: Sequence[tuple[str, str]], file: str = "") -> Section:
    """Return the commands that make the run again, and what it depends on."""
    shown: list[Part] = [Commands(tuple(command)), Table(("", ""), tuple(facts), left=("",))]
    if file:
        shown.append(Commands((file.rstrip(),), "the scenario as a file", folded=True))
    return Section("Make it again", tuple(shown))
