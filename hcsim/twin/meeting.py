"""The members of a running cluster measure the links between them, when a client asks them to.

The client tells each its rank, hears where it listens, and tells all where the others are. Then they are a group for a
moment, over the same TLS as in training, and the client hears what each has found.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from hcsim.cluster.control_connections import MESSAGE_LIMIT_BYTES
from hcsim.cluster.messages import (
    SCHEMA,
    MeetingBegin,
    MeetingNews,
    MeetingPlace,
    MeetingRequest,
    MeetingResult,
    StatusReply,
)
from hcsim.collectives.group import Group
from hcsim.collectives.select import Options
from hcsim.errors import ChannelBroken, ChannelError, HcsimError
from hcsim.real.host import RealHost, RealOptions
from hcsim.real.interfaces import host_name
from hcsim.real.keys import beside_a_node, load_credentials
from hcsim.real.tls import ClusterTls
from hcsim.runtime.address import address_at, hosts_of
from hcsim.runtime.channel import Channel
from hcsim.runtime.host import Host
from hcsim.transport.admission import AdmittedHost
from hcsim.transport.groups import GroupMembership
from hcsim.transport.messages import expect
from hcsim.twin.links import Pace, Surveyed, held_out, joined, survey

_OPEN_S = 30.0
_FLOW_S = 120.0
"""How long one step may take."""
LONGEST_S = 1800.0
_NAMES = ("flows", "calls")


async def take_part(host: Host, control: str, channel: Channel, request: MeetingRequest) -> None:
    """Serve a request that came over this channel to the member with that control address, until the client goes."""
    try:
        async with host.clock.timeout(LONGEST_S):
            found = await _found(host, control, channel, request)
        result = MeetingResult(msgspec.json.encode(found))
    except (HcsimError, TimeoutError) as error:
        result = MeetingResult(error=str(error) or f"it took longer than {LONGEST_S:g} s")
    await SCHEMA.send(channel, result)


async def _cancel_if_gone(channel: Channel, work: asyncio.Task[Surveyed]) -> None:
    """Cancel the work when the client, which has nothing more to say, has closed the channel."""
    with suppress(HcsimError):
        await SCHEMA.recv(channel)
    work.cancel()


async def _found(host: Host, control: str, channel: Channel, request: MeetingRequest) -> Surveyed:
    hosts, _ = hosts_of(control)
    async with AsyncExitStack() as stack:
        listeners = []
        for _ in _NAMES:
            listeners.append(await host.listen(address_at(hosts, 0)))
            stack.push_async_callback(listeners[-1].close)
        ports = [int(listener.address.rpartition(":")[2]) for listener in listeners]
        await SCHEMA.send(channel, MeetingPlace(tuple(address_at(hosts, port) for port in ports)))
        async with host.clock.timeout(_OPEN_S):
            begin = expect(await SCHEMA.recv(channel), MeetingBegin, channel.peer)
        groups = []
        for number, (name, listener) in enumerate(zip(_NAMES, listeners, strict=True)):
            addresses = tuple(each[number] for each in begin.addresses)
            us = GroupMembership(request.rank, addresses, name=name, identities=begin.nodes)
            group = await Group.open(host, us, Options(timeout_s=_FLOW_S), listener)
            groups.append(await stack.enter_async_context(group))
        flows, calls = groups
        news: asyncio.Queue[MeetingNews] = asyncio.Queue()
        telling = host.spawn(_tell(channel, news), name="tell of the measurement")
        stack.callback(telling.cancel)
        work = host.spawn(_measured(flows, calls, news), name="measure the links")
        stack.callback(work.cancel)
        watching = host.spawn(_cancel_if_gone(channel, work), name="watch the client")
        stack.callback(watching.cancel)
        try:
            surveyed: Surveyed = await work
        except asyncio.CancelledError:
            if watching.done():
                raise ChannelBroken("the client has gone", channel.peer) from None
            raise
        media = [
            (request.rank, rank, interface.medium.value)
            for rank, (ours, _) in flows.ends.items()
            for interface in host.interfaces()
            if ours in interface.addresses
        ]
        await calls.barrier()
    return msgspec.structs.replace(surveyed, media=tuple(media))


async def _measured(flows: Group, calls: Group, news: asyncio.Queue[MeetingNews]) -> Surveyed:
    def tell(what: str) -> None:
        news.put_nowait(MeetingNews(what))

    def part(found: Surveyed) -> None:
        news.put_nowait(MeetingNews(data=msgspec.json.encode(found)))

    found = await survey(flows, calls, tell, Pace(), part)
    part(found)
    tell("an all-reduce, to be predicted")
    return await held_out(flows, found)


async def _tell(channel: Channel, news: asyncio.Queue[MeetingNews]) -> None:
    while True:
        await SCHEMA.send(channel, await news.get())


async def survey_cluster(
    home: Path,
    cluster: str,
    members: Sequence[StatusReply],
    tell: Callable[[str], None],
    part: Callable[[Surveyed], object],
) -> Surveyed:
    """Have these members measure the links between them; return what they have found. `part` is called with what is
    known before the end."""
    proved = beside_a_node(load_credentials(home, cluster, host_name()))
    tls = ClusterTls(proved.key, proved.secret)
    async with RealHost(RealOptions("asker", seed=secrets.randbits(64), tls=tls)) as host, AsyncExitStack() as stack:
        admitted = AdmittedHost(host, proved)
        channels = []
        for rank, told in enumerate(members):
            channel = await admitted.connect(told.status.control, timeout_s=_OPEN_S)
            stack.push_async_callback(channel.close)
            channel.limit(MESSAGE_LIMIT_BYTES)
            await SCHEMA.send(channel, MeetingRequest(rank, len(members)))
            channels.append(channel)
        parts: dict[int, list[Surveyed]] = {rank: [] for rank in range(len(members))}

        def take(rank: int, news: MeetingNews) -> None:
            if news.text and not rank:
                tell(news.text)
            if news.data:
                parts[rank].append(msgspec.json.decode(news.data, type=Surveyed))
                count = len(parts[rank])
                if min(map(len, parts.values())) == count:
                    part(joined([each[count - 1] for each in parts.values()]))

        async def heard(kind: type[R]) -> list[R]:
            return await asyncio.gather(
                *(
                    _heard(told, channel, partial(take, rank), kind)
                    for rank, (told, channel) in enumerate(zip(members, channels, strict=True))
                )
            )

        places = await heard(MeetingPlace)
        nodes = tuple(told.status.us.node for told in members)
        begin = MeetingBegin(tuple(place.addresses for place in places), nodes)
        for channel in channels:
            await SCHEMA.send(channel, begin)
        results = await heard(MeetingResult)
    return joined([msgspec.json.decode(result.data, type=Surveyed) for result in results])


R = TypeVar("R", MeetingPlace, MeetingResult)


async def _heard(told: StatusReply, channel: Channel, take: Callable[[MeetingNews], None], kind: type[R]) -> R:
    """Return the next message of that kind of a member; raise `HcsimError` if it cannot take part."""
    name = told.status.us.name
    try:
        while True:
            message = await SCHEMA.recv(channel)
            if isinstance(message, MeetingNews):
                take(message)
            elif isinstance(message, MeetingResult) and message.error:
                raise HcsimError(f"{name} cannot take part: {message.error}")
            elif isinstance(message, kind):
                return message
    except ChannelError as error:
        raise HcsimError(
            f"{name} does not take part any more ({error}): does it run the same hcsim as this machine?"
        ) from None
