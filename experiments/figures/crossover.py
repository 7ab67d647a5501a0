"""Which method is the fastest, by bandwidth and model size; and where one machine alone is, and how much slower the
best cluster is there.

Every tile is simulated: the time of a training step over the same number of samples, encoding included. Networks that
are no switch stand beside the switches, each simulated as what it is: stations of Wi-Fi share the air, and take it for
both directions, so that no switch has a rate that equals it. Local SGD
and DiLoCo do not learn the same from the same samples, so their tiles say how fast, not how well.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.patches import Rectangle

from experiments.clusters import FREE_FORM
from experiments.figures.hidden import METHOD, check_shown
from experiments.figures.methods import method, with_methods
from experiments.figures.style import count_label, figure, in_order, labelled, rate_label, save_data, takeaway
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
SWITCHES = {"100 MbE": 100e6, "1 GbE": 1e9, "2.5 GbE": 2.5e9, "10 GbE": 10e9}
"""The rates of the switches that are sold: marks among the tiles, all of which are switches."""
OTHERS = {"two-homes": "two homes", "wifi6": "Wi-Fi 6", "thunderbolt": "Thunderbolt"}
"""Networks that are no switch."""
MEMORY_GIB = 32
"""Of each Mac: what data parallelism needs has to fit into what macOS lets the GPU wire of it."""
SMALLEST, LARGEST = 1e6, 1e11
NEAR = 1.9
_BESIDE = 1.06
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
            "with compression and local steps": ours,
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
    others = in_order([link for link in choices[-1]["link"] if not link.startswith(FREE_FORM)], tuple(OTHERS))
    kinds = 2 if others else 1
    ratios = (7, max(1.4, 0.95 * len(others)))[:kinds] * len(choices)
    with figure((4.7 + 0.6 * len(others)) * len(choices) + 0.6, 3.9 * len(tokens) + 0.9, file) as sheet:
        panels = sheet.subplots(len(tokens), kinds * len(choices), squeeze=False, width_ratios=ratios)
        for row, length in zip(panels, tokens, strict=True):
            for number, tiles in enumerate(choices):
                pair = row[kinds * number : kinds * (number + 1)]
                here = tiles[tiles["tokens"] == length]
                _pair(pair, here, fills, others)
                if len(here):
                    words = f"{place}, {length:,} tokens per Mac and step;\n{tiles['methods'].iloc[0]}"
                    pair[0].set_title(words, pad=40)
        takeaway(sheet, _finding(choices, place))
        winners = {name for tiles in choices for name in tiles["fastest"]}
        shown = [name for name in fills if name in winners]
        handles = [Rectangle((0, 0), 1, 1, facecolor=fills[n][0], hatch=fills[n][1], edgecolor="0.35") for n in shown]
        words = (
            "fastest (in the tiles: how many times as fast as one Mac alone the fastest cluster is, "
            "also where it loses; ?: with other likely figures another one is the fastest)"
        )
        sheet.legend(handles, shown, loc="outside lower center", ncols=6, title=words, handleheight=1.6)


def _finding(choices: list[pd.DataFrame], place: str) -> str:
    pays = [int((tiles["fastest"] != method(SINGLE)).sum()) for tiles in choices]
    words = [tiles["methods"].iloc[0] for tiles in choices]
    first = f"{place} beat one in {pays[0]} of {len(choices[0])} tiles ({words[0]})"
    return ", ".join([first, *(f"in {count} {allowed}" for count, allowed in zip(pays[1:], words[1:], strict=True))])


def _pair(pair: Any, tiles: pd.DataFrame, fills: dict[str, tuple[str, str]], others: list[str]) -> None:
    """Switches on an axis of rates, and beside them the networks that are none."""
    switched = tiles[tiles["rate_bps"].notna()]
    sizes = sorted(set(tiles["parameters"]))
    for axes in pair:
        axes.axis("on" if len(tiles) else "off")
    if tiles.empty:
        return
    if len(switched):
        rates = sorted(set(switched["rate_bps"]))
        _panel(pair[0], switched.assign(column=[rates.index(rate) for rate in switched["rate_bps"]]), fills, sizes,
               _edges(rates))  # fmt: skip
        pair[0].set_xscale("log")
        labelled(pair[0].xaxis, rate_label)
        pair[0].set_xlabel("bandwidth of each Mac's port at a switch")
        _switch_marks(pair[0])
    else:
        pair[0].axis("off")
    pair[0].set_ylabel("parameters")
    if len(pair) > 1:
        rest = tiles[tiles["rate_bps"].isna()]
        _panel(pair[1], rest.assign(column=[others.index(link) for link in rest["link"]]), fills, sizes,
               [number - 0.5 for number in range(len(others) + 1)])  # fmt: skip
        pair[1].set_xticks(range(len(others)), [OTHERS.get(link, link) for link in others], rotation=35, ha="right")
        pair[1].set_yticklabels([])
    _model_marks(pair[-1], pair, tiles["tokens"].iloc[0])


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
        cluster = min(means_s.index, key=lambda name: times_s[name])
        rows.append(
            {
                "world": int(part["world"].iloc[0]), "tokens": specs[task].tokens, "parameters": specs[task].parameters,
                "link": link, "rate_bps": _rate_bps(link), "fastest": fastest,
                "speedup": times_s[method(SINGLE)] / times_s[fastest],
                "fastest_cluster": cluster, "cluster_speedup": times_s[method(SINGLE)] / times_s[cluster],
                **dict(zip(("speedup_p10", "speedup_p90"), np.quantile(speedups, (0.1, 0.9)), strict=True)),
                "fastest_in": float(np.mean(drawn_s[fastest] <= others_s)),
                **{f"{name}, s": time_s for name, time_s in times_s.items()},
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def _rate_bps(link: str) -> float | None:
    """Return the rate of a switch; what is no switch has none that could be compared."""
    return float(decode_quantity(BitRate, link.removeprefix(FREE_FORM))) if link.startswith(FREE_FORM) else None


def _panel(
    axes: Any, tiles: pd.DataFrame, fills: dict[str, tuple[str, str]], sizes: list[float], across: list[float]
) -> None:
    up = _edges(sizes)
    is_log = across[0] > 0
    for tile in tiles.to_dict("records"):
        column, row = tile["column"], sizes.index(tile["parameters"])
        left, right, low, high = across[column], across[column + 1], up[row], up[row + 1]
        colour, hatch = fills[tile["fastest"]]
        axes.add_patch(
            Rectangle(
                (left, low), right - left, high - low, facecolor=colour, hatch=hatch, edgecolor="0.55", linewidth=0
            )
        )
        axes.text(
            (left * right) ** 0.5 if is_log else (left + right) / 2, (low * high) ** 0.5, _words(tile),
            ha="center", va="center", fontsize=7,
            bbox={"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.75},
        )  # fmt: skip
    _borders(axes, tiles, sizes, across)
    axes.set(yscale="log", xlim=(across[0], across[-1]), ylim=(up[0], up[-1]))
    axes.grid(visible=False)
    labelled(axes.yaxis, count_label)


def _borders(axes: Any, tiles: pd.DataFrame, sizes: list[float], across: list[float]) -> None:
    """A line wherever the fastest changes: the regions read without colour."""
    up = _edges(sizes)
    fastest = {(tile["column"], tile["parameters"]): tile["fastest"] for tile in tiles.to_dict("records")}
    for column in range(len(across) - 1):
        for row, size in enumerate(sizes):
            here = fastest.get((column, size))
            if column + 2 < len(across) and here != fastest.get((column + 1, size)):
                axes.plot([across[column + 1]] * 2, up[row : row + 2], color="black", linewidth=1.3)
            if row + 1 < len(sizes) and here != fastest.get((column, sizes[row + 1])):
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


_TICK: dict[str, Any] = {"color": "black", "linewidth": 0.8, "clip_on": False}


def _switch_marks(axes: Any) -> None:
    """Switches that are sold, above the tiles."""
    for words, rate_bps in SWITCHES.items():
        if _within(rate_bps, axes.get_xlim()):
            axes.plot([rate_bps] * 2, [1, 1.025], transform=axes.get_xaxis_transform(), **_TICK)
            axes.text(rate_bps, 1.04, words, transform=axes.get_xaxis_transform(), fontsize=7.5, rotation=35)


def _model_marks(axes: Any, panels: Any, tokens: float) -> None:
    """Real models at the right, and a line over which a model does not fit into a Mac."""
    full = largest_that_fits(int(tokens))
    for each in panels:
        each.axhline(full, color="black", linewidth=1.1, linestyle=(0, (6, 3)), zorder=2.5)
    for words, size in {**MODELS, f"{MEMORY_GIB} GB full": full}.items():
        if _within(size, axes.get_ylim()):
            axes.plot([1, 1.03], [size] * 2, transform=axes.get_yaxis_transform(), **_TICK)
            axes.text(_BESIDE, size, words, transform=axes.get_yaxis_transform(), fontsize=7.5, va=_side(size, full))


def _side(size: float, full: float) -> str:
    """Return how the words of a model stand beside its mark: those of one near the line keep clear of the line's."""
    if size == full:
        return "bottom"
    near = max(size, full) / min(size, full) < NEAR
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
    speedup = tile["cluster_speedup"]
    times = f"{speedup:.1f}×" if speedup >= 0.95 else f"{speedup:.2f}×" if speedup >= 0.005 else "0×"
    return times if tile["fastest_in"] >= SURE else f"{times} ?"
