"""Step time over loopback: every backend takes a turn in every round, in rotating order, and noise hits all alike."""

from __future__ import annotations

import statistics
from contextlib import ExitStack

import msgspec
from rich import box
from rich.table import Table

from experiments.ddp.steps import Steps, Timed
from experiments.ddp.team import BACKENDS, Row, team
from experiments.peers.crew import TeamFailed

WARM_UP = Steps(3)
"""torch rebuilds its buckets after the first step."""
TURN = Steps(3)


class Measured(msgspec.Struct):
    """What one backend did."""

    durations_s: list[float] = []
    """Of the slowest rank in each step."""
    cpu_s: list[float] = []
    """Of all ranks together in each step."""

    def add(self, reports: list[Timed]) -> None:
        """One turn more."""
        self.durations_s += [max(each) for each in zip(*(report.durations_s for report in reports), strict=True)]
        self.cpu_s += [sum(each) for each in zip(*(report.cpu_s for report in reports), strict=True)]


def measure(ranks: int, rounds: int) -> Row:
    """One row of the table."""
    with ExitStack() as stack:
        teams = {backend: stack.enter_context(team(backend, ranks)) for backend in BACKENDS}
        measured = {backend: Measured() for backend in BACKENDS}
        check({backend: crew.take(WARM_UP, Timed) for backend, crew in teams.items()})
        for number in range(rounds):
            for backend in BACKENDS if number % 2 else reversed(BACKENDS):
                measured[backend].add(teams[backend].take(TURN, Timed))
    row: Row = {"ranks": ranks, "rounds": rounds}
    for backend, result in measured.items():
        row[f"{backend}_step_s"] = statistics.median(result.durations_s)
        row[f"{backend}_least_s"] = min(result.durations_s)
        row[f"{backend}_cpu_s"] = statistics.median(result.cpu_s)
    row["ratio_step"] = float(row["hcsim_step_s"]) / float(row["gloo_step_s"])
    row["ratio_least"] = float(row["hcsim_least_s"]) / float(row["gloo_least_s"])
    row["ratio_cpu"] = float(row["hcsim_cpu_s"]) / float(row["gloo_cpu_s"])
    return row


def check(reports: dict[str, list[Timed]]) -> None:
    """All ranks have the same parameters, and all backends nearly."""
    sums = {backend: {report.checksum for report in of_ranks} for backend, of_ranks in reports.items()}
    for backend, values in sums.items():
        if len(values) > 1:
            raise TeamFailed(f"the ranks of {backend} have unlike parameters: {sorted(values)}")
    ours, theirs = (min(values) for values in sums.values())
    if abs(ours - theirs) > 1e-6 * abs(theirs):
        raise TeamFailed(f"the parameters add up to {ours} with hcsim and {theirs} with gloo")


def table(rows: list[Row]) -> Table:
    """Milliseconds of a step, and hcsim's over gloo's."""
    result = Table(title="DDP, 25 million parameters, within one machine: a step, ms", box=box.SIMPLE_HEAD)
    result.add_column("ranks", justify="right")
    for what in ("", " least", " CPU"):
        for heading in (f"hcsim{what}", f"gloo{what}", "ratio"):
            result.add_column(heading, justify="right")
    for row in rows:
        cells = [str(row["ranks"])]
        for what in ("step", "least", "cpu"):
            cells += [f"{1e3 * float(row[f'{backend}_{what}_s']):.0f}" for backend in BACKENDS]
            cells.append(f"{row[f'ratio_{what}']:.2f}")
        result.add_row(*cells)
    return result
