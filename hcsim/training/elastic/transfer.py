"""Messages between members before they go on: values that all receive alike, and arrays from member to member.

`gather_echoed` is an all-gather with an echo: all members know that they received the same values from each.
The members' next actions follow from these values. If a member sent different values to different members,
correct members would diverge, and each would take the other for faulty. Therefore every member sends to all
directly, and then an echo, as in Bracha's reliable broadcast (1987): digests of what it received. If two
members received different values from a third, either one of them misreports or the third sent different ones.
`hcsim.cluster.diagnosis` looks for the fewest members that explain all such findings.

`relay` carries arrays in pieces that each have the group's deadline. All members of the group take part, also
those that give and take nothing: they follow its rounds, so that no member waits for longer than one piece
takes.
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
from hcsim.training.learner import StateArray, fingerprint

_MOST = 16
"""In a larger group direct sending takes long: there values are forwarded, and not compared."""


class VoteConflict(NamedTuple):
    """Either the accused or the witness is wrong; the witness may be this member."""

    witness: int
    accused: int
    reason: str


class Contradiction(CollectiveError):
    """Members report different values; `doubts` name the members concerned."""

    def __init__(
        self, message: str, *, peer: int | None = None, phase: str = "", doubts: tuple[VoteConflict, ...] = ()
    ) -> None:
        super().__init__(message, peer=peer, phase=phase)
        self.doubts = doubts


async def gather_echoed(group: Group, words: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Return each rank's values; raise `Contradiction` unless all members have received the same."""
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
    """Return each rank's values, received directly unless the group is large. Other members may have received
    others."""
    # Folded onto a power of two, words would cross the slow line between two homes three times instead of once.
    direct = group.size <= _MOST or group.size.bit_count() != 1
    return [_numbers(each) for each in await group.all_gather(words, algorithm="direct" if direct else "auto")]


def digests(said: Sequence[npt.NDArray[np.int64]]) -> tuple[int, ...]:
    """Return a digest of each rank's values."""
    return tuple(fingerprint(each) for each in said)


def _doubts(us: int, ours: npt.NDArray[np.int64], them: int, theirs: npt.NDArray[np.int64]) -> list[VoteConflict]:
    """Return the contradictions between two ranks' digests of what each rank sent."""
    if theirs[them] != ours[them]:
        return [VoteConflict(us, them, f"rank {them} told rank {us} something else than it says it told")]
    unlike = [rank for rank in range(len(ours)) if theirs[rank] != ours[rank]]
    return [VoteConflict(them, rank, f"rank {rank} did not tell rank {us} and rank {them} the same") for rank in unlike]


def _numbers(data: object) -> npt.NDArray[np.int64]:
    return np.asarray(array_of(data), np.int64)  # type: ignore[arg-type]


PIECE_BYTES = 8 << 20
LABEL_MOST_BYTES = 16 << 20
T = TypeVar("T")
Arrays: TypeAlias = Mapping[str, StateArray]
TransferRoute: TypeAlias = tuple[int, int]
"""The giving rank and the taking rank."""


class _Item(msgspec.Struct, frozen=True):
    name: str
    dtype: Annotated[str, msgspec.Meta(pattern=r"^([<>|][a-zA-Z][0-9]{1,2})?$")]
    """The type of one number; empty for a phantom. The pattern excludes the other texts that numpy accepts as a
    dtype."""
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * (np.dtype(self.dtype).itemsize if self.dtype else 1)


class _Label(msgspec.Struct, frozen=True):
    about: bytes
    items: tuple[_Item, ...]


class StateArrays(msgspec.Struct, frozen=True):
    """Arrays by name, with metadata."""

    about: bytes
    arrays: Arrays
    giver: int = -1
    """The rank that it came from, if any."""

    def told(self, kind: type[T]) -> T:
        """Return the metadata, decoded as that type."""
        try:
            return msgspec.msgpack.decode(self.about, type=kind)
        except UNDECODABLE as error:
            refuse(self.giver, error)

    def packed(self) -> tuple[bytes, list[npt.NDArray[np.uint8] | Phantom]]:
        """Return a label, and the content in pieces."""
        items = tuple(_item(name, array) for name, array in self.arrays.items())
        label = msgspec.msgpack.encode(_Label(self.about, items))
        total = sum(item.size_bytes for item in items)
        if any(not item.dtype for item in items):
            return label, [Phantom(hi - lo) for lo, hi in _cuts(total)]
        flat = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in self.arrays.values()]
        joined = np.concatenate([*flat, np.empty(0, np.uint8)])
        return label, [joined[lo:hi] for lo, hi in _cuts(total)]


class _Taking:
    """A parcel being received."""

    def __init__(self, label: bytes, giver: int, pieces: int) -> None:
        """`pieces` is the number that the giver announced."""
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

    def snapshot(self) -> StateArrays:
        arrays: dict[str, StateArray] = {}
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
        return StateArrays(self._label.about, arrays, self._giver)


async def relay(group: Group, routes: Sequence[TransferRoute], giving: Mapping[int, StateArrays]) -> list[StateArrays]:
    """Carry a parcel along each route; `giving` has this rank's parcels by taker. Return the parcels received here,
    in the order of the routes."""
    packed = {taker: snapshot.packed() for taker, snapshot in giving.items()}
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
    return [taking.snapshot() for taking in arriving]


def refuse(giver: int, why: object) -> NoReturn:
    """Raise the protocol error of a member that handed over what no correct member would."""
    text = f"rank {giver} handed over a state that cannot be read: {why}"
    raise CollectiveError(text, peer=giver, phase="synchronising") from RemoteProtocolError(text, str(giver))


async def _carried(operations: list[asyncio.Task[Any]]) -> None:
    for failed in await asyncio.gather(*operations, return_exceptions=True):
        if isinstance(failed, CollectiveError):
            raise failed
        if isinstance(failed, BaseException):
            raise failed


def _item(name: str, array: StateArray) -> _Item:
    if isinstance(array, Phantom):
        return _Item(name, "", (array.nbytes,))
    return _Item(name, array.dtype.str, array.shape)


def _cuts(total: int) -> list[tuple[int, int]]:
    return [(lo, min(lo + PIECE_BYTES, total)) for lo in range(0, total, PIECE_BYTES)]
