"""Step time over loopback: every backend takes a turn in every round, in rotating order, and noise hits all alike."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
from rich import box
from rich.table import Table

from experiments.ddp.rank import Job, Ready, Report, Turn
from experiments.peers.crew import Command, Crew, TeamFailed, free_ports, module, working

BACKENDS = ("hcsim", "gloo")
WARM_UP = Turn(3)
"""torch rebuilds its buckets after the first step."""
TURN = Turn(3)

Row = dict[str, str | int | float]


class Measured(msgspec.Struct):
    """What one backend did."""

    durations_s: list[float] = []
    """Of the slowest rank in each step."""
    cpu_s: list[float] = []
    """Of all ranks together in each step."""

    def add(self, reports: list[Report]) -> None:
        """One turn more."""
        self.durations_s += [max(each) for each in zip(*(report.durations_s for report in reports), strict=True)]
        self.cpu_s += [sum(each) for each in zip(*(report.cpu_s for report in reports), strict=True)]


@contextmanager
def team(backend: str, ranks: int) -> Iterator[Crew]:
    """All ranks of one backend."""

    def commands(folder: Path) -> list[Command]:
        described = msgspec.json.encode(Job(backend, ranks, str(folder), free_ports(1)[0])).decode()
        return [module("experiments.ddp.rank", described, str(rank)) for rank in range(ranks)]

    with working(ranks, commands) as crew:
        crew.hear(Ready)
        yield crew


def measure(ranks: int, rounds: int) -> Row:
    """One row of the table."""
    with ExitStack() as stack:
        teams = {backend: stack.enter_context(team(backend, ranks)) for backend in BACKENDS}
        measured = {backend: Measured() for backend in BACKENDS}
        _check({backend: crew.take(WARM_UP, Report) for backend, crew in teams.items()})
        for number in range(rounds):
            for backend in BACKENDS if number % 2 else reversed(BACKENDS):
                measured[backend].add(teams[backend].take(TURN, Report))
    row: Row = {"ranks": ranks, "rounds": rounds}
    for backend, result in measured.items():
        row[f"{backend}_step_s"] = statistics.median(result.durations_s)
        row[f"{backend}_cpu_s"] = statistics.median(result.cpu_s)
    row["ratio_step"] = float(row["hcsim_step_s"]) / float(row["gloo_step_s"])
    row["ratio_cpu"] = float(row["hcsim_cpu_s"]) / float(row["gloo_cpu_s"])
    return row


def _check(reports: dict[str, list[Report]]) -> None:
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
    result = Table(title="DDP, 25 million parameters, loopback TCP: a step, ms", box=box.SIMPLE_HEAD)
    for heading in ("ranks", "hcsim", "gloo", "ratio", "hcsim CPU", "gloo CPU", "ratio"):
        result.add_column(heading, justify="right")
    for row in rows:
        names = ("hcsim_step_s", "gloo_step_s", "ratio_step", "hcsim_cpu_s", "gloo_cpu_s", "ratio_cpu")
        cells = [f"{row[name]:.2f}" if name.startswith("ratio") else f"{1e3 * float(row[name]):.0f}" for name in names]
        result.add_row(str(row["ranks"]), *cells)
    return result
