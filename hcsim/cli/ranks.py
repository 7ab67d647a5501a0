"""One job on a fixed set of ranks: in a scenario's virtual cluster, or on real ranks that were started by hand. Also
the rendezvous of real ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from hcsim.cli import screen
from hcsim.cli.recording import RecordingFiles, recording, show_run, tell_failures, tell_fingerprint
from hcsim.collectives.group import Group
from hcsim.collectives.naming import naming
from hcsim.collectives.select import Options
from hcsim.collectives.startup import assemble
from hcsim.config import Job, Scenario
from hcsim.errors import CollectiveError, ConfigError, HcsimError
from hcsim.jobs import JobRepeat, check_job, run_job
from hcsim.launch.virtual import simulate
from hcsim.telemetry.trace import Sink
from hcsim.transport.groups import Wire
from hcsim.twin.job_band import USUAL_VARIANTS, is_quick_job, job_band

if TYPE_CHECKING:
    from hcsim.real.tls import TlsFiles

_GRACE_S = 1.0
"""The time limit of an operation is this much longer than that of a link that it needs: the link's error says
more."""
_GATHERING = ("all_gather", "gather")
"""Operations whose results are as many times as large as there are ranks."""
_WORTH_A_LOOK = 1 << 30


class ManualRank(msgspec.Struct, frozen=True):
    """The rank and the peers of a real process."""

    peers: tuple[str, ...]
    given_rank: int | None
    tls: TlsFiles | None
    insecure: bool
    metrics_at: str | None = None
    files: RecordingFiles = RecordingFiles()

    @property
    def rank(self) -> int:
        """The index of this process among the peers. Raises `ConfigError` if it was not given."""
        rank, ranks = self.given_rank, len(self.peers)
        if rank is None or not 0 <= rank < ranks:
            given = "it was not given" if rank is None else f"it is {rank}"
            raise ConfigError(f"--rank says which of the {ranks} peers we are, from 0 to {ranks - 1}; {given}")
        return rank


def run_virtual(scenario: Scenario, wire: Wire, files: RecordingFiles, bands: int | None = None) -> bool:
    """Run the job and show the outcome. Return whether all ranks got the right result."""
    job = scenario.job
    check_job(job)
    _check_memory(job, len(scenario.nodes))
    options = Options(timeout_s=job.timeout_s, groups=_groups(scenario))
    laps: list[JobRepeat] = []
    with screen.ProgressLine("repeat", job.repeat, simulated=True) as progress, recording(files) as record:

        def observe(lap: JobRepeat) -> None:
            if lap.number > len(laps):  # the first rank to know tells for all
                laps.append(lap)
                progress.lap(lap)

        async def program(group: Group) -> None:
            await assemble(group, job.timeout_s, lambda missing: None)
            await run_job(group, job, observe)

        outcome = simulate(scenario, program, options=options, wire=wire, sink=record.sink)
        record.keep(outcome.metrics)
    names = [node.name for node in scenario.nodes]
    screen.report(screen.title(job, len(names), f"{scenario.name}, simulated"), job, len(names), laps)
    if laps:
        _show_band(scenario, options, wire, [lap.seconds for lap in laps], bands, outcome.events)
    healthy = tell_failures(names, outcome.results)
    tell_fingerprint(outcome)
    if files.report is not None:
        from hcsim.cli.report import report_job

        report_job(files, record, scenario, laps, outcome)
    show_run(record, files)
    return healthy and not any(lap.wrong for lap in laps)


def _check_memory(job: Job, ranks: int) -> None:
    """Refuse a job whose data do not fit into this machine's free memory: the ranks of a simulation share it."""
    each = ranks + 1 if job.operation in _GATHERING else 2
    needed_bytes = each * ranks * job.size_bytes
    if job.payload == "phantom" or needed_bytes < _WORTH_A_LOOK:
        return
    from hcsim.real.sensors import Sensors

    free_bytes = Sensors().read().free_bytes
    if free_bytes is not None and needed_bytes > free_bytes:
        raise ConfigError(
            f"{job.operation} of {screen.size(job.size_bytes)} among {ranks} ranks needs {screen.size(needed_bytes)} "
            f"here, where {screen.size(free_bytes)} are free; --set payload=phantom simulates it without data"
        )


def _show_band(
    scenario: Scenario, options: Options, wire: Wire, times_s: Sequence[float], bands: int | None, events: int
) -> None:
    """Show the band of the median of a simulated job's repeats. The run itself had so many events."""
    if bands is None:
        bands = USUAL_VARIANTS if is_quick_job(scenario, events) else 0
    if not bands:
        return
    try:
        low, high = job_band(scenario, options, wire, bands)
    except HcsimError as error:  # it ends before its first repeat
        screen.note(f"p10 and p90 are not known: {error}")
        return
    middle_s = median(times_s)
    band = f"{screen.duration(low * middle_s)} – {screen.duration(high * middle_s)}"
    screen.say(f"a simulated repeat takes {screen.duration(middle_s)} (median), p10–p90 {band}")


def _groups(scenario: Scenario) -> tuple[tuple[int, ...], ...]:
    """Return the groups of nearby ranks for a hierarchical all_reduce: one per home."""
    if scenario.job.algorithm != "hierarchical":
        return ()
    if len(scenario.homes) < 2:
        raise ConfigError(f"hierarchical goes over several homes, and all nodes of {scenario.name} are in one")
    return scenario.homes


def run_real(job: Job, place: ManualRank, wire: Wire) -> bool:
    """Run the job on this rank and show the outcome. Return whether the result was right."""
    check_job(job)
    if job.algorithm == "hierarchical":
        raise ConfigError("hierarchical needs to know who is close to whom: use the library, with Options(groups=…)")
    ranks = len(place.peers)
    with screen.ProgressLine("repeat", job.repeat) as progress, recording(place.files, real=True) as record:
        laps, where = asyncio.run(_run(job, place, wire, progress, record.sink))
    screen.report(screen.title(job, ranks, where), job, ranks, laps)  # all ranks have told each other how it went
    show_run(record, place.files)
    return not any(lap.wrong for lap in laps)


async def _run(
    job: Job, place: ManualRank, wire: Wire, progress: screen.ProgressLine, sink: Sink | None
) -> tuple[list[JobRepeat], str]:
    from hcsim.training.trainer import agree

    async with joined(place, job.timeout_s, wire, progress, sink=sink) as group:
        await agree(group, job)
        return await run_job(group, job, progress.lap), for_real(group, f"rank {group.rank} ")


@asynccontextmanager
async def joined(
    place: ManualRank,
    timeout_s: float,
    wire: Wire,
    progress: screen.ProgressLine,
    device: str = "cpu",
    sink: Sink | None = None,
) -> AsyncIterator[Group]:
    """Yield the group once all peers are connected. Until then, show the peers that are still missing."""
    from hcsim.launch.real import real_group  # a virtual run does without it
    from hcsim.real.process import at_work

    absent: list[str] = []

    def missing(ranks: list[int]) -> None:
        absent[:] = [f"rank {rank} at {place.peers[rank]}" for rank in ranks]
        progress.waiting(absent)

    with at_work(progress.news):  # the group holds it too, silently
        async with real_group(
            place.rank,
            place.peers,
            options=Options(timeout_s=timeout_s),
            wire=wire,
            tls=place.tls,
            insecure=place.insecure,
            device=device,
            metrics_at=place.metrics_at,
            on_refused=progress.news,
            tell=progress.news,
            sink=sink,
        ) as group:
            try:
                await assemble(group, wire.connect_timeout_s + _GRACE_S, missing)
            except CollectiveError as error:
                if isinstance(error.__cause__, ConfigError):  # waiting longer would not have helped
                    raise error.__cause__ from None
                raise HcsimError(f"gave up waiting for {', '.join(absent)}: {error}") from None
            try:
                yield group
            except CollectiveError as error:
                raise naming(error, place.peers) from error


def for_real(group: Group, who: str = "") -> str:
    """Return a description of the real run and its carrier, which explains an unexpected duration."""
    return f"for real, {who}over {' and '.join(group.carriers)}" if group.carriers else "for real"
