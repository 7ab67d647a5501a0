"""Mismatch detection: check that all ranks call the same operations.

Each frame carries the number of its operation, which is its position in the order, and a signature of what it
is. A frame whose receive is posted is checked there. Any other frame is checked here: it may be early, or show
that its sender runs a different operation, for which no receive will ever be posted.

Ranks that call different collectives may all wait to receive, so that no frame reveals the mismatch. A rank
whose collective takes long therefore reports it to the lowest rank of its group (`watch`), which compares.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import TypeAlias

from hcsim.collectives.algorithms import PLANNERS
from hcsim.collectives.operation import POINT_TO_POINT, OperationId
from hcsim.errors import CollectiveError, HcsimError, RemoteProtocolError
from hcsim.runtime.channel import EMPTY
from hcsim.runtime.frame import Header, Kind
from hcsim.transport.mesh import Mesh

_OPERATIONS = tuple(PLANNERS)
_DIGEST_BITS = 28
REMEMBERED = 64
"""The number of finished operations kept, so that an error can name them."""
_Key: TypeAlias = tuple[int, int, int]
"""(group, bucket, operation)"""


@lru_cache(maxsize=64)
def signature_of(operation: str, agreed: object) -> int:
    """Return a digest of everything that all ranks must agree on. The upper bits identify the operation."""
    digest = zlib.crc32(repr((operation, agreed)).encode())
    return _OPERATIONS.index(operation) << _DIGEST_BITS | digest & (1 << _DIGEST_BITS) - 1


def _name_of(signature: int) -> str:
    number = signature >> _DIGEST_BITS
    return _OPERATIONS[number] if number < len(_OPERATIONS) else "unknown operation"


class MismatchDetector:
    """The collectives of all groups of one mesh: those in flight here, and those begun first by other ranks."""

    def __init__(self, us: int) -> None:
        self._us = us
        self.lowest: dict[int, int] = {}
        """The lowest rank of each group, by group number."""
        self._in_flight: dict[_Key, OperationId] = {}
        self._over: dict[_Key, int] = {}
        """Signatures of the most recently finished operations."""
        self._begun: dict[tuple[int, int], int] = {}
        """The number of operations begun, by group and bucket."""
        self._ahead: dict[_Key, dict[int, int]] = {}
        """For operations not begun here: the signature of the first frame from each sender."""

    def begin(self, identity: OperationId) -> CollectiveError | None:
        """Register the start of a collective. Return an error if an earlier frame shows that it cannot succeed."""
        key = (identity.group, identity.bucket, identity.number)
        self._in_flight[key] = identity
        self._begun[key[:2]] = identity.number + 1
        ours = (self._us, identity.signature)
        for theirs in (self._ahead.pop(key, {}) if self._ahead else {}).items():
            if (trouble := _compared(identity.number, ours, theirs)) is not None:
                return trouble
        return None

    def end(self, identity: OperationId) -> None:
        key = (identity.group, identity.bucket, identity.number)
        self._over[key] = self._in_flight.pop(key).signature
        if len(self._over) > REMEMBERED:
            del self._over[next(iter(self._over))]

    def oldest(self) -> list[OperationId]:
        """Return the oldest operation in flight of each bucket."""
        found: dict[tuple[int, int], OperationId] = {}
        for identity in self._in_flight.values():
            found.setdefault((identity.group, identity.bucket), identity)
        return list(found.values())

    def objection(self, sender: int, header: Header) -> CollectiveError | None:
        """Return an error if an unexpected frame shows that its sender runs a different operation."""
        key, number, theirs = (header.group, header.bucket, header.operation), header.operation, header.signature
        identity = self._in_flight.get(key)
        if (identity is not None and identity.signature == theirs) or header.group & POINT_TO_POINT:
            return None
        if number >= self._begun.get(key[:2], 0):
            # Which of two others is wrong shows only what we do there: we wait for that, unless they wait for each
            # other already.
            ahead = self._ahead.setdefault(key, {})
            ahead.setdefault(sender, theirs)
            return _contradiction(number, ahead) if header.kind is Kind.WAITING else None
        ours = identity.signature if identity is not None else self._over.get(key)
        trouble = None if ours is None else _compared(number, (self._us, ours), (sender, theirs))
        if trouble is None and identity is None and header.kind is Kind.DATA:
            text = f"rank {sender} is doing another operation: it sends for {_name_of(theirs)} #{number}, which is over"
            return _violation(text, sender)
        return trouble


async def watch(mesh: Mesh, detector: MismatchDetector, every_s: float) -> None:
    """Report operations that outlast one interval, once each, until cancelled."""
    before: list[OperationId] = []
    reported: list[OperationId] = []
    while True:
        await mesh.host.clock.sleep(every_s)
        oldest = detector.oldest()
        late = [identity for identity in oldest if identity in before]
        for identity in late:
            lowest = detector.lowest[identity.group]
            if identity not in reported and lowest != mesh.us.rank:
                mesh.host.spawn(_report(mesh, lowest, identity), name=f"tell rank {lowest} of {identity}")
        before, reported = oldest, late


async def _report(mesh: Mesh, rank: int, identity: OperationId) -> None:
    header = Header(
        0,
        Kind.WAITING,
        identity.rank,
        identity.bucket,
        identity.epoch,
        identity.group,
        identity.number,
        identity.signature,
    )
    try:
        link = await mesh.link(rank)
        await link.send(header, EMPTY)
    except HcsimError:
        pass  # it cannot be reached; the operation finds out by itself why


def _compared(number: int, one: tuple[int, int], other: tuple[int, int]) -> CollectiveError | None:
    """Return an error if another rank's operation at this position differs from the local one."""
    text = _unlike(number, one, other)
    return _violation(text, other[0]) if text else None


def _contradiction(number: int, ahead: Mapping[int, int]) -> CollectiveError | None:
    """Return an error if two other ranks run different operations at this position; either may be wrong."""
    (first, *later) = ahead.items()
    text = next(filter(None, (_unlike(number, first, other) for other in later)), "")
    return CollectiveError(text) if text else None


def _unlike(number: int, one: tuple[int, int], other: tuple[int, int]) -> str:
    """Describe how the operations of two ranks differ, given their signatures; empty if they are the same."""
    (rank, signature), (peer, theirs) = one, other
    if signature == theirs:
        return ""
    name, their_name = _name_of(signature), _name_of(theirs)
    unlike = f"{their_name}, not {name}"
    if name == their_name:
        unlike = f"{name} with another dtype, length, root, reduction or algorithm"
    return f"rank {peer} is doing another operation than rank {rank} as #{number}: {unlike}"


def _violation(text: str, peer: int) -> CollectiveError:
    error = CollectiveError(text, peer=peer)
    error.__cause__ = RemoteProtocolError(text, str(peer))
    return error
