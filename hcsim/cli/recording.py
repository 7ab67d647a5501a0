"""The files that a virtual run writes, and the summary lines at its end."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from hcsim.cli import screen
from hcsim.collectives.naming import naming
from hcsim.errors import CollectiveError, CollectiveTimeout, ConfigError, HcsimError
from hcsim.telemetry.aligned import AlignedSink
from hcsim.telemetry.chakra import trace_file, write_traces
from hcsim.telemetry.execution import ExecutionGraph
from hcsim.telemetry.metrics import HostMetrics
from hcsim.telemetry.timeline import MOST_STEPS, Timeline
from hcsim.telemetry.trace import Event, IntervalSink, Sink

if TYPE_CHECKING:
    from hcsim.cli.recorded import RecordedRun


class RecordingFiles(msgspec.Struct, frozen=True):
    """The output files that were requested."""

    trace: Path | None = None
    metrics: Path | None = None
    dashboard: bool = False
    """Whether the run is shown as a page when it has ended."""
    timeline: Path | None = None
    timeline_steps: int = MOST_STEPS
    """The number of steps after which the timeline ends."""
    chakra: Path | None = None
    """The beginning of the names of the execution traces."""
    report: Path | None = None
    """A page about the run."""
    command: str = ""
    """What starts the same run again."""


class Recording(msgspec.Struct, frozen=True):
    """The output files, open."""

    sink: Sink | None
    """Receives the events of the trace."""
    figures: _Output | None
    run: RecordedRun | None = None
    """What the page will show, if one was requested."""
    timeline: Timeline | None = None
    """What writes the timeline, if one was requested."""
    graph: ExecutionGraph | None = None
    """What the execution traces will be made from, if they were requested."""

    def keep(self, metrics: Mapping[str, HostMetrics]) -> None:
        """Write the hosts' final metrics in Prometheus' text format."""
        if self.figures is not None:
            from hcsim.telemetry.exposition import prometheus_text

            self.figures.write(prometheus_text(metrics).encode())


class _Output:
    """An output file. A failed write raises an error that names the file, and so does every later one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed: ConfigError | None = None
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise self._failure(error) from None

    def write(self, data: bytes) -> None:
        """Append data."""
        if self._failed is None:
            try:
                self._file.write(data)
            except OSError as error:
                self._failed = self._failure(error)
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        """Leave the file empty: it can be written."""
        self._file.close()

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._file.close()
        except OSError as error:
            self._failed = self._failed or self._failure(error)
        if self._failed is not None and kind is None:  # else something else has ended the run
            raise self._failed

    def _failure(self, error: OSError) -> ConfigError:
        return ConfigError(f"{self._path}: cannot be written: {error.strerror}")


class _Lost(SystemExit):
    """The trace cannot be written. This is raised inside the simulation, where no component of the simulated
    machines may take it for its own error. The event loop passes on only this and a `KeyboardInterrupt`."""

    def __init__(self, error: ConfigError) -> None:
        super().__init__(1)
        self.error = error


class FinishedRun(Protocol):
    """A finished virtual run."""

    @property
    def seconds(self) -> float:
        """The virtual time that passed."""

    @property
    def events(self) -> int:
        """The number of events in its trace."""

    @property
    def trace_sha256(self) -> str:
        """The digest of all events."""


@contextmanager
def recording(files: RecordingFiles, *, real: bool = False) -> Iterator[Recording]:
    """Open the files, so that an unwritable one is reported before the run. A real machine's timeline fits to those of
    others, and it notes frames for it."""
    try:
        with ExitStack() as stack:
            sinks = [] if files.trace is None else [_lines(stack.enter_context(_Output(files.trace)))]
            figures = None if files.metrics is None else stack.enter_context(_Output(files.metrics))
            run = timeline = graph = None
            write: Callable[[bytes], None]
            if files.dashboard or files.report is not None:
                from hcsim.cli.recorded import RecordedRun

                run = RecordedRun("this run")
                sinks.append(run.listen)
            if files.timeline is not None or files.report is not None:
                write = _dropped
                if files.timeline is not None:
                    write = _until_lost(stack.enter_context(_Output(files.timeline)).write)
                timeline = Timeline(write, files.timeline_steps, origin=secrets.randbits(64) if real else 0)
                stack.callback(timeline.end)
                sinks.append(_aligned(stack, timeline) if real and files.timeline is not None else timeline)
            if files.chakra is not None:
                _Output(trace_file(files.chakra, 0)).close()
                graph = ExecutionGraph()
                sinks.append(graph)
            yield Recording(_all(sinks), figures, run, timeline, graph)
    except _Lost as lost:
        raise lost.error from None


def tell_failures(names: Sequence[str], results: Sequence[object]) -> bool:
    """Report every rank that failed. Return whether none did."""
    healthy = True
    for rank, (name, result) in enumerate(zip(names, results, strict=True)):
        if isinstance(result, BaseException):
            if not isinstance(result, HcsimError):
                raise result
            healthy = False
            told = naming(result, names) if isinstance(result, CollectiveError) else result
            screen.say(f"rank {rank} ({name}) failed: {told}")
    if any(isinstance(result, CollectiveTimeout) for result in results):
        screen.note('a large model on a slow link takes its time: --set timeout="5 min" allows more of it')
    return healthy


def tell_fingerprint(run: FinishedRun) -> None:
    """Show the run's simulated duration and the digest that all runs of the same scenario and seed share."""
    screen.say(f"simulated time {screen.duration(run.seconds)}, {run.events:,} events")
    screen.say(f"trace sha256 {run.trace_sha256}")


def show_run(record: Recording, files: RecordingFiles) -> None:
    """Show what the timeline says, and the run as a page until the user ends it, if that was requested."""
    if record.timeline is not None and files.timeline is not None:
        from hcsim.cli.timeline import tell_timeline

        tell_timeline(files.timeline, record.timeline.end())
    if record.graph is not None and files.chakra is not None:
        _write_graph(files.chakra, record.graph)
    if record.run is not None and files.dashboard:
        from hcsim.cli.dashboard import show_recorded

        show_recorded(record.run)


def _write_graph(prefix: Path, graph: ExecutionGraph) -> None:
    graphs = graph.ranks()
    written = write_traces(prefix, graphs)
    names = ", ".join([*map(str, written.files[:1]), *(["…"] if len(written.files) > 1 else [])])
    ranks = screen.counted(len(written.files), "rank")
    screen.note(f"execution traces of {ranks} with {written.nodes:,} nodes: {names or 'nothing happened'}")
    if len(graphs) > 1 and all(node.exchange is None for graph in graphs for node in graph.nodes):
        screen.note("they have computations only: nothing was exchanged by operations of a group")
    if graph.is_cut:
        screen.note("they end before the run does: it is too long, or its ranks were numbered anew")
    if graphs and (beyond := trace_file(prefix, 1 + graphs[-1].rank)).exists():
        screen.note(f"{beyond} is of another run, which had more ranks")


class _WithIntervals(IntervalSink):
    """Several sinks, one of which wants intervals."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks
        self.wants_frames = any(isinstance(sink, IntervalSink) and sink.wants_frames for sink in sinks)

    def __call__(self, events: Sequence[Event]) -> None:
        for sink in self._sinks:
            sink(events)


def _all(sinks: Sequence[Sink]) -> Sink | None:
    """Return one sink for all."""
    if len(sinks) < 2:
        return sinks[0] if sinks else None
    joined = _WithIntervals(sinks)
    return joined if any(isinstance(sink, IntervalSink) for sink in sinks) else lambda events: joined(events)


def _aligned(stack: ExitStack, timeline: Timeline) -> AlignedSink:
    aligned = AlignedSink(timeline)
    stack.callback(aligned.end)
    return aligned


def _lines(file: _Output) -> Sink:
    """Return a sink that writes each event as a line of JSON."""
    encode, write = msgspec.json.Encoder().encode_lines, _until_lost(file.write)
    return lambda events: write(encode(events))


def _dropped(data: bytes) -> None:
    """Write nothing: of a timeline, the analysis alone is wanted."""


def _until_lost(write: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """Return a function that writes, from within a simulation, until it fails."""
    lost = False

    def writing(data: bytes) -> None:
        nonlocal lost
        if lost:  # while the world is torn down
            return
        try:
            write(data)
        except ConfigError as error:
            lost = True
            raise _Lost(error) from None

    return writing
