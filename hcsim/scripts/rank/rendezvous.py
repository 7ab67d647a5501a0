"""torch.distributed on hcsim clusters: every rendezvous uses one store, kept on the machine of rank 0, and every
backend is hcsim.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, Protocol
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError, DistStoreError, distributed_c10d
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import _rendezvous_handlers

from hcsim.errors import CallRefused, DeadlineExceeded, UsageError
from hcsim.scripts.ipc import SimulatorReply, Stored, raised
from hcsim.torch_backend.options import NAME

_LEFT_ALONE = (NAME, "fake")


class StoreTransport(Protocol):
    """Carries out the store operations of a rank."""

    def ask(self, message: Stored, /) -> SimulatorReply: ...


class RemoteStore(Store):
    """A store in which each operation is a round trip over the network (the simulated one for a simulated
    rank).

    torch calls some methods by their C++ names."""

    def __init__(self, attendant: StoreTransport, prefix: str = "") -> None:
        super().__init__()
        self._attendant = attendant
        self._prefix = prefix

    def part(self, prefix: str) -> Any:
        """Return a store with a namespace of its own at the same place."""
        return RemoteStore(self._attendant, self._prefix + prefix)

    def set(self, key: str, value: str | bytes) -> None:
        self._do("set", [key], [value])

    def get(self, key: str) -> bytes:
        """Wait until the key has a value, and return it."""
        return self._do("get", [key])[1][0]

    def add(self, key: str, amount: int) -> int:
        """Add to the key's numeric value, which is initially 0, and return the sum."""
        return self._do("add", [key], amount=amount)[0]

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._do("check", keys)[0])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values."""
        self._do("wait", keys, timeout=timeout)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set the key to `desired` if its value is `expected`, or if it has no value and `expected` is empty.
        Return the value afterwards."""
        return self._do("compare_set", [key], [expected, desired])[1][0]

    def delete_key(self, key: str) -> bool:
        """Delete the key; return whether it existed."""
        return bool(self._do("delete_key", [key])[0])

    def num_keys(self) -> int:
        return self._do("num_keys", [])[0]

    def append(self, key: str, value: str | bytes) -> None:
        self._do("append", [key], [value])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait until all keys have values, and return them."""
        return list(self._do("get", keys)[1])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._do("set", keys, values)

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._do("queue_push", [key], [value])

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Remove and return the first value of the key's queue; `block`: wait for one if it is empty."""
        return self._do("queue_pop", [key], amount=int(block))[1][0]

    def queue_len(self, key: str) -> int:
        return self._do("queue_len", [key])[0]

    def list_keys(self) -> list[str]:
        names = [name.decode() for name in self._do("list_keys", [])[1]]
        return [name.removeprefix(self._prefix) for name in names if name.startswith(self._prefix)]

    def has_extended_api(self) -> bool:
        """Return True: append, multi_get and multi_set are supported."""
        return True

    def clone(self) -> RemoteStore:
        """Return this store: all clones share one connection."""
        return self

    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def _do(
        self,
        operation: str,
        keys: Sequence[str],
        values: Sequence[str | bytes] = (),
        amount: int = 0,
        timeout: timedelta | None = None,
    ) -> tuple[int, tuple[bytes, ...]]:
        allowed: timedelta = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]
        named = tuple(self._prefix + key for key in keys)
        encoded = tuple(value.encode() if isinstance(value, str) else bytes(value) for value in values)
        answer = self._attendant.ask(Stored(operation, named, encoded, amount, allowed.total_seconds()))
        if answer.failure is not None:
            error = raised(answer.failure)
            kind = (
                DistStoreError if isinstance(error, DeadlineExceeded | CallRefused | UsageError) else DistNetworkError
            )
            raise kind(str(error))
        return answer.number, answer.values


def install_store(store: RemoteStore) -> None:
    """Make torch use this store for every rendezvous, whatever address a script gives, and hcsim for every
    group."""

    def meet(url: str, **_: Any) -> Iterator[tuple[Store, int, int]]:
        query = parse_qs(urlparse(url).query)
        rank = int(query.get("rank", [os.environ["RANK"]])[0])
        world = int(query.get("world_size", [os.environ["WORLD_SIZE"]])[0])
        yield store, rank, world

    for scheme in ("env", "tcp", "file"):
        _rendezvous_handlers[scheme] = meet
    _adapt("init_process_group", lambda given: _ours(given, "backend", 0))
    _adapt("new_group", lambda given: _ours(given, "backend", 2))

    class TcpStore(Store):
        """A namespace of the rank's store, whichever address a script gives."""

        def __new__(
            cls,
            host_name: str,
            port: int,
            world_size: int | None = None,
            is_master: bool = False,
            timeout: timedelta = default_pg_timeout,
            **_: Any,
        ) -> Any:
            made = store.part(f"{host_name}:{port}/")
            made.set_timeout(timeout)
            made.host, made.port = host_name, port
            return made

    class FileStore(Store):
        """A namespace of the rank's store, in place of a file."""

        def __new__(cls, file_name: str, world_size: int = -1) -> Any:
            made = store.part(f"{file_name}/")
            made.path = file_name
            return made

    _replace("TCPStore", TcpStore)
    _replace("FileStore", FileStore)


def _ours(given: tuple[list[Any], dict[str, Any]], name: str, place: int) -> None:
    """Replace the backend among the arguments (gloo, nccl, mpi) by hcsim."""
    positional, named = given
    if place < len(positional):
        positional[place] = positional[place] if str(positional[place]) in _LEFT_ALONE else NAME
    elif str(named.get(name)) not in _LEFT_ALONE:
        named[name] = NAME


def _adapt(function: str, change: Callable[[tuple[list[Any], dict[str, Any]]], None]) -> None:
    """Wrap the torch function so that it is called with changed arguments."""
    original = getattr(distributed_c10d, function)

    @wraps(original)
    def adapted(*positional: Any, **named: Any) -> Any:
        given = (list(positional), named)
        change(given)
        return original(*given[0], **given[1])

    _replace(function, adapted)


def _replace(name: str, other: Any) -> None:
    """Replace an object in every torch module that has it under this name."""
    original = getattr(dist, name)
    for module in (dist, *(module for path, module in sys.modules.items() if path.startswith("torch.distributed"))):
        if getattr(module, name, None) is original:
            setattr(module, name, other)
