"""`hcsim run` with an elastic cluster, simulated or real, with the same output.

A real run can start nodes on other machines over ssh. There, the job is read from standard input, which
stays open until the run is to end. A closed connection closes it. A connection can also die silently, so
the starting machine sends heartbeats; once the first has arrived, silence counts as the end of the
connection. The started machine acknowledges the job with a line, which tells a machine that was lost from
one that was never reached.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import msgspec

from hcsim.cli import screen
from hcsim.cli.recording import RecordingFiles, recording, show_run
from hcsim.cli.training import ConsoleReporter, check, check_for_real, fastest_device, show_report, tell_outcome
from hcsim.cli.twin import ChosenTwin, MeasuredRun, as_copies, compare
from hcsim.cluster.view import View
from hcsim.config import Cluster, Scenario, Training, write_job
from hcsim.errors import ConfigError
from hcsim.launch.hosts import HostEntry
from hcsim.launch.real import RealNode, train_in_cluster
from hcsim.launch.virtual_cluster import simulate_cluster
from hcsim.node import ClusterJob
from hcsim.real.interfaces import host_name, list_interfaces, reachable_at
from hcsim.real.keys import load_secret
from hcsim.real.ssh import SshProcesses, remotes
from hcsim.runtime.address import with_port
from hcsim.telemetry.trace import Sink
from hcsim.training.run import Point, Report
from hcsim.training.strategies import check_elastic
from hcsim.transport.admission_queue import plain
from hcsim.transport.groups import Wire
from hcsim.twin.prediction import PredictedRun

_GRACE_S = 30.0
"""The time limit for the started machines to end."""
END_OF_JOB = "..."
"""After this line standard input stays open. When it closes, the starting process has gone or asks this node
to leave. The same line acknowledges the job."""
SILENCE_S = 30.0


class Outputs(msgspec.Struct, frozen=True):
    """What a real run writes or shows, beside its result."""

    files: RecordingFiles = RecordingFiles()
    save: Path | None = None
    dashboard: bool = False
    """Whether this machine serves a page of the cluster meanwhile."""
    log: Path | None = None
    """Gets the lines of all machines that are started from here."""
    twin: ChosenTwin | None = None
    """Predicts the run, once it is over."""


class RemoteHosts(msgspec.Struct, frozen=True):
    """The machines that are started from here."""

    hosts: tuple[HostEntry, ...] = ()
    program: str = "hcsim"
    """The name or path of hcsim on those machines."""


class MemberReporter(ConsoleReporter):
    """Shows the progress of the members. Each step is shown once, for the first member that reports it."""

    def __init__(self, progress: screen.ProgressLine, save: Path | None, *, only_first: bool) -> None:
        super().__init__(progress, save)
        self._only_first = only_first
        self._step = 0

    def point(self, rank: int, point: Point) -> None:
        """Show a member's progress."""
        if point.step > self._step and (rank == 0 or not self._only_first):
            self._step = point.step
            self._progress.together(point)


def train_virtual_cluster(
    scenario: Scenario,
    settings: Training,
    wire: Wire,
    files: RecordingFiles,
    save: Path | None,
    bands: int | None = None,
) -> bool:
    """Train a virtual cluster and show the outcome. Return whether all nodes that were present at the end
    finished."""
    check(settings, len(scenario.nodes), len(scenario.homes), save)
    check_elastic(settings)
    progress_line = screen.ProgressLine("step", settings.steps, simulated=True, clock=_simulated_time)
    with progress_line as progress, recording(files) as record:
        onlooker = MemberReporter(progress, save, only_first=True)
        told: dict[str, None] = {}

        def tell(host: str, what: str) -> None:
            if what not in told:  # all members of a view have the same to say
                told[what] = None
                progress.news(f"{host}: {what}")

        outcome = simulate_cluster(scenario, settings, wire=wire, sink=record.sink, observer=onlooker, tell=tell)
        record.keep(outcome.metrics)
    run = PredictedRun(settings, wire, forms_cluster=True)
    healthy = tell_outcome(scenario, settings, "node", outcome, run, bands)
    show_report(files, record, scenario, run, outcome, bands)
    show_run(record, files)
    return healthy


def train_for_real(node: RealNode, plan: ClusterJob, outputs: Outputs, others: RemoteHosts, *, attended: bool) -> bool:
    """Find the other machines, train with them, and show the outcome.

    Other machines may be started from here. If this process was itself started from another machine
    (`attended`), it leaves when that machine disconnects."""
    settings, cluster = plan.training, plan.cluster
    load_secret(node.home, node.cluster)  # whoever has joined no cluster need not wait
    check(settings, cluster.needed, 1, outputs.save)
    check_elastic(settings)
    check_for_real(settings, node.device)
    with (
        MachineLog.at(outputs.log, node.name or host_name()) as written,
        screen.ProgressLine("step", settings.steps, written, clock=str if attended else _time_of_day) as progress,
        recording(outputs.files, real=True) as record,
    ):
        if node.device == "auto":
            node = msgspec.structs.replace(node, device=asyncio.run(fastest_device(settings, progress.news)))
        missing = cluster.needed - 1
        if missing:
            progress.waiting([screen.counted(missing, "other node")])
        else:
            progress.news("work begins with this member alone (--nodes); others may join it")
        written.also_from([host.ssh for host in others.hosts])
        session = _Session(node, plan, progress, outputs.save, record.sink)
        report = asyncio.run(_shown(session.run(others, attended=attended), node, cluster, outputs))
    screen.training_report(settings, f"this node was rank {report.rank} at the end, for real", [report])
    show_run(record, outputs.files)
    pair = None
    if outputs.twin is not None:
        names, rank, points = session.longest_view(report.points)
        run = MeasuredRun(settings, plan.seed, plan.wire, names, rank, node.device, points, forms_cluster=True)
        pair = compare(outputs.twin, run)
    if outputs.files.report is not None:
        from hcsim.cli.report import RealRun, report_real

        twin = "" if outputs.twin is None else str(outputs.twin.path)
        report_real(outputs.files, record, RealRun(settings, plan.seed, report, pair, twin))
    return True


async def _shown(session: Coroutine[Any, Any, Report], node: RealNode, cluster: Cluster, outputs: Outputs) -> Report:
    """Carry out a session, with a page of the cluster meanwhile if it was requested."""
    if not outputs.dashboard:
        return await session
    from hcsim.cli.dashboard import serving_cluster

    try:
        hosts = node.hosts or reachable_at(list_interfaces())
        async with serving_cluster(None, node.home, node.cluster, [with_port(hosts[0], cluster.discovery_port)]):
            return await session
    finally:
        session.close()


def _simulated_time() -> str:
    return f"{asyncio.get_running_loop().time():8.3f} s  "


def _time_of_day() -> str:
    return f"{datetime.now():%H:%M:%S}  "


class MachineLog:
    """A file with the lines of this machine, and of those that were started from here, each with its time and its
    machine."""

    def __init__(self, file: TextIO | None, name: str) -> None:
        self._file = file
        self._name = name
        self._others: tuple[str, ...] = ()

    @classmethod
    @contextmanager
    def at(cls, path: Path | None, name: str) -> Iterator[MachineLog]:
        """Append to the file at this path; with none, nothing is written."""
        try:
            file = None if path is None else path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--set log={path}: cannot be written: {error.strerror}") from None
        try:
            yield cls(file, name)
        finally:
            if file is not None:
                with suppress(OSError):  # the disk may be full, and what it had room for is there
                    file.close()

    def also_from(self, hosts: Sequence[str]) -> None:
        """Lines that begin with one of these names are theirs."""
        self._others = tuple(f"{host}: " for host in hosts)

    def __call__(self, text: str) -> None:
        """Write a line."""
        if self._file is not None:
            time = datetime.now().astimezone().isoformat(timespec="seconds")
            whose = "" if text.startswith(self._others) and self._others else f"{self._name}: "
            try:
                self._file.write(f"{time} {whose}{plain(text)}\n")
                self._file.flush()
            except OSError:
                self._file = None  # the work goes on without it


class _Session:
    """The training of this node, and the handling of interrupts and of standard input meanwhile."""

    def __init__(
        self, node: RealNode, plan: ClusterJob, progress: screen.ProgressLine, save: Path | None, sink: Sink | None
    ) -> None:
        self._node = node
        self._sink = sink
        self._plan = plan
        self._progress = progress
        self._onlooker = MemberReporter(progress, save, only_first=False)
        self._leaving = asyncio.Event()
        self._views: list[tuple[tuple[str, ...], int, int]] = []
        """The names of the members of each view, our rank in it, and the steps taken before it."""

    def longest_view(self, points: Sequence[Point]) -> tuple[tuple[str, ...], int, list[Point]]:
        """Return the names of the members that took the most steps together, our rank among them, and these steps."""
        if not self._views:
            return (), 0, []
        ends = [*(step for *_, step in self._views[1:]), sys.maxsize]
        steps = [[point for point in points if step < point.step <= end]
                 for (*_, step), end in zip(self._views, ends, strict=True)]  # fmt: skip
        longest = max(range(len(steps)), key=lambda i: len(steps[i]))
        names, rank, _ = self._views[longest]
        return names, rank, steps[longest]

    def _viewed(self, view: View, rank: int, step: int) -> None:
        self._views.append((as_copies([member.name for member in view.members]), rank, step))

    async def run(self, others: RemoteHosts, *, attended: bool) -> Report:
        """Train until the end, or until the node is asked to leave."""
        training = asyncio.ensure_future(self._train())
        stopped = False

        def interrupted(words: str) -> None:
            nonlocal stopped
            if self._leaving.is_set():
                stopped = True
                training.cancel()
                return
            self._leaving.set()
            started.let_go()
            self._progress.news(f"leaving after this step; {words} (once more to stop at once)")

        async with remotes(self._progress.news, END_OF_JOB, _GRACE_S) as started:
            words = "so do those that were started from here" if others.hosts else "the others go on"
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, interrupted, words)
            if attended:
                when_input_closes(partial(interrupted, "whoever started us has gone"))
            started.failed.add_done_callback(lambda failed: training.cancel())
            try:
                await self._start(started, others)
                return await training
            except asyncio.CancelledError:
                if started.failed.done() and not started.failed.cancelled():
                    raise started.failed.result() from None
                if stopped:
                    raise KeyboardInterrupt from None
                raise
            finally:
                training.cancel()
                await asyncio.gather(training, return_exceptions=True)

    async def _start(self, started: SshProcesses, others: RemoteHosts) -> None:
        node, plan = self._node, self._plan
        job = write_job("job", plan.seed, plan.cluster, plan.training)
        wire = plan.wire
        settings = {
            "machine.cluster": json.dumps(node.cluster, ensure_ascii=False),
            "wire.stripes": wire.stripes,
            "wire.segment": f"{wire.segment_bytes} B",
        }
        given = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        commands = {}
        for host in others.hosts:
            at = ("--set", f"at={json.dumps(host.ips)}") if host.ips else ()
            commands[host.ssh] = (others.program, "run", "--real", "-", *given, *at)
        if commands:
            await started.start_all(commands, f"{job}{END_OF_JOB}\n")

    async def _train(self) -> Report:
        from hcsim.twin.meeting import take_part

        return await train_in_cluster(
            self._node,
            self._plan,
            observer=self._onlooker,
            tell=self._progress.news,
            leaving=self._leaving,
            began=self._viewed,
            sink=self._sink,
            meeting=take_part,
        )


def read_job() -> tuple[str, bool]:
    """Return the job from standard input, and whether the run is attended: whether the job ended with
    `END_OF_JOB`."""
    lines: list[str] = []
    for line in sys.stdin or ():  # it may be closed
        if line.rstrip("\n") == END_OF_JOB:
            sys.stdout, sys.stderr = _Unheard(sys.stdout), _Unheard(sys.stderr)
            print(END_OF_JOB, flush=True)
            return "".join(lines), True
        lines.append(line)
    return "".join(lines), False


def when_input_closes(act: Callable[[], None], silence_s: float = SILENCE_S) -> None:
    """Call `act` once standard input has ended, or has been silent for `silence_s` after the first input."""
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
    silence: asyncio.TimerHandle | None = None

    def ended() -> None:
        loop.remove_reader(descriptor)
        act()

    def readable() -> None:
        nonlocal silence
        if silence is not None:
            silence.cancel()
        if os.read(descriptor, 4096):
            silence = loop.call_later(silence_s, ended)
        else:
            ended()

    with suppress(PermissionError):  # a file: nobody holds it open for us
        loop.add_reader(descriptor, readable)


class _Unheard(io.TextIOBase):
    """A standard stream that drops output nobody reads any more, so that the node can still leave in order."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]  # it is read-only in io.TextIOBase, too
        """The encoding of the stream that this one replaces."""
        return self._stream.encoding

    def write(self, text: str) -> int:
        """Write the text, and report all of it as written even if it was dropped."""
        with suppress(ConnectionError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream, if it can still be written."""
        with suppress(ConnectionError):
            self._stream.flush()

    def isatty(self) -> bool:
        """Return what the stream that this one replaces returns."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return the descriptor of the stream that this one replaces."""
        return self._stream.fileno()
