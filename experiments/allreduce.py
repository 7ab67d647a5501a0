"""All-reduce within one machine: hcsim beside gloo, MLX's ring and Open MPI over TCP, in one run.

    python -m experiments.allreduce --ranks 2,4 --sizes 64KB,16MB --json allreduce.json
    python -m experiments.allreduce --dtype bfloat16

Times of one machine mean something only beside each other, and machines are noisy. So the ranks
of every library are started once and kept, asleep, and each cell (ranks × size) is measured in
rounds: every library takes a turn in every round, in rotating order, and noise hits all alike. A
first round, not counted, checks every element of each library's sum and finds out how many
iterations fit into a turn. An iteration is an all-reduce right after a barrier and takes as long
as its slowest rank. A cell is the median over the iterations of all rounds.

All have one thread for arithmetic and no binding to cores. `ratio_X` is hcsim's time over X's:
below one, hcsim is faster. `X_peak_bytes` is the most that a rank of X occupied in a turn, its tensor
included, beyond what it had occupied right before while it reduced a single number as often;
`X_idle_bytes` is the most of the latter. (Right before: with each new thing that it does, a process grows for good, by
code that is read and by pages that its heap keeps.)

The processes of one machine share memory with hcsim; `hcsim_tcp` is hcsim over TCP like the others, as it is between
machines, and `tcp_ratio_X` its time over X's. `--peers hcsim_tcp,gloo,bare` puts a ring in C over bare sockets beside
them: what TCP itself costs here.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Annotated, Any

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from experiments import asked
from experiments.peers.peer import EXACT, Peer
from experiments.peers.rank import Turn
from experiments.peers.roster import PEERS, UNASKED
from experiments.peers.team import Team, TeamFailed, running
from hcsim.collectives.algorithms import algorithms
from hcsim.collectives.arithmetic import dtype_named

Row = dict[str, Any]

TURN_S = 0.4
"""How long a turn should last; a large tensor's one iteration may take longer."""
MAX_ITERATIONS = 40
MAX_RANKS = 64
BUSY_LOAD = 0.5
FLOAT_BYTES = 4
MAX_BYTES = 4 << 30
RATIOS = {"hcsim": "ratio", "hcsim_tcp": "tcp_ratio"}
"""Whose time is compared with the others', and how that is called in the rows."""
_WIDE = 160
"""Characters: a file has no edge at which to cut columns."""
_UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}


class Measured(msgspec.Struct):
    """What one library did in one cell."""

    durations_s: list[float] = []
    idle_bytes: int | None = None
    peak_bytes: int | None = None


class Study:
    """One run: its teams, its progress, and what went wrong on the way."""

    def __init__(self, peers: list[Peer], rounds: int, algorithm: str, dtype: str, progress: Progress) -> None:
        self.failures: list[str] = []
        self._peers = peers
        self._rounds = rounds
        self._algorithm = algorithm
        self._dtype = dtype
        self._progress = progress
        self._task = TaskID(0)

    def measure(self, rank_counts: list[int], sizes: list[int]) -> Iterator[Row]:
        """One row per cell, as soon as it is there."""
        turns = len(rank_counts) * len(sizes) * len(self._peers) * (self._rounds + 1)
        self._task = self._progress.add_task("", total=turns)
        for ranks in rank_counts:
            with ExitStack() as stack:
                teams = self._start(stack, ranks)
                for size_bytes in sizes:
                    measured = self._measure_cell(teams, ranks, size_bytes)
                    yield row(ranks, size_bytes, measured) | {"dtype": self._dtype}

    def _start(self, stack: ExitStack, ranks: int) -> list[Team]:
        teams = []
        for peer in self._peers:
            self._progress.update(self._task, description=f"{ranks} ranks: starting {peer.name}")
            try:
                teams.append(stack.enter_context(running(peer, ranks, self._algorithm, self._dtype)))
            except TeamFailed as failure:
                self.failures.append(f"{peer.name} on {ranks} ranks: {failure}")
        return teams

    def _measure_cell(self, teams: list[Team], ranks: int, size_bytes: int) -> dict[str, Measured]:
        """Takes a team that fails out of `teams`: its ranks are of no more use."""
        measured = {team.peer.name: Measured() for team in teams}
        turns: dict[str, Turn] = {}
        for number in range(self._rounds + 1):
            shift = number % max(1, len(teams))
            for team in teams[shift:] + teams[:shift]:
                name = team.peer.name
                self._progress.update(
                    self._task, advance=1, description=f"{ranks} ranks, {size_label(size_bytes)}: {name}"
                )
                try:
                    if number == 0:
                        turns[name] = _first_turn(team, size_bytes // dtype_named(self._dtype).itemsize)
                    else:
                        _take_turn(team, turns[name], measured[name])
                except TeamFailed as failure:
                    self.failures.append(f"{name} on {ranks} ranks, {size_label(size_bytes)}: {failure}")
                    teams.remove(team)
                    del measured[name]
        return measured


def _first_turn(team: Team, elements: int) -> Turn:
    """Check the sum; say how the turns that count shall be."""
    reports = team.take(Turn(elements, iterations=1, verify=True))
    wrong = sum(report.wrong_elements for report in reports)
    if wrong:
        raise TeamFailed(f"{wrong} elements of the sum are wrong")
    iteration_s = max(report.durations_s[0] for report in reports)
    return Turn(elements, iterations=max(1, min(MAX_ITERATIONS, int(TURN_S / iteration_s))))


def _take_turn(team: Team, turn: Turn, measured: Measured) -> None:
    idle_bytes = [report.peak_bytes for report in team.take(Turn(1, turn.iterations))]
    reports = team.take(turn)
    measured.durations_s += [max(of_ranks) for of_ranks in zip(*(r.durations_s for r in reports), strict=True)]
    beyond_idle = [
        None if idle is None or report.peak_bytes is None else report.peak_bytes - idle
        for idle, report in zip(idle_bytes, reports, strict=True)
    ]
    measured.idle_bytes = _most([measured.idle_bytes, *idle_bytes])
    measured.peak_bytes = _most([measured.peak_bytes, *beyond_idle])


def _most(sizes_bytes: list[int | None]) -> int | None:
    """The largest; None where the system tells none."""
    return max((size for size in sizes_bytes if size is not None), default=None)


def row(ranks: int, size_bytes: int, measured: dict[str, Measured]) -> Row:
    """One cell's results; null for a library that was not measured."""
    result: Row = {"ranks": ranks, "size_bytes": size_bytes}
    medians = {name: statistics.median(m.durations_s) for name, m in measured.items()}
    result |= {f"{name}_s": medians.get(name) for name in PEERS}
    for us, ratio in RATIOS.items():
        for name in PEERS:
            if name not in RATIOS or (us, name) == ("hcsim", "hcsim_tcp"):
                both = us in medians and name in medians
                result[f"{ratio}_{name}"] = medians[us] / medians[name] if both else None
    for name in PEERS:
        of_peer = measured.get(name)
        result[f"{name}_peak_bytes"] = of_peer.peak_bytes if of_peer else None
        result[f"{name}_idle_bytes"] = of_peer.idle_bytes if of_peer else None
        result[f"{name}_iterations"] = len(of_peer.durations_s) if of_peer else None
    return result


def time_table(rows: list[Row]) -> Table:
    """Milliseconds, and hcsim's time over each of the others': through memory, and over TCP."""
    names = _measured(rows)
    others = [name for name in names if name not in RATIOS]
    ratios = {
        f"{'TCP ' * (us != 'hcsim')}÷ {name}": f"{ratio}_{name}"
        for us, ratio in RATIOS.items()
        for name in others
        if us in names
    }
    result = _table(f"all-reduce of {rows[0]['dtype']} within one machine, ms", [*names, *ratios])
    for cell in rows:
        times = [_number(cell[f"{name}_s"], 1e-3) for name in names]
        result.add_row(*_place(cell), *times, *(_number(cell[field]) for field in ratios.values()))
    return result


def memory_table(rows: list[Row]) -> Table:
    """Megabytes that a rank occupied beyond an idle one."""
    names = _measured(rows)
    result = _table("peak memory of a rank beyond an idle one, MB", names)
    for cell in rows:
        result.add_row(*_place(cell), *(_number(cell[f"{name}_peak_bytes"], _UNITS["MB"]) for name in names))
    return result


def _measured(rows: list[Row]) -> list[str]:
    """Whoever has a time in some cell."""
    return [name for name in PEERS if any(cell[f"{name}_s"] is not None for cell in rows)]


def _table(title: str, columns: list[str]) -> Table:
    result = Table(title=title, box=box.SIMPLE_HEAD)
    for heading in ["ranks", "size", *columns]:
        result.add_column(heading, justify="right", no_wrap=True)
    return result


def _place(cell: Row) -> tuple[str, str]:
    return str(cell["ranks"]), size_label(int(cell["size_bytes"] or 0))


def _number(value: float | None, unit: float = 1.0) -> str:
    return "–" if value is None else f"{value / unit:.3g}" if value < 100 * unit else f"{value / unit:.0f}"


def size_label(size_bytes: int) -> str:
    """16777216 → "16 MB"."""
    unit = next(name for name in reversed(_UNITS) if size_bytes % _UNITS[name] == 0)
    return f"{size_bytes // _UNITS[unit]} {unit}"


def parse_sizes(text: str) -> list[int]:
    """ "4KB,16MB" → bytes, in rising order. 1 KB is 1024 bytes."""
    sizes = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+) *([KMG]?B)?", part.strip().upper())
        size_bytes = int(match[1]) * _UNITS[match[2] or "B"] if match else 0
        if not 1 <= size_bytes <= MAX_BYTES or size_bytes % FLOAT_BYTES:
            raise typer.BadParameter(
                f"{part!r} is not a multiple of 4 bytes up to 4GB, such as 4096, 64KB or 16MB", param_hint="--sizes"
            )
        sizes.append(size_bytes)
    return sorted(set(sizes))


def parse_ranks(text: str) -> list[int]:
    """ "2,4,8" → numbers of ranks, in rising order."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isdecimal() and 2 <= int(part) <= MAX_RANKS):
            raise typer.BadParameter(f"{part!r} is not a number of ranks from 2 to {MAX_RANKS}", param_hint="--ranks")
    return sorted({int(part) for part in parts})


def parse_peers(text: str) -> list[Peer]:
    """ "hcsim,gloo" → the peers of that name, in the order of the columns."""
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in PEERS:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(PEERS)}", param_hint="--peers")
    return [peer for name, peer in PEERS.items() if name in names]


def parse_algorithm(text: str) -> str:
    """One of hcsim's algorithms for all-reduce, or "auto"; a hierarchy needs several homes, and here is one machine."""
    known = ["auto", *(name for name in algorithms("all_reduce") if name != "hierarchical")]
    if text not in known:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(known)}", param_hint="--algorithm")
    return text


def parse_dtype(text: str) -> str:
    """A kind of floats that all, or nearly all, can add."""
    if text not in EXACT:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(EXACT)}", param_hint="--dtype")
    return text


def main(
    ranks: Annotated[str, typer.Option(help="Numbers of processes.")] = "2,4,8",
    sizes: Annotated[
        str, typer.Option(help="Sizes of the tensor; 1 KB is 1024 bytes.")
    ] = "4KB,64KB,1MB,16MB,64MB,256MB",
    peers: Annotated[
        str,
        typer.Option(help="Whom to measure; there are hcsim_tls, hcsim_tls_tcp, hcsim_mlx and bare (TCP's limit) too."),
    ] = ",".join(UNASKED),
    repeat: Annotated[int, typer.Option(min=1, max=1000, help="Rounds in which every peer takes a turn.")] = 5,
    algorithm: Annotated[str, typer.Option(help="hcsim's algorithm.")] = "auto",
    dtype: Annotated[str, typer.Option(help=f"What is added: {', '.join(EXACT)}.")] = "float32",
    json_file: Annotated[str | None, typer.Option("--json", help="Write one row per cell to this file.")] = None,
) -> None:
    """All-reduce within one machine: hcsim beside gloo, MLX and Open MPI over TCP, interleaved in one run."""
    rank_counts, size_list, chosen = parse_ranks(ranks), parse_sizes(sizes), parse_peers(peers)
    hcsim_algorithm, kind = parse_algorithm(algorithm), parse_dtype(dtype)
    asked.check_json(json_file)
    notes = Console(stderr=True)
    reasons = {peer.name: peer.missing() if kind in peer.dtypes else f"it adds no {kind}" for peer in chosen}
    for name, reason in reasons.items():
        if reason:
            notes.print(f"{name} is left out: {reason}")
    if os.getloadavg()[0] > BUSY_LOAD:
        notes.print("this machine is busy with something else: MLX and Open MPI, which spin, suffer most from that")
    present = [peer for peer in chosen if not reasons[peer.name]]
    rows: list[Row] = []
    try:
        with Progress(console=notes, transient=True) as progress:
            study = Study(present, repeat, hcsim_algorithm, kind, progress)
            for cell in study.measure(rank_counts, size_list):
                rows.append(cell)
                asked.write_json(json_file, rows)
    finally:  # a full disk, or Ctrl-C, costs only what has not been measured yet
        console = Console()
        if not console.is_terminal:
            console = Console(width=_WIDE)
        if rows:
            console.print(time_table(rows), memory_table(rows))
    for failure in study.failures:
        notes.print(f"failed: {failure}", markup=False)
    if study.failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    asked.run(main)
