"""Admission: a host whose channels all lead to proven members of our cluster.

`AdmittedHost` wraps any host. Its `connect` and `listen` run the handshake (see `identity.handshake`) on
each new channel before anybody else sees it, and the channel then says who is at the other end. Nothing that comes
after costs more than before: the wrapped channel's methods are the channel's own.

What a stranger may take from us before it has proved anything is bounded: small messages, a few seconds, a
number of half-open callers in all and from one source, and less and less after failures. A source is what is
known about the caller at that point: the identity that TLS has proved, or else its address. Who claims to be a
node that was admitted before does not have to wait for others' failures, and is heard beside those of its source who
stand at the door and say nothing, so a few strangers on its machine do not lock it out: it must prove that node's key
first, which nobody guesses, and learns nothing about the secret until then.
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
)
from hcsim.identity.handshake import (
    MAX_LIST_BYTES,
    MAX_MESSAGE_BYTES,
    Credentials,
    Fault,
    Handshake,
    Role,
    State,
    read_hello,
)
from hcsim.identity.trust_list import Reason, told
from hcsim.runtime.channel import Channel, Listener, Phantom
from hcsim.runtime.frame import Header, Kind
from hcsim.runtime.host import CONNECT_TIMEOUT_S, Host, Lan, Store
from hcsim.transport.callers import Callers, Throttle

ADMISSION_TIMEOUT_S = 5.0
MAX_HALF_OPEN_PER_SOURCE = 16
CROWDED_S = 0.5
"""How long a caller beyond those has to say who it claims to be, if not too many of them do."""
MAX_CLAIMS = 4
"""Half-open callers who claim to be one node that was admitted before."""
FIRST_LIMIT_BYTES = 64 * 1024
"""What a member may send before somebody raises the limit."""
_REFUSAL_TIMEOUT_S = 0.25
_FIRST_RETRY_S = 0.05
_SLOWEST_RETRY_S = 1.0
_NOT_NOW = (Reason.TOO_MANY_FAILURES.name, Reason.TOO_MANY_CALLERS.name)
"""Refusals after which one may call again."""
_NO_GUESSES = (Reason.COPIED_IDENTITY, Reason.TOO_MANY_FAILURES, Reason.TOO_MANY_CALLERS, Reason.WE_ARE_UNLISTED)
"""Refusals that nobody has to wait for."""


class Verdict(msgspec.Struct, frozen=True):
    """How one handshake ended, for logs."""

    peer: str
    text: str
    node: str = ""
    """The node that was admitted; empty when nobody was."""
    boot: int = 0
    reason: Reason | None = None
    """Why nobody was admitted; None when somebody was, or the connection just broke."""


Observer: TypeAlias = Callable[[Verdict], None]


class AdmittedChannel:
    """A channel to a member. Its methods are the inner channel's own, so that a frame costs nothing extra."""

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

    def __repr__(self) -> str:
        return f"<{self._inner!r} to node {self.identity}>"

    async def close(self) -> None:
        """See `Channel.close`."""
        self._on_close(self)
        await self._inner.close()


class AdmittedHost:
    """The host that it wraps, but for `connect` and `listen`."""

    def __init__(self, host: Host, credentials: Credentials, observer: Observer | None = None) -> None:
        self._host = host
        self._doorkeeper = _Doorkeeper(host, credentials, observer)
        self.name = host.name
        self.clock = host.clock
        self.device = host.device
        self.interfaces = host.interfaces
        self.spawn = host.spawn
        self.rng = host.rng
        self.trace = host.trace
        self.metrics = host.metrics

    @property
    def lan(self) -> Lan:
        """The inner host's, which may be made when somebody asks for it."""
        return self._host.lan

    @property
    def store(self) -> Store:
        """The inner host's."""
        return self._host.store

    async def listen(self, address: str) -> AdmittedListener:
        """Accept members at `host:port`."""
        return AdmittedListener(self._host, await self._host.listen(address), self._doorkeeper)

    async def connect(self, address: str, *, timeout_s: float = CONNECT_TIMEOUT_S) -> AdmittedChannel:
        """Open a channel to a member; see `Host.connect`.

        Raises `AdmissionRefused` when we and whoever listens there are not of one cluster.
        """
        clock = self._host.clock
        started_s = clock.elapsed()
        draw = self._host.rng("admission", address)
        delay_s = _FIRST_RETRY_S
        failure: ChannelError | None = None
        while True:
            left_s = max(0.0, timeout_s - (clock.elapsed() - started_s))
            try:
                channel = await self._host.connect(address, timeout_s=left_s)
                left_s = max(0.0, timeout_s - (clock.elapsed() - started_s))
                async with clock.timeout(left_s):
                    return await self._doorkeeper.call(channel)
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
    """Hands out members; who is not one never gets that far."""

    def __init__(self, host: Host, inner: Listener, doorkeeper: _Doorkeeper) -> None:
        self._host = host
        self._inner = inner
        self._doorkeeper = doorkeeper
        self._callers = Callers(host)
        self._admitted: asyncio.Queue[AdmittedChannel | None] = asyncio.Queue()
        self._greeting: dict[Channel, asyncio.Task[None]] = {}
        self._serving = host.spawn(self._serve(), name=f"admit at {inner.address}")

    @property
    def address(self) -> str:
        """`host:port`, with the port that was really taken."""
        return self._inner.address

    async def accept(self) -> AdmittedChannel:
        """The next member's channel."""
        channel = await self._admitted.get()
        if channel is None:
            self._admitted.put_nowait(None)  # for the next who asks
            raise ChannelClosed(f"the listener at {self.address} is closed", self.address)
        return channel

    async def close(self) -> None:
        """Accept no more; who was not accepted yet is let go."""
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
    """Runs handshakes, remembers failures, and says how each ended."""

    def __init__(self, host: Host, credentials: Credentials, observer: Observer | None) -> None:
        self._host = host
        self._us = credentials
        self._observer = observer
        self._throttle = Throttle()
        self._known: dict[str, None] = {}
        self._half_open: dict[str, int] = {}
        self._claims: dict[str, int] = {}
        self._open: dict[AdmittedChannel, None] = {}
        if credentials.trusted is not None:
            credentials.trusted.on_change.append(self._hang_up_on_others)

    def _hang_up_on_others(self) -> None:
        """End the channels to those that are members no more."""
        assert self._us.trusted is not None
        members = self._us.trusted.list.members
        for channel in [each for each in self._open if each.identity not in members]:
            del self._open[channel]
            self._host.spawn(channel.close(), name=f"hang up on {channel.identity}")

    async def call(self, channel: Channel) -> AdmittedChannel:
        """As the one who dialled; the channel is closed if this fails."""
        handshake = Handshake(Role.CALLER, self._us, channel.binding)
        try:
            channel.limit(MAX_MESSAGE_BYTES)
            await _say(channel, handshake.first())
            await self._go_on(handshake, channel)
            return self._conclude(handshake, channel)
        except BaseException:
            await channel.close()
            raise

    async def answer(self, channel: Channel) -> AdmittedChannel:
        """As the one who was called; the channel is closed if this fails."""
        source = channel.identity or _host_of(channel.peer)
        handshake = Handshake(Role.LISTENER, self._us, channel.binding)
        before = _come(self._half_open, source)
        try:
            channel.limit(MAX_MESSAGE_BYTES)
            if before < 2 * MAX_HALF_OPEN_PER_SOURCE:
                crowded = before >= MAX_HALF_OPEN_PER_SOURCE
                source = await self._examine(handshake, channel, source, crowded)
            else:
                await self._refuse(handshake, channel, Reason.TOO_MANY_CALLERS)
            return self._conclude(handshake, channel, source)
        except BaseException:
            await channel.close()
            raise
        finally:
            _go(self._half_open, channel.identity or _host_of(channel.peer))

    async def _examine(self, handshake: Handshake, channel: Channel, source: str, crowded: bool) -> str:
        """Run the handshake, unless its source has to wait; returns what a failure counts against, if anything."""
        clock, known = self._host.clock, ""
        try:
            async with clock.timeout(ADMISSION_TIMEOUT_S):
                async with clock.timeout(CROWDED_S if crowded else None):
                    hello = await _hear(channel)
                if (claimed := _claimed(hello)) in self._known:
                    known = claimed
                    if _come(self._claims, known) < MAX_CLAIMS:
                        source, crowded = "", False
                if crowded:
                    await self._refuse(handshake, channel, Reason.TOO_MANY_CALLERS)
                elif source and self._throttle.wait_s(source, clock.elapsed()) > 0.0:
                    await self._refuse(handshake, channel, Reason.TOO_MANY_FAILURES)
                else:
                    await _say(channel, handshake.receive(hello))
                    await self._go_on(handshake, channel)
        except RemoteProtocolError:  # it has ended the channel, so nobody can be told
            handshake.refuse(Reason.MALFORMED)
        except TimeoutError:
            if handshake.state is not State.REFUSED:
                await self._refuse(handshake, channel, Reason.TOO_MANY_CALLERS if crowded else Reason.TOO_SLOW)
        finally:
            if known:
                _go(self._claims, known)
        return source

    async def _go_on(self, handshake: Handshake, channel: Channel) -> None:
        while handshake.state not in (State.ADMITTED, State.REFUSED):
            answer = handshake.receive(await _hear(channel))
            if handshake.state is State.AWAITS_LIST:
                channel.limit(MAX_LIST_BYTES)
            await _say(channel, answer)

    async def _refuse(self, handshake: Handshake, channel: Channel, reason: Reason) -> None:
        with suppress(ChannelError, TimeoutError):  # it need not listen
            async with self._host.clock.timeout(_REFUSAL_TIMEOUT_S):
                await _say(channel, handshake.refuse(reason))

    def _conclude(self, handshake: Handshake, channel: Channel, source: str = "") -> AdmittedChannel:
        """The member's channel, or an error that says why there is none; either is reported."""
        theirs, peer, trusted = handshake.theirs, channel.peer, self._us.trusted
        if trusted is not None and theirs is not None:
            if handshake.state is State.ADMITTED and theirs.node_id not in trusted.list.members:
                handshake.refuse(Reason.UNLISTED)  # the list has changed just now
            name = trusted.list.members.get(theirs.node_id) or trusted.list.expelled.get(theirs.node_id)
            peer = f"{name} ({peer})" if name else peer
        if handshake.state is State.ADMITTED and theirs is not None:
            self._known[theirs.node_id] = None
            self._throttle.succeeded(source)
            self._host.trace("admitted", channel.peer, theirs.node_id, theirs.boot)
            self._report(Verdict(channel.peer, f"{peer} is node {theirs.node_id}", theirs.node_id, theirs.boot))
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
        self._report(Verdict(channel.peer, text, reason=reason))
        raise AdmissionRefused(text, channel.peer, reason.name)

    def _report(self, verdict: Verdict) -> None:
        if self._observer is not None:
            self._observer(verdict)


def _host_of(peer: str) -> str:
    """Without the port, which every connection has another of."""
    return peer.rpartition(":")[0] or peer


def _come(counts: dict[str, int], who: str) -> int:
    """One more; how many there were before."""
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
    except Fault:
        return ""


async def _say(channel: Channel, message: bytes | None) -> None:
    if message is not None:
        await channel.send(Header(len(message), Kind.HELLO), memoryview(message))


async def _hear(channel: Channel) -> bytes:
    header, payload = await channel.recv(lambda header: None)
    return b"" if isinstance(payload, Phantom) or header.kind is not Kind.HELLO else bytes(payload)
