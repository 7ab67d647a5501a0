"""Faults of data: a frame that arrives other than it should, a number that is none."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from hcsim.config import FlippedBit, NanGradient, StaleStep, WrongSize
from hcsim.runtime.channel import Payload, Phantom
from hcsim.runtime.frame import Header, Kind
from hcsim.virtual.faults.apply import apply, draws, note
from hcsim.virtual.tampering import FLIP

if TYPE_CHECKING:
    from hcsim.virtual.channel import VirtualChannel
    from hcsim.virtual.tampering import Frame
    from hcsim.virtual.world import World


@apply.register(FlippedBit)
def flip_bit(fault: FlippedBit, world: World) -> None:
    """The next payload has one bit changed; a phantom has no bits, so the fault waits for data."""
    rng = draws(world, fault)

    def alter(channel: VirtualChannel, header: Header, payload: Payload) -> Frame | None:
        wanted = fault.of == "any" or (fault.of == "data") == (header.kind is Kind.DATA)
        if not wanted or isinstance(payload, Phantom) or not payload.nbytes:
            return None
        damaged = bytearray(payload)
        bit = rng.randrange(8 * len(damaged))
        damaged[bit // 8] ^= 1 << bit % 8
        return header, memoryview(damaged)

    world.tampering.add(FLIP, *fault.between, alter)


@apply.register(WrongSize)
def change_size(fault: WrongSize, world: World) -> None:
    """The next segment is some bytes longer or shorter, and its header says so."""
    by = fault.by_bytes if fault.longer else -fault.by_bytes

    def alter(channel: VirtualChannel, header: Header, payload: Payload) -> Frame | None:
        length = header.length + by
        if header.kind is not Kind.DATA or length < 0:
            return None
        total = max(header.total, header.offset + length) if header.total else 0
        header = replace(header, length=length, total=total)
        if isinstance(payload, Phantom):
            return header, Phantom(length)
        return header, memoryview(bytes(payload)[:length].ljust(length, b"\0"))

    world.tampering.add("resize", *fault.between, alter)


@apply.register(StaleStep)
def repeat_step(fault: StaleStep, world: World) -> None:
    """A segment of an earlier step arrives again, in the place of the first one of a later step."""
    earlier: dict[VirtualChannel, Frame] = {}

    def alter(channel: VirtualChannel, header: Header, payload: Payload) -> Frame | None:
        if header.kind is not Kind.DATA:
            return None
        first, old = earlier.setdefault(channel, (header, payload))
        return None if (first.operation, first.step) == (header.operation, header.step) else (first, old)

    world.tampering.add("repeat", *fault.between, alter)


@apply.register(NanGradient)
def spoil_gradient(fault: NanGradient, world: World) -> None:
    """One number of the n-th piece of gradients that the device computes from now on is not a number."""
    host = world.host(fault.node)
    host.device.spoil(_Spoiler(world, fault, draws(world, fault)))


class _Spoiler:
    """Counts pieces of gradients, and spoils the n-th."""

    def __init__(self, world: World, fault: NanGradient, rng: Random) -> None:
        self._world = world
        self._node = fault.node
        self._left = fault.nth
        self._rng = rng

    def __call__(self, gradients: memoryview) -> bool:
        self._left -= 1
        if self._left:
            return False
        np.asarray(gradients)[self._rng.randrange(len(gradients))] = np.nan
        note(self._world, "spoil", self._node)
        return True
