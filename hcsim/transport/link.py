"""A link: all messages between this rank and one peer, identified by tags.

A receiver posts the destination of a message under its tag. One pump per channel reads frames and puts each
payload directly into its posted destination. A frame without a posted destination stays in the channel, and the
peer sees back-pressure. The exception: if an operation waits for a frame behind it, or for a link to another
peer, the frame is received early and kept. A receiver that cannot post yet, because it may take another message
instead, looks out for a tag, and is called when it appears. The tag is (group, operation, bucket, step,
offset), so messages of concurrent operations cannot be confused, in whatever order they come.

A link fails as a whole: all waiting and later receivers get its error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeAlias

import msgspec

from hcsim.errors import ChannelBroken, ChannelError, HcsimError, RemoteProtocolError
from hcsim.runtime.channel import Channel, Fold, Leg, Outlet, Payload, Phantom
from hcsim.runtime.clock import fail_future
from hcsim.runtime.frame import Header, Kind
from hcsim.runtime.host import Host
from hcsim.transport.admission_queue import plain

Tag: TypeAlias = tuple[int, int, int, int, int]
"""(group, operation, bucket, step, offset)"""

EARLY_MOST_BYTES = 4 * 2**30
"""The limit on bytes received early; a peer that sends more violates the protocol."""
EARLY_FRAME_BYTES = 1024
"""The memory of an early frame besides its payload; it counts for empty frames, too."""

SPARE = 1
"""The number of buffers of early segments kept for reuse by all links: fresh memory costs more than the copy."""
WORTH_KEEPING_BYTES = 64 * 1024
_OF_OTHER_TIMES = (Kind.HELLO, Kind.LATER, Kind.CONTROL)
"""Kinds of frames that are only valid where there is no link yet."""
_DATA = Kind.DATA  # an enum's member takes long to look up, and every frame asks


class SegmentReceive(msgspec.Struct, frozen=True):
    """A pending receive of one segment."""

    arrived: asyncio.Future[Payload]
    into: memoryview | None
    fold: Fold | None
    """How to reduce the segment on receive."""
    signature: int
    total: int

    def fits(self, header: Header) -> bool:
        """Return whether the header is that of the expected segment."""
        return (
            header.signature == self.signature
            and header.total == self.total
            and (self.into is None or self.into.nbytes == header.length)
        )


class Link:
    """A connection to one peer, over one channel or striped over several."""

    __slots__ = (
        "_attentive", "_belts", "_early", "_early_bytes", "_error", "_loop", "_our_epoch", "_posted", "_pumps",
        "_sought", "_spare", "_stripes_open", "_turn", "_wanted", "channels", "closed", "leaving", "on_abort",
        "on_clock", "on_computing", "on_failure", "on_stray", "peer_rank", "received_bytes", "received_frames",
        "sent_bytes", "sent_frames",
    )  # fmt: skip

    def __init__(
        self, host: Host, peer_rank: int, our_epoch: int, channels: Sequence[Channel], spare: list[memoryview]
    ) -> None:
        self.peer_rank = peer_rank
        self.channels = tuple(channels)
        self.on_abort: Callable[[Header, str], None] | None = None
        self.on_clock: Callable[[Link, Header], None] | None = None
        self.on_computing: Callable[[Link, Header], None] | None = None
        self.on_failure: Callable[[Link, HcsimError], None] | None = None
        self.on_stray: Callable[[Link, Header], None] | None = None
        """Called with each frame that has no posted destination, belongs to another operation, or needs no destination;
        may fail the link."""
        self.sent_bytes = 0
        self.sent_frames = 0
        self.received_bytes = 0
        self.received_frames = 0
        self._our_epoch = our_epoch
        self._turn = 0
        self._stripes_open = len(self.channels)
        self._loop = asyncio.get_running_loop()
        self._posted: dict[Tag, SegmentReceive] = {}
        self._sought: dict[Tag, Callable[[], None]] = {}
        self._early: dict[Tag, tuple[Header, Payload]] = {}
        self._early_bytes = 0
        self._spare = spare
        self._wanted: asyncio.Future[None] | None = None
        self._attentive = False
        self._belts: dict[asyncio.Future[None], tuple[int, int, int]] = {}
        """The running belts, with the operation of each: (group, operation, bucket)."""
        self._error: HcsimError | None = None
        self.leaving = False
        """Whether the peer has sent BYE."""
        self.closed = False
        self._pumps = [
            host.spawn(self._pump(channel), name=f"link to rank {peer_rank}, stripe {stripe}")
            for stripe, channel in enumerate(self.channels)
        ]

    def __repr__(self) -> str:
        return f"<link to rank {self.peer_rank} at {self.channels[0].peer}>"

    @property
    def error(self) -> HcsimError | None:
        return self._error

    @property
    def outlet(self) -> Outlet | None:
        """See `Channel.outlet`; None if the link is striped."""
        return self.channels[0].outlet if len(self.channels) == 1 else None

    def send(self, header: Header, payload: Payload) -> Coroutine[Any, Any, None]:
        """Send one segment, on the stripes in turn."""
        if self._error is not None:
            raise self._error
        channels = self.channels
        self._turn = (self._turn + 1) % len(channels)
        self.count_sent(header)
        return channels[self._turn].send(header, payload)

    def count_sent(self, header: Header) -> None:
        """Count a segment that is sent, directly or by a belt."""
        self.sent_bytes += header.length
        self.sent_frames += 1

    def post(self, tag: Tag, into: memoryview | Fold | None, signature: int, total: int) -> asyncio.Future[Payload]:
        """Post the destination of the segment with that tag; the returned future has its payload when it has come."""
        arrived: asyncio.Future[Payload] = asyncio.Future(loop=self._loop)
        if isinstance(into, Fold):
            receipt = SegmentReceive(arrived, into.room, into, signature, total)
        else:
            receipt = SegmentReceive(arrived, into, None, signature, total)
        if self._early and tag in self._early:
            header, payload = self._early.pop(tag)
            self._early_bytes -= header.length + EARLY_FRAME_BYTES
            self._settle(header, payload, receipt)
        elif self._error is not None:
            fail_future(arrived, self._error)
        else:
            self._posted[tag] = receipt
        if self._wanted is not None:
            self._let_in()
        return arrived

    async def forward(self, legs: Sequence[Leg], to: Link, moved: Callable[[int], None]) -> None:
        """Let segments of one operation come here and go on there, as far as that goes; see `Outlet.forward`.

        Both links have an outlet. The rest is to be posted and sent."""
        first, ours, theirs = legs[0].comes or legs[0].goes, self.outlet, to.outlet
        assert first is not None
        assert ours is not None
        assert theirs is not None
        operation = (first.group, first.operation, first.bucket)
        if to.error is not None or any(tag[:3] == operation for tag in self._early):
            return
        if self._error is not None:
            raise self._error
        counted = 0

        def count(done: int) -> None:
            nonlocal counted
            for leg in legs[counted:done]:
                if leg.comes is not None:
                    self.received_bytes += leg.comes.length
                    self.received_frames += 1
                if leg.goes is not None:
                    to.count_sent(leg.goes)
            counted = done
            moved(done)

        over = ours.forward(legs, theirs, count)
        self._belts[over] = operation
        try:
            if self._wanted is not None:
                self._let_in()
            await over
        finally:
            over.cancel()
            del self._belts[over]

    def look_out(self, tag: Tag, shown: Callable[[], None]) -> bool:
        """Return whether the segment with that tag is here already. If not, `shown` is called once it is about to come.

        The segment then waits until the caller posts its destination."""
        if tag in self._early:
            return True
        if self._error is None:
            self._sought[tag] = shown
            self._let_in()
        return False

    def look_away(self, tag: Tag) -> None:
        self._sought.pop(tag, None)

    def attend(self, yes: bool) -> None:
        """Set whether to receive frames without a posted destination: an ABORT of the peer may be behind them."""
        self._attentive = yes
        if yes:
            self._let_in()

    def holds(self, group: int, operation: int, bucket: int, *, or_later: bool) -> bool:
        """Return whether early frames of that operation, or (with `or_later`) of a later one in its bucket, are here.

        Always False for striped links, where the order of frames shows nothing."""
        return len(self.channels) == 1 and any(
            (tag[0], tag[2]) == (group, bucket) and (tag[1] == operation or (or_later and tag[1] > operation))
            for tag in self._early
        )

    def check_over(self, group: int, operation: int, bucket: int) -> None:
        """Check the early frames after an operation: any left for it show that the peer does another one."""
        for tag, (header, _) in self._early.items():
            if tag[:3] == (group, operation, bucket):
                raise self._disagreement(header, 0)

    def fail(self, error: HcsimError) -> None:
        """Fail the link: all waiting receivers get the error."""
        if self._error is not None:
            return
        self._error = error
        for receipt in self._posted.values():
            fail_future(receipt.arrived, error)
        for over in self._belts:
            fail_future(over, error)
        self._posted.clear()
        self._sought.clear()
        if self.on_failure is not None:
            self.on_failure(self, error)

    async def close(self, error: HcsimError) -> None:
        """End the link; return when nothing can write into a posted destination any more."""
        self.closed = True
        self.fail(error)
        for pump in self._pumps:
            pump.cancel()
        async with AsyncExitStack() as stack:
            for channel in reversed(self.channels):
                stack.push_async_callback(channel.close)
            await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _pump(self, channel: Channel) -> None:
        try:
            await channel.pump(self._place, self._landed)
        except Exception as error:
            self._stripes_open -= 1
            if not isinstance(error, ChannelError):  # no memory for a frame, say
                error = ChannelBroken(f"what came from rank {self.peer_rank} could not be taken: {error!r}")
            if not self.leaving:
                self.fail(error)
            elif not self._stripes_open:  # until then what it sent before it left may still come
                self.fail(_left(self.peer_rank))

    def _place(self, header: Header) -> memoryview | Fold | asyncio.Future[None] | None:
        if header.sender != self.peer_rank:
            raise self._wrong(f"a frame as rank {header.sender}")
        if header.kind is not _DATA:
            if header.kind in _OF_OTHER_TIMES:
                raise self._wrong(f"a {header.kind.name} where there is a link already")
            return None
        if header.epoch != self._our_epoch:
            raise self._wrong(f"a frame of epoch {header.epoch} in epoch {self._our_epoch}")
        receipt = self._posted.get((header.group, header.operation, header.bucket, header.step, header.offset))
        if receipt is not None:
            if receipt.fold is not None and receipt.fits(header):
                return receipt.fold
            into = receipt.into
            return into if into is not None and into.nbytes == header.length else None
        if self.on_stray is not None:
            self.on_stray(self, header)
        if self._sought:
            shown = self._sought.pop((header.group, header.operation, header.bucket, header.step, header.offset), None)
            if shown is not None:
                shown()
                return self._until_wanted()
        if not (self._posted or self._sought or self._attentive or self._conveys()):
            # Nobody waits for anything behind it either.
            return self._until_wanted()
        for number, room in enumerate(self._spare):
            if room.nbytes == header.length:
                return self._spare.pop(number)
        return None

    def _conveys(self) -> bool:
        return any(not over.done() for over in self._belts)

    def _until_wanted(self) -> asyncio.Future[None]:
        self._wanted = self._wanted or self._loop.create_future()
        return self._wanted

    def _let_in(self) -> None:
        """Reconsider the frame that was left waiting: there is a new receiver."""
        if self._wanted is not None:
            self._wanted.set_result(None)
            self._wanted = None

    def _landed(self, header: Header, payload: Payload) -> None:
        self.received_bytes += header.length
        self.received_frames += 1
        if header.kind is not _DATA:
            self._signalled(header, payload)
            return
        tag = (header.group, header.operation, header.bucket, header.step, header.offset)
        receipt = self._posted.pop(tag, None)
        if receipt is None:
            if tag in self._early:
                raise self._wrong(f"segment {tag} twice")
            self._early[tag] = (header, payload)
            self._early_bytes += header.length + EARLY_FRAME_BYTES
            if self._early_bytes > EARLY_MOST_BYTES and not isinstance(payload, Phantom):
                count = len(self._early)
                raise self._wrong(f"{count} frames that nobody asked for, which take {self._early_bytes} bytes")
            for over, operation in self._belts.items():
                if tag[:3] == operation and not over.done():  # it was on its way in before its belt
                    over.set_result(None)
            shown = self._sought.pop(tag, None)
            if shown is not None:  # it was on its way in before anybody looked out for it
                shown()
        elif not receipt.arrived.done():  # it may have been cancelled meanwhile
            self._settle(header, payload, receipt)

    def _settle(self, header: Header, payload: Payload, receipt: SegmentReceive) -> None:
        """Complete a pending receive with a payload, in its destination."""
        if not receipt.fits(header):
            if header.signature != receipt.signature and self.on_stray is not None:
                self.on_stray(self, header)
            fail_future(receipt.arrived, self._error or self._disagreement(header, receipt.total))
            return
        into, fold = receipt.into, receipt.fold
        folded = fold is not None and payload is fold.into
        if into is not None and payload is not into and not folded and not isinstance(payload, Phantom):
            into[:] = payload  # it came, at least in part, before its place was known
            if len(self._spare) < SPARE and payload.nbytes >= WORTH_KEEPING_BYTES:
                self._spare.append(payload)
            payload = into
        receipt.arrived.set_result(payload)

    def _wrong(self, what: str) -> RemoteProtocolError:
        return RemoteProtocolError(f"rank {self.peer_rank} sent {what}", str(self.peer_rank))

    def _disagreement(self, header: Header, total: int) -> HcsimError:
        detail = f"it sent a message of {header.total} bytes, we expect {total}" if header.total != total else ""
        return RemoteProtocolError(
            f"rank {self.peer_rank} is doing another operation than we are in operation {header.operation}"
            f" (its kind, dtype, length, root or algorithm differs{'; ' if detail else ''}{detail})",
            str(self.peer_rank),
        )

    def _signalled(self, header: Header, payload: Payload) -> None:
        if header.kind is Kind.BYE:
            self.leaving = True
        elif header.kind is Kind.WAITING and self.on_stray is not None:
            self.on_stray(self, header)
        elif header.kind is Kind.COMPUTING and self.on_computing is not None:
            self.on_computing(self, header)
        elif header.kind is Kind.CLOCK and self.on_clock is not None:
            self.on_clock(self, header)
        elif header.kind is Kind.ABORT and self.on_abort is not None:
            text = "" if isinstance(payload, Phantom) else plain(bytes(payload).decode(errors="replace"))
            self.on_abort(header, text)


def _left(rank: int) -> ChannelBroken:
    return ChannelBroken(f"rank {rank} has left the group", str(rank))
