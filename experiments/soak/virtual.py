"""The soak's faults in the virtual world: the same cluster, job and schedule, on modelled ports of 1 Gb/s."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from experiments.soak.history import PHASES, History
from experiments.soak.job import NAMES, job
from experiments.soak.schedule import SWITCH, Planned, Profile, as_fault, strikes
from experiments.soak.task import MACHINE, STEP_S, Paced
from hcsim.config import Scenario, parse_scenario
from hcsim.launch.virtual_cluster import simulate_cluster
from hcsim.telemetry.trace import Event

BEGINS_S = 5.0
"""By then the members have found each other and train."""


def home(text: str, seed: int) -> Scenario:
    """Four machines on a switch that are to do the job."""
    nodes = ", ".join(f'{{ name = "{name}", machine = {MACHINE}, links = ["{SWITCH}"] }}' for name in NAMES)
    media = f'[{{ kind = "ethernet", name = "{SWITCH}", rate = "1 Gb/s" }}]'
    # A key after a table would belong to it.
    top, tables = text.split("[cluster]")
    return parse_scenario(f"{top}\nnode = [{nodes}]\nmedium = {media}\n[cluster]{tables}", f"soak {seed}")


def simulate(
    profile: Profile, periods: int, seed: int, preset: str, begins_s: float = BEGINS_S
) -> tuple[History, Planned, list[str | None]]:
    """Run a virtual cluster through so many periods and to its end; the digests of its members' parameters."""
    schedule = strikes(profile, NAMES, periods, seed)
    steps = math.ceil(periods * profile.period_s / STEP_S)
    faults = tuple(as_fault(strike, begins_s) for strike in schedule)
    scenario = replace(home(job(steps, preset), seed), faults=faults)
    events: list[Event] = []

    def sink(new: Sequence[Event]) -> None:
        events.extend(event for event in new if event[1] in PHASES)

    outcome = simulate_cluster(scenario, sink=sink, what=Paced(sleeps=False))
    digests = [report.sha256 for report in outcome.values()]
    return History(events), Planned(profile, schedule, periods, begins_s), digests
