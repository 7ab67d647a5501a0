"""Which method is the fastest, by bandwidth and model size; and where one machine alone is.

Every tile is simulated: the time of a training step over the same number of samples, encoding included. Local SGD
and DiLoCo do not learn the same from the same samples, so their tiles say how fast, not how well.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.patches import Rectangle

from experiments.figures.hidden import METHOD, check_shown
from experiments.figures.methods import method, with_methods
from experiments.figures.style import count_label, figure, labelled, rate_label, save_data
from experiments.study.grid import SINGLE
from experiments.study.tables import draws_of
from hcsim.config import Training
from hcsim.config.machine import GIB, usable_bytes
from hcsim.config.training import read_spec
from hcsim.training.fitting import Room, fits_of
from hcsim.training.tasks.transformer import Transformer
from hcsim.units import BitRate, decode_quantity

FILLS: tuple[tuple[str, str], ...] = (
    ("#f0f0f0", ""),
    ("#56b4e9", ""),
    ("#f5d76e", "///"),
    ("#9fd8c4", "..."),
    ("#e8b4d0", "\\\\\\"),
    ("#f2b38a", "xxx"),
    ("#c9c9e8", "---"),
    ("#d9e8b0", "+++"),
)
EVERY_STEP = (SINGLE, "ddp", "hierarchical")
"""Strategies that take the steps one machine would, but for what a compressor leaves out."""
MODELS = {"ResNet-50": 25.6e6, "GPT-2": 124e6, "Llama 1B": 1.24e9, "Llama 7B": 6.74e9}
LINKS = {"two homes": 20e6, "1 GbE": 1e9, "2.5 GbE": 2.5e9, "Thunderbolt 4": 16.4e9}
AIR_BPS = 780e6
"""What Wi-Fi 6 carries; all stations share it, and every byte between two of them crosses it twice."""
MEMORY_GIB = 32
"""Of each Mac: what data parallelism needs has to fit into what macOS lets the GPU wire of it."""
SMALLEST, LARGEST = 1e6, 1e11
NEAR = 1.5
SURE = 0.8
"""A tile's method counts as the fastest if it is in so many of the draws of machines and links."""
FILES = r"crossover(_\d+_macs)?"


def draw(cells: pd.DataFrame, curves: pd.DataFrame, out: Path) -> None:
    """A figure for each number of Macs: rows by the work in a step, columns by what is allowed."""
    check_shown(cells, "task", *METHOD, "link", "world")
    cells = with_methods(cells)
    fills = {name: FILLS[number % len(FILLS)] for number, name in enumerate(dict.fromkeys(cells["method"]))}
    for number, world in enumerate(sorted(set(cells["world"]))):
        file = f"crossover_{world}_macs" if number else "crossover"
        ours = cells[cells["world"] == world]
        every_step = ours[ours["strategy"].isin(EVERY_STEP)]
        choices = {
            "data parallel, nothing compressed": every_step[every_step["compressor"].fillna("none") == "none"],
            "with compression": every_step,
            "and with local steps": ours,
        }
        tiles = [
            _tiles(allowed).assign(methods=words)
            for words, allowed in choices.items()
            if (allowed["strategy"] != SINGLE).any()
        ]
        save_data(pd.concat(tiles, ignore_index=True), out / file)
        _sheet(tiles, fills, f"{world} M4 Macs", out / file)


def _sheet(choices: list[pd.DataFrame], fills: dict[str, tuple[str, str]], place: str, file: Path) -> None:
    tokens = sorted(set(choices[-1]["tokens"]))  # the last allows all
    with figure(4.7 * len(choices), 3.9 * len(tokens) + 0.6, file) as sheet:
        panels = sheet.subplots(len(tokens), len(choices), squeeze=False)
        for row, length in zip(panels, tokens, strict=True):
            for axes, tiles in zip(row, choices, strict=True):
                here = tiles[tiles["tokens"] == length]
                if here.empty:
                    axes.axis("off")
                    continue
                _panel(axes, here, fills)
                axes.set_title(f"{place}, {length:,} tokens per Mac and step;\n{tiles['methods'].iloc[0]}", pad=44)
        winners = {name for tiles in choices for name in tiles["fastest"]}
        shown = [name for name in fills if name in winners]
        handles = [Rectangle((0, 0), 1, 1, facecolor=fills[n][0], hatch=fills[n][1], edgecolor="0.35") for n in shown]
        words = "fastest (in the tiles: times as fast as one Mac alone; ?: with other likely figures another one is)"
        sheet.legend(handles, shown, loc="outside lower center", ncols=6, title=words, handleheight=1.6)


def _tiles(cells: pd.DataFrame) -> pd.DataFrame:
    """For each point of the grid, the fastest in the mean over the seeds, and how much faster than alone it is."""
    specs = {task: read_spec(task, {"transformer": Transformer}, "task") for task in dict.fromkeys(cells["task"])}
    alone = cells[cells["strategy"] == SINGLE].groupby("task")["step_s"].mean()
    draws = {(row["task"], row["link"], row["method"]): draws_of(row) for row in cells.to_dict("records")}
    draws_alone = {row["task"]: draws_of(row) for row in cells[cells["strategy"] == SINGLE].to_dict("records")}
    rows = []
    together = cells[cells["strategy"] != SINGLE]
    for (task, link), part in together.groupby(["task", "link"], sort=False):
        means_s = part.groupby("method", sort=False)["step_s"].mean()
        times_s = {method(SINGLE): float(alone[task]), **means_s.astype(float)}
        fastest = min(times_s, key=lambda name: times_s[name])
        drawn_s = {name: times_s[name] * draws[task, link, name] for name in means_s.index}
        drawn_s[method(SINGLE)] = times_s[method(SINGLE)] * draws_alone[task]
        others_s = np.min([each_s for name, each_s in drawn_s.items() if name != fastest], axis=0)
        speedups = drawn_s[method(SINGLE)] / drawn_s[fastest]
        rows.append(
            {
                "world": int(part["world"].iloc[0]), "tokens": specs[task].tokens, "parameters": specs[task].parameters,
                "link": link, "rate_bps": float(decode_quantity(BitRate, link.partition(":")[2])), "fastest": fastest,
                "speedup": times_s[method(SINGLE)] / times_s[fastest],
                **dict(zip(("speedup_p10", "speedup_p90"), np.quantile(speedups, (0.1, 0.9)), strict=True)),
                "fastest_in": float(np.mean(drawn_s[fastest] <= others_s)),
                **{f"{name}, s": time_s for name, time_s in times_s.items()},
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def _panel(axes: Any, tiles: pd.DataFrame, fills: dict[str, tuple[str, str]]) -> None:
    rates, sizes = sorted(set(tiles["rate_bps"])), sorted(set(tiles["parameters"]))
    across, up = _edges(rates), _edges(sizes)
    for tile in tiles.to_dict("records"):
        column, row = rates.index(tile["rate_bps"]), sizes.index(tile["parameters"])
        left, right, low, high = across[column], across[column + 1], up[row], up[row + 1]
        colour, hatch = fills[tile["fastest"]]
        axes.add_patch(
            Rectangle(
                (left, low), right - left, high - low, facecolor=colour, hatch=hatch, edgecolor="0.55", linewidth=0
            )
        )
        axes.text(
            (left * right) ** 0.5, (low * high) ** 0.5, _words(tile), ha="center", va="center", fontsize=7,
            bbox={"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.75},
        )  # fmt: skip
    _borders(axes, tiles, rates, sizes)
    axes.set(xscale="log", yscale="log", xlim=(across[0], across[-1]), ylim=(up[0], up[-1]))
    axes.grid(visible=False)
    labelled(axes.xaxis, rate_label)
    labelled(axes.yaxis, count_label)
    axes.set_xlabel("bandwidth of each Mac's link")
    axes.set_ylabel("parameters")
    _marks(axes, {**LINKS, "Wi-Fi 6": AIR_BPS / 2 / tiles["world"].iloc[0]}, tiles["tokens"].iloc[0])


def _borders(axes: Any, tiles: pd.DataFrame, rates: list[float], sizes: list[float]) -> None:
    """A line wherever the fastest changes: the regions read without colour."""
    across, up = _edges(rates), _edges(sizes)
    fastest = {(tile["rate_bps"], tile["parameters"]): tile["fastest"] for tile in tiles.to_dict("records")}
    for column, rate in enumerate(rates):
        for row, size in enumerate(sizes):
            here = fastest.get((rate, size))
            if column + 1 < len(rates) and here != fastest.get((rates[column + 1], size)):
                axes.plot([across[column + 1]] * 2, up[row : row + 2], color="black", linewidth=1.3)
            if row + 1 < len(sizes) and here != fastest.get((rate, sizes[row + 1])):
                axes.plot(across[column : column + 2], [up[row + 1]] * 2, color="black", linewidth=1.3)


@cache
def largest_that_fits(tokens: int) -> float:
    """Return the parameters of the largest transformer that a Mac trains with data parallelism, one text at a time."""
    memory_bytes = MEMORY_GIB * GIB
    room = Room("", "M4", memory_bytes, usable_bytes("M4", memory_bytes))
    least, most = SMALLEST, LARGEST
    while most / least > 1.01:
        size = (least * most) ** 0.5
        settings = Training(task=f"transformer:{size:g},tokens={tokens}")
        least, most = (size, most) if fits_of(settings, [room, room])[0].fits else (least, size)
    return least


def _marks(axes: Any, links: dict[str, float], tokens: float) -> None:
    """Real links above, real models at the right, and a line over which a model does not fit into a Mac."""
    full = largest_that_fits(int(tokens))
    axes.axhline(full, color="black", linewidth=1.1, linestyle=(0, (6, 3)), zorder=2.5)
    tick: dict[str, Any] = {"color": "black", "linewidth": 0.8, "clip_on": False}
    for words, rate_bps in links.items():
        if _within(rate_bps, axes.get_xlim()):
            axes.plot([rate_bps] * 2, [1, 1.025], transform=axes.get_xaxis_transform(), **tick)
            axes.text(rate_bps, 1.04, words, transform=axes.get_xaxis_transform(), fontsize=7.5, rotation=35)
    for words, size in {**MODELS, f"{MEMORY_GIB} GB full": full}.items():
        if _within(size, axes.get_ylim()):
            axes.plot([1, 1.015], [size] * 2, transform=axes.get_yaxis_transform(), **tick)
            axes.text(1.025, size, words, transform=axes.get_yaxis_transform(), fontsize=7.5, va=_side(size, full))


def _side(size: float, full: float) -> str:
    """Return how the words of a model stand beside its mark: those of one near the line keep clear of the line's."""
    near = 1 < max(size, full) / min(size, full) < NEAR
    return ("top" if size < full else "bottom") if near else "center"


def _within(value: float, limits: tuple[float, float]) -> bool:
    return limits[0] <= value <= limits[1]


def _edges(centres: list[float]) -> list[float]:
    """Of tiles around the centres, on a logarithmic axis."""
    logs = np.log(centres)
    if len(logs) == 1:
        return [centres[0] / 2, centres[0] * 2]
    middles = (logs[1:] + logs[:-1]) / 2
    ends = np.concatenate([[2 * logs[0] - middles[0]], middles, [2 * logs[-1] - middles[-1]]])
    return [float(edge) for edge in np.exp(ends)]


def _words(tile: dict[str, Any]) -> str:
    times = f"{tile['speedup']:.1f}×" if tile["speedup"] > 1 else "1×"
    return times if tile["fastest_in"] >= SURE else f"{times} ?"
