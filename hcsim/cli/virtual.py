"""`hcsim run SCENARIO`: the job in a simulated cluster."""

from __future__ import annotations

from collections.abc import Sequence

from hcsim.cli import screen
from hcsim.cli.recording import Files, recording, tell_fingerprint
from hcsim.collectives.group import Group
from hcsim.collectives.options import Options
from hcsim.collectives.startup import assemble
from hcsim.config import Scenario
from hcsim.errors import CollectiveTimeout, ConfigError, HcsimError
from hcsim.jobs import Lap, check_job, run_job
from hcsim.launch import simulate
from hcsim.transport.wire import Wire


def run_virtual(scenario: Scenario, wire: Wire, files: Files) -> bool:
    """Run, and show how it went; whether all ranks came to a result, and to the right one."""
    job = scenario.job
    check_job(job)
    options = Options(timeout_s=job.timeout_s, groups=_groups(scenario))
    laps: list[Lap] = []
    with screen.Progress("repeat", job.repeat) as progress, recording(files) as record:

        def observe(lap: Lap) -> None:
            if lap.number > len(laps):  # the first rank to know tells for all
                laps.append(lap)
                progress.lap(lap)

        async def program(group: Group) -> None:
            await assemble(group, job.timeout_s, lambda missing: None)
            await run_job(group, job, observe)

        outcome = simulate(scenario, program, options=options, wire=wire, sink=record.sink)
        record.keep(outcome.metrics)
    names = [node.name for node in scenario.nodes]
    screen.report(screen.title(job, len(names), scenario.name), job, len(names), laps)
    healthy = tell_failures(names, outcome.results)
    tell_fingerprint(outcome)
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
