"""Dispatch of faults: each kind registers the function that applies it to the world."""

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


@singledispatch
def apply(fault: object, world: Surroundings) -> FaultProcess | None:
    """Apply the fault to the world; return a process if the fault continues."""
    raise UsageError(f"{type(fault).__name__} is no fault of the virtual world")


@singledispatch
def prepare(fault: object, world: Surroundings) -> None:
    """Prepare for a fault before its time; most kinds need nothing."""


def schedule(world: Surroundings, fault: AnyFault) -> None:
    prepare(fault, world)
    world.env.process(_strike(world, fault))


def _strike(world: Surroundings, fault: AnyFault) -> FaultProcess:
    yield world.env.timeout(max(0, round(fault.at_s * NS) - world.env.now_ns))
    world.trace.record((world.env.now_ns, "fault", type(fault).__name__, repr(fault)))
    process = apply(fault, world)
    if process is not None:
        yield from process


def lasting(world: Surroundings, duration_s: float | None) -> FaultProcess:
    """Wait for the end of a fault; never return if `duration_s` is None."""
    yield world.env.event() if duration_s is None else world.env.timeout(round(duration_s * NS))


def note(world: Surroundings, what: str, where: str | int) -> None:
    """Record a consequence of a fault in the trace, such as its end or the return of a node."""
    world.trace.record((world.env.now_ns, "fault", what, where))


def draws(world: Surroundings, fault: AnyFault) -> Random:
    """Return the random stream of the fault, which depends only on the seed and on the fault."""
    return random_stream(world.scenario.seed, "fault", repr(fault))
