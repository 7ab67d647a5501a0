"""What calling and serving over one channel share."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from hcsim.errors import ChannelBroken, ChannelError, HcsimError, RemoteProtocolError
from hcsim.runtime.channel import Channel
from hcsim.runtime.host import Host
from hcsim.transport.rpc.inbox import Inbox
from hcsim.transport.rpc.messages import OF_CALL, OF_RESULT, Limits, Parcel, Release
from hcsim.transport.rpc.outbox import Outbox, Outgoing
from hcsim.transport.rpc.refs import Fetch, Refs
from hcsim.transport.rpc.values import arrays_bytes, oversized


class Line:
    """A channel with what is on its way over it, and what has been lent over it."""

    def __init__(self, host: Host, channel: Channel, limits: Limits, fetch: Fetch) -> None:
        self.host = host
        self.channel = channel
        self.limits = limits
        self.ended: asyncio.Future[HcsimError] = asyncio.get_running_loop().create_future()
        """Done, with the reason, once the channel is of no more use."""
        self.refs = Refs(channel.peer, limits.max_refs, self._dropped, fetch)
        self.inbox = Inbox(channel.peer, lambda key: self.known(*key))
        self.outbox = Outbox(channel)
        self.last = {OF_CALL: 0, OF_RESULT: 0}
        """The number of the peer's last call, and of ours, which its results answer."""

    @property
    def peer(self) -> str:
        """The other end: who it has proved to be, or where it is."""
        return self.channel.identity or self.channel.peer

    def known(self, step: int, number: int) -> bool:
        """Whether there has been a call of that number, theirs (OF_CALL) or ours (OF_RESULT)."""
        return 0 < number <= self.last.get(step, 0)

    def expect(self, right: bool, otherwise: str) -> None:
        """The peer breaks the protocol unless this is right."""
        if not right:
            raise RemoteProtocolError(f"{self.peer} {otherwise}", self.channel.peer)

    def too_much(self, parcel: Parcel) -> str:
        """Why a parcel is not to be received, if it is not."""
        objection = oversized(parcel, self.limits)
        if not objection and self.inbox.held_bytes + arrays_bytes(parcel) > self.limits.max_held_bytes:
            return f"more than {self.limits.max_held_bytes} bytes of arrays would be under way"
        return objection

    def over(self, name: str) -> HcsimError:
        """What a call comes to when the channel has ended."""
        reason = self.ended.result()
        kind = type(reason) if isinstance(reason, ChannelError) else ChannelBroken
        return kind(f"{name} at {self.peer} was not answered: {reason}", self.channel.peer)

    def _dropped(self, number: int, times: int) -> None:
        """Python has freed a reference of theirs, perhaps in the middle of something."""
        with suppress(RuntimeError):  # the loop has ended, and so has the channel
            asyncio.get_running_loop().call_soon(self.outbox.put, Outgoing(Release(number, times)))
