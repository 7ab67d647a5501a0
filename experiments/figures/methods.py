"""What strategies and compressors are called in figures, and how each looks: the same in all of them."""

from __future__ import annotations

from typing import Any

import pandas as pd

from experiments.figures.style import LOOKS

_STRATEGIES = {
    "single": "one Mac alone",
    "ddp": "data parallel",
    "hierarchical": "hierarchical",
    "local_sgd": "local SGD",
    "diloco": "DiLoCo",
    "parameter_server": "server",
}
_SERVER = {"sync": "waits for all", "bounded": "bounded", "async": "async"}
_COMPRESSORS = {"topk": "top-k", "randomk": "random-k", "powersgd": "PowerSGD", "onebit": "one bit"}


def method(strategy: str, compressor: str = "none") -> str:
    """Both in words: "DiLoCo 16, int8"."""
    name, _, setting = strategy.partition(":")
    words = _STRATEGIES.get(name, name)
    if name == "parameter_server":
        mode, *others = setting.split(",") if setting else ["sync"]
        figures = dict(other.partition("=")[::2] for other in others)
        how = f"waits for {figures['quorum']}, {figures['deadline_s']} s" if "quorum" in figures else _SERVER[mode]
        words = f"{words}, {how}"
    elif setting:
        words = f"{words} {setting.replace(',', ', ').replace('=', ' ')}"
    return words if compressor == "none" else f"{words}, {compressor_words(compressor)}"


def compressor_words(compressor: str) -> str:
    """ "topk:0.01+ef" → "top-k 1 %"; error feedback is what one would use, so only its absence is worth a word."""
    name, _, setting = compressor.removesuffix("+ef").partition(":")
    words = _COMPRESSORS.get(name, name)
    if name in ("topk", "randomk"):
        return f"{words} {100 * float(setting):g} %"
    return f"{words} {setting}".strip()


def with_methods(cells: pd.DataFrame) -> pd.DataFrame:
    """The table with a column `method`."""
    words = [method(*pair) for pair in zip(cells["strategy"], cells["compressor"].fillna("none"), strict=True)]
    return cells.assign(method=words)


def looks(names: list[str]) -> dict[str, dict[str, Any]]:
    """One for each name, in order; they come around again after the eighth."""
    return {name: LOOKS[number % len(LOOKS)] for number, name in enumerate(names)}
