"""Control connections to the other nodes: one per node, whichever side dialled.

Two nodes that find each other at the same moment both dial. Both ends then keep the channel dialled by the node
with the lower id, and close the other. A new channel may come from a node that is already connected, but with a
different boot. Then either the node was restarted or its key was copied: if the old connection still answers,
the new one is rejected.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Protocol

import msgspec

from hcsim.cluster.messages import (
    SCHEMA,
    ControlMessage,
    Details,
    Goodbye,
    HeartbeatMessage,
    MeetingRequest,
    NodeHello,
    ProbeRequest,
    Status,
    StatusReply,
    StatusRequest,
    fitting,
)
from hcsim.errors import ChannelError, HcsimError, PeerRefused, RemoteProtocolError, WrongPeer
from hcsim.runtime.channel import Channel, Listener
from hcsim.runtime.clock import BroadcastEvent, within
from hcsim.runtime.host import Host
from hcsim.telemetry.history import RunHistory
from hcsim.transport.admission_queue import AdmissionQueue
from hcsim.transport.messages import expect

MESSAGE_LIMIT_BYTES = 256 * 1024
HELLO_TIMEOUT_S = 5.0
PROBE_S = 1.0
"""How long the old connection of a node has to answer when a new one with another boot arrives."""
MOST_WATCHERS = 8
"""The maximum number of status clients that may ask again over the same channel."""
WATCHER_SILENCE_S = 30.0
"""How long such a client may ask nothing."""
LAST_ANSWER_S = 2.5
"""How long a node that ends waits for such clients to ask once more, so that they learn how it ended."""
WATCHED_ENOUGH = f"{MOST_WATCHERS} pages or terminals watch this node already: close one of them"
OUTBOX = 256
"""The maximum number of messages queued for a peer that does not read; beyond it the peer counts as stuck."""
COPIED = (
    "copied_identity",
    "another machine with the same identity is already here: give each machine its own node key",
)
"""The reason for rejecting a node, for metrics and log."""


class StatusSource(Protocol):
    """What a node tells status clients."""

    def asked(self, ask: StatusRequest) -> StatusReply:
        """Return the status of this node to a status client, and process what the client reports."""

    async def details(self, since_s: float) -> Details:
        """Return the details of this node's status, and what happened since that moment of its clock."""


class ConnectionHandler(StatusSource, Protocol):
    """Callbacks for events on the control connections."""

    def status(self) -> Status: ...

    def hello(self) -> NodeHello: ...

    async def probed(self, channel: Channel) -> None:
        """Serve a peer that measures the link to this node."""

    async def met(self, channel: Channel, request: MeetingRequest) -> None:
        """Join a group with other members for a moment, and close the channel."""

    def up(self, hello: NodeHello) -> None: ...

    def down(self, node: str, goodbye: Goodbye | None) -> None:
        """The connection to a node has closed, with its goodbye if it sent one."""

    def said(self, node: str, message: ControlMessage) -> None: ...

    def told(self, what: str) -> None: ...


class StatusClients:
    """The clients that ask a node for its status, once or again and again."""

    def __init__(self, host: Host, source: StatusSource) -> None:
        self._host = host
        self._source = source
        self._watchers: dict[Channel, None] = {}
        self._left = BroadcastEvent()
        self._closed = False

    async def answer(self, channel: Channel, first: StatusRequest) -> None:
        """Answer a client. One that watches this node keeps its place among the watchers, or is refused."""
        if first.since_s is not None:
            if len(self._watchers) >= MOST_WATCHERS:
                await SCHEMA.send(channel, Goodbye(WATCHED_ENOUGH, refused=True))
                return
            self._watchers[channel] = None
        await self._reply(channel, first)

    async def answer_again(self, channel: Channel) -> None:
        """Answer the further requests of a client, if it watches this node; then close its channel."""
        try:
            while channel in self._watchers and not self._closed:
                async with self._host.clock.timeout(WATCHER_SILENCE_S):
                    request = expect(await SCHEMA.recv(channel), StatusRequest, channel.peer)
                    await self._reply(channel, request)
        except (ChannelError, TimeoutError):
            pass  # it watches no longer
        finally:
            await channel.close()

    def left(self, channel: Channel) -> None:
        """Give the place of this client to others."""
        if channel in self._watchers:
            del self._watchers[channel]
            self._left.tell()

    async def close(self) -> None:
        """Answer each watcher once more, and close the channels."""
        self._closed = True
        with suppress(TimeoutError):
            async with self._host.clock.timeout(LAST_ANSWER_S):
                while self._watchers:
                    await self._left.next()
        for channel in list(self._watchers):
            await channel.close()

    async def _reply(self, channel: Channel, request: StatusRequest) -> None:
        reply = self._source.asked(request)
        if request.since_s is not None:
            reply = msgspec.structs.replace(reply, details=await self._source.details(request.since_s))
        await SCHEMA.send(channel, fitting(reply, MESSAGE_LIMIT_BYTES))


async def details_of(host: Host, history: RunHistory, needed: int, since_s: float) -> Details:
    """Return the state of this machine and of its work, for a client that watches it."""
    return Details(
        host.clock.elapsed(),
        host.device.chip,
        await host.readings(),
        history.title,
        history.total_steps,
        needed,
        history.steps(since_s),
        history.messages(since_s),
    )


class ControlConnection:
    """The control connection to one node."""

    def __init__(self, channel: Channel, status: Status, dialler: str) -> None:
        self.channel = channel
        self.us = status.us
        self.dialler = dialler
        self.signs = 0
        self._outbox: asyncio.Queue[ControlMessage] = asyncio.Queue(OUTBOX)

    def put(self, message: ControlMessage) -> None:
        """Queue a message; a stuck connection drops it, and the sender repeats it later."""
        if not self._outbox.full():
            self._outbox.put_nowait(message)

    async def send_all(self) -> None:
        while True:
            await SCHEMA.send(self.channel, await self._outbox.get())


class ControlConnections:
    """All control connections of this node."""

    def __init__(self, host: Host, owner: ConnectionHandler) -> None:
        self._host = host
        self._owner = owner
        self._lines: dict[str, ControlConnection] = {}
        self._admission = AdmissionQueue(host)
        self._clients = StatusClients(host, owner)
        self._closed = False

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(self._lines)

    def address(self, node: str) -> str:
        """Return the remote address of the connection to a node; empty if there is none."""
        line = self._lines.get(node)
        return "" if line is None else line.channel.peer

    def send(self, node: str, message: ControlMessage) -> None:
        line = self._lines.get(node)
        if line is not None:
            line.put(message)

    def send_all(self, message: ControlMessage) -> None:
        for line in self._lines.values():
            line.put(message)

    async def serve(self, listener: Listener) -> None:
        try:
            await self._admission.accept(listener, self._called)
        finally:
            await listener.close()

    async def dial(self, address: str, timeout_s: float, node: str = "") -> str:
        """Connect to that node, or to the one at that address. Return its id once it is connected (or is this node);
        raise an error if it cannot be."""
        us = self._owner.status().us.node

        def is_peer(identity: str) -> bool:
            return identity == node if node else identity != us

        try:
            channel = await self._host.connect(address, timeout_s=timeout_s, is_peer=is_peer)
        except WrongPeer as error:
            if error.identity != us:
                raise
            return us
        try:
            channel.limit(MESSAGE_LIMIT_BYTES)
            late = f"{address} did not say who it is within {HELLO_TIMEOUT_S:g} s"
            async with within(self._host.clock, HELLO_TIMEOUT_S, late):
                ours = self._owner.hello()
                theirs = _hello(await SCHEMA.ask(channel, ours), channel)
            await self._introduce(channel, theirs, ours, self._owner.status().us.node)
        except BaseException:
            await channel.close()
            raise
        return theirs.status.us.node

    async def close(self, reason: str) -> None:
        """Send a goodbye to all nodes, and accept no more connections."""
        self._closed = True
        for line in list(self._lines.values()):
            try:
                async with self._host.clock.timeout(PROBE_S):
                    await SCHEMA.send(line.channel, Goodbye(reason))
            except (ChannelError, TimeoutError):
                pass  # it will notice by itself
            await line.channel.close()
        await self._clients.close()

    def _called(self, channel: Channel, number: int) -> None:
        self._host.spawn(self._greet(channel), name=f"control caller {number}")

    async def _greet(self, channel: Channel) -> None:
        known = False
        try:
            channel.limit(MESSAGE_LIMIT_BYTES)
            async with self._host.clock.timeout(HELLO_TIMEOUT_S):
                first = await SCHEMA.recv(channel)
                if isinstance(first, StatusRequest):
                    await self._clients.answer(channel, first)
                elif not isinstance(first, ProbeRequest | MeetingRequest):
                    theirs, ours = _hello(first, channel), self._owner.hello()
                    await SCHEMA.send(channel, ours)
            self._admission.known(channel)
            known = True
            if isinstance(first, StatusRequest):
                await self._clients.answer_again(channel)
                return
            if isinstance(first, ProbeRequest):
                await self._owner.probed(channel)
                return
            if isinstance(first, MeetingRequest):
                await self._owner.met(channel, first)
                return
            await self._introduce(channel, theirs, ours, theirs.status.us.node)
        except (HcsimError, TimeoutError) as error:
            self._owner.told(f"a call from {channel.peer} was not taken: {error or 'it said nothing'}")
            await channel.close()
        except BaseException:
            await channel.close()
            raise
        finally:
            self._clients.left(channel)
            if not known:
                self._admission.known(channel)

    async def _introduce(self, channel: Channel, hello: NodeHello, ours: NodeHello, dialler: str) -> None:
        """Decide whether a channel becomes the connection to that node; if so, run it.

        The status may have changed since the hello: what was sent meanwhile went to the connection before, if any."""
        us, theirs = self._owner.status().us, hello.status
        node = theirs.us.node
        if self._closed:
            await self._refuse(channel, "gone", "we have gone")
        if channel.identity and channel.identity != node:
            text = f"you say that you are {node}, and your key says {channel.identity}"
            await self._refuse(channel, "other_identity", text)
        if (node, theirs.us.boot) == (us.node, us.boot):
            await channel.close()  # one list of addresses serves all machines, so we are in it
            return
        if node == us.node:
            await self._refuse(channel, *COPIED)
        old = self._lines.get(node)
        anew = old is not None and old.us.boot != theirs.us.boot
        if old is not None and (anew or dialler > old.dialler) and await self._answers(old):
            if anew:
                await self._refuse(channel, *COPIED)
            await channel.close()
            return
        if self._closed:
            await channel.close()
            return
        old = self._lines.get(node)
        line = self._lines[node] = ControlConnection(channel, theirs, dialler)
        if old is not None:
            await old.channel.close()
        if self._lines.get(node) is line:
            self._host.spawn(self._run(line, node), name=f"line to {theirs.us.name}")
            if (status := self._owner.status()) != ours.status:
                line.put(HeartbeatMessage(0, status))
            self._owner.up(hello)

    async def _refuse(self, channel: Channel, reason: str, text: str) -> None:
        self._host.metrics.counter("hcsim_admission_refusals_total", reason=reason).add()
        try:
            await SCHEMA.send(channel, Goodbye(text, refused=True))
        finally:
            await channel.close()
        raise PeerRefused(f"{channel.peer} was refused: {text}", channel.peer)

    async def _answers(self, line: ControlConnection) -> bool:
        """Return whether the node at the other end still answers."""
        signs = line.signs
        line.put(HeartbeatMessage(1, self._owner.status()))
        await self._host.clock.sleep(PROBE_S)
        return self._lines.get(line.us.node) is line and line.signs > signs

    async def _run(self, line: ControlConnection, node: str) -> None:
        sending = self._host.spawn(line.send_all(), name=f"outbox for {line.us.name}")
        goodbye: Goodbye | None = None
        try:
            while True:
                message = await SCHEMA.recv(line.channel)
                line.signs += 1
                if isinstance(message, Goodbye):
                    goodbye = message
                    what = "refused us" if message.refused else "has gone"
                    self._owner.told(f"{line.us.name} {what}: {message.reason}")
                    break
                self._owner.said(node, message)
        except RemoteProtocolError as error:
            self._owner.told(str(error))
        except ChannelError:
            pass  # whoever needs the node dials again
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            await line.channel.close()
            if self._lines.get(node) is line:
                del self._lines[node]
                if not self._closed:
                    self._owner.down(node, goodbye)


def _hello(message: ControlMessage, channel: Channel) -> NodeHello:
    if isinstance(message, Goodbye):
        raise PeerRefused(f"{channel.peer} refused us: {message.reason}", channel.peer)
    return expect(message, NodeHello, channel.peer)
