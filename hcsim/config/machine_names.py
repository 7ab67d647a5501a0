"""Machines by the names that people have for them: "M4 mini", "MacBook Pro M3", "mac studio m2 ultra".

A name of the catalogue is taken as it is, in any case. In any other, the chip counts ("M3", "M3 Pro"; what follows the
number directly), and whether it is a MacBook Air, which has no fan; what else the machine is called, its year and its
size do not.
"""

from __future__ import annotations

import re

from hcsim.config.machine import CATALOGUE
from hcsim.errors import ConfigError
from hcsim.units import did_you_mean

_CHIP = re.compile(r"\bm(\d)[\s-]*(pro|max|ultra)?\b")
_OTHER_WORDS = re.compile(
    r"\b(apple|imac|mac|macbook|macs|macbooks|book|mini|minis|studio|studios|air|airs|pro|pros|laptop|laptops|chip|"
    r"inch|in|the|a|an|old|new|20[12]\d|\d+(\.\d)?[\s-]*(inch|\"|″)|\d+[\s-]*core)(?![\w.])"
)


def machine_named(words: str) -> str:
    """Return the name in the catalogue of the machine that these words mean."""
    text = " ".join(words.split())
    for name in CATALOGUE:
        if name.lower() == text.lower():
            return name
    if text in CATALOGUE:  # a plugin that was not loaded until it was asked for
        return text
    lower = text.lower()
    chip = _CHIP.search(lower)
    rest = lower if chip is None else f"{lower[: chip.start()]} {lower[chip.end() :]}"
    is_air = re.search(r"\bairs?\b", rest) is not None
    left = _OTHER_WORDS.sub(" ", rest).strip(" ,.-'\"″()")
    if chip is None or left:
        which = "; say which chip it has" if not left else ""
        raise _unknown(text, did_you_mean(text.title(), CATALOGUE) + which)
    name = " ".join([f"M{chip[1]}", *([chip[2].capitalize()] if chip[2] else []), *(["Air"] if is_air else [])])
    if name not in CATALOGUE:
        raise ConfigError(
            f'there is no machine "{name}"{did_you_mean(name, CATALOGUE)}; `hcsim list machines` shows all'
        )
    return name


def _unknown(name: str, hint: str) -> ConfigError:
    return ConfigError(f'there is no machine "{name}"{hint}; `hcsim list machines` shows all')
