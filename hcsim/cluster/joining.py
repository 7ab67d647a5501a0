"""Joining a cluster with an invitation: an exchange between one member and one newcomer.

An invitation is a secret shared by two machines. With it they find each other, prove that they know it and
which keys they have, and encrypt the exchange, in the same way as members do with the cluster's secret. Then

    newcomer                            member
      | knock: name, cluster if it has one →
      |    ← welcome: first secret, list  |   with the newcomer on it; or denied: reason
      | thanks →                          |   the newcomer has saved it

The member saves the list before it sends the welcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from hcsim.cluster.discovery import place_of
from hcsim.errors import ConfigError, HcsimError, PeerRefused, RemoteProtocolError
from hcsim.identity.keys import SECRET_BYTES, ClusterSecret, node_id_of
from hcsim.identity.trust_list import MOST_BYTES, MOST_NAME, Invitation, PublicKey, TrustRecord
from hcsim.identity.trust_store import TrustStore
from hcsim.runtime.channel import Channel
from hcsim.runtime.host import Host, Service
from hcsim.transport.admission_queue import AdmissionQueue, one_line
from hcsim.transport.messages import Schema, expect

_ANSWER_S = 10.0
_LIMIT_BYTES = MOST_BYTES + 1024
_PROPERTY = "invitation"


class Knock(msgspec.Struct, frozen=True, tag="knock"):
    """A request to join."""

    public: PublicKey
    name: Annotated[str, Meta(min_length=1, max_length=MOST_NAME)]
    namespace: Annotated[bytes, Meta(max_length=32)] = b""
    """The cluster that the newcomer already belongs to under the name that this one is to have."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The newcomer is admitted."""

    first: Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    """The first secret of the cluster."""
    record: TrustRecord


class Denied(msgspec.Struct, frozen=True, tag="denied"):
    """The newcomer is rejected, with the reason."""

    reason: Annotated[str, Meta(max_length=1000)]


class Thanks(msgspec.Struct, frozen=True, tag="thanks"):
    """The newcomer has saved the welcome."""


JoinMessage: TypeAlias = Knock | Welcome | Denied | Thanks
SCHEMA: Schema[JoinMessage] = Schema(JoinMessage)


class InvitationServer:
    """The member's side. `host` accepts any peer that knows the invitation's secret."""

    def __init__(
        self, host: Host, trusted: TrustStore, first: ClusterSecret, invitation: Invitation, tell: Callable[[str], None]
    ) -> None:
        self._host = host
        self._trusted = trusted
        self._first = first
        self._invitation = invitation
        self._tell = tell
        self._callers = AdmissionQueue(host)
        self._news = asyncio.Event()

    async def serve(self, address: str, namespace: str) -> bool:
        """Wait for newcomers until the invitation is over; return whether it was used up."""
        listener = await self._host.listen(address)
        service = Service(f"invitation-{namespace[:8]}", address, {_PROPERTY: namespace, "at": address})
        announced = ""
        try:
            try:
                announced = await self._host.lan.advertise(service)
            except HcsimError as error:
                self._tell(f"not announced: {error}; the other machine has to name this one with --peer")
            accepting = self._host.spawn(self._callers.accept(listener, self._called), name="newcomers")
            accepting.add_done_callback(lambda done: self._news.set())
            clock = self._host.clock
            while not accepting.done() and not self._invitation.is_over(clock.elapsed()):
                self._news.clear()
                try:
                    async with clock.timeout(self._invitation.expires_at_s - clock.elapsed()):
                        await self._news.wait()
                except TimeoutError:
                    return False
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)
            return True
        finally:
            await listener.close()
            if announced:
                await self._host.lan.withdraw(announced)

    def _called(self, channel: Channel, number: int) -> None:
        self._host.spawn(self._greet(channel), name=f"newcomer {number}")

    async def _greet(self, channel: Channel) -> None:
        try:
            channel.limit(_LIMIT_BYTES)
            async with self._host.clock.timeout(_ANSWER_S):
                knock = expect(await SCHEMA.recv(channel), Knock, channel.peer)
                answer = self._answer(knock, channel)
                await SCHEMA.send(channel, answer)
                if isinstance(answer, Welcome):
                    expect(await SCHEMA.recv(channel), Thanks, channel.peer)
                    self._invitation.confirm(knock.public)
                    self._tell(f"{one_line(knock.name)} has joined, as node {node_id_of(knock.public)}")
                    self._news.set()
        except (HcsimError, TimeoutError) as error:
            self._tell(f"{channel.peer} did not join: {one_line(str(error)) or 'it did not answer in time'}")
        finally:
            self._callers.known(channel)
            await channel.close()

    def _answer(self, knock: Knock, channel: Channel) -> Welcome | Denied:
        name = one_line(knock.name)
        if channel.identity != node_id_of(knock.public):
            raise RemoteProtocolError(f"{channel.peer} knocks with a key that is not its own", channel.peer)
        if knock.namespace not in (b"", self._trusted.namespace):
            why = "that machine belongs to another cluster of that name already; give this one another with --name"
            self._tell(f"{name} did not join: {why}")
            return Denied(why)
        why = self._invitation.use(knock.public, self._host.clock.elapsed())
        if not why:
            try:
                self._trusted.enlist(knock.public, knock.name)
            except ConfigError as error:
                self._invitation.give_back(knock.public)
                why = str(error)
        if why:
            self._tell(f"{name} did not join: {why}")
            return Denied(why)
        return Welcome(self._first.data, self._trusted.record)


async def knock(host: Host, address: str, ours: Knock, timeout_s: float) -> tuple[Welcome, Channel]:
    """Ask to join at that address; call `thank` with the channel once the answer is saved."""
    channel = await host.connect(address, timeout_s=timeout_s)
    try:
        channel.limit(_LIMIT_BYTES)
        async with host.clock.timeout(_ANSWER_S):
            answer = await SCHEMA.ask(channel, ours)
        if isinstance(answer, Denied):
            raise PeerRefused(f"{channel.peer} does not take us in: {one_line(answer.reason)}", channel.peer)
        return expect(answer, Welcome, channel.peer), channel
    except TimeoutError:
        await channel.close()
        raise PeerRefused(f"{address} did not answer within {_ANSWER_S:g} s", address) from None
    except BaseException:
        await channel.close()
        raise


async def thank(channel: Channel) -> None:
    """Confirm that the answer is saved."""
    try:
        await SCHEMA.send(channel, Thanks())
    finally:
        await channel.close()


async def find(host: Host, namespace: str, look_s: float) -> str:
    """Return the address of the member that waits with that invitation; empty if none is announced."""
    try:
        async with host.clock.timeout(look_s):
            async for sighting in host.lan.browse():
                if sighting.service.properties.get(_PROPERTY) == namespace and not sighting.gone:
                    return place_of(sighting.service)
    except TimeoutError:
        pass
    return ""
