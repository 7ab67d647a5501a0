"""`hcsim run --real`: this machine's part of the job."""

from __future__ import annotations

import asyncio

from hcsim.cli import screen
from hcsim.cli.place import Place, for_real, joined
from hcsim.config import Job
from hcsim.errors import ConfigError
from hcsim.jobs import Lap, check_job, run_job
from hcsim.training.agreement import agree
from hcsim.transport.wire import Wire


def run_real(job: Job, place: Place, wire: Wire) -> bool:
    """Run, and show how it went; whether the result was right."""
    check_job(job)
    if job.algorithm == "hierarchical":
        raise ConfigError("hierarchical needs to know who is close to whom: use the library, with Options(groups=…)")
    ranks = len(place.peers)
    with screen.Progress("repeat", job.repeat) as progress:
        laps, where = asyncio.run(_run(job, place, wire, progress))
    screen.report(screen.title(job, ranks, where), job, ranks, laps)  # all ranks have told each other how it went
    return not any(lap.wrong for lap in laps)


async def _run(job: Job, place: Place, wire: Wire, progress: screen.Progress) -> tuple[list[Lap], str]:
    async with joined(place, job.timeout_s, wire, progress) as group:
        await agree(group, job)
        return await run_job(group, job, progress.lap), for_real(group, f"rank {group.rank} ")
