"""`hcsim run SCRIPT.py --scenario SCENARIO`: a torch script on a simulated cluster."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from hcsim.cli import screen
from hcsim.cli.recording import RecordingFiles, recording, show_run, tell_fingerprint
from hcsim.config import Cluster, Scenario
from hcsim.launch.real import RealNode
from hcsim.real.keys import load_secret
from hcsim.scripts.ipc import ended_how
from hcsim.scripts.member import ScriptExit, ScriptSpec, run_in_cluster
from hcsim.scripts.run import ScriptRun, simulate_script
from hcsim.transport.groups import Wire

_BUSIEST = 8


class RankPrefixWriter:
    """Writes the complete lines of each rank with the rank as a prefix."""

    def __init__(self, names: Sequence[str]) -> None:
        width = max(map(len, names), default=0)
        self._prefixes = [f"[{rank} {name:<{width}}] " for rank, name in enumerate(names)]
        self._begun: dict[tuple[int, int], str] = {}

    def __call__(self, rank: int, stream: int, text: str) -> None:
        """Take text that the script has written."""
        *lines, rest = (self._begun.pop((rank, stream), "") + text).split("\n")
        if rest:
            self._begun[rank, stream] = rest
        for line in lines:
            self._write(rank, stream, line)

    def end(self) -> None:
        """Write incomplete lines as they are; no more text follows."""
        for (rank, stream), line in self._begun.items():
            self._write(rank, stream, line)
        self._begun.clear()

    def _write(self, rank: int, stream: int, line: str) -> None:
        shown = line.rstrip("\r").rpartition("\r")[2]  # of a line that overwrites itself, what stays
        print(self._prefixes[rank] + shown, file=sys.stdout if stream == 1 else sys.stderr, flush=True)


def run_script(script: Path, arguments: Sequence[str], scenario: Scenario, wire: Wire, files: RecordingFiles) -> bool:
    """Run the script and show the outcome. Return whether all ranks succeeded."""
    say = RankPrefixWriter([node.name for node in scenario.nodes])
    with recording(files) as record:
        try:
            run = simulate_script(scenario, script, arguments, say=say, wire=wire, sink=record.sink)
        finally:
            say.end()
        record.keep(run.metrics)
    screen.say(f"{script.name} on {scenario.name}, {screen.counted(len(run.ranks), 'rank')}, simulated")
    _show_ranks(run)
    _show_links(run)
    _tell_ends(run)
    tell_fingerprint(run)
    if files.report is not None:
        from hcsim.cli.report import report_script

        report_script(files, record, script, scenario, run)
    show_run(record, files)
    if run.succeeded and not run.took_part:
        screen.complain(
            f"{script.name} has computed nothing with torch or MLX and called no other rank, so nothing was simulated. "
            "If it starts processes of its own: hcsim is the launcher, and runs it on each machine as one RANK of "
            "WORLD_SIZE"
        )
        return False
    return run.succeeded


def run_script_for_real(here: RealNode, cluster: Cluster, path: Path, arguments: Sequence[str]) -> bool:
    """Run this machine's rank of a script on a real cluster. Return whether it succeeded.

    The script's output is passed on unchanged. Messages of hcsim go to standard error."""
    load_secret(here.home, here.cluster)  # whoever has joined no cluster need not wait
    script = ScriptSpec.read(path, arguments)
    ended = asyncio.run(_run_for_real(here, cluster, script))
    if ended.code:
        screen.note(f"rank {ended.rank} of {ended.world}: the script {ended_how(ended.code)}")
    return ended.code == 0


async def _run_for_real(here: RealNode, cluster: Cluster, script: ScriptSpec) -> ScriptExit:
    leaving = asyncio.Event()
    running = asyncio.ensure_future(run_in_cluster(here, cluster, script, tell=screen.note, leaving=leaving))

    def interrupted() -> None:
        if leaving.is_set():
            running.cancel()
        leaving.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupted)
    missing = cluster.needed - 1
    screen.note(f"waiting for {screen.counted(missing, 'other node')}" if missing else "this member is alone")
    try:
        return await running
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _show_ranks(run: ScriptRun) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("rank", "time", "compute", "waiting", "calls", "a step", "sent", "end"):
        table.add_column(heading, justify="left" if heading in ("rank", "end") else "right", no_wrap=True)
    for record in run.ranks:
        steps = record.steps_s
        each = screen.duration((steps[-1] - steps[0]) / (len(steps) - 1)) if len(steps) > 1 else "–"
        table.add_row(
            f"{record.rank} {record.host}",
            "–" if record.ended_s is None else screen.duration(record.ended_s - record.began_s),
            screen.duration(record.compute_s),
            screen.duration(record.wait_s),
            str(record.calls),
            each,
            screen.size(record.sent_bytes),
            "crashed" if record.code is None else "ok" if record.code == 0 else "failed",
        )
    screen.show(table)


def _show_links(run: ScriptRun) -> None:
    """Show the busiest links."""
    loads = sorted(run.loads, key=lambda load: -load.share)
    if not loads:
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("link", "carried", "used"):
        table.add_column(heading, justify="left" if heading == "link" else "right", no_wrap=True)
    for load in loads[:_BUSIEST]:
        table.add_row(load.name, screen.size(load.sent_bytes), f"{load.share:.1%}")
    screen.show(table)
    if len(loads) > _BUSIEST:
        screen.say(f"and {len(loads) - _BUSIEST} more, less busy")


def _tell_ends(run: ScriptRun) -> None:
    for record in run.ranks:
        if record.code != 0:
            screen.say(f"rank {record.rank} ({record.host}) failed: {record.error}")
