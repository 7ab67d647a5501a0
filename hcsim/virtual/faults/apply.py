"""How a fault is put to work: each kind registers what it does to the world."""

from __future__ import annotations

from collections.abc import Generator
from functools import singledispatch
from random import Random
from typing import Any, TypeAlias

import simpy

from hcsim.config import AnyFault
from hcsim.errors import UsageError
from hcsim.rng import stream as random_stream
from hcsim.virtual.environment import NS
from hcsim.virtual.host import Surroundings

FaultProcess: TypeAlias = Generator[simpy.Event, Any, None]
"""As SimPy knows them."""


@singledispatch
def apply(fault: object, world: Surroundings) -> FaultProcess | None:
    """Do to the world what the fault says; a process, where the fault goes on."""
    raise UsageError(f"{type(fault).__name__} is no fault of the virtual world")


@singledispatch
def prepare(fault: object, world: Surroundings) -> None:
    """Do what has to be done before the fault's time comes: nothing, for most."""


def schedule(world: Surroundings, fault: AnyFault) -> None:
    """Apply the fault when its time comes."""
    prepare(fault, world)
    world.env.process(_strike(world, fault))


def _strike(world: Surroundings, fault: AnyFault) -> FaultProcess:
    yield world.env.timeout(max(0, round(fault.at_s * NS) - world.env.now_ns))
    world.trace.record((world.env.now_ns, "fault", type(fault).__name__, repr(fault)))
    process = apply(fault, world)
    if process is not None:
        yield from process


def lasting(world: Surroundings, duration_s: float | None) -> FaultProcess:
    """Wait for the end of a fault; what comes behind one that lasts for good never happens."""
    yield world.env.event() if duration_s is None else world.env.timeout(round(duration_s * NS))


def note(world: Surroundings, what: str, where: str | int) -> None:
    """Put what follows from a fault into the trace: that it healed, that a node is back."""
    world.trace.record((world.env.now_ns, "fault", what, where))


def draws(world: Surroundings, fault: AnyFault) -> Random:
    """The fault's own random stream, which depends on the seed and on the fault alone."""
    return random_stream(world.scenario.seed, "fault", repr(fault))
