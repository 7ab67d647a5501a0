"""What all members must have been started with alike, and what is said where they were not.

Each node tells its terms when it meets another: by name, and only those that are not as usual. Whoever differs from the
most senior member of its view could never compute with it, whatever is tried again, and so ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from hcsim.errors import ConfigError

Terms: TypeAlias = Mapping[str, str]
_USUAL = "left out"


def unlike(theirs: Terms, ours: Terms, there: str) -> str:
    """In what the terms differ; empty if they do not."""
    names = sorted({*theirs, *ours})
    return ", ".join(
        f"{name} is {theirs.get(name, _USUAL)} on {there} and {ours.get(name, _USUAL)} here"
        for name in names
        if theirs.get(name) != ours.get(name)
    )


def refusal(leader: str, differences: str) -> ConfigError:
    """Why a node cannot be a member."""
    return ConfigError(f"{leader} leads, and was started otherwise: {differences}. Start all nodes alike")
