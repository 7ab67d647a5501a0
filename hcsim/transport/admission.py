"""Admission: a host whose channels all lead to authenticated members of the cluster.

`AdmittedHost` wraps any host. Its `connect` and `listen` run the handshake (see `identity.handshake`) on each
new channel before they return it; the channel then has the peer's identity. There is no further cost: the
methods are those of the wrapped channel.

The resources of an unauthenticated caller are bounded: small messages, a few seconds, a number of half-open
callers in all and per source, and growing delays after failures. A source is the identity that TLS has proved,
or else the address.

A caller that claims to be a node that was admitted before is neither delayed by the failures of its source nor
rejected because of its silent half-open callers (up to a limit). So strangers on a node's machine do not lock
it out. This is safe, because the caller first has to prove that node's key, which cannot be guessed, and learns
nothing about the secret until then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

import msgspec

from hcsim.errors import (
    AdmissionRefused,
    ChannelBroken,
    ChannelClosed,
    ChannelError,
    DeadlineExceeded,
    RemoteProtocolError,
    WrongPeer,
)
from hcsim.identity.handshake import (
    MAX_LIST_BYTES,
    MAX_MESSAGE_BYTES,
    Credentials,
    Handshake,
    HandshakeFault,
    HandshakeRole,
    HandshakeState,
    read_hello,
)
from hcsim.identity.trust_list import RefusalReason, told
from hcsim.runtime.channel import Channel, Listener, Phantom, SegmentCounts
from hcsim.runtime.frame import Header, Kind
from hcsim.runtime.host import CONNECT_TIMEOUT_S, Host, Lan, PeerCheck, Store
from hcsim.transport.admission_queue import AdmissionQueue, FailureBackoff

ADMISSION_TIMEOUT_S = 5.0
MAX_HALF_OPEN_PER_SOURCE = 16
CROWDED_S = 0.5
"""How long a caller beyond `MAX_HALF_OPEN_PER_SOURCE` has to send its hello; at twice that number it is rejected."""
MAX_CLAIMS = 4
"""The number of half-open callers that may claim to be the same node, one that was admitted before."""
FIRST_LIMIT_BYTES = 64 * 1024
"""The initial frame limit of an admitted member."""
_REFUSAL_TIMEOUT_S = 0.25
_FIRST_RETRY_S = 0.05
_SLOWEST_RETRY_S = 1.0
_NOT_NOW = (RefusalReason.TOO_MANY_FAILURES.name, RefusalReason.TOO_MANY_CALLERS.name)
"""Refusals after which a caller may try again."""
_NO_GUESSES = (
    RefusalReason.COPIED_IDENTITY,
    RefusalReason.TOO_MANY_FAILURES,
    RefusalReason.TOO_MANY_CALLERS,
    RefusalReason.WE_ARE_UNLISTED,
)
"""Refusals that do not count as failures of the source."""


class AdmissionOutcome(msgspec.Struct, frozen=True):
    """The outcome of a handshake, for logs."""

    peer: str
    text: str
    node: str = ""
    """The admitted node; empty if none was admitted."""
    boot: int = 0
    reason: RefusalReason | None = None
    """The reason of a refusal; None if a node was admitted or the connection broke."""


AdmissionObserver: TypeAlias = Callable[[AdmissionOutcome], None]


class AdmittedChannel:
    """A channel to a member. Its methods are those of the inner channel, so frames have no extra cost."""

    __slots__ = (
        "_inner", "_on_close", "binding", "carrier", "ends", "identity", "limit", "outlet", "peer", "pump", "recv",
        "send",
    )  # fmt: skip

    def __init__(self, inner: Channel, identity: str, on_close: Callable[[AdmittedChannel], object]) -> None:
        self._inner = inner
        self._on_close = on_close
        self.identity = identity
        self.peer = inner.peer
        self.carrier = inner.carrier
        self.ends = inner.ends
        self.binding = inner.binding
        self.outlet = inner.outlet
        self.send = inner.send
        self.recv = inner.recv
        self.pump = inner.pump
        self.limit = inner.limit

    @property
    def segments(self) -> SegmentCounts | None:
        return self._inner.segments

    def __repr__(self) -> str:
        return f"<{self._inner!r} to node {self.identity}>"

    async def close(self) -> None:
        self._on_close(self)
        await self._inner.close()


class AdmittedHost:
    """A host that authenticates peers in `connect` and `listen`, and otherwise behaves as the one that it wraps."""

    def __init__(self, host: Host, credentials: Credentials, observer: AdmissionObserver | None = None) -> None:
        self._host = host
        self._doorkeeper = _Doorkeeper(host, credentials, observer)
        self.name = host.name
        self.clock = host.clock
        self.device = host.device
        self.interfaces = host.interfaces
        self.readings = host.readings
        self.spawn = host.spawn
        self.rng = host.rng
        self.trace = host.trace
        self.note = host.note
        self.interval = host.interval
        self.timeline_clock = host.timeline_clock
        self.metrics = host.metrics

    @property
    def lan(self) -> Lan:
        """The wrapped host's, which may be created at the first use."""
        return self._host.lan

    @property
    def store(self) -> Store:
        return self._host.store

    async def listen(self, address: str) -> AdmittedListener:
        return AdmittedListener(self._host, await self._host.listen(address), self._doorkeeper)

    async def connect(
        self, address: str, *, timeout_s: float = CONNECT_TIMEOUT_S, is_peer: PeerCheck | None = None
    ) -> AdmittedChannel:
        """Open a channel to a member; see `Host.connect`.

        Raises `AdmissionRefused` if the peer is not a member of the same cluster."""
        clock = self._host.clock
        started_s = clock.elapsed()
        draw = self._host.rng("admission", address)
        delay_s = _FIRST_RETRY_S
        failure: ChannelError | None = None
        while True:
            left_s = max(0.0, timeout_s - (clock.elapsed() - started_s))
            try:
                channel = await self._host.connect(address, timeout_s=left_s, is_peer=is_peer)
                left_s = max(0.0, timeout_s - (clock.elapsed() - started_s))
                async with clock.timeout(left_s):
                    admitted = await self._doorkeeper.call(channel)
                if is_peer is None or is_peer(admitted.identity):
                    return admitted
                await admitted.close()
                text = f"another node answers at {address}: {admitted.identity}"
                raise WrongPeer(text, channel.peer, admitted.identity)
            except AdmissionRefused as error:
                if error.reason not in _NOT_NOW:
                    raise
                failure = error
            except ChannelBroken as error:  # it may have been started anew just now
                failure = error
            except TimeoutError as error:
                if failure is not None:  # the time ran out on a repeat: what ended the last attempt says more
                    raise failure from None
                if isinstance(error, DeadlineExceeded):
                    raise
                text = f"{address} did not finish the admission handshake within {timeout_s:g} s"
                raise DeadlineExceeded(f"{text}: does it run without admission?") from None
            pause_s = delay_s * draw.uniform(0.5, 1.0)
            if clock.elapsed() - started_s + pause_s > timeout_s:
                raise failure
            await clock.sleep(pause_s)
            delay_s = min(2 * delay_s, _SLOWEST_RETRY_S)


class AdmittedListener:
    """Accepts channels of authenticated members."""

    def __init__(self, host: Host, inner: Listener, doorkeeper: _Doorkeeper) -> None:
        self._host = host
        self._inner = inner
        self._doorkeeper = doorkeeper
        self._callers = AdmissionQueue(host)
        self._admitted: asyncio.Queue[AdmittedChannel | None] = asyncio.Queue()
        self._greeting: dict[Channel, asyncio.Task[None]] = {}
        self._serving = host.spawn(self._serve(), name=f"admit at {inner.address}")

    @property
    def address(self) -> str:
        """`host:port`, with the actual port."""
        return self._inner.address

    async def accept(self) -> AdmittedChannel:
        channel = await self._admitted.get()
        if channel is None:
            self._admitted.put_nowait(None)  # for the next who asks
            raise ChannelClosed(f"the listener at {self.address} is closed", self.address)
        return channel

    async def close(self) -> None:
        """Stop listening and close the channels that have not been accepted."""
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        await self._inner.close()
        await self._let_go()

    async def _serve(self) -> None:
        try:
            with suppress(ChannelClosed):  # by whoever gave us the inner listener
                await self._callers.accept(self._inner, self._called)
        finally:  # also when the host ends
            await self._let_go()

    async def _let_go(self) -> None:
        for task in self._greeting.values():
            task.cancel()
        for channel in tuple(self._greeting):
            await channel.close()
        while not self._admitted.empty():
            if waiting := self._admitted.get_nowait():
                await waiting.close()
        self._admitted.put_nowait(None)

    def _called(self, channel: Channel, number: int) -> None:
        self._greeting[channel] = self._host.spawn(self._greet(channel), name=f"admit caller {number}")

    async def _greet(self, channel: Channel) -> None:
        try:
            self._admitted.put_nowait(await self._doorkeeper.answer(channel))
        except (ChannelError, TimeoutError):
            pass  # the observer has been told
        finally:
            self._callers.known(channel)
            self._greeting.pop(channel, None)


class _Doorkeeper:
    """Runs handshakes, counts failures by source, and reports each outcome."""

    def __init__(self, host: Host, credentials: Credentials, observer: AdmissionObserver | None) -> None:
        self._host = host
        self._us = credentials
        self._observer = observer
        self._throttle = FailureBackoff()
        self._known: dict[str, None] = {}
        self._half_open: dict[str, int] = {}
        self._claims: dict[str, int] = {}
        self._open: dict[AdmittedChannel, None] = {}
        if credentials.trusted is not None:
            credentials.trusted.on_change.append(self._hang_up_on_others)

    def _hang_up_on_others(self) -> None:
        """Close the channels to nodes that are no longer members."""
        assert self._us.trusted is not None
        members = self._us.trusted.list.members
        for channel in [each for each in self._open if each.identity not in members]:
            del self._open[channel]
            self._host.spawn(channel.close(), name=f"hang up on {channel.identity}")

    async def call(self, channel: Channel) -> AdmittedChannel:
        """Run the dialling side's handshake; the channel is closed on failure."""
        handshake = Handshake(HandshakeRole.CALLER, self._us, channel.binding)
        try:
            channel.limit(MAX_MESSAGE_BYTES)
            await _send(channel, handshake.first())
            await self._go_on(handshake, channel)
            return self._conclude(handshake, channel)
        except BaseException:
            await channel.close()
            raise

    async def answer(self, channel: Channel) -> AdmittedChannel:
        """Run the listening side's handshake; the channel is closed on failure."""
        source = channel.identity or _host_of(channel.peer)
        handshake = Handshake(HandshakeRole.LISTENER, self._us, channel.binding)
        before = _come(self._half_open, source)
        try:
            channel.limit(MAX_MESSAGE_BYTES)
            if before < 2 * MAX_HALF_OPEN_PER_SOURCE:
                crowded = before >= MAX_HALF_OPEN_PER_SOURCE
                source = await self._examine(handshake, channel, source, crowded)
            else:
                await self._refuse(handshake, channel, RefusalReason.TOO_MANY_CALLERS)
            return self._conclude(handshake, channel, source)
        except BaseException:
            await channel.close()
            raise
        finally:
            _go(self._half_open, channel.identity or _host_of(channel.peer))

    async def _examine(self, handshake: Handshake, channel: Channel, source: str, crowded: bool) -> str:
        """Run the handshake unless its source is throttled. Return the source that a failure counts against, or an
        empty
        string."""
        clock, known = self._host.clock, ""
        try:
            async with clock.timeout(ADMISSION_TIMEOUT_S):
                async with clock.timeout(CROWDED_S if crowded else None):
                    hello = await _receive(channel)
                if (claimed := _claimed(hello)) in self._known:
                    known = claimed
                    if _come(self._claims, known) < MAX_CLAIMS:
                        source, crowded = "", False
                if crowded:
                    await self._refuse(handshake, channel, RefusalReason.TOO_MANY_CALLERS)
                elif source and self._throttle.wait_s(source, clock.elapsed()) > 0.0:
                    await self._refuse(handshake, channel, RefusalReason.TOO_MANY_FAILURES)
                else:
                    await _send(channel, handshake.receive(hello))
                    await self._go_on(handshake, channel)
        except RemoteProtocolError:  # it has ended the channel, so nobody can be told
            handshake.refuse(RefusalReason.MALFORMED)
        except TimeoutError:
            if handshake.state is not HandshakeState.REFUSED:
                await self._refuse(
                    handshake, channel, RefusalReason.TOO_MANY_CALLERS if crowded else RefusalReason.TOO_SLOW
                )
        finally:
            if known:
                _go(self._claims, known)
        return source

    async def _go_on(self, handshake: Handshake, channel: Channel) -> None:
        while handshake.state not in (HandshakeState.ADMITTED, HandshakeState.REFUSED):
            answer = handshake.receive(await _receive(channel))
            if handshake.state is HandshakeState.AWAITS_LIST:
                channel.limit(MAX_LIST_BYTES)
            await _send(channel, answer)

    async def _refuse(self, handshake: Handshake, channel: Channel, reason: RefusalReason) -> None:
        with suppress(ChannelError, TimeoutError):  # it need not listen
            async with self._host.clock.timeout(_REFUSAL_TIMEOUT_S):
                await _send(channel, handshake.refuse(reason))

    def _conclude(self, handshake: Handshake, channel: Channel, source: str = "") -> AdmittedChannel:
        """Report the outcome; return the member's channel or raise `AdmissionRefused`."""
        theirs, peer, trusted = handshake.theirs, channel.peer, self._us.trusted
        if trusted is not None and theirs is not None:
            if handshake.state is HandshakeState.ADMITTED and theirs.node_id not in trusted.list.members:
                handshake.refuse(RefusalReason.UNLISTED)  # the list has changed just now
            name = trusted.list.members.get(theirs.node_id) or trusted.list.expelled.get(theirs.node_id)
            peer = f"{name} ({peer})" if name else peer
        if handshake.state is HandshakeState.ADMITTED and theirs is not None:
            self._known[theirs.node_id] = None
            self._throttle.succeeded(source)
            self._host.trace("admitted", channel.peer, theirs.node_id, theirs.boot)
            self._report(
                AdmissionOutcome(channel.peer, f"{peer} is node {theirs.node_id}", theirs.node_id, theirs.boot)
            )
            channel.limit(FIRST_LIMIT_BYTES)
            admitted = AdmittedChannel(channel, theirs.node_id, lambda closed: self._open.pop(closed, None))
            self._open[admitted] = None
            return admitted
        reason = handshake.reason
        assert reason is not None
        if source and reason not in _NO_GUESSES and not handshake.was_told:
            self._throttle.failed(source, self._host.clock.elapsed())
        if not handshake.was_told:
            self._host.metrics.counter("hcsim_admission_refusals_total", reason=reason.name.lower()).add()
        text = told(peer, reason, by_them=handshake.was_told)
        self._host.trace("refused", channel.peer, reason.name, "by them" if handshake.was_told else "by us")
        self._report(AdmissionOutcome(channel.peer, text, reason=reason))
        raise AdmissionRefused(text, channel.peer, reason.name)

    def _report(self, verdict: AdmissionOutcome) -> None:
        if self._observer is not None:
            self._observer(verdict)


def _host_of(peer: str) -> str:
    """Return the address without the port, which differs between connections."""
    return peer.rpartition(":")[0] or peer


def _come(counts: dict[str, int], who: str) -> int:
    """Increment the count and return its previous value."""
    before = counts.get(who, 0)
    counts[who] = before + 1
    return before


def _go(counts: dict[str, int], who: str) -> None:
    counts[who] -= 1
    if not counts[who]:
        del counts[who]


def _claimed(hello: bytes) -> str:
    try:
        return read_hello(hello).node_id
    except HandshakeFault:
        return ""


async def _send(channel: Channel, message: bytes | None) -> None:
    if message is not None:
        await channel.send(Header(len(message), Kind.HELLO), memoryview(message))


async def _receive(channel: Channel) -> bytes:
    header, payload = await channel.recv(lambda header: None)
    return b"" if isinstance(payload, Phantom) or header.kind is not Kind.HELLO else bytes(payload)
