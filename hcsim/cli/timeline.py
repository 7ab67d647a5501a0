"""What `--timeline` says on the screen: where the time of a step goes on each machine, and what limits the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from hcsim.cli import screen
from hcsim.telemetry.breakdown import StepBreakdown
from hcsim.telemetry.critical_path import COMPUTE, ENCODE, FAULT, NETWORK, OTHER, PathSegment, path_gain, shares
from hcsim.telemetry.timeline import TimelineAnalysis

_MOST_MACHINES = 16
_MOST_GAINS = 4
_LEAST_GAIN = 0.001
FASTER = 1.1
KIND_WORDS = {
    COMPUTE: "computing",
    ENCODE: "encoding",
    NETWORK: "the network",
    FAULT: "faults",
    OTHER: "handling messages and waiting for timers",
}

CAUSE_WORDS = {
    COMPUTE: "compute of {}",
    ENCODE: "encoding of {}",
    NETWORK: "{}",
    FAULT: "a fault of {}",
    OTHER: "messages, timers of {}",
}


def tell_timeline(path: Path, analysis: TimelineAnalysis) -> None:
    """Show the breakdown of the steps, what limits the run, and what it would help to improve."""
    screen.note(f"timeline in {path}: open it at https://ui.perfetto.dev, which keeps it on this machine")
    if not analysis.steps:
        return
    if analysis.is_cut:
        last = max(step.number for step in analysis.steps)
        screen.note(f"it ends with step {last}; --set timeline_steps=N for more")
    _show_steps(analysis.steps)
    if analysis.path:
        screen.say(what_limits(analysis.path))
        _show_gains(gains(analysis.path))


def what_limits(path: Sequence[PathSegment]) -> str:
    """Return in a sentence where the time passes on the way to the end."""
    by_kind, by_place = time_by_kind(path)
    parts = [f"{KIND_WORDS[kind]} {percent(spent_ns, by_kind.total())}" for kind, spent_ns in by_kind.most_common()]
    kind = by_kind.most_common(1)[0][0]
    place, _ = by_place[kind].most_common(1)[0]
    return f"What limits it is {KIND_WORDS[kind]}, above all {place}. On the critical path: {', '.join(parts)}."


def gains(path: Sequence[PathSegment]) -> list[tuple[str, float]]:
    """Return what would make the path shorter if it were 10 % faster, and by which share of the time, the largest
    first."""
    _, by_place = time_by_kind(path)
    found = [
        (f"computing on {machine}", path_gain(path, COMPUTE, machine, FASTER))
        for machine in by_place.get(COMPUTE, Counter())
    ]
    found.append(("the whole network", path_gain(path, NETWORK, None, FASTER)))
    return sorted(((what, gain) for what, gain in found if gain >= _LEAST_GAIN), key=lambda each: -each[1])


def time_by_kind(path: Sequence[PathSegment]) -> tuple[Counter[str], dict[str, Counter[str]]]:
    by_kind: Counter[str] = Counter()
    by_place: dict[str, Counter[str]] = {}
    for (kind, machine, target), spent_ns in shares(path).items():
        by_kind[kind] += spent_ns
        by_place.setdefault(kind, Counter())[f"{machine} → {target}" if target else machine] += spent_ns
    return by_kind, by_place


def _show_steps(steps: Sequence[StepBreakdown]) -> None:
    """Show how each machine's steps divide up."""
    machines: dict[str, list[StepBreakdown]] = {}
    for step in steps:
        machines.setdefault(step.machine, []).append(step)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("machine", "a step", "compute", "encode", "exposed", "idle", "hidden", "waits most for"):
        table.add_column(heading, justify="left" if heading in ("machine", "waits most for") else "right", no_wrap=True)
    for name, taken in list(machines.items())[:_MOST_MACHINES]:
        whole_ns = sum(step.whole_ns for step in taken)
        columns = ("compute_ns", "encode_ns", "exposed_ns", "idle_ns", "hidden_ns")
        parts = (percent(sum(getattr(step, column) for step in taken), whole_ns) for column in columns)
        table.add_row(name, screen.duration(whole_ns / len(taken) / 1e9), *parts, longest_wait(taken))
    screen.show(table)
    if len(machines) > _MOST_MACHINES:
        screen.say(f"and {len(machines) - _MOST_MACHINES} more")


def _show_gains(found: Sequence[tuple[str, float]]) -> None:
    if not found:
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("10 % faster", no_wrap=True)
    table.add_column("may save", justify="right", no_wrap=True)
    for what, gain in found[:_MOST_GAINS]:
        table.add_row(what, percent(gain, 1.0))
    screen.show(table)


def longest_wait(taken: Sequence[StepBreakdown]) -> str:
    """Return what a machine waits for longest."""
    causes: Counter[str] = Counter()
    for step in taken:
        for (kind, where), spent_ns in step.causes:
            causes[CAUSE_WORDS[kind].format(where)] += spent_ns
    return causes.most_common(1)[0][0] if causes else ""


def percent(part: float, whole: float) -> str:
    share = part / whole
    return "–" if not part else f"{share:.0%}" if share >= 0.0995 else f"{share:.1%}"
