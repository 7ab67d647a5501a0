"""Time to a loss over slow links: hcsim with compressed gradients beside gloo with dense ones.

Each rank is in a network namespace of its own, on a switch, behind a cable of so many Mbit/s each way. Both backends'
ranks live in the same namespaces and take turns.
"""

from __future__ import annotations

import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

from rich import box
from rich.table import Table

from experiments.ddp.team import Place, Row, team
from experiments.ddp.training import Trained, Training
from experiments.peers.crew import Command, TeamFailed
from tests.real.namespaces import Lan, lan

TARGET_LOSS = 0.2
BURST = "256kb"
"""A lesser one halves the rate: the system hands over segments of 64 KB."""


def measure(ranks: int, mbit: int, rounds: int, compression: str) -> Row:
    """One row of the table."""
    asked = {"hcsim": Training(TARGET_LOSS, compression), "gloo": Training(TARGET_LOSS)}
    runs: dict[str, list[Trained]] = {backend: [] for backend in asked}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hcsim-")))
        machines = stack.enter_context(lan(folder, [f"m{rank}" for rank in range(ranks)]))
        place = _place(machines, mbit)
        teams = {backend: stack.enter_context(team(backend, ranks, place)) for backend in asked}
        for _ in range(rounds):
            for backend, crew in teams.items():
                reports = crew.take(asked[backend], Trained)
                runs[backend].append(max(reports, key=lambda report: report.duration_s))
    row: Row = {"ranks": ranks, "mbit": mbit, "compression": compression, "target_loss": TARGET_LOSS}
    for backend, of_backend in runs.items():
        if any(run.loss > TARGET_LOSS for run in of_backend):
            raise TeamFailed(f"{backend} did not reach a loss of {TARGET_LOSS} in {of_backend[0].steps} steps")
        row[f"{backend}_s"] = statistics.median(run.duration_s for run in of_backend)
        row[f"{backend}_steps"] = of_backend[0].steps
    row["ratio"] = float(row["hcsim_s"]) / float(row["gloo_s"])
    return row


def _place(machines: Lan, mbit: int) -> Place:
    each = list(machines)
    for machine in each:
        machine.slow(1000 * mbit, BURST)

    def launch(rank: int, command: Command) -> Command:
        settings = [f"HCSIM_ADDRESSES={each[rank].ip}", "HCSIM_INSECURE=1"]
        return [*each[rank].prefix, "env", *settings, *command]

    return Place(each[0].ip, "eth0", launch)


def table(rows: list[Row]) -> Table:
    """Seconds to the loss, and hcsim's over gloo's."""
    title = f"DDP, 1.1 million parameters: seconds to a loss of {TARGET_LOSS}"
    result = Table(title=title, box=box.SIMPLE_HEAD)
    for heading in ("ranks", "Mbit/s", "compression", "hcsim", "steps", "gloo, dense", "steps", "ratio"):
        result.add_column(heading, justify="right")
    for row in rows:
        times = (f"{row['hcsim_s']:.2f}", str(row["hcsim_steps"]), f"{row['gloo_s']:.2f}", str(row["gloo_steps"]))
        result.add_row(str(row["ranks"]), str(row["mbit"]), str(row["compression"]), *times, f"{row['ratio']:.2f}")
    return result
