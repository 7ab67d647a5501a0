"""How long an all-reduce takes, by algorithm, size and link: a simulated study.

    python -m experiments.sweep [--quick] [--out results]

Each point is the median over some repeats after a first one, which opens connections and windows.
Payloads are phantoms, so a point needs no memory, and its time does not depend on this machine:
every run of the same code writes the same bytes into the table. Some clusters have nothing but
latency and bandwidth; there the textbook's formulas hold, and stand beside the result.

Written are `allreduce.csv`, two figures (PNG and SVG), and `manifest.json` with what is needed to
tell two runs apart: the commit, versions, seeds, and digests of each scenario and each trace.
"""

from __future__ import annotations

import csv
import hashlib
import json
import platform
import statistics
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress

from experiments import plots
from experiments.clusters import FLAT, Cluster, homes, ideal
from hcsim.collectives.cost import closed_form
from hcsim.collectives.group import Group, Options
from hcsim.launch import simulate
from hcsim.runtime.channel import Phantom
from hcsim.transport.mesh import MAX_FRAME_BYTES, Wire

TIMEOUT_S = 24 * 3600.0
"""Slow links are part of the study: nothing is to fail for being slow."""
MEETING_S = 1.0
"""Longer than the message takes that makes the appointment."""
RECORDED = ("hcsim", "simpy", "numpy", "msgspec", "matplotlib")


class Effort(msgspec.Struct, frozen=True):
    """How many points there are."""

    sizes_bytes: tuple[int, ...]
    repeats: int


QUICK = Effort(tuple(4**power << 10 for power in range(9)), repeats=3)
FULL = Effort(tuple(2**power << 10 for power in range(19)), repeats=9)


class Point(msgspec.Struct, frozen=True):
    """One row of the table. Times are of the slowest rank."""

    cluster: str
    ranks: int
    algorithm: str
    size_bytes: int
    median_s: float
    fastest_s: float
    slowest_s: float
    sent_bytes: int
    """By the busiest rank."""
    closed_form_s: float | None


def measure(cluster: Cluster, algorithm: str, size_bytes: int, repeats: int) -> tuple[Point, str]:
    """One point, and the digest of its trace."""
    options = Options(timeout_s=TIMEOUT_S, groups=cluster.groups)
    # The formulas know no pipelining, so messages are not cut where they are compared.
    wire = Wire(segment_bytes=MAX_FRAME_BYTES) if cluster.alpha_beta else Wire()

    async def program(group: Group) -> tuple[list[float], int]:
        return await timed(group, algorithm, size_bytes, repeats)

    outcome = simulate(cluster.scenario, program, options=options, wire=wire)
    by_rank, sent_bytes = zip(*outcome.values(), strict=True)
    times_s = [round(max(times), 9) for times in zip(*by_rank, strict=True)]  # the simulator's clock has whole ns
    point = Point(
        cluster.scenario.name,
        cluster.ranks,
        algorithm,
        size_bytes,
        statistics.median(times_s),
        min(times_s),
        max(times_s),
        max(sent_bytes),
        closed_form(algorithm, cluster.ranks, size_bytes, *cluster.alpha_beta) if cluster.alpha_beta else None,
    )
    return point, outcome.trace_sha256


async def timed(group: Group, algorithm: str, size_bytes: int, repeats: int) -> tuple[list[float], int]:
    """This rank's times, and the bytes it sent in each. All virtual clocks agree, so all can start at one instant."""
    clock = group.host.clock
    tensor = Phantom(size_bytes)
    await group.all_reduce(tensor, algorithm=algorithm)
    sent_bytes = group.bytes_sent
    times_s = []
    for _ in range(repeats):
        nows_s = await group.all_gather(np.array([clock.now()]))
        start_s = float(np.max(nows_s)) + MEETING_S
        await clock.sleep(start_s - clock.now())
        await group.all_reduce(tensor, algorithm=algorithm)
        times_s.append(clock.now() - start_s)
    return times_s, sent_bytes


def textbook() -> list[Cluster]:
    """Where the formulas hold."""
    return [ideal(8, FLAT)]


def grid(places: list[Cluster], effort: Effort) -> list[tuple[Cluster, str, int]]:
    """All points of the study. Where messages must stay whole, the sizes end where a frame does."""
    return [
        (cluster, algorithm, size_bytes)
        for cluster in places
        for algorithm in cluster.algorithms
        for size_bytes in effort.sizes_bytes
        if not cluster.alpha_beta or size_bytes <= MAX_FRAME_BYTES
    ]


def write_table(points: list[Point], file: Path) -> None:
    with file.open("w", newline="", encoding="utf-8") as out:
        rows = csv.writer(out, lineterminator="\n")
        rows.writerow(Point.__struct_fields__)
        rows.writerows(msgspec.structs.astuple(point) for point in points)


def manifest(places: list[Cluster], points: list[Point], traces: list[str], command: str) -> dict[str, Any]:
    """What made these files."""
    digest = hashlib.sha256
    return {
        "command": command,
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in RECORDED}},
        "scenarios": [
            {
                "name": cluster.scenario.name,
                "seed": cluster.scenario.seed,
                "sha256": digest(msgspec.json.encode(cluster.scenario, enc_hook=float)).hexdigest(),
            }
            for cluster in places
        ],
        "trace_sha256": {
            f"{point.cluster} {point.algorithm} {point.size_bytes}": trace
            for point, trace in zip(points, traces, strict=True)
        },
    }


def _commit() -> str | None:
    """What is checked out, with a mark when files differ from it; None outside a repository."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40", "--dirty"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def study(places: list[Cluster], effort: Effort, out: Path, command: str) -> list[Point]:
    """Measure everything and write the files."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        todo = progress.track(grid(places, effort), description="simulating")
        points, traces = map(list, zip(*(measure(*point, effort.repeats) for point in todo), strict=True))
    write_table(points, out / "allreduce.csv")
    text = json.dumps(manifest(places, points, traces, command), indent=1)
    (out / "manifest.json").write_text(text + "\n", encoding="utf-8")
    titles = {cluster.scenario.name: cluster.title for cluster in places}
    plots.times_by_link([point for point in points if point.closed_form_s is None], titles, out / "allreduce_by_link")
    plots.closed_forms([point for point in points if point.closed_form_s is not None], out / "allreduce_closed_form")
    return points


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and repeats.")] = False,
    out: Annotated[Path, typer.Option(help="Where the table and the figures go.")] = Path("results"),
) -> None:
    """Simulate all-reduces on unlike links; write a table, a manifest and figures."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"{out}: {error.strerror}", param_hint="--out") from None
    command = "python -m experiments.sweep" + (" --quick" if quick else "")
    points = study([*homes(), *textbook()], QUICK if quick else FULL, out, command)
    typer.echo(f"{len(points)} points in {out / 'allreduce.csv'}, figures beside it")


if __name__ == "__main__":
    typer.run(main)
