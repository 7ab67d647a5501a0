"""`hcsim plan --report FILE`: a page of a plan that stands by itself, for whoever has to be convinced of it."""

from __future__ import annotations

from collections.abc import Sequence

from hcsim.cli import report_parts as parts
from hcsim.cli import screen
from hcsim.cli.plan_words import (
    cause_words,
    change_lines,
    faster_than,
    home_line,
    is_doubtful,
    learning_words,
    limit_line,
    number_of,
    on_words,
    per_s,
    percent,
    remarks,
    shown_alternatives,
    speedup_heading,
    speedup_words,
    together_line,
    unit,
    what_to_do,
)
from hcsim.plan.outlook import Change, MachineTime
from hcsim.plan.plan import Plan, tokens_of
from hcsim.plan.search import Ranked, memory_of
from hcsim.report.chart import BarPart, bars
from hcsim.report.page import Commands, Facts, Figure, Page, Part, Section, Table, Text

_JOB = "job.toml"
_MOST_EXCLUDED = 8


def page_of(found: Plan, command: str, job: str) -> Page:
    """Return the page of a plan, of the command that makes it again and of the file of its job."""
    return Page(
        what_to_do(found),
        home_line(found),
        (
            Section("", _headline(found)),
            _alternatives(found),
            parts.the_home(found.request.home),
            _limits(found),
            _changes("If something changes, and the plan does not", change_lines(found), found),
            _changes("If you bought", found.purchases, found),
            *_memory(found),
            _job(command, job),
        ),
    )


def _headline(found: Plan) -> tuple[Part, ...]:
    best, alone, band = found.best, found.found.alone, found.speedup
    facts = [(unit(found), number_of(per_s(found, best)), on_words(found, best))]
    lines = list(remarks(found))
    if alone is None:
        lines.insert(0, together_line(found))
    elif best.candidate.nodes == alone.candidate.nodes:
        if len(found.request.home.nodes) > 1:
            lines.insert(0, "No way to train on several of them is faster than this one alone.")
    elif band is not None:
        spread = f"p10–p90 {band.p10:.2f} – {band.p90:.2f}"
        facts.insert(0, (f"as fast as {alone.candidate.nodes[0]} alone", f"{band.value:.2f} ×", spread))
        lines.insert(0, f"{band.value:.2f} ×{faster_than(found, alone, band)}.")
    samples = screen.counted(found.request.model.samples, "sample")
    facts.append(("a step", screen.duration(best.result.step_s), samples))
    simulated = f"{found.found.simulated} simulations; the rest would be slower, or does not fit"
    facts.append(("ways to train", f"{found.found.candidates:,}", simulated))
    return (Facts(tuple(facts)), *map(Text, lines))


def _alternatives(found: Plan) -> Section:
    shown = shown_alternatives(found)
    rows = tuple(
        (
            str(each.candidate.method), on_words(found, each), number_of(per_s(found, each)),
            learning_words(each.learning), *speedup_words(found, each),
        )
        for each in shown
    )  # fmt: skip
    table = Table(("how", "on", unit(found), "learning", *speedup_heading(found)), rows, left=("on",))
    best = _best_of_each(found)
    drawn = [(each.candidate.method.family, [_bar(found, each)]) for each in best]
    longest = max(_counted_per_s(found, each) for each in best)
    whole = f"{number_of(longest)} {unit(found)}"
    numbers = Table(
        ("strategy", "at its best", "on", unit(found)),
        tuple(
            (each.candidate.method.family, str(each.candidate.method), on_words(found, each),
             number_of(_counted_per_s(found, each)))
            for each in best
        ),
        left=("at its best", "on"),
    )  # fmt: skip
    counted = "counted for the same quality: a way that needs more samples for it is that much slower"
    picture = bars("the best of each strategy", drawn, whole)
    learning = (
        "Learning: exact is what one machine alone would learn from the same samples; figures are times as many "
        "samples to the same loss, measured on a small model; of the unknown, nothing was measured."
    )
    figure = Figure("The best of each strategy", picture, numbers, "strategies", f"{unit(found)}, {counted}.")
    return Section("What else there is", (figure, table, Text(learning, soft=True)))


def _best_of_each(found: Plan) -> list[Ranked]:
    """Return the best candidate of each strategy, the plan first."""
    ranked = [found.best, *(each for doubt in (True, False) for each in found.alternatives(chosen=doubt))]
    first: dict[str, Ranked] = {}
    for each in ranked:
        first.setdefault(each.candidate.method.family, each)
    return list(first.values())


def _counted_per_s(found: Plan, each: Ranked) -> float:
    return (tokens_of(found.request.model.base.task) or 1) / each.quality_s


def _bar(found: Plan, each: Ranked) -> BarPart:
    name, colour = "what else may be chosen", "wait"
    if each is found.best:
        name, colour = "the plan", "compute"
    elif is_doubtful(each):
        name, colour = "too little is known of how it learns", "idle"
    value = _counted_per_s(found, each)
    return BarPart(name, value, colour, f"({each.candidate.method}): {number_of(value)} {unit(found)}")


def _limits(found: Plan) -> Section:
    machines = found.limits.machines
    if not machines:
        return Section("What limits it", ())
    columns = ("compute", "encode", "exposed communication", "idle")
    rows = tuple((each.machine, *map(percent, _shares(each)), cause_words(each)) for each in machines)
    table = Table(("machine", *columns, "waits most for"), rows, left=("waits most for",))
    colours = ("compute", "encode", "network", "idle")
    drawn = [
        (each.machine, [BarPart(name, share, colour, f"{percent(share)} of a step")
                        for name, share, colour in zip(columns, _shares(each), colours, strict=True)])
        for each in machines
    ]  # fmt: skip
    figure = Figure(
        "Where the time of a step goes", bars("the parts of a step by machine", drawn, "a step"),
        caption="Communication is exposed while a device waits for what is on its way.",
    )  # fmt: skip
    return Section("What limits it", (Text(limit_line(found)), figure, table))


def _shares(each: MachineTime) -> tuple[float, float, float, float]:
    return each.compute, each.encode, each.exposed, each.idle


def _changes(title: str, changes: Sequence[Change], found: Plan) -> Section:
    if not changes:
        return Section(title, ())
    tokens = tokens_of(found.request.model.base.task) or 1
    then = ("then",) if any(each.method for each in changes) else ()
    rows = tuple(
        (
            each.words, number_of(tokens * each.samples_per_s), f"{each.ratio:.2f} ×",
            *((f"{each.method} on {', '.join(each.nodes)}",) if then else ()),
        )
        for each in changes
    )  # fmt: skip
    table = Table(("what", unit(found), "speed", *then), rows, left=("then",))
    drawn = [("as it is", [BarPart("as it is", 1.0, "wait", "1 ×")])]
    drawn += [
        (each.words, [BarPart("then", each.ratio, "compute" if each.ratio > 1 else "encode", f"{each.ratio:.2f} ×")])
        for each in changes
    ]
    most = max(1.0, *(each.ratio for each in changes))
    return Section(title, (Figure("", bars(title, drawn, f"{most:.2f} ×")), table))


def _memory(found: Plan) -> tuple[Section, ...]:
    needs = parts.memory(memory_of(found.request, found.best.candidate))
    excluded = tuple(
        (
            str(candidate.method), fit.room.name, screen.size(fit.need.total),
            "unknown" if fit.room.usable_bytes is None else screen.size(fit.room.usable_bytes),
        )
        for candidate, fit in found.found.excluded[:_MOST_EXCLUDED]
    )  # fmt: skip
    if not excluded:
        return (needs,)
    return needs, Section("What does not fit", (Table(("how", "on", "needs", "can use"), excluded, left=("on",)),))


def _job(command: str, job: str) -> Section:
    lines = (
        f"{command} -o {_JOB}", f"hcsim run {_JOB}         # simulates it",
        f"hcsim run --real {_JOB}  # on each of the machines: does it",
    )  # fmt: skip
    return Section("Do it", (Commands(lines), Commands((job.rstrip(),), _JOB, folded=True)))
