"""`hcsim run --real`: this machine's part of the job."""

from __future__ import annotations

import asyncio

from hcsim.cli import screen
from hcsim.cli.options import Place
from hcsim.collectives.group import Group, Options
from hcsim.config import Job
from hcsim.errors import CollectiveError, ConfigError, HcsimError
from hcsim.jobs import Lap, assemble, check_job, run_job
from hcsim.launch import real_group
from hcsim.training.agreement import agree
from hcsim.transport.mesh import Wire

_GRACE_S = 1.0
"""The wait for a link ends before the operation that needs it does, and its error says more."""


def run_real(job: Job, place: Place, wire: Wire) -> bool:
    """Run, and show how it went; whether the result was right."""
    check_job(job)
    if job.algorithm == "hierarchical":
        raise ConfigError("hierarchical needs to know who is close to whom: use the library, with Options(groups=…)")
    rank, ranks = our_rank(place), len(place.peers)
    with screen.Progress("repeat", job.repeat) as progress:
        laps, where = asyncio.run(_run(job, place, wire, progress))
    if rank == 0:
        screen.report(screen.title(job, ranks, where), job, ranks, laps)
    else:
        screen.say(f"rank {rank}: done, {screen.counted(len(laps), 'repeat')}")
    return not any(lap.wrong for lap in laps)


async def _run(job: Job, place: Place, wire: Wire, progress: screen.Progress) -> tuple[list[Lap], str]:
    options = Options(timeout_s=job.timeout_s)
    async with real_group(
        our_rank(place),
        place.peers,
        options=options,
        wire=wire,
        tls=place.tls,
        insecure=place.insecure,
        metrics_at=place.metrics_at,
    ) as group:
        await meet(group, place, wire, progress)
        await agree(group, job)
        return await run_job(group, job, progress.lap), for_real(group, f"rank {group.rank} ")


def our_rank(place: Place) -> int:
    """Which of the peers we are, if that was said."""
    ranks = len(place.peers)
    if place.rank is None or not 0 <= place.rank < ranks:
        given = "it was not given" if place.rank is None else f"it is {place.rank}"
        raise ConfigError(f"--rank says which of the {ranks} peers we are, from 0 to {ranks - 1}; {given}")
    return place.rank


def for_real(group: Group, who: str = "") -> str:
    """That it was, and by what way: who expected another sees why it took as long as it did."""
    return f"for real, {who}over {' and '.join(group.carriers)}" if group.carriers else "for real"


async def meet(group: Group, place: Place, wire: Wire, progress: screen.Progress) -> None:
    """Wait for all ranks, and say for whom."""
    absent: list[str] = []

    def missing(ranks: list[int]) -> None:
        absent[:] = [f"rank {rank} at {place.peers[rank]}" for rank in ranks]
        progress.waiting(absent)

    try:
        await assemble(group, wire.connect_timeout_s + _GRACE_S, missing)
    except CollectiveError as error:
        raise HcsimError(f"gave up waiting for {', '.join(absent)}: {error}") from None
