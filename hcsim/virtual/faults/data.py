"""Data faults: frames that arrive corrupted, and values that are NaN."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, TypeAlias

import msgspec
import numpy as np
from msgspec.structs import replace

from hcsim.config import FlippedBit, Misbehave, NanGradient, StaleStep, WrongSize
from hcsim.runtime.channel import Payload, Phantom
from hcsim.runtime.frame import HEADER_BYTES, Header, Kind
from hcsim.virtual.channel import NO_FRAME_BYTES, Undecodable, VirtualChannel
from hcsim.virtual.faults.apply import FaultProcess, apply, draws, lasting, note
from hcsim.virtual.host import Surroundings
from hcsim.virtual.host_network import FLIP, Frame


@apply.register(FlippedBit)
def flip_bit(fault: FlippedBit, world: Surroundings) -> None:
    """Flip one bit of the next payload. A phantom payload has no bits, so the fault waits for real data."""
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
def change_size(fault: WrongSize, world: Surroundings) -> None:
    """Make the next segment longer or shorter by some bytes, with a matching header."""
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
def repeat_step(fault: StaleStep, world: Surroundings) -> None:
    """Deliver a segment of an earlier step again, in place of the first segment of a later step."""
    earlier: dict[VirtualChannel, Frame] = {}

    def alter(channel: VirtualChannel, header: Header, payload: Payload) -> Frame | None:
        if header.kind is not Kind.DATA:
            return None
        first, old = earlier.setdefault(channel, (header, payload))
        return None if (first.operation, first.step) == (header.operation, header.step) else (first, old)

    world.tampering.add("repeat", *fault.between, alter)


@apply.register(NanGradient)
def spoil_gradient(fault: NanGradient, world: Surroundings) -> None:
    """Replace one value by NaN in the n-th piece of gradients that the device computes from now on."""
    host = world.host(fault.node)
    host.device.spoil(_Spoiler(world, fault, draws(world, fault)))


class _Spoiler:
    """Count pieces of gradients and corrupt the n-th."""

    def __init__(self, world: Surroundings, fault: NanGradient, rng: Random) -> None:
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


@apply.register(Misbehave)
def misbehave(fault: Misbehave, world: Surroundings) -> FaultProcess:
    """Make the node violate the protocol. A draw for each frame decides whether it is affected."""
    rng = draws(world, fault)
    ways = [
        (fault.node, host.name) for host in world.hosts if host.name != fault.node and fault.to in (None, host.name)
    ]

    def rule(channel: VirtualChannel, header: Header, payload: Payload) -> tuple[Frame, ...] | None:
        if header.kind is not (Kind.CONTROL if fault.how == "lie" else Kind.DATA):
            return None
        return _DEEDS[fault.how](rng, header, payload) if rng.random() < fault.share else None

    for way in ways:
        world.tampering.add_rule("misbehave", *way, rule)
    yield from lasting(world, fault.duration_s)
    note(world, "behave", fault.node)
    for way in ways:
        world.tampering.remove_rule(*way, rule)


_Deed: TypeAlias = Callable[[Random, Header, Payload], "tuple[Frame, ...] | None"]
"""A protocol violation. It maps a frame of its kind to the frames sent instead, or to None where it does not
apply."""

_MOST_32_BITS, _MOST_64_BITS = 2**32 - 1, 2**64 - 1
_ELEMENT_BYTES = 4


def _change(rng: Random, header: Header, payload: Payload, **fields: int) -> tuple[Frame, ...]:
    return ((replace(header, **fields), payload),)


def _change_epoch(rng: Random, header: Header, payload: Payload, by: int) -> tuple[Frame, ...] | None:
    epoch = header.epoch + by
    return ((replace(header, epoch=epoch), payload),) if 0 <= epoch <= _MOST_32_BITS else None


def _change_signature(rng: Random, header: Header, payload: Payload) -> tuple[Frame, ...]:
    return ((replace(header, signature=header.signature ^ rng.randint(1, _MOST_32_BITS)), payload),)


def _send_twice(rng: Random, header: Header, payload: Payload) -> tuple[Frame, ...]:
    return (header, payload), (header, payload)


def _send_unasked(rng: Random, header: Header, payload: Payload) -> tuple[Frame, ...]:
    """Send data of an operation that has not started, before the correct frame."""
    return (replace(header, operation=header.operation + rng.randint(1000, 9999)), payload), (header, payload)


def _send_garbage(rng: Random, header: Header, payload: Payload) -> tuple[Frame, ...]:
    raw = bytes([rng.randrange(128, 256)]) + rng.randbytes(HEADER_BYTES - 1)  # which is not how a header begins
    return ((Undecodable(NO_FRAME_BYTES, raw=raw), payload),)


def _shorten(rng: Random, header: Header, payload: Payload) -> tuple[Frame, ...] | None:
    length = header.length - _ELEMENT_BYTES
    if length < 0:
        return None
    rest = Phantom(length) if isinstance(payload, Phantom) else payload[:length]
    return ((replace(header, length=length), rest),)


def _make_noise(rng: Random, header: Header, payload: Payload) -> tuple[Frame, ...] | None:
    if isinstance(payload, Phantom) or not payload.nbytes:
        return None
    return ((header, memoryview(rng.randbytes(payload.nbytes))),)


def _lie(rng: Random, header: Header, payload: Payload) -> tuple[Frame, ...] | None:
    """Replace every epoch in a membership message by another one."""
    if isinstance(payload, Phantom):
        return None
    try:
        message = msgspec.msgpack.decode(payload)
    except msgspec.DecodeError:
        return None
    lied = _with_other_epochs(message, rng.randint(1, 1000))
    if lied == message:
        return None
    data = msgspec.msgpack.encode(lied)
    return ((replace(header, length=len(data), total=len(data) if header.total else 0), memoryview(data)),)


def _with_other_epochs(message: Any, by: int) -> Any:
    if isinstance(message, dict):
        return {
            key: value + by if key == "epoch" and isinstance(value, int) else _with_other_epochs(value, by)
            for key, value in message.items()
        }
    return [_with_other_epochs(each, by) for each in message] if isinstance(message, list) else message


_DEEDS: dict[str, _Deed] = {
    "duplicate": _send_twice,
    "other_epoch": partial(_change_epoch, by=1),
    "old_epoch": partial(_change_epoch, by=-1),
    "huge_operation": partial(_change, operation=_MOST_64_BITS),
    "huge_step": partial(_change, step=_MOST_32_BITS),
    "huge_offset": partial(_change, offset=_MOST_64_BITS),
    "giant_total": partial(_change, total=_MOST_64_BITS),
    "unasked": _send_unasked,
    "raw_bytes": _send_garbage,
    "wrong_signature": _change_signature,
    "short": _shorten,
    "noise": _make_noise,
    "lie": _lie,
}
