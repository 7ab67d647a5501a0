"""How well the catalogue's Macs predict published training speeds, each figure from the others.

    python -m experiments.published

The tables in results/fidelity say what was published (`published_macs.csv`: each figure with its source) and what work
it is (`published_workloads.csv`: kernels by kind, counted). The model has few parameters, each with a meaning:

- matrix products, convolutions and attention run at the share of the peak that a large matrix product reaches,
- copies at the share of the bandwidth that a copy reaches,
- a launch takes as long as the small model of the table needs for each of its kernels,
- all other kernels (norms, activations, sums, optimizers) reach a share of the bandwidth that depends on the framework.

The first three come from measurements of their own. The last is chosen so that times of the framework's other figures
are right on the whole (the mean of log(measured / predicted) is 0): the figure itself takes no part in its prediction.
The band holds 80 % of what a further figure of the framework would be (Student's t, p10 to p90), from the deviations
of the others. `hcsim/config/machine.py` holds the same model, with one share for all frameworks that are in use.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from msgspec.structs import replace
from rich import box
from rich.console import Console
from rich.table import Table
from scipy.stats import t as student

from experiments import asked, published_clusters
from experiments.published_clusters import ClusterFigure, ClusterPrediction
from hcsim.config import CATALOGUE, KernelEfficiency, Machine
from hcsim.config.machine import KernelKind
from hcsim.runtime.host import KernelGroup, Work
from hcsim.runtime.work_time import seconds
from hcsim.units import ByteRate, FlopRate, PositiveShare, Seconds

FOLDER = Path(__file__).parent.parent / "results" / "fidelity"
COVERAGE = 0.8
"""From the 10th to the 90th percentile."""
TRAINING = ("benchmark", "training", "evaluation")
"""The uses of figures that tell of a framework. The catalogue is held to those of "benchmark"; "evaluation" is for
programs that hardly train."""
FIRST_MONTHS = "PyTorch MPS 2022"
"""Nightly builds of a framework's first months, which say nothing of today's."""
LAUNCH_S = 40e-6
T = TypeVar("T", bound=msgspec.Struct)


class Figure(msgspec.Struct, frozen=True):
    """A published measurement."""

    use: str
    """What it is for: one of `TRAINING`, or "launch", "product" or "copy"."""
    chip: str
    gpu_cores: int
    peak_tflops: float
    memory_gbytes_per_s: float
    framework: str
    workload: str
    measured: float
    unit: str
    seconds: float
    """The time of the workload, by the figure."""
    share_of_peak: float
    """Of the bandwidth's, for a copy."""
    source: str
    gflop_per_unit: float | None = None
    remark: str = ""


class Workload(msgspec.Struct, frozen=True):
    """Kernels by kind."""

    workload: str
    matmul_gflop: float
    convolution_gflop: float
    attention_gflop: float
    other_gbytes: float
    kernels: int
    counted: str

    @property
    def gflop(self) -> float:
        return self.matmul_gflop + self.convolution_gflop + self.attention_gflop

    @property
    def work(self) -> Work:
        """All kernels, those between the products alike."""
        between = "copy" if self.workload == "copy" else "elementwise"
        products = {
            "matmul": self.matmul_gflop,
            "convolution": self.convolution_gflop,
            "attention": self.attention_gflop,
        }
        groups = [KernelGroup(kind, 1e9 * gflop, 0.0) for kind, gflop in products.items() if gflop]
        if self.other_gbytes:
            groups.append(KernelGroup(between, 0.0, 1e9 * self.other_gbytes / self.kernels, self.kernels))
        return Work(groups=tuple(groups))


class Model(msgspec.Struct, frozen=True):
    """Shares of the data-sheet figures, and the time of a launch."""

    product: float
    copy: float
    launch_s: float
    between: float
    """What all other kernels reach of the memory's bandwidth."""

    def machine(self, figure: Figure) -> Machine:
        """The machine of the figure, which may have fewer cores than the catalogue's."""
        kinds: dict[KernelKind, float] = {
            "matmul": self.product, "convolution": self.product, "attention": self.product,
            "copy": self.copy, "elementwise": self.between,
        }  # fmt: skip
        return replace(
            CATALOGUE[figure.chip],
            peak_flops=FlopRate(1e12 * figure.peak_tflops),
            memory_Bps=ByteRate(1e9 * figure.memory_gbytes_per_s),
            overhead_s=Seconds(self.launch_s),
            efficiencies=tuple(KernelEfficiency(kind, PositiveShare(share)) for kind, share in kinds.items()),
        )

    def seconds(self, figure: Figure, work: Work) -> float:
        return seconds(self.machine(figure), work)


class Prediction(msgspec.Struct, frozen=True):
    """A figure with what the others say of it: a time, with its 10th and 90th percentile."""

    figure: Figure
    seconds: float
    low_s: float
    high_s: float

    @property
    def error(self) -> float:
        return self.seconds / self.figure.seconds - 1

    @property
    def inside(self) -> bool:
        return self.low_s <= self.figure.seconds <= self.high_s


class Published:
    """The tables, and the model that follows from them."""

    def __init__(self) -> None:
        self.figures = _rows("published_macs.csv", Figure)
        self.work = {row.workload: row.work for row in _rows("published_workloads.csv", Workload)}
        self.clusters = _rows("published_clusters.csv", ClusterFigure)
        self.gflop = {row.workload: row.gflop for row in _rows("published_workloads.csv", Workload)}

    def used_for(self, *uses: str) -> list[Figure]:
        return [figure for figure in self.figures if figure.use in uses]

    def in_use(self) -> list[Figure]:
        """The figures of training with software of today."""
        return [figure for figure in self.used_for("benchmark", "training") if figure.framework != FIRST_MONTHS]

    def fitted(self, figures: Sequence[Figure]) -> Model:
        """The model whose times of these figures are right on the whole."""
        product, copy = (
            statistics.median(each.share_of_peak for each in self.used_for(use)) for use in ("product", "copy")
        )
        least, most = 0.01, 1.0
        for _ in range(40):
            model = Model(product, copy, LAUNCH_S, (least + most) / 2)
            if statistics.fmean(self.deviations(model, figures)) > 0:
                most = model.between
            else:
                least = model.between
        return model

    def deviations(self, model: Model, figures: Iterable[Figure]) -> list[float]:
        """log(measured / predicted): above 0 where the machine is slower than the model says."""
        return [math.log(each.seconds / model.seconds(each, self.work[each.workload])) for each in figures]

    def launch_s(self, between: float) -> float:
        """The time of a launch by the small model, of which the launches are the most."""
        times = []
        for figure in self.used_for("launch"):
            work = self.work[figure.workload]
            rest_s = Model(1.0, 1.0, 0.0, between).seconds(figure, work)
            times.append((figure.seconds - rest_s) / sum(group.count for group in work.groups))
        return statistics.median(times)

    def predicted(self, figure: Figure) -> Prediction:
        """Predict a figure from the others of its framework."""
        others = [
            other for other in self.used_for(*TRAINING) if other.framework == figure.framework and other is not figure
        ]
        model = self.fitted(others)
        deviations = self.deviations(model, others)
        count = len(others)
        spread = math.sqrt(sum(each**2 for each in deviations) / (count - 1) * (1 + 1 / count))
        factor = math.exp(float(student.ppf(0.5 + COVERAGE / 2, count - 1)) * spread)
        predicted_s = model.seconds(figure, self.work[figure.workload])
        return Prediction(figure, predicted_s, predicted_s / factor, predicted_s * factor)


def _rows(name: str, kind: type[T]) -> list[T]:
    with (FOLDER / name).open(newline="", encoding="utf-8") as file:
        rows = [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]
    return msgspec.convert(rows, list[kind], strict=False)  # type: ignore[valid-type]


def half_width(deviations: Sequence[float]) -> float:
    """Half of the distance between the 10th and the 90th percentile, relative to the median."""
    return math.sinh(statistics.NormalDist().inv_cdf(0.5 + COVERAGE / 2) * statistics.stdev(deviations))


def row_of(prediction: Prediction) -> dict[str, Any]:
    figure = prediction.figure
    names = ("use", "chip", "gpu_cores", "framework", "workload", "share_of_peak", "source")
    times = {"predicted_s": prediction.seconds, "low_s": prediction.low_s, "high_s": prediction.high_s}
    told = {name: getattr(figure, name) for name in names}
    return {**told, **times, "measured_s": figure.seconds, "error": prediction.error, "inside": prediction.inside}


def main(json: Annotated[str | None, typer.Option(metavar="FILE", help="Also write the rows as JSON.")] = None) -> None:
    """Predict each published training speed of a Mac from the others."""
    asked.check_json(json)
    published, console = Published(), Console()
    predictions = [published.predicted(figure) for figure in published.used_for(*TRAINING)]
    table = Table("chip", "cores", "framework", "workload", box=box.SIMPLE_HEAD)
    for column in ("of peak", "predicted", "p10", "p90", "measured", "error", "inside"):
        table.add_column(column, justify="right")
    for each in predictions:
        figure = each.figure
        if figure.use != predictions[0].figure.use and not any(row.end_section for row in table.rows):
            table.add_section()
        table.add_row(
            figure.chip, str(figure.gpu_cores), figure.framework, figure.workload, f"{figure.share_of_peak:.2f}",
            f"{each.seconds:.3g} s", f"{each.low_s:.3g}", f"{each.high_s:.3g}", f"{figure.seconds:.3g} s",
            f"{each.error:+.0%}", "yes" if each.inside else "no",
        )  # fmt: skip
    console.print(table)
    benchmark = [each for each in predictions if each.figure.use == "benchmark"]
    for name, some in (("above the line", benchmark), ("all", predictions)):
        median, inside = statistics.median(abs(each.error) for each in some), sum(each.inside for each in some)
        console.print(f"{name}: median error {median:.0%}, {inside} of {len(some)} inside")
    for framework in sorted({figure.framework for figure in published.used_for(*TRAINING)}):
        told = [figure for figure in published.used_for(*TRAINING) if figure.framework == framework]
        model = published.fitted(told)
        spread = half_width(published.deviations(model, told))
        console.print(f"{framework}: {model.between:.2f} of the bandwidth between products, ±{spread:.0%}")
    clusters = [published_clusters.predicted(figure) for figure in published.clusters]
    console.print(table_of_clusters(clusters))
    if json is not None:
        rows = [*map(row_of, predictions), *map(published_clusters.row_of, clusters)]
        Path(json).write_bytes(msgspec.json.format(msgspec.json.encode(rows)))


def table_of_clusters(clusters: Sequence[ClusterPrediction]) -> Table:
    """Two lines for each cluster: what was published, and what is simulated."""
    table = Table("cluster", "task", "", box=box.SIMPLE_HEAD)
    for column in ("one, tokens/s", "all", "times as fast", "error"):
        table.add_column(column, justify="right")
    for each in clusters:
        figure = each.figure
        told: tuple[tuple[str, ClusterFigure | ClusterPrediction, str], ...] = (
            ("published", figure, ""), ("simulated", each, f"{each.speedup / figure.speedup - 1:+.0%}"),
        )  # fmt: skip
        for kind, speeds, error in told:
            table.add_row(
                f"{figure.machines} x {figure.chip}", figure.task, kind, f"{speeds.alone_tokens_per_s:.0f}",
                f"{speeds.together_tokens_per_s:.0f}", f"{speeds.speedup:.2f}", error,
            )  # fmt: skip
    return table


if __name__ == "__main__":
    asked.run(main)
