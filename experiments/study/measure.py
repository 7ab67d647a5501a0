"""Runs one cell in a simulated cluster. Times are virtual: they do not depend on this machine."""

from __future__ import annotations

import hashlib
import statistics

import msgspec
import numpy as np

from experiments.clusters import Cluster, cluster
from experiments.study.cell import AllReduce, AnyCell, Result
from hcsim.collectives.cost import closed_form
from hcsim.collectives.group import Group
from hcsim.collectives.select import Options
from hcsim.config import Scenario
from hcsim.launch.virtual import Outcome, simulate
from hcsim.runtime.channel import Phantom
from hcsim.runtime.frame import HEADER_BYTES
from hcsim.transport.groups import MAX_FRAME_BYTES, Wire

TIMEOUT_S = 24 * 3600.0
"""Slow links are part of a study: nothing is to fail for being slow."""
MEETING_S = 1.0
"""Longer than the message takes that makes the appointment."""


def measured(cell: AnyCell) -> Result:
    """What the cell comes to, without its band."""
    if isinstance(cell, AllReduce):
        return _all_reduces(cell)
    # torch is behind this, and cells without training need not pay for it.
    from experiments.study.measure_training import trained

    return trained(cell)


def timed(cell: AnyCell, scenario: Scenario) -> float:
    """The time that the cell is about in another scenario of its cluster, with shapes in place of data."""
    if isinstance(cell, AllReduce):
        return _all_reduce_s(cell, scenario)
    from experiments.study.measure_training import step_s

    return step_s(cell, scenario)


def _all_reduces(cell: AllReduce) -> Result:
    """The median over some repeats after a first one, which opens connections and windows."""
    place = cluster(cell.link, cell.world)
    outcome = _simulated(cell, place)
    times_s = _slowest_s(outcome)
    _, sent_bytes = zip(*outcome.values(), strict=True)
    return Result(
        steps=cell.repeats,
        step_s=statistics.median(times_s),
        fastest_s=min(times_s),
        slowest_s=max(times_s),
        total_s=round(outcome.seconds, 9),
        step_sent_bytes=max(sent_bytes),
        closed_form_s=_formula_s(cell, place),
        **fingerprints(place.scenario, outcome.trace_sha256),
    )


def _all_reduce_s(cell: AllReduce, scenario: Scenario) -> float:
    """The time of the cell in another scenario of its cluster."""
    place = cluster(cell.link, cell.world)
    return statistics.median(_slowest_s(_simulated(cell, msgspec.structs.replace(place, scenario=scenario))))


def _simulated(cell: AllReduce, place: Cluster) -> Outcome[tuple[list[float], int]]:
    # The formulas know no pipelining, so messages are not cut where they are compared.
    wire = Wire(segment_bytes=MAX_FRAME_BYTES) if place.alpha_beta else Wire()

    async def program(group: Group) -> tuple[list[float], int]:
        return await _timed(group, cell.algorithm, cell.size_bytes, cell.repeats)

    return simulate(place.scenario, program, options=Options(timeout_s=TIMEOUT_S, groups=place.groups), wire=wire)


def _slowest_s(outcome: Outcome[tuple[list[float], int]]) -> list[float]:
    """Of each repeat the time of the slowest rank; the simulator's clock has whole ns."""
    by_rank, _ = zip(*outcome.values(), strict=True)
    return [round(max(times), 9) for times in zip(*by_rank, strict=True)]


def _formula_s(cell: AllReduce, place: Cluster) -> float | None:
    if not place.alpha_beta:
        return None
    return closed_form(cell.algorithm, cell.world, cell.size_bytes, *place.alpha_beta, header_bytes=HEADER_BYTES)


async def _timed(group: Group, algorithm: str, size_bytes: int, repeats: int) -> tuple[list[float], int]:
    """This rank's times, and the bytes it sent in each, headers included.

    All virtual clocks agree, so all can start at one instant."""
    clock = group.host.clock
    tensor = Phantom(size_bytes)
    await group.all_reduce(tensor, algorithm=algorithm)
    sent_bytes = group.wire_bytes
    times_s = []
    for _ in range(repeats):
        nows_s = await group.all_gather(np.array([clock.now()]))
        start_s = float(np.max(nows_s)) + MEETING_S
        await clock.sleep(start_s - clock.now())
        await group.all_reduce(tensor, algorithm=algorithm)
        times_s.append(clock.now() - start_s)
    # Who leaves while slow lines still carry the last bytes to others would break their links.
    await group.barrier()
    return times_s, sent_bytes


def fingerprints(scenario: Scenario, trace_sha256: str) -> dict[str, str]:
    """What tells this run apart from every other."""
    return {
        "scenario": scenario.name,
        "scenario_sha256": hashlib.sha256(msgspec.json.encode(scenario, enc_hook=float)).hexdigest(),
        "trace_sha256": trace_sha256,
    }
