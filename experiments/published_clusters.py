"""How well the simulator predicts what clusters of Macs were published to do, from the catalogue alone.

results/fidelity/published_clusters.csv says who published it and what was run. Each row is simulated twice, on one
machine and on a mesh of them, with the catalogue's machine, the cables of the row and data parallelism. No figure of
the model is chosen by these rows.
"""

from __future__ import annotations

from itertools import combinations, pairwise
from statistics import fmean
from typing import Any

import msgspec

from hcsim.config import Scenario, Training, parse_scenario
from hcsim.launch.virtual import simulate_training
from hcsim.training.run import Report

STEPS = 3


class ClusterFigure(msgspec.Struct, frozen=True):
    """A published speed of one machine and of several."""

    machines: int
    chip: str
    cable_gbits_per_s: float
    cable_latency_us: float
    task: str
    texts: int
    """Of each machine in a step."""
    text_tokens: float
    """That count, without padding."""
    alone_tokens_per_s: float
    together_tokens_per_s: float
    remark: str
    source: str

    @property
    def speedup(self) -> float:
        return self.together_tokens_per_s / self.alone_tokens_per_s

    @property
    def settings(self) -> Training:
        return Training(task=self.task, strategy="ddp", algorithm="ring", batch=self.texts, steps=STEPS)

    def home(self, machines: int) -> Scenario:
        """Return so many of the machines, each with a cable to each other one."""
        names = [f"mac-{number}" for number in range(1, machines + 1)]
        nodes = [f'[[node]]\nname = "{name}"\nmachine = "{self.chip}"\nlinks = ["switch"]' for name in names]
        cables = [
            f'[[medium.cable]]\nbetween = ["{one}", "{other}"]\n'
            f'forward = "{self.cable_gbits_per_s:g} Gb/s"\nlatency = "{self.cable_latency_us:g} us"'
            for one, other in combinations(names, 2)
        ]
        mesh = ['[[medium]]\nkind = "thunderbolt"\nname = "mesh"', *cables] if cables else []
        # What starts them; the cables are faster, so nothing else crosses it.
        switch = '[[medium]]\nkind = "ethernet"\nname = "switch"\nrate = "10 Gb/s"'
        return parse_scenario("\n".join(['name = "mesh"', switch, *mesh, *nodes]), "published")


class ClusterPrediction(msgspec.Struct, frozen=True):
    """A figure with what is simulated."""

    figure: ClusterFigure
    alone_tokens_per_s: float
    together_tokens_per_s: float
    exchange_s: float
    """Of a step that a machine waits for the exchange."""
    sent_bytes: int
    """By a machine in a step, headers included."""

    @property
    def speedup(self) -> float:
        return self.together_tokens_per_s / self.alone_tokens_per_s


def predicted(figure: ClusterFigure) -> ClusterPrediction:
    """Simulate one machine and all of them."""
    alone, together = (simulate_training(figure.home(count), figure.settings) for count in (1, figure.machines))
    tokens = figure.texts * figure.text_tokens
    report = together.values()[0]
    return ClusterPrediction(
        figure,
        tokens / step_s(alone.values()[0]),
        figure.machines * tokens / step_s(report),
        fmean(point.spent_s["wait"] for point in report.points[1:]),
        report.points[-1].sent_bytes - report.points[-2].sent_bytes,
    )


def step_s(report: Report) -> float:
    """Return the mean time of a step, but for the first one."""
    return fmean(later.time_s - earlier.time_s for earlier, later in pairwise(report.points))


def row_of(prediction: ClusterPrediction) -> dict[str, Any]:
    figure = prediction.figure
    told = {name: getattr(figure, name) for name in ("machines", "chip", "task", "source")}
    names = ("alone_tokens_per_s", "together_tokens_per_s", "speedup")
    pairs = {
        f"{kind}_{name}": getattr(each, name)
        for kind, each in (("published", figure), ("predicted", prediction))
        for name in names
    }
    return {"use": "cluster", **told, **pairs, "wait_s": prediction.exchange_s, "sent_bytes": prediction.sent_bytes}
