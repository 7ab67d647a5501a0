"""Faults between machines: partition, link change, reset."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hcsim.config import LinkChange, Partition, Reset
from hcsim.virtual.faults.apply import apply, note

if TYPE_CHECKING:
    from hcsim.virtual.world import World


@apply.register(Partition)
def partition(fault: Partition, world: World) -> None:
    """Packets between the two sides are lost; one-way, those from the first side to the second."""
    pairs = [(a, b) for a in fault.sides[0] for b in fault.sides[1]]
    if not fault.oneway:
        pairs += [(b, a) for a, b in pairs]
    world.cut(pairs)
    world.later(fault.duration_s, _heal, world, pairs)


def _heal(world: World, pairs: list[tuple[str, str]]) -> None:
    note(world, "heal", len(pairs))
    world.mend(pairs)


@apply.register(LinkChange)
def change_link(fault: LinkChange, world: World) -> None:
    """A link gets another rate, latency or loss, for a while or for good."""
    world.change_link(fault)
    if fault.duration_s is not None:
        world.later(fault.duration_s, _restore, world, fault)


def _restore(world: World, change: LinkChange) -> None:
    note(world, "restore", repr(change))
    world.restore_link(change)


@apply.register(Reset)
def reset(fault: Reset, world: World) -> None:
    """Every connection between the two breaks: at once, or else when half of a frame has left."""
    here, there = fault.between
    for channel in list(world.host(here).channels):
        if channel.peer == there:
            break_it = partial(channel.reset, "connection reset")
            if fault.mid_frame:
                for stream in channel.streams:
                    stream.when_half_sent(break_it)
            else:
                break_it()
