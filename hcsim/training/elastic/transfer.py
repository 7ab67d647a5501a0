"""What members send each other before they go on: words that all receive alike, and arrays from member to member.

`gather_echoed` is an all-gather with an echo: all members know that they received the same from each. What members do
next follows from what they received. So if a member sends one thing to one and another to the next, correct members
part ways, and each takes the other for the one that is wrong. Therefore everybody sends to everybody directly, and then
an echo, as in Bracha's reliable broadcast (1987): digests of what it received. Where two received unlike things from a
third, either one of them misreports or the third did not send all the same: `hcsim.cluster.diagnosis` looks for the
fewest members that explain all such findings.

`relay` carries arrays in pieces that each have the group's deadline. All members of the group take part in it, those
without anything to give or take too: they follow its rounds, so that nobody waits for longer than one piece takes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, NoReturn, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from hcsim.collectives.buffers import array_of
from hcsim.collectives.group import Group
from hcsim.errors import UNDECODABLE, CollectiveError, RemoteProtocolError
from hcsim.runtime.channel import Phantom
from hcsim.training.learner import fingerprint

_MOST = 16
"""In a larger group that all talk to all takes long: there words are passed on, and nobody compares them."""


class Doubt(NamedTuple):
    """Either the accused is wrong or the witness, which may be ourselves."""

    witness: int
    accused: int
    reason: str


class Contradiction(CollectiveError):
    """Members say unlike things; `doubts` are about which of them."""

    def __init__(
        self, message: str, *, peer: int | None = None, phase: str = "", doubts: tuple[Doubt, ...] = ()
    ) -> None:
        super().__init__(message, peer=peer, phase=phase)
        self.doubts = doubts


async def gather_echoed(group: Group, words: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """What each sent, by rank; all have received the same, or it raises `Contradiction`."""
    said = await gather_direct(group, words)
    if not 2 < group.size <= _MOST:
        return said
    ours = np.array(digests(said), np.int64)
    heard = await gather_direct(group, ours)
    doubts = tuple(doubt for rank, theirs in enumerate(heard) for doubt in _doubts(group.rank, ours, rank, theirs))
    if doubts:
        raise Contradiction(doubts[0].reason, phase="synchronising", doubts=doubts)
    return said


async def gather_direct(group: Group, words: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """What each sent, by rank, from itself unless the group is large; perhaps not what others received."""
    # Folded onto a power of two, words would cross the slow line between two homes three times instead of once.
    direct = group.size <= _MOST or group.size.bit_count() != 1
    return [_numbers(each) for each in await group.all_gather(words, algorithm="direct" if direct else "auto")]


def digests(said: Sequence[npt.NDArray[np.int64]]) -> tuple[int, ...]:
    """One of what each said."""
    return tuple(fingerprint(each) for each in said)


def _doubts(us: int, ours: npt.NDArray[np.int64], them: int, theirs: npt.NDArray[np.int64]) -> list[Doubt]:
    """What does not fit in what another rank has heard, given digests of what each rank said."""
    if theirs[them] != ours[them]:
        return [Doubt(us, them, f"rank {them} told rank {us} something else than it says it told")]
    unlike = [rank for rank in range(len(ours)) if theirs[rank] != ours[rank]]
    return [Doubt(them, rank, f"rank {rank} did not tell rank {us} and rank {them} the same") for rank in unlike]


def _numbers(data: object) -> npt.NDArray[np.int64]:
    return np.asarray(array_of(data), np.int64)  # type: ignore[arg-type]


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
