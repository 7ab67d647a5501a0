"""`hcsim run SCENARIO`: the job in a simulated cluster."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from hcsim.cli import screen
from hcsim.collectives.group import Group, Options
from hcsim.config import Scenario
from hcsim.errors import CollectiveTimeout, ConfigError, HcsimError
from hcsim.jobs import Lap, assemble, check_job, run_job
from hcsim.launch import Outcome, simulate
from hcsim.telemetry.trace import Event, Sink
from hcsim.transport.mesh import Wire


class Files(msgspec.Struct, frozen=True):
    """What a virtual run writes, where it is asked to."""

    trace: Path | None = None
    metrics: Path | None = None


def run_virtual(scenario: Scenario, wire: Wire, files: Files) -> bool:
    """Run, and show how it went; whether all ranks came to a result, and to the right one."""
    job = scenario.job
    check_job(job)
    options = Options(timeout_s=job.timeout_s, groups=_groups(scenario))
    laps: list[Lap] = []
    with ExitStack() as stack:
        progress = stack.enter_context(screen.Progress("repeat", job.repeat))
        sink = writer(files.trace, stack) if files.trace is not None else None
        figures = writable(files.metrics, stack) if files.metrics is not None else None

        def observe(lap: Lap) -> None:
            if lap.number > len(laps):  # the first rank to know tells for all
                laps.append(lap)
                progress.lap(lap)

        async def program(group: Group) -> None:
            await assemble(group, job.timeout_s, lambda missing: None)
            await run_job(group, job, observe)

        outcome = simulate(scenario, program, options=options, wire=wire, sink=sink)
        write_metrics(figures, outcome)
    names = [node.name for node in scenario.nodes]
    screen.report(screen.title(job, len(names), scenario.name), job, len(names), laps)
    healthy = tell_failures(names, outcome.results)
    screen.say(f"virtual time {screen.duration(outcome.seconds)}, {outcome.events:,} events")
    screen.say(f"trace sha256 {outcome.trace_sha256}")
    return healthy and not any(lap.wrong for lap in laps)


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
        screen.note("a large model on a slow link takes its time: --timeout allows more of it")
    return healthy


def _groups(scenario: Scenario) -> tuple[tuple[int, ...], ...]:
    """Who is close to whom, for a hierarchical all_reduce: those in one home."""
    if scenario.job.algorithm != "hierarchical":
        return ()
    if len(scenario.homes) < 2:
        raise ConfigError(f"hierarchical goes over several homes, and all nodes of {scenario.name} are in one")
    return scenario.homes


def write_metrics(file: BinaryIO | None, outcome: Outcome[Any]) -> None:
    """The hosts' figures at the end, as Prometheus reads them."""
    if file is not None:
        from hcsim.telemetry.exposition import prometheus_text

        file.write(prometheus_text(outcome.metrics).encode())


def writable(path: Path, stack: ExitStack) -> BinaryIO:
    """The file, open: what cannot be written is found out before the run."""
    try:
        return stack.enter_context(path.open("wb"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def writer(path: Path, stack: ExitStack) -> Sink:
    """Writes each event as a line of JSON."""
    file = writable(path, stack)
    encode = msgspec.json.Encoder().encode_lines

    def write(events: Sequence[Event]) -> None:
        file.write(encode(events))

    return write
