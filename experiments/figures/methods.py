"""What strategies and compressors are called in figures: the same in all of them."""

from __future__ import annotations

from collections import Counter

import pandas as pd

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
        words = f"{words}, {_server_words(setting)}"
    elif setting:
        setting = setting.replace("pace=speed", "by speed")
        words = f"{words} {setting.replace(',', ', ').replace('=', ' ')}"
    return words if compressor == "none" else f"{words}, {compressor_words(compressor)}"


def _server_words(setting: str) -> str:
    first, *others = setting.split(",")
    named = dict(other.partition("=")[::2] for other in (first if "=" in first else f"mode={first or 'sync'}", *others))
    if "quorum" not in named:
        return _SERVER[named.get("mode", "sync")]
    patience = f", {named['deadline_s']} s" if "deadline_s" in named else ""
    return f"waits for {named['quorum']}{patience}"


def compressor_words(compressor: str) -> str:
    """ "topk:0.01+ef" → "top-k 1 %"; whether with error feedback, words leave out."""
    name, _, setting = compressor.removesuffix("+ef").partition(":")
    words = _COMPRESSORS.get(name, name)
    if name in ("topk", "randomk"):
        return f"{words} {100 * float(setting):g} %"
    return f"{words} {setting}".strip()


def with_methods(cells: pd.DataFrame) -> pd.DataFrame:
    """The table with a column `method`: a name for each strategy with each compressor, which no other of them has.

    Words leave out settings that seldom matter; two that differ in nothing else are called as the sweep calls them."""
    pairs = list(zip(cells["strategy"], cells["compressor"].fillna("none"), strict=True))
    words = {pair: method(*pair) for pair in pairs}
    shared = Counter(words.values())
    return cells.assign(method=[words[pair] if shared[words[pair]] == 1 else _as_asked(*pair) for pair in pairs])


def _as_asked(strategy: str, compressor: str) -> str:
    return strategy if compressor == "none" else f"{strategy}, {compressor}"
