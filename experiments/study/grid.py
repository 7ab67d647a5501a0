"""A sweep file: grids of what is to be run, in TOML.

    plugins = ["ternary.py"]                      # modules, or files beside this one, that are loaded first

    [[grid]]
    kind = "training"
    study = "compression"                      # the rows of this grid belong to this study
    tasks = ["digits"]
    strategies = ["ddp"]
    compressors = ["none", "topk:0.01+ef"]
    links = ["1gbe", "ethernet:300 Mb/s"]
    worlds = [4]
    seeds = [1, 2, 3]
    steps = 300

    [grid.quick]                               # what `--quick` has in its place
    seeds = [1]

A plural is an axis, and a grid is the product of its axes. Every mistake in a file is a `ConfigError` that names
the place and what would be valid there, and is found before the first cell runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, field

from experiments.clusters import ALONE
from experiments.study.cell import AllReduce, AnyCell, Train
from experiments.study.words import check_cell
from hcsim.config.table import Count, Name, Table, explain
from hcsim.config.training import Positive
from hcsim.errors import ConfigError, HcsimError
from hcsim.registry import load_plugin
from hcsim.units import PositiveBytes, PositiveSeconds, decode_quantity, did_you_mean

_SWEEPS = Path(__file__).parents[1] / "sweeps"

Words = Annotated[tuple[str, ...], Meta(min_length=1)]
Counts = Annotated[tuple[Count, ...], Meta(min_length=1)]
Sizes = Annotated[tuple[PositiveBytes, ...], Meta(min_length=1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""As the tables can hold it."""
SINGLE = "single"
"""One machine alone, with the batch of all: what every speed-up is relative to."""


class Asked(NamedTuple):
    """A cell, and the study that asked for it."""

    study: str
    cell: AnyCell


class AllReduceGrid(Table, frozen=True, kw_only=True, tag_field="kind", tag="all_reduce"):
    """All-reduces by link, number of ranks, algorithm and size."""

    study: Name
    links: Words
    worlds: Counts
    algorithms: Words
    sizes: Sizes
    repeats: Count = 3
    """Of which the median counts."""

    def cells(self) -> Iterator[AnyCell]:
        """All of them, in the order of the axes."""
        for link, world, algorithm, size in product(self.links, self.worlds, self.algorithms, self.sizes):
            yield AllReduce(link, world, algorithm, int(size), self.repeats)


class TrainingGrid(Table, frozen=True, kw_only=True, tag_field="kind", tag="training"):
    """Training runs."""

    study: Name
    tasks: Words
    strategies: Words
    links: Words
    worlds: Counts
    compressors: Words = ("none",)
    algorithms: Words = ("auto",)
    variants: Words = ("equal",)
    seeds: Annotated[tuple[Seed, ...], Meta(min_length=1)] = (1,)
    failures_per_hour: Annotated[tuple[Annotated[float, Meta(ge=0, le=1e9)], ...], Meta(min_length=1)] = (0.0,)
    """Of each node, per hour that it runs."""
    failure: Literal["pause", "dropout", "crash"] = "pause"
    """With "crash" the Macs form a cluster, which goes on without those that are down."""
    failure_lasts_s: PositiveSeconds = PositiveSeconds(10)
    steps: Count = 200
    batch: Count | None = None
    """Samples per rank and step; left out, as the task says."""
    lr: Positive | None = None
    momentum: Annotated[float, Meta(ge=0, lt=1)] | None = None
    warmup: Annotated[int, Meta(ge=0)] = 0
    scale_lr: bool = False
    evaluate_every: Count = 20
    bucket_bytes: PositiveBytes | None = None
    target_loss: Positive | None = None
    """Held-out loss; the time at which it is first reached is noted."""

    def cells(self) -> Iterator[AnyCell]:
        """All of them, in the order of the axes; a machine that is alone has no link, so it is there once."""
        seen: dict[AnyCell, None] = {}
        for task, world, link, variant, per_hour, algorithm, strategy, compressor, seed in product(
            self.tasks, self.worlds, self.links, self.variants, self.failures_per_hour,
            self.algorithms, self.strategies, self.compressors, self.seeds,
        ):  # fmt: skip
            place: dict[str, Any] = {"link": link, "variant": variant, "algorithm": algorithm, "compressor": compressor}
            if strategy == SINGLE:
                place = {"link": ALONE}
            together = strategy != SINGLE
            failing = per_hour > 0 and together
            in_cluster = self.failure == "crash" and together  # what does not fail is to be in one, too
            cell = Train(
                **place,
                world=world, task=task, strategy=strategy, seed=seed, steps=self.steps, batch=self.batch, lr=self.lr,
                momentum=self.momentum, warmup=self.warmup, scale_lr=self.scale_lr, evaluate_every=self.evaluate_every,
                bucket_bytes=self.bucket_bytes and int(self.bucket_bytes), target_loss=self.target_loss,
                failure=self.failure if failing or in_cluster else "pause",
                failures_per_hour=per_hour if failing else 0.0,
                failure_s=float(self.failure_lasts_s) if failing else 0.0,
            )  # fmt: skip
            seen[cell] = None
        yield from seen


class Sweep(Table, frozen=True):
    """A file."""

    grids: Annotated[tuple[AllReduceGrid | TrainingGrid, ...], Meta(min_length=1)] = field(name="grid")
    description: str = ""
    plugins: tuple[str, ...] = ()


def shipped_sweeps() -> dict[str, Path]:
    """The sweeps that come with the project, by name."""
    return {path.stem: path for path in sorted(_SWEEPS.glob("*.toml"))}


def load_sweep(where: str, *, quick: bool = False) -> list[Asked]:
    """All cells of a file, or of a shipped sweep by its name, each checked."""
    shipped = shipped_sweeps()
    path = shipped.get(where, Path(where))
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        hint = did_you_mean(where, shipped)
        raise ConfigError(f"{where}: no such file{hint}; shipped sweeps: {', '.join(shipped)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    return parse_sweep(text, str(path), path.parent, quick=quick)


def parse_sweep(text: str, source: str, folder: Path | None = None, *, quick: bool = False) -> list[Asked]:
    """All cells of a sweep; `source` names it in errors, and plugins are looked for in `folder`."""
    try:
        raw = msgspec.toml.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{source}: this is not TOML: {error}") from None
    plain, hurried = _without_quick(raw), _with_quick(raw)
    sweep = _converted(plain, source)
    hurried_sweep = _converted(hurried, f"{source}, with its quick tables")
    for plugin in sweep.plugins:
        try:
            load_plugin(plugin, folder)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
    grids = (hurried_sweep if quick else sweep).grids
    return [asked for place, grid in enumerate(grids) for asked in _checked(grid, f"{source}: grid[{place}]")]


def _converted(raw: dict[str, Any], source: str) -> Sweep:
    try:
        return msgspec.convert(raw, Sweep, dec_hook=decode_quantity)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {explain(error, raw, Sweep)}") from None


def _checked(grid: AllReduceGrid | TrainingGrid, place: str) -> list[Asked]:
    cells = list(grid.cells())
    try:
        for cell in cells:
            check_cell(cell)
    except HcsimError as error:
        raise ConfigError(f"{place}: {error}") from None
    return [Asked(grid.study, cell) for cell in cells]


def _grids(raw: dict[str, Any]) -> list[Any]:
    grids = raw.get("grid")
    return grids if isinstance(grids, list) else []


def _without_quick(raw: dict[str, Any]) -> dict[str, Any]:
    if not _grids(raw):
        return raw
    return raw | {"grid": [_less_quick(grid) for grid in _grids(raw)]}


def _with_quick(raw: dict[str, Any]) -> dict[str, Any]:
    if not _grids(raw):
        return raw
    merged = []
    for grid in _grids(raw):
        other = grid.get("quick") if isinstance(grid, dict) else None
        merged.append(_less_quick(grid) | other if isinstance(other, dict) else grid)
    return raw | {"grid": merged}


def _less_quick(grid: Any) -> Any:
    """A `quick` that is no table stays, for the decoder to refuse."""
    if not isinstance(grid, dict) or not isinstance(grid.get("quick"), dict):
        return grid
    return {key: value for key, value in grid.items() if key != "quick"}
