"""How long it takes to notice that a member is gone, and until training goes on, against the heartbeats' interval."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import msgspec
import pandas as pd
from msgspec.structs import replace

from experiments.figures.style import LOOKS, figure, save_data
from hcsim.config import Cluster, Crash, Heartbeat, Pause, Training, parse_scenario
from hcsim.launch.virtual_cluster import simulate_cluster
from hcsim.rng import stream
from hcsim.telemetry.trace import Event
from hcsim.training.tasks.convex import LinearTask
from hcsim.units import PositiveSeconds, Seconds
from hcsim.workers import starting

INTERVALS_S = (0.25, 0.5, 1.0, 2.0, 5.0)
NODES = 4
REPEATS = 3
LOSSES = {
    "its process is killed (connections reset)": ("crash", True),
    "its power goes (silence)": ("crash", False),
    "it hangs (connections stay open)": ("pause", False),
}
FILE = "recovery"
SLOW = '{ name = "slow", peak = "1 TFLOPS", memory = "100 GB/s", overhead = "30 ms" }'
"""A step takes about a quarter of a second, so that training outlasts the loss."""
SWITCH = '[[medium]]\nkind = "ethernet"\nname = "switch"\nrate = "1 Gb/s"\n'


class Loss(msgspec.Struct, frozen=True):
    """One member lost, once."""

    kind: str
    interval_s: float
    repeat: int


def draw(out: Path, workers: int) -> None:
    """Measure, write the table, draw."""
    cases = [
        Loss(kind, interval_s, repeat) for kind in LOSSES for interval_s in INTERVALS_S for repeat in range(REPEATS)
    ]
    with starting():
        pool = multiprocessing.get_context("spawn").Pool(workers)
    with pool:
        rows = pool.map(_measured, cases)
    table = pd.DataFrame(rows)
    save_data(table, out / f"{FILE}.csv")
    _plot(table, out / FILE)


def _measured(case: Loss) -> dict[str, str | float | int]:
    """When the loss happened, when the others' work was over, and when they had done the next step."""
    home = parse_scenario(
        f"""
        name = "loss"
        node = [{{ name = "mac", count = {NODES}, machine = {SLOW}, links = ["switch"] }}]
        {SWITCH}
        """,
        "loss",
    )
    moment = stream(case.repeat, "loss", case.kind, int(1000 * case.interval_s))
    at_s = 10 * case.interval_s + moment.uniform(2.0, 4.0)
    kind, clean = LOSSES[case.kind]
    victim = f"mac-{moment.randint(1, NODES)}"
    fault = (
        Crash(Seconds(at_s), victim, clean=clean)
        if kind == "crash"
        else Pause(Seconds(at_s), victim, PositiveSeconds(1e4))
    )
    beat = Heartbeat(interval_s=PositiveSeconds(case.interval_s), timeout_s=PositiveSeconds(3 * case.interval_s))
    end_s = at_s + 5 * case.interval_s + 5
    steps = int(end_s / 0.2)
    scenario = replace(
        home,
        seed=case.repeat,
        faults=(fault,),
        cluster=Cluster(nodes=NODES, heartbeat=beat),
        training=Training(task="slopes", steps=steps, timeout_s=PositiveSeconds(600)),
    )
    events: list[Event] = []
    simulate_cluster(scenario, sink=events.extend, what=LinearTask(), limit_s=end_s)
    struck_ns = next(int(event[0]) for event in events if event[1] == "fault")
    later = [event for event in events if int(event[0]) > struck_ns and event[2] != victim]
    noticed_ns = next(int(event[0]) for event in later if event[1] in ("view failed", "view"))
    epoch = next(int(event[4]) for event in later if event[1] == "view")
    again_ns = next(int(e[0]) for e in later if e[1] == "applied" and int(e[3]) >= epoch)
    return {
        "loss": case.kind,
        "interval_s": case.interval_s,
        "repeat": case.repeat,
        "detection_s": (noticed_ns - struck_ns) / 1e9,
        "recovery_s": (again_ns - struck_ns) / 1e9,
    }


def _plot(table: pd.DataFrame, file: Path) -> None:
    with figure(7.2, 3.4, file) as sheet:
        panels = sheet.subplots(1, 2, sharey=True)
        for panel, (what, title) in zip(
            panels,
            (("detection_s", "until the others' work is over"), ("recovery_s", "until they have done the next step")),
            strict=True,
        ):
            for look, kind in zip(LOOKS, LOSSES, strict=False):
                by = table[table.loss == kind].groupby("interval_s")[what]
                middle = by.median()
                panel.plot(middle.index, middle.to_numpy(), label=kind, **look)
                panel.fill_between(middle.index, by.min(), by.max(), color=look["color"], alpha=0.15, linewidth=0)
            panel.set(xscale="log", yscale="log", xlabel="heartbeat interval (s)", title=title)
            panel.set_xticks(INTERVALS_S, [f"{interval_s:g}" for interval_s in INTERVALS_S])
            panel.minorticks_off()
        panels[0].set_ylabel("seconds after the loss")
        panels[1].legend(loc="lower right", fontsize=8)
