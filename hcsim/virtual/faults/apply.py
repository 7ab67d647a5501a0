"""How a fault is put to work: each kind registers what it does to the world."""

from __future__ import annotations

from functools import singledispatch
from random import Random
from typing import TYPE_CHECKING

from hcsim.config import AnyFault
from hcsim.errors import UsageError
from hcsim.rng import stream as random_stream

if TYPE_CHECKING:
    from hcsim.virtual.world import World


@singledispatch
def apply(fault: object, world: World) -> None:
    """Do to the world what the fault says."""
    raise UsageError(f"{type(fault).__name__} is no fault of the virtual world")


@singledispatch
def prepare(fault: object, world: World) -> None:
    """Do what has to be done before the fault's time comes: nothing, for most."""


def schedule(world: World, fault: AnyFault) -> None:
    """Apply the fault when its time comes."""
    prepare(fault, world)
    world.loop.call_at_ns(round(fault.at_s * 1e9), _strike, world, fault)


def _strike(world: World, fault: AnyFault) -> None:
    world.trace.record((world.loop.now_ns, "fault", type(fault).__name__, repr(fault)))
    apply(fault, world)


def note(world: World, what: str, where: str | int) -> None:
    """Put what follows from a fault into the trace: that it healed, that a node is back."""
    world.trace.record((world.loop.now_ns, "fault", what, where))


def draws(world: World, fault: AnyFault) -> Random:
    """The fault's own random stream, which depends on the seed and on the fault alone."""
    return random_stream(world.scenario.seed, "fault", repr(fault))
