"""Whether all ranks call the same operations: each frame says which operation its sender takes it to be part of.

Its number says where in the order the operation stands, its signature what it is. A frame that finds its place posted
is checked there. One that does not is looked at here: it may only be early, or show that its sender does something
else, for which no place will ever be posted here.

Ranks that call unlike collectives may all wait to receive: then no frame shows that they disagree. So a rank that has
been in one for a while tells the lowest rank of its group which one it is (`watch`), and that rank compares.
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
"""Operations that are over, so that an error can say what they were."""
_Key: TypeAlias = tuple[int, int, int]
"""(group, bucket, operation)"""


@lru_cache(maxsize=64)
def signature_of(operation: str, agreed: object) -> int:
    """A digest of what all ranks must agree on; its upper bits say which operation it is."""
    digest = zlib.crc32(repr((operation, agreed)).encode())
    return _OPERATIONS.index(operation) << _DIGEST_BITS | digest & (1 << _DIGEST_BITS) - 1


def _name_of(signature: int) -> str:
    number = signature >> _DIGEST_BITS
    return _OPERATIONS[number] if number < len(_OPERATIONS) else "unknown operation"


class Agreement:
    """The collectives of all groups over one mesh: those in flight here, and those that other ranks began first."""

    def __init__(self, us: int) -> None:
        self._us = us
        self.lowest: dict[int, int] = {}
        """The lowest rank of each group, by its number."""
        self._in_flight: dict[_Key, OperationId] = {}
        self._over: dict[_Key, int] = {}
        """Signatures of the last ones that ended."""
        self._begun: dict[tuple[int, int], int] = {}
        """How many a group has begun in a bucket."""
        self._ahead: dict[_Key, dict[int, int]] = {}
        """Of an operation that we have not begun: by sender, the signature of the first frame that came."""

    def begin(self, identity: OperationId) -> CollectiveError | None:
        """This rank begins a collective. Returns why it cannot succeed, if a frame that came before shows that."""
        key = (identity.group, identity.bucket, identity.number)
        self._in_flight[key] = identity
        self._begun[key[:2]] = identity.number + 1
        ours = (self._us, identity.signature)
        for theirs in (self._ahead.pop(key, {}) if self._ahead else {}).items():
            if (trouble := _compared(identity.number, ours, theirs)) is not None:
                return trouble
        return None

    def end(self, identity: OperationId) -> None:
        """It is over here."""
        key = (identity.group, identity.bucket, identity.number)
        self._over[key] = self._in_flight.pop(key).signature
        if len(self._over) > REMEMBERED:
            del self._over[next(iter(self._over))]

    def oldest(self) -> list[OperationId]:
        """The first of each bucket that is in flight."""
        found: dict[tuple[int, int], OperationId] = {}
        for identity in self._in_flight.values():
            found.setdefault((identity.group, identity.bucket), identity)
        return list(found.values())

    def objection(self, sender: int, header: Header) -> CollectiveError | None:
        """Why a frame that finds no place shows that its sender does something else, if it does."""
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


async def watch(mesh: Mesh, agreement: Agreement, every_s: float) -> None:
    """Go on until cancelled; what has not ended from one look to the next is reported, once."""
    before: list[OperationId] = []
    reported: list[OperationId] = []
    while True:
        await mesh.host.clock.sleep(every_s)
        oldest = agreement.oldest()
        late = [identity for identity in oldest if identity in before]
        for identity in late:
            lowest = agreement.lowest[identity.group]
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
    """What another rank does at one place of the order, given what we do there, if it is not the same."""
    text = _unlike(number, one, other)
    return _violation(text, other[0]) if text else None


def _contradiction(number: int, ahead: Mapping[int, int]) -> CollectiveError | None:
    """That two others do unlike operations at one place, if they do: either may be the one that is wrong."""
    (first, *later) = ahead.items()
    text = next(filter(None, (_unlike(number, first, other) for other in later)), "")
    return CollectiveError(text) if text else None


def _unlike(number: int, one: tuple[int, int], other: tuple[int, int]) -> str:
    """How the operations of two ranks differ, given their signatures; empty: they do not."""
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
