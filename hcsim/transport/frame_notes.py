"""Notes of frames for the timeline of a real run: each end of a link notes what it sends or receives.

A frame has the same number in both notes, a digest of the group, of the two ranks, and of what tells the frame from
others of the link. So the files of the two machines fit together, although nothing is added to the frame.

The notes are made by a wrapper around a channel. Where no timeline is wanted there is none, and frames cost no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from hashlib import blake2b
from struct import Struct
from typing import Any

from hcsim.runtime.channel import EMPTY, Channel, Landed, Leg, Outlet, Payload, Place, SegmentCounts
from hcsim.runtime.frame import Header, Kind
from hcsim.runtime.host import Host
from hcsim.transport.groups import GroupMembership

_FRAME = Struct("<IQHIQ")
_NS = 1e9


class LinkNotes:
    """The notes of one link."""

    def __init__(self, host: Host, us: GroupMembership, peer_rank: int) -> None:
        self._host = host
        self._peer_rank = peer_rank
        group = repr((us.name, us.epoch, us.addresses))
        self._out = blake2b(f"{group} {us.rank} {peer_rank}".encode(), digest_size=8)
        self._in = blake2b(f"{group} {peer_rank} {us.rank}".encode(), digest_size=8)

    def now_s(self) -> float:
        return self._host.clock.elapsed()

    def sent(self, header: Header, began_s: float) -> None:
        """Note that a frame was handed over at that time, and that its buffer is free now."""
        self._note("sent", self._out, header, began_s)

    def received(self, header: Header) -> None:
        """Note that a frame is here."""
        self._note("received", self._in, header, self.now_s())

    def _note(self, kind: str, link: Any, header: Header, began_s: float) -> None:
        if header.kind is not Kind.DATA:  # others are not told apart by their headers
            return
        digest = link.copy()
        digest.update(_FRAME.pack(header.group, header.operation, header.bucket, header.step, header.offset))
        number = int.from_bytes(digest.digest(), "little") or 1
        took_ns = max(0, round((self.now_s() - began_s) * _NS))
        about = (header.operation, header.bucket, header.step, header.offset, header.length)
        self._host.note(kind, self._peer_rank, number, took_ns, *about)


class NotedChannel:
    """A channel whose frames are noted."""

    def __init__(self, inner: Channel, notes: LinkNotes) -> None:
        self._inner = inner
        self._notes = notes
        self.recv = inner.recv
        self.limit = inner.limit
        self.close = inner.close
        self.outlet = None if inner.outlet is None else _NotedOutlet(inner.outlet, notes)

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def peer(self) -> str:
        return self._inner.peer

    @property
    def carrier(self) -> str:
        return self._inner.carrier

    @property
    def identity(self) -> str:
        return self._inner.identity

    @property
    def ends(self) -> tuple[str, str]:
        return self._inner.ends

    @property
    def segments(self) -> SegmentCounts | None:
        return self._inner.segments

    @property
    def binding(self) -> bytes:
        return self._inner.binding

    async def send(self, header: Header, payload: Payload = EMPTY) -> None:
        began_s = self._notes.now_s()
        try:
            await self._inner.send(header, payload)
        finally:  # a frame whose sender was cancelled may arrive all the same
            self._notes.sent(header, began_s)

    async def pump(self, place: Place, landed: Landed) -> None:
        def noted(header: Header, payload: Payload) -> None:
            self._notes.received(header)
            landed(header, payload)

        await self._inner.pump(place, noted)


class _NotedOutlet:
    """An end that forwards frames by itself, and says at times how many it has moved."""

    def __init__(self, inner: Outlet, notes: LinkNotes) -> None:
        self.inner = inner
        self.notes = notes
        self.most_bytes = inner.most_bytes

    def forward(self, legs: Sequence[Leg], to: Outlet, moved: Callable[[int], None]) -> asyncio.Future[None]:
        assert isinstance(to, _NotedOutlet)  # all links of a mesh are noted, or none
        sender, counted, since_s = to.notes, 0, self.notes.now_s()

        def noted(done: int) -> None:
            nonlocal counted, since_s
            for leg in legs[counted:done]:
                if leg.comes is not None:
                    self.notes.received(leg.comes)
                if leg.goes is not None:  # at some time since the last report
                    sender.sent(leg.goes, since_s)
            counted, since_s = done, self.notes.now_s()
            moved(done)

        return self.inner.forward(legs, to.inner, noted)
