"""Faults of clocks: they are set, and they drift."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hcsim.config import ClockJump
from hcsim.virtual.faults.apply import apply

if TYPE_CHECKING:
    from hcsim.virtual.world import World


@apply.register(ClockJump)
def jump(fault: ClockJump, world: World) -> None:
    """The host's clock is set forward or back."""
    world.host(fault.node).clock.offset_s += fault.by_s
