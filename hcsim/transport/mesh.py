"""The mesh: links to the other ranks of a group, opened on demand.

Both ends of a link know that they need it, since each message has a sender and a receiver. So the higher rank
dials, and the lower one waits for the call. The first frame in each direction is a hello. A caller that does
not belong to the group is rejected with a reason. A caller of a later epoch is asked to call again, and this
rank learns that its epoch is over. Before its hello a caller may send at most a few KiB, within a deadline, and
the number of such callers is bounded.

The links count their traffic; the metrics are updated when they are collected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, NamedTuple

import msgspec

from hcsim.errors import (
    ChannelBroken,
    ChannelError,
    CollectiveError,
    DeadlineExceeded,
    HcsimError,
    PeerRefused,
    RemoteProtocolError,
    UsageError,
    WrongPeer,
)
from hcsim.runtime.channel import Channel, Listener
from hcsim.runtime.clock import Limit, fail_future, within
from hcsim.runtime.frame import Kind
from hcsim.runtime.host import Counter, Host, Metrics
from hcsim.transport.admission_queue import AdmissionQueue, RefusalLog, plain
from hcsim.transport.clock_questions import ClockQuestions
from hcsim.transport.frame_notes import LinkNotes, NotedChannel
from hcsim.transport.groups import (
    HELLO_LIMIT_BYTES,
    HELLO_TIMEOUT_S,
    MAX_FRAME_BYTES,
    MOST_EPOCHS,
    FirstFrame,
    GroupHello,
    GroupListener,
    GroupMembership,
    decode_hello,
    objection,
    receive_frame,
    send_frame,
    send_hello,
)
from hcsim.transport.link import Link

_ANSWERS = {Kind.HELLO: "taken", Kind.ABORT: "refused", Kind.LATER: "later"}


class LinkMetrics:
    """Updates a host's network metrics from the counts of a mesh's links."""

    def __init__(self, metrics: Metrics, addresses: Sequence[str], links: Mapping[int, Link]) -> None:
        self._metrics = metrics
        self._addresses = addresses
        self._links = links
        self._reported: dict[int, tuple[int, int, int, int]] = {}
        self.end = metrics.collect(self._tell)
        """Report the final counts and stop: the mesh is closed."""

    def opened(self) -> None:
        self._metrics.counter("hcsim_links_opened_total").add()

    def greeted(self, answer: Kind) -> None:
        self._metrics.counter("hcsim_hellos_total", answer=_ANSWERS[answer]).add()

    def _tell(self) -> None:
        for rank, link in self._links.items():
            counts = (link.sent_bytes, link.received_bytes, link.sent_frames, link.received_frames)
            reported = self._reported.get(rank, (0, 0, 0, 0))
            self._reported[rank] = counts
            for series, now, before in zip(self._series(self._addresses[rank]), counts, reported, strict=True):
                series.add(now - before)

    def _series(self, peer: str) -> tuple[Counter, ...]:
        counter = self._metrics.counter
        return (
            counter("hcsim_link_sent_bytes_total", peer=peer),
            counter("hcsim_link_received_bytes_total", peer=peer),
            counter("hcsim_link_sent_frames_total", peer=peer),
            counter("hcsim_link_received_frames_total", peer=peer),
        )


ABORT_TIMEOUT_S = 0.25
BYE_TIMEOUT_S = 30.0
"""The time limit for a BYE, which waits behind the data sent before it; on a slow line that takes a while."""
LATE_S = 2.0
"""How long a closing mesh waits for late callers, to tell them the reason."""
FIRST_BACKOFF_S = 0.02
LAST_BACKOFF_S = 0.5


class CloseNotice(NamedTuple):
    """The last message to all peers."""

    kind: Kind
    text: bytes
    culprit: int | None
    """The rank that caused the end, if any."""


class Mesh:
    """The links of this rank to the other members of its group."""

    def __init__(
        self, host: Host, us: GroupMembership, listener: Listener | None = None, reception: GroupListener | None = None
    ) -> None:
        if not 0 <= us.rank < us.world:
            raise UsageError(f"rank {us.rank} does not exist in a group of {us.world}")
        if us.identities and len(us.identities) != us.world:
            raise UsageError(f"a group of {us.world} has as many identities, not {len(us.identities)}")
        if not 0 <= us.epoch < MOST_EPOCHS:
            raise UsageError(f"an epoch is a number below {MOST_EPOCHS}, not {us.epoch}")
        self.host = host
        self.us = us
        self.links: dict[int, Link] = {}
        self._traffic = LinkMetrics(host.metrics, us.addresses, self.links)
        self._clock = ClockQuestions(host, us, self.links)
        self.on_link: Callable[[Link], None] | None = None
        self.on_newer: Callable[[int, int], None] | None = None
        """Called with a rank of a later epoch, and that epoch."""
        self.patient = False
        """Whether to dial a peer again that hangs up on the hello: it may be moving on from its last epoch."""
        self.newest_epoch = us.epoch
        self.dialled = us.addresses
        """The address to dial for each rank: its address, or the same one with its hosts in another order."""
        self._opening: dict[int, asyncio.Future[Link]] = {}
        self._called: dict[int, dict[int, Channel]] = {}
        self._complete: dict[int, asyncio.Future[Link]] = {}
        self._calls: dict[int, Limit] = {}
        """The time limits of the ranks that are to call."""
        self._listener = listener
        self._reception = reception
        """Accepts callers for this mesh, where the node has a listener that outlives it."""
        self._accepting: asyncio.Task[None] | None = None
        self._greeting: dict[asyncio.Task[None], None] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._spare: list[memoryview] = []
        self._admission = AdmissionQueue(host)
        self._refusals = us.refusals or RefusalLog()
        self._refusals.forget()
        self._closed = ""
        """The reason of the close; empty while open."""
        self._parting: CloseNotice | None = None
        self._uninformed: dict[int, asyncio.Future[None]] = {}
        """The late ranks that are to get the reason when they call."""
        self._awaited = 0

    async def open(self) -> None:
        """Listen for the other ranks, if there are any."""
        self._clock.start()
        if self._reception is not None:
            self._reception.attach(self._called_with)
        elif self.us.world > 1:
            if self._listener is None:
                self._listener = await self.host.listen(self.us.addresses[self.us.rank])
            accepting = self._admission.accept(self._listener, self._called_by)
            self._accepting = self.host.spawn(accepting, name="accept")

    async def link(self, rank: int) -> Link:
        """Return the link to that rank, opening it if necessary."""
        await self.reach((rank,))
        return self.links[rank]

    async def reach(self, ranks: Sequence[int]) -> None:
        """Open the missing links to these ranks concurrently; raises the error of the first that cannot be opened.

        Sequential opening would keep the second peer waiting for the first; in a ring all ranks would wait in turn."""
        missing = [rank for rank in ranks if rank not in self.links]
        if not missing:
            return
        if self._closed:
            raise UsageError("the group is closed")
        for rank in missing:
            if rank not in self._opening:
                self._opening[rank] = asyncio.get_running_loop().create_future()
                self._tasks.append(self.host.spawn(self._open(rank), name=f"open a link to rank {rank}"))
        self._await_links(1)
        try:
            await asyncio.gather(*(asyncio.shield(self._opening[rank]) for rank in missing))
        finally:
            self._await_links(-1)

    def unreached(self, ranks: Sequence[int]) -> int | None:
        """Return one of these ranks that cannot be reached, or else the first without a link; None if there is none."""
        missing = [rank for rank in ranks if rank not in self.links]
        failed = [rank for rank in missing if rank in self._opening and self._opening[rank].done()]
        return next(iter((*failed, *missing)), None)

    def _await_links(self, change: int) -> None:
        """Change the number of tasks that wait for links. Meanwhile the open links receive, to notice aborts of other
        ranks."""
        self._awaited += change
        for link in self.links.values():
            link.attend(self._awaited > 0)

    async def close(self, parting: tuple[Kind, str], error: HcsimError, late: Sequence[int] = ()) -> None:
        """Send the last message (BYE, or ABORT with a reason), end all links with `error`, and stop listening.

        The ranks in `late` will call soon, and get the reason then; otherwise they would dial in vain."""
        self._closed = str(error)
        kind, text = parting
        culprit = error.peer if kind is Kind.ABORT and isinstance(error, CollectiveError) else None
        self._parting = CloseNotice(kind, text.encode()[:HELLO_LIMIT_BYTES], culprit)
        self._uninformed = {rank: asyncio.get_running_loop().create_future() for rank in late}
        self._clock.stop()
        for task in self._tasks:
            task.cancel()
        for opening in self._opening.values():
            fail_future(opening, error)
        try:
            await self._leave(error)
        finally:
            await self._let_go(error)

    async def _leave(self, error: HcsimError) -> None:
        """Send the last message on all links, to peers that are being dialled, and to those that call meanwhile."""
        calling = asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._part(link, error) for link in self.links.values()), calling)
        if self._uninformed:
            with suppress(TimeoutError):
                async with self.host.clock.timeout(LATE_S):
                    await asyncio.gather(*self._uninformed.values())
        if self._greeting:  # whoever has just called hears why, too
            with suppress(TimeoutError):
                async with self.host.clock.timeout(ABORT_TIMEOUT_S):
                    await asyncio.gather(*map(asyncio.shield, self._greeting), return_exceptions=True)

    async def _let_go(self, error: HcsimError) -> None:
        """Close what is still open; if this is cancelled, the rest is closed all the same."""
        if self._accepting is not None:
            self._accepting.cancel()
        if self._reception is not None:
            self._reception.detach()
        async with AsyncExitStack() as stack:  # from the last to the first
            stack.callback(self._traffic.end)
            for channels in self._called.values():
                for channel in channels.values():
                    stack.push_async_callback(channel.close)
            if self._listener is not None:
                stack.push_async_callback(self._listener.close)
            for link in self.links.values():
                if not link.closed:  # its goodbye was cut short
                    stack.push_async_callback(link.close, error)

    async def _part(self, link: Link, error: HcsimError) -> None:
        try:
            await self._send_goodbye(link.channels)
        finally:
            await link.close(error)

    async def _send_goodbye(self, channels: Sequence[Channel]) -> None:
        assert self._parting is not None
        kind, text, culprit = self._parting
        try:
            async with self.host.clock.timeout(BYE_TIMEOUT_S if kind is Kind.BYE else ABORT_TIMEOUT_S):
                for channel in channels:
                    await send_frame(channel, kind, self.us, text, culprit)
        except (ChannelError, TimeoutError):
            pass  # it will notice by itself that we are gone

    async def _hang_up(self, channel: Channel) -> None:
        """Close a dialled channel. If the mesh is closing, a peer that has accepted it gets the last message."""
        try:
            if self._parting is not None:
                await self._send_goodbye([channel])
        finally:
            await channel.close()

    async def _open(self, rank: int) -> None:
        opening = self._opening[rank]
        try:
            link = await self._opened(rank)
        except HcsimError as error:
            fail_future(opening, error)
        else:
            if not opening.done():
                opening.set_result(link)

    async def _opened(self, rank: int) -> Link:
        us, limit_s = self.us, self.us.wire.connect_timeout_s
        if rank < us.rank:
            return self._join(rank, await self._dial_all(rank, self.host.clock.elapsed() + limit_s))
        if rank in self.links:  # it called between the question for the link and this first look
            return self.links[rank]
        called: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
        self._complete[rank] = called
        limit = self.host.clock.timeout(limit_s)
        try:
            async with limit:
                self._calls[rank] = limit
                try:
                    return await called
                finally:
                    del self._calls[rank]
        except TimeoutError as error:
            if isinstance(error, HcsimError) or not limit.expired():
                raise
            text = f"rank {rank} did not call within {limit_s:g} s{self.doubts(rank)}"
            raise DeadlineExceeded(text) from None

    def postpone_calls(self) -> None:
        """Wait longer for the ranks that have yet to call: somebody still computes."""
        for limit in self._calls.values():
            self.host.clock.postpone(limit, self.us.wire.connect_timeout_s)

    def doubts(self, rank: int | None) -> str:
        """Return a hint for a rank that should have called but did not: the last refusal of a caller."""
        return self._refusals.hint if rank is not None and rank > self.us.rank and rank not in self.links else ""

    def _join(self, rank: int, channels: Sequence[Channel]) -> Link:
        """Make a link of the channels, and start to receive on it."""
        if self.host.timeline_clock is not None:
            notes = LinkNotes(self.host, self.us, rank)
            channels = [NotedChannel(channel, notes) for channel in channels]
        link = self.links[rank] = Link(self.host, rank, self.us.epoch, channels, self._spare)
        self._clock.joined(link)
        link.attend(self._awaited > 0)
        self._traffic.opened()
        if self.on_link is not None:
            self.on_link(link)
        return link

    async def _dial_all(self, rank: int, until_s: float) -> list[Channel]:
        """Dial a channel for each stripe. If one fails, all are closed."""
        channels: list[Channel] = []
        async with AsyncExitStack() as stack:
            while len(channels) < self.us.wire.stripes:
                channel = await self._dial(rank, len(channels), until_s)
                stack.push_async_callback(self._hang_up, channel)
                channels.append(channel)
            stack.pop_all()
        return channels

    async def _dial(self, rank: int, stripe: int, until_s: float) -> Channel:
        """Dial until the peer accepts or rejects. A peer that is an epoch behind answers LATER."""
        clock, backoff_s = self.host.clock, FIRST_BACKOFF_S
        late = f"rank {rank} did not answer within {self.us.wire.connect_timeout_s:g} s"
        while True:
            # It has its own deadline, and says why nobody could be reached.
            left_s = max(0.0, until_s - clock.elapsed())
            try:
                channel = await self.host.connect(self.dialled[rank], timeout_s=left_s, is_peer=self.us.is_rank(rank))
            except WrongPeer as error:
                raise self._impostor(rank, error.identity, error.peer) from None
            async with within(clock, max(0.0, until_s - clock.elapsed()), late):
                if await self._is_taken_in(channel, rank, stripe):
                    return channel
                await clock.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)

    def _impostor(self, rank: int, identity: str, peer: str) -> PeerRefused:
        proved = f"proved to be node {identity}" if identity else "proved nothing"
        expected = f"should be rank {rank}, node {self.us.identities[rank]}"
        return PeerRefused(f"{self.us.addresses[rank]} {expected}, but {proved}", peer)

    async def _is_taken_in(self, channel: Channel, rank: int, stripe: int) -> bool:
        """Exchange hellos on a new channel; close it unless the peer accepts."""
        us = self.us
        try:
            if us.is_impostor(rank, channel):
                raise self._impostor(rank, channel.identity, channel.peer)
            await send_hello(channel, us, stripe)
            channel.limit(HELLO_LIMIT_BYTES)
            kind, data = await receive_frame(channel)
            if kind is Kind.LATER:
                await channel.close()
                return False
            if kind is Kind.ABORT:
                raise PeerRefused(f"rank {rank} at {channel.peer} refused us: {plain(data.decode(errors='replace'))}")
            theirs = decode_hello(data, channel.peer)
            if theirs.rank != rank:
                raise PeerRefused(f"{us.addresses[rank]} should be rank {rank}, but says it is rank {theirs.rank}")
            channel.limit(MAX_FRAME_BYTES)
        except ChannelBroken as error:
            await channel.close()
            if self.patient:
                return False
            doubt = "does it run another version of hcsim? It says whom it refuses"
            raise ChannelBroken(f"rank {rank} hung up on our hello: {error} ({doubt})", error.peer) from error
        except BaseException:
            await self._hang_up(channel)
            raise
        return True

    def _called_by(self, channel: Channel, number: int) -> None:
        self._start_greeting(self._greet_stranger(channel), f"greet caller {number}")

    def _called_with(self, channel: Channel, first: FirstFrame) -> None:
        self._start_greeting(self._greet(channel, first), "greet a caller")

    def _start_greeting(self, work: Coroutine[Any, Any, None], name: str) -> None:
        greeting: asyncio.Task[None] = self.host.spawn(work, name=name)
        self._greeting[greeting] = None
        greeting.add_done_callback(self._greeting.pop)

    async def _greet_stranger(self, channel: Channel) -> None:
        try:
            await self._greet(channel)
        finally:
            self._admission.known(channel)

    async def _greet(self, channel: Channel, first: FirstFrame | None = None) -> None:
        """Receive a caller's hello, and accept it or reject it with a reason."""
        taken_in = False
        try:
            channel.limit(HELLO_LIMIT_BYTES)
            async with self.host.clock.timeout(HELLO_TIMEOUT_S):
                kind, data = first or await receive_frame(channel)
                if kind is not Kind.HELLO:
                    raise RemoteProtocolError(f"{channel.peer} did not start with a hello", channel.peer)
                theirs = decode_hello(data, channel.peer)
                answer, reason = self._answer(theirs, channel)
                self._traffic.greeted(answer)
                if answer is Kind.HELLO:
                    self._admit(theirs, channel)
                    taken_in = True
                    await send_hello(channel, self.us)
                else:
                    if answer is Kind.ABORT and not self._closed:
                        self._refusals(f"{channel.peer}, as rank {theirs.rank}, was told: {reason}")
                    await send_frame(channel, answer, self.us, reason.encode())
                    await channel.close()
                    if answer is Kind.ABORT and theirs.name == self.us.name:
                        self._informed(theirs.rank)
        except BaseException as error:
            if isinstance(error, RemoteProtocolError):
                self._refusals(str(error))
            # One that has hung up meanwhile may have said why: that is for its link to read.
            if not (taken_in and isinstance(error, ChannelError)):
                await channel.close()
            if not isinstance(error, ChannelError | TimeoutError):
                raise

    def _informed(self, rank: int) -> None:
        """Note that a late rank has got the reason of the close."""
        told = self._uninformed.get(rank)
        if told is not None and not told.done():
            told.set_result(None)

    def _answer(self, theirs: GroupHello, channel: Channel) -> tuple[Kind, str]:
        """Decide whether to accept the caller, reject it with a reason, or ask it to call again."""
        us = self.us
        if us.identities and not channel.identity:
            return Kind.ABORT, "you have not proved who you are"
        if theirs.name == us.name and theirs.epoch > us.epoch:
            # Nobody whose group differs in more than that ends ours: it may be a stranger.
            in_our_epoch = msgspec.structs.replace(theirs, epoch=us.epoch)
            if self.on_newer is not None and not objection(us, in_our_epoch, channel):
                # They gave our epoch up and went on; so must we.
                self.newest_epoch = max(self.newest_epoch, theirs.epoch)
                self.on_newer(theirs.rank, theirs.epoch)
            return Kind.LATER, ""
        if us.identities and theirs.name != us.name:
            return Kind.LATER, ""  # perhaps we have yet to follow them to a view of another lineage
        reason = self._closed or self._objection(theirs, channel)
        return (Kind.ABORT, reason) if reason else (Kind.HELLO, "")

    def _objection(self, theirs: GroupHello, channel: Channel) -> str:
        reason = objection(self.us, theirs, channel)
        if not reason and (theirs.rank in self.links or theirs.stripe in self._called.get(theirs.rank, {})):
            return f"rank {theirs.rank} is connected already"
        return reason

    def _admit(self, theirs: GroupHello, channel: Channel) -> None:
        channel.limit(MAX_FRAME_BYTES)
        stripes = self._called.setdefault(theirs.rank, {})
        stripes[theirs.stripe] = channel
        if len(stripes) == self.us.wire.stripes:
            del self._called[theirs.rank]
            link = self._join(theirs.rank, [stripes[stripe] for stripe in range(len(stripes))])
            awaited = self._complete.pop(theirs.rank, None)
            if awaited is not None and not awaited.done():
                awaited.set_result(link)
