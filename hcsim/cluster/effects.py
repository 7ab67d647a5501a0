"""What a node's part in its cluster asks its driver to do (see `membership`)."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from hcsim.cluster.messages import Message
from hcsim.cluster.view import View


class Send(msgspec.Struct, frozen=True):
    """Send a message to a node, if it is connected."""

    to: str
    message: Message


class Adopted(msgspec.Struct, frozen=True):
    """A view takes effect here."""

    view: View


class Over(msgspec.Struct, frozen=True):
    """Nothing can be computed in that epoch any more."""

    epoch: int
    reason: str


class Waiting(msgspec.Struct, frozen=True):
    """We cannot go on, and why."""

    reason: str


class Check(msgspec.Struct, frozen=True):
    """Check our device and the other members of that epoch's view, and tell `Membership.checked` what was found."""

    epoch: int
    slow: bool = False
    """Whether members that are only slow are looked for."""


class Qualify(msgspec.Struct, frozen=True):
    """Check our device and the members of that lineage, and measure the ways to them, before we join them; then tell
    `Membership.qualified`."""

    lineage: str


Effect: TypeAlias = Send | Adopted | Over | Waiting | Check | Qualify
