"""torch's key-value store: kept on the machine of rank 0 and called from the others, in both worlds.

As under torchrun it outlives the scripts, but not the machine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import msgspec

from hcsim.errors import CallRefused, ChannelError, DeadlineExceeded, HcsimError, UsageError
from hcsim.runtime.channel import Listener
from hcsim.runtime.host import Host
from hcsim.scripts.ipc import Stored
from hcsim.transport.rpc import Endpoint, Limits, Procedure, ProcedureRegistry

PORT = 29500
LINGER_S = 30.0
"""How long a rank waits for the others at the store once a script has failed, since the failed rank sets no
more keys. The store outlives its own machine's script by as long, for slower ranks."""
_MOST_WAIT_S = 1e9


class StoreRequest(msgspec.Struct, frozen=True, array_like=True):
    """One operation."""

    operation: str
    keys: tuple[str, ...]
    values: tuple[bytes, ...]
    amount: int


class StoreReply(msgspec.Struct, frozen=True, array_like=True):
    """The result of an operation."""

    number: int = 0
    values: tuple[bytes, ...] = ()


_STORE = Procedure("store", {"request": StoreRequest}, StoreReply)
_LIMITS = Limits(max_body_bytes=16 << 20)
"""torch stores serialised objects, so values of several MB are common."""


class StoreService:
    """The keys and their values."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}
        self._changed = asyncio.Condition()

    async def serve(self, host: Host, listener: Listener) -> None:
        """Serve connections at the listener for as long as the host lives."""
        registry = ProcedureRegistry()
        registry.serve(_STORE, self.do)
        while True:
            Endpoint(host, await listener.accept(), registry, _LIMITS)

    async def do(self, request: StoreRequest) -> StoreReply:
        """Carry out one operation, and wait where the operation waits."""
        keys, values = request.keys, request.values
        match request.operation:
            case "get" | "wait":
                await self._until(keys)
                return StoreReply(values=tuple(self._values[key] for key in keys) if request.operation == "get" else ())
            case "check":
                return StoreReply(int(all(key in self._values for key in keys)))
            case "num_keys":
                return StoreReply(len(self._values))
            case "list_keys":
                return StoreReply(values=tuple(key.encode() for key in sorted(self._values)))
            case "queue_len":
                return StoreReply(len(self._queues.get(keys[0], ())))
            case "queue_pop":
                return await self._popped(keys[0], wait=bool(request.amount))
        async with self._changed:
            self._changed.notify_all()
            return self._change(request.operation, keys, values, request.amount)

    def _change(self, operation: str, keys: Sequence[str], values: Sequence[bytes], amount: int) -> StoreReply:
        key, store = keys[0], self._values
        match operation:
            case "set":
                store.update(zip(keys, values, strict=True))
            case "add":
                try:
                    total = int(store.get(key, b"0")) + amount
                except ValueError:
                    raise CallRefused(f"{key} is {store[key][:40]!r}: nothing can be added to that") from None
                store[key] = str(total).encode()
                return StoreReply(total)
            case "compare_set":
                expected, desired = values
                if store.get(key, b"") == expected:
                    store[key] = desired
                return StoreReply(values=(store.get(key, expected),))
            case "append":
                store[key] = store.get(key, b"") + values[0]
            case "delete_key":
                return StoreReply(int(store.pop(key, None) is not None))
            case "queue_push":
                self._queues.setdefault(key, deque()).append(values[0])
            case unknown:
                raise CallRefused(f"a store does not {unknown}")
        return StoreReply()

    async def _until(self, keys: Sequence[str]) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: all(key in self._values for key in keys))

    async def _popped(self, key: str, *, wait: bool) -> StoreReply:
        async with self._changed:
            if wait:
                await self._changed.wait_for(lambda: bool(self._queues.get(key)))
            if not self._queues.get(key):
                raise CallRefused(f"the queue {key} is empty")
            return StoreReply(values=(self._queues[key].popleft(),))


class StoreClient:
    """One rank's connection to the store, opened on first use."""

    def __init__(self, host: Host, keeper: str, address: str) -> None:
        self._host = host
        self._keeper = keeper
        self._address = address
        self._endpoint: Endpoint | None = None
        self._under_way: dict[asyncio.Timeout, None] = {}
        self._hurried: tuple[str, float] | None = None

    def hurry(self, reason: str, within_s: float) -> None:
        """Limit all calls, also those in flight, to this time from now on: for this reason, what they wait for may
        never come."""
        if self._hurried is None or within_s < self._hurried[1]:
            self._hurried = reason, within_s
            self._reschedule(asyncio.get_running_loop().time() + within_s)

    def take_time(self) -> None:
        """Lift the limit of `hurry`."""
        self._hurried = None
        self._reschedule(None)

    def _reschedule(self, when_s: float | None) -> None:
        for limit in self._under_way:
            if not limit.expired():
                limit.reschedule(when_s)

    async def do(self, asked: Stored) -> StoreReply:
        """Carry out the operation within the rank's timeout, or the shorter limit of `hurry`."""
        try:
            async with asyncio.timeout(None) as limit:
                if self._hurried is not None:
                    limit.reschedule(asyncio.get_running_loop().time() + self._hurried[1])
                self._under_way[limit] = None
                try:
                    return await self._done(asked)
                finally:
                    del self._under_way[limit]
        except TimeoutError:
            if not limit.expired():
                raise
            why = self._hurried[0] if self._hurried is not None else "a script had failed"
            raise HcsimError(f"{asked.operation} of {', '.join(asked.keys)}: {why}") from None

    async def _done(self, asked: Stored) -> StoreReply:
        limit_s = _MOST_WAIT_S if asked.timeout_s is None else max(asked.timeout_s, 1e-3)
        request = StoreRequest(asked.operation, asked.keys, asked.values, asked.amount)
        what = f"{asked.operation} of {', '.join(asked.keys)}"
        try:
            async with self._host.clock.timeout(limit_s):
                if self._endpoint is None or self._endpoint.ended.done():
                    channel = await self._host.connect(self._address, timeout_s=limit_s)
                    self._endpoint = Endpoint(self._host, channel, limits=_LIMITS)
                return await self._endpoint.call(_STORE, request)
        except TimeoutError:
            raise DeadlineExceeded(f"the store on {self._keeper}: {what} took longer than {limit_s:g} s") from None
        except CallRefused:
            raise
        except UsageError as error:
            raise UsageError(f"{what} is too large for the store on {self._keeper}: {error}") from None
        except (ChannelError, HcsimError) as error:
            raise HcsimError(f"the store on {self._keeper} is gone ({what}): {error}") from error

    async def close(self) -> None:
        if self._endpoint is not None:
            await self._endpoint.close()
