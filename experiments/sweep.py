"""How long an all-reduce takes, by algorithm, size and link: a simulated study.

    python -m experiments.sweep [--quick] [--out results]

Each point is the median over a few repeats after a first one, which opens connections and windows.
Payloads are phantoms, so a point costs no memory and its time does not depend on this machine:
every run of the same code writes the same bytes into the table. A last cluster has nothing but
latency and bandwidth, where the textbook's formulas hold, and is compared with them.

Written are `allreduce.csv`, two figures (PNG and SVG), and `manifest.json` with all that is needed to
tell two runs apart: the commit, versions, seeds, and the digest of each scenario and each trace.
"""

from __future__ import annotations

import csv
import hashlib
import json
import platform
import statistics
import subprocess
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from msgspec.structs import replace
from rich.console import Console
from rich.progress import Progress

from experiments import plots
from hcsim.collectives.cost import closed_form
from hcsim.collectives.group import Group, Options
from hcsim.config import Cable, Ethernet, Job, Scenario, Thunderbolt, idealised, load_scenario
from hcsim.jobs import Lap, run_job
from hcsim.launch import simulate
from hcsim.transport.mesh import MAX_FRAME_BYTES, Wire
from hcsim.units import BitRate, Bytes

FLAT = ("ring", "tree", "centralized", "recursive_doubling", "halving_doubling")
KIB, MIB = 1 << 10, 1 << 20
TIMEOUT_S = 24 * 3600.0
"""Slow links are part of the study; nothing is to fail for being slow."""


class Cluster(msgspec.Struct, frozen=True):
    """One place to measure at."""

    title: str
    scenario: Scenario
    algorithms: tuple[str, ...] = FLAT
    groups: tuple[tuple[int, ...], ...] = ()
    alpha_beta: tuple[float, float] | None = None
    """Latency in seconds and bytes per second, where links are uniform and nothing else takes time."""

    @property
    def name(self) -> str:
        """As in the table."""
        return self.scenario.name


class Point(msgspec.Struct, frozen=True):
    """One row of the table."""

    cluster: str
    ranks: int
    algorithm: str
    size_bytes: int
    seconds: float
    fastest_s: float
    slowest_s: float
    sent_bytes: int
    closed_form_s: float | None


def clusters() -> list[Cluster]:
    """Five homes, made from the shipped scenarios, and one ideal switch."""
    four, eight = load_scenario("four-macs-1gbe"), load_scenario("eight-macs-2.5gbe")
    wifi, homes = load_scenario("two-macs-wifi"), load_scenario("two-homes-wan")
    mini, laptop = four.nodes[0], wifi.nodes[0]
    stations = tuple(replace(laptop, name=f"air-{number}") for number in range(1, 5))
    switched = tuple(replace(eight.nodes[1], name=f"mini-{number}") for number in range(1, 9))
    ideal = _ideal(four)
    link = ideal.media[0]
    assert isinstance(link, Ethernet)
    return [
        Cluster("4 Macs, 1 Gb/s Ethernet", four),
        Cluster("8 Macs, 2.5 Gb/s Ethernet", replace(eight, name="eight-equal-macs-2.5gbe", nodes=switched)),
        Cluster("4 Macs, one Wi-Fi 6 access point", replace(wifi, name="four-macs-wifi", nodes=stations)),
        Cluster("4 Macs, ring of Thunderbolt cables", _cabled(mini)),
        Cluster("2 homes with 2 Macs each, over the internet", homes, (*FLAT, "hierarchical"), ((0, 1), (2, 3))),
        Cluster("8 ideal ports", ideal, alpha_beta=(link.latency_s, link.rate_bps / 8)),
    ]


def _ideal(four: Scenario) -> Scenario:
    nodes = tuple(replace(four.nodes[0], name=f"node-{number}") for number in range(8))
    return idealised(replace(four, name="eight-ideal-ports", nodes=nodes))


def _cabled(node: msgspec.Struct) -> Scenario:
    """Four Macs, each with a cable to the next; both directions at the measured faster rate."""
    names = [f"mini-{number}" for number in range(1, 5)]
    rate_bps = BitRate(16.4e9)
    cables = tuple(Cable((names[i], names[(i + 1) % 4]), rate_bps, rate_bps) for i in range(4))
    desk = Thunderbolt("desk", cables)
    return _scenario_of("four-macs-thunderbolt", names, desk)


def measure(cluster: Cluster, algorithm: str, size_bytes: int, repeats: int) -> tuple[Point, str]:
    """One point, and the digest of its trace."""
    job = Job(algorithm=algorithm, size_bytes=Bytes(size_bytes), payload="phantom", repeat=repeats + 1)
    uncut = cluster.alpha_beta is not None
    wire = Wire(segment_bytes=MAX_FRAME_BYTES) if uncut else Wire()

    async def program(group: Group) -> list[Lap]:
        return await run_job(group, job, lambda lap: None)

    options = Options(timeout_s=TIMEOUT_S, groups=cluster.groups if algorithm == "hierarchical" else ())
    outcome = simulate(cluster.scenario, program, options=options, wire=wire)
    laps = outcome.values()[0][1:]
    times_s = [lap.seconds for lap in laps]
    ranks = len(cluster.scenario.nodes)
    expected_s = closed_form(algorithm, ranks, size_bytes, *cluster.alpha_beta) if cluster.alpha_beta else None
    point = Point(
        cluster.name,
        ranks,
        algorithm,
        size_bytes,
        statistics.median(times_s),
        min(times_s),
        max(times_s),
        laps[0].sent_bytes,
        expected_s,
    )
    return point, outcome.trace_sha256
