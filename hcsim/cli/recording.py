"""What a virtual run writes into files, and the lines that each ends with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from hcsim.cli import screen
from hcsim.errors import CollectiveTimeout, ConfigError, HcsimError
from hcsim.telemetry.metrics import HostMetrics
from hcsim.telemetry.trace import Event, Sink


class Files(msgspec.Struct, frozen=True):
    """What it writes, where it is asked to."""

    trace: Path | None = None
    metrics: Path | None = None


class Recording(msgspec.Struct, frozen=True):
    """The files, open."""

    sink: Sink | None
    """Takes the trace's events."""
    figures: _Output | None

    def keep(self, metrics: Mapping[str, HostMetrics]) -> None:
        """The hosts' figures at the end, as Prometheus reads them."""
        if self.figures is not None:
            from hcsim.telemetry.exposition import prometheus_text

            self.figures.write(prometheus_text(metrics).encode())


class _Output:
    """A file that is written; what cannot be is an error that names it, from then on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed: ConfigError | None = None
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise self._failure(error) from None

    def write(self, data: bytes) -> None:
        """Write some more."""
        if self._failed is None:
            try:
                self._file.write(data)
            except OSError as error:
                self._failed = self._failure(error)
        if self._failed is not None:
            raise self._failed

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
    """The trace cannot be written. It happens in the midst of whatever is recorded, and no component of the simulated
    machines is to take it for its own error: the loop passes on this and a person's interrupt, and nothing else."""

    def __init__(self, error: ConfigError) -> None:
        super().__init__(1)
        self.error = error


class Ran(Protocol):
    """A virtual run that is over."""

    @property
    def seconds(self) -> float:
        """Virtual time that passed."""

    @property
    def events(self) -> int:
        """In its trace."""

    @property
    def trace_sha256(self) -> str:
        """Over all of them."""


@contextmanager
def recording(files: Files) -> Iterator[Recording]:
    """Open them: what cannot be written is found out before the run."""
    try:
        with ExitStack() as stack:
            sink = None if files.trace is None else _lines(stack.enter_context(_Output(files.trace)))
            yield Recording(sink, None if files.metrics is None else stack.enter_context(_Output(files.metrics)))
    except _Lost as lost:
        raise lost.error from None


def tell_failures(names: Sequence[str], results: Sequence[object]) -> bool:
    """Name every rank that failed; whether none did."""
    healthy = True
    for rank, (name, result) in enumerate(zip(names, results, strict=True)):
        if isinstance(result, BaseException):
            if not isinstance(result, HcsimError):
                raise result
            healthy = False
            screen.say(f"rank {rank} ({name}) failed: {result}")
    if any(isinstance(result, CollectiveTimeout) for result in results):
        screen.note('a large model on a slow link takes its time: --set timeout="5 min" allows more of it')
    return healthy


def tell_fingerprint(run: Ran) -> None:
    """How long it took, and what every run of the same scenario and seed has in common."""
    screen.say(f"virtual time {screen.duration(run.seconds)}, {run.events:,} events")
    screen.say(f"trace sha256 {run.trace_sha256}")


def _lines(file: _Output) -> Sink:
    """Writes each event as a line of JSON."""
    encode = msgspec.json.Encoder().encode_lines
    lost = False

    def write(events: Sequence[Event]) -> None:
        nonlocal lost
        if lost:  # while the world is torn down
            return
        try:
            file.write(encode(events))
        except ConfigError as error:
            lost = True
            raise _Lost(error) from None

    return write
