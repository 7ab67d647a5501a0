"""What all nodes of a cluster hold alike when they form views.

Terms are what all members must have been started with alike. Each node tells its terms when it meets another: by
name, and only those that are not as usual. Whoever differs from the most senior member of its view could never
compute with it, whatever is tried again, and so ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from hcsim.cluster.view import Quorum
from hcsim.errors import ConfigError

PATIENCE_S = 1.0
"""How long a member waits for those before it to propose, and a proposer before it tries again."""
ASTRAY_S = 5.0
"""How long a member may follow another view before it is left out."""


DEPARTED_S = 5.0
"""How long members may go on with a view that a member has left, once it is gone: what it sent last may still come."""


class Rules(msgspec.Struct, frozen=True):
    """What a person may choose."""

    needed: int
    """Members that work begins with."""
    quorum: Quorum = "tiebreak"
    settle_s: float = 0.5
    """How long newcomers are gathered."""
    answer_s: float = 15.0
    """How long a proposal waits for a member that seems to be well."""


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
