"""`hcsim replay`: an execution trace as a program on a virtual cluster."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec.structs import replace

from hcsim.cli import screen
from hcsim.cli.recording import RecordingFiles, recording, show_run, tell_failures, tell_fingerprint
from hcsim.collectives.group import Group
from hcsim.collectives.select import Options
from hcsim.collectives.startup import assemble
from hcsim.config import Scenario
from hcsim.config.scenario import first_nodes
from hcsim.errors import ConfigError
from hcsim.launch.virtual import simulate
from hcsim.replay.program import LONGEST_S, Program, load_program
from hcsim.replay.run import ReplayRepeat, replay
from hcsim.transport.groups import Wire


class ReplayJob(msgspec.Struct, frozen=True):
    """What is replayed, and how."""

    trace: Path
    nodes: int | None
    modelled: bool
    repeat: int
    files: RecordingFiles


def run_replay(asked: ReplayJob, scenario: Scenario, wire: Wire) -> bool:
    """Replay the traces and show how long it took. Return whether all ranks came to the end."""
    program = load_program(asked.trace, asked.nodes or len(scenario.nodes))
    scenario = _fitting(scenario, program, asked)
    ranks = len(program.ranks)
    longest = max(map(len, program.ranks))
    with recording(asked.files) as record:

        async def run(group: Group) -> list[ReplayRepeat]:
            await assemble(group, LONGEST_S, lambda missing: None)
            return await replay(group, program, "modelled" if asked.modelled else "recorded", asked.repeat)

        outcome = simulate(scenario, run, options=Options(timeout_s=LONGEST_S), wire=wire, sink=record.sink)
        record.keep(outcome.metrics)
    screen.say(f"replay of {asked.trace}, {longest:,} nodes a rank, {ranks} ranks, {scenario.name}")
    laps: list[ReplayRepeat] = next((each for each in outcome.results if not isinstance(each, BaseException)), [])
    for lap in laps:
        screen.say(f"repeat {lap.number}: {screen.duration(lap.seconds)}")
    if laps and program.recorded_s:  # on connections as fresh as those of the first repeat
        change = laps[0].seconds / program.recorded_s - 1
        screen.say(f"recorded: {screen.duration(program.recorded_s)}, the first repeat {change:+.1%}")
    healthy = tell_failures([node.name for node in scenario.nodes], outcome.results)
    tell_fingerprint(outcome)
    show_run(record, asked.files)
    return healthy


def _fitting(scenario: Scenario, program: Program, asked: ReplayJob) -> Scenario:
    """Return the scenario with as many nodes as there are ranks."""
    ranks, there = len(program.ranks), len(scenario.nodes)
    if asked.nodes is not None and asked.nodes != ranks:
        raise ConfigError(f"--nodes {asked.nodes}: {asked.trace} has {ranks} ranks; one rank's file is for any number")
    if ranks > there:
        raise ConfigError(f"{asked.trace} has {ranks} ranks, and {scenario.name} has {there} nodes")
    scenario = first_nodes(scenario, ranks) if ranks < there else scenario
    return replace(scenario, training=None, cluster=None)
