"""Arrays on their way from member to member, in pieces that each have the group's deadline.

All members of the group take part in a relay, those without anything to give or take too: they follow its rounds,
so that nobody waits for longer than one piece takes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NoReturn, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from hcsim.collectives.group import Group
from hcsim.errors import UNDECODABLE, CollectiveError, RemoteProtocolError
from hcsim.runtime.channel import Phantom
from hcsim.training.elastic.pact import gather_echoed

PIECE_BYTES = 8 << 20
LABEL_MOST_BYTES = 16 << 20
T = TypeVar("T")
Arrays: TypeAlias = Mapping[str, "npt.NDArray[np.generic] | Phantom"]
Route: TypeAlias = tuple[int, int]
"""From whom to whom."""


class _Item(msgspec.Struct, frozen=True):
    name: str
    dtype: Annotated[str, msgspec.Meta(pattern=r"^([<>|][a-zA-Z][0-9]{1,2})?$")]
    """Of one number; empty for a phantom. What else numpy reads as a dtype is a language of its own."""
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * (np.dtype(self.dtype).itemsize if self.dtype else 1)


class _Label(msgspec.Struct, frozen=True):
    about: bytes
    items: tuple[_Item, ...]


class Parcel(msgspec.Struct, frozen=True):
    """Arrays by name, and what there is to say about them."""

    about: bytes
    arrays: Arrays
    giver: int = -1
    """The rank that it came from, if it came from one."""

    def told(self, kind: type[T]) -> T:
        """What there is to say about them, of that type."""
        try:
            return msgspec.msgpack.decode(self.about, type=kind)
        except UNDECODABLE as error:
            refuse(self.giver, error)

    def packed(self) -> tuple[bytes, list[npt.NDArray[np.uint8] | Phantom]]:
        """A label, and the content in pieces."""
        items = tuple(_item(name, array) for name, array in self.arrays.items())
        label = msgspec.msgpack.encode(_Label(self.about, items))
        total = sum(item.size_bytes for item in items)
        if any(not item.dtype for item in items):
            return label, [Phantom(hi - lo) for lo, hi in _cuts(total)]
        flat = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in self.arrays.values()]
        joined = np.concatenate([*flat, np.empty(0, np.uint8)])
        return label, [joined[lo:hi] for lo, hi in _cuts(total)]


class _Taking:
    """A parcel that arrives."""

    def __init__(self, label: bytes, giver: int, pieces: int) -> None:
        """`pieces` is how many it announced before."""
        try:
            self._label = msgspec.msgpack.decode(label, type=_Label)
            self._total = sum(item.size_bytes for item in self._label.items)
        except (*UNDECODABLE, TypeError, ValueError) as error:
            refuse(giver, error)
        if any(length < 0 for item in self._label.items for length in item.shape):
            refuse(giver, "an array of it would have a negative length")
        if pieces != -(-self._total // PIECE_BYTES):
            refuse(giver, f"it announced {pieces} pieces, and its label says {self._total} bytes")
        self._giver = giver
        self._phantom = any(not item.dtype for item in self._label.items)
        try:
            self._joined = np.empty(0 if self._phantom else self._total, np.uint8)
        except (MemoryError, ValueError):
            refuse(giver, f"there is no room here for {self._total} bytes")

    def piece(self, number: int) -> npt.NDArray[np.uint8] | Phantom:
        lo = number * PIECE_BYTES
        hi = min(lo + PIECE_BYTES, self._total)
        return Phantom(hi - lo) if self._phantom else self._joined[lo:hi]

    def parcel(self) -> Parcel:
        arrays: dict[str, npt.NDArray[np.generic] | Phantom] = {}
        at = 0
        for item in self._label.items:
            end = at + item.size_bytes
            try:
                flat = self._joined[at:end]
                arrays[item.name] = (
                    Phantom(item.size_bytes) if self._phantom else flat.view(item.dtype).reshape(item.shape)
                )
            except (TypeError, ValueError) as error:
                refuse(self._giver, error)
            at = end
        return Parcel(self._label.about, arrays, self._giver)


async def relay(group: Group, routes: Sequence[Route], giving: Mapping[int, Parcel]) -> list[Parcel]:
    """Carry a parcel along each route; `giving` has ours, by taker. Returns what came here, in the routes' order."""
    packed = {taker: parcel.packed() for taker, parcel in giving.items()}
    sizes = np.zeros((group.size, 2), np.int64)
    for taker, (label, pieces) in packed.items():
        sizes[taker] = len(label), len(pieces)
    everyone = [each.reshape(sizes.shape) for each in await gather_echoed(group, sizes.reshape(-1))]
    ours = [(giver, everyone[giver][group.rank]) for giver, taker in routes if taker == group.rank]
    for giver, (length, _) in ours:
        if not 0 <= length <= LABEL_MOST_BYTES:
            refuse(giver, f"its label would have {length} bytes")
    labels = [np.empty(int(length), np.uint8) for _, (length, _) in ours]
    await _carried(
        [group.send(np.frombuffer(label, np.uint8), taker) for taker, (label, _) in packed.items()]
        + [group.recv(label, giver) for label, (giver, _) in zip(labels, ours, strict=True)]
    )
    arriving = [
        _Taking(label.tobytes(), giver, int(count)) for label, (giver, (_, count)) in zip(labels, ours, strict=True)
    ]
    rounds = max((int(everyone[giver][taker][1]) for giver, taker in routes), default=0)
    for number in range(rounds):
        await _carried(
            [group.send(pieces[number], taker) for taker, (_, pieces) in packed.items() if number < len(pieces)]
            + [
                group.recv(taking.piece(number), giver)
                for taking, (giver, (_, count)) in zip(arriving, ours, strict=True)
                if number < count
            ]
        )
        await group.barrier()
    return [taking.parcel() for taking in arriving]


def refuse(giver: int, why: object) -> NoReturn:
    """What a member handed over cannot be what a correct one hands over: it has broken the protocol."""
    text = f"rank {giver} handed over a state that cannot be read: {why}"
    raise CollectiveError(text, peer=giver, phase="synchronising") from RemoteProtocolError(text, str(giver))


async def _carried(operations: list[asyncio.Task[Any]]) -> None:
    for failed in await asyncio.gather(*operations, return_exceptions=True):
        if isinstance(failed, CollectiveError):
            raise failed
        if isinstance(failed, BaseException):
            raise failed


def _item(name: str, array: npt.NDArray[np.generic] | Phantom) -> _Item:
    if isinstance(array, Phantom):
        return _Item(name, "", (array.nbytes,))
    return _Item(name, array.dtype.str, array.shape)


def _cuts(total: int) -> list[tuple[int, int]]:
    return [(lo, min(lo + PIECE_BYTES, total)) for lo in range(0, total, PIECE_BYTES)]
