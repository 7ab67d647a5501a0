"""What all nodes of a cluster hold alike when they form views."""

from __future__ import annotations

import msgspec

from hcsim.cluster.view import Quorum

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
