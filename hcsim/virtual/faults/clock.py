"""Faults of clocks: they are set, and they drift."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hcsim.config import ClockDrift, ClockJump
from hcsim.virtual.faults.apply import FaultProcess, apply, lasting, note, prepare

if TYPE_CHECKING:
    from hcsim.virtual.world import World


@prepare.register(ClockJump)
def be_wrong(fault: ClockJump, world: World) -> None:
    """A clock that is wrong from the start is so before the first line of a program runs."""
    if fault.at_s == 0.0:
        world.host(fault.node).clock.offset_s += fault.by_s


@apply.register(ClockJump)
def jump(fault: ClockJump, world: World) -> None:
    """The host's clock is set forward or back."""
    if fault.at_s > 0.0:
        world.host(fault.node).clock.offset_s += fault.by_s


@apply.register(ClockDrift)
def drift(fault: ClockDrift, world: World) -> FaultProcess:
    """The host's clock runs fast or slow, and its timers with it."""
    world.host(fault.node).clock.multiply_rate(fault.rate)
    yield from lasting(world, fault.duration_s)
    note(world, "steady", fault.node)
    world.host(fault.node).clock.multiply_rate(1.0 / fault.rate)
