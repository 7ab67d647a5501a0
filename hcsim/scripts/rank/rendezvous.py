"""torch.distributed as it is on our clusters: everybody meets at one store, kept at the machine of rank 0, and every
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
from hcsim.scripts.conversation import Answer, Stored, raised
from hcsim.torch_backend.options import NAME

_LEFT_ALONE = (NAME, "fake")


class Attendant(Protocol):
    """Whoever carries out what a rank asks for."""

    def ask(self, message: Stored, /) -> Answer:
        """Ask, and wait for the answer."""


class RemoteStore(Store):
    """Each operation is a round trip over the network, a simulated one for a simulated rank.

    torch calls some methods by the names that they have in C++."""

    def __init__(self, attendant: Attendant, prefix: str = "") -> None:
        super().__init__()
        self._attendant = attendant
        self._prefix = prefix

    def part(self, prefix: str) -> Any:
        """A store of its own at the same place."""
        return RemoteStore(self._attendant, self._prefix + prefix)

    def set(self, key: str, value: str | bytes) -> None:
        """Let the key have this value."""
        self._do("set", [key], [value])

    def get(self, key: str) -> bytes:
        """Its value, once it has one."""
        return self._do("get", [key])[1][0]

    def add(self, key: str, amount: int) -> int:
        """Add to the number that is its value, if it has one."""
        return self._do("add", [key], amount=amount)[0]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all have values."""
        return bool(self._do("check", keys)[0])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all have values."""
        self._do("wait", keys, timeout=timeout)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Change the value if it is the expected one, or there is none and none was expected; what it is then."""
        return self._do("compare_set", [key], [expected, desired])[1][0]

    def delete_key(self, key: str) -> bool:
        """Forget the key; whether there was one."""
        return bool(self._do("delete_key", [key])[0])

    def num_keys(self) -> int:
        """How many keys there are."""
        return self._do("num_keys", [])[0]

    def append(self, key: str, value: str | bytes) -> None:
        """Put this at the end of its value."""
        self._do("append", [key], [value])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of all, once they have them."""
        return list(self._do("get", keys)[1])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Let each have its value."""
        self._do("set", keys, values)

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Put this at the end of the key's queue."""
        self._do("queue_push", [key], [value])

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first of the key's queue, waiting for one if there is none."""
        return self._do("queue_pop", [key], amount=int(block))[1][0]

    def queue_len(self, key: str) -> int:
        """How many are in the key's queue."""
        return self._do("queue_len", [key])[0]

    def list_keys(self) -> list[str]:
        """All keys, in order."""
        names = [name.decode() for name in self._do("list_keys", [])[1]]
        return [name.removeprefix(self._prefix) for name in names if name.startswith(self._prefix)]

    def has_extended_api(self) -> bool:
        """It has: append, multi_get, multi_set."""
        return True

    def clone(self) -> RemoteStore:
        """There is one line, which all use."""
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
    """Have torch meet at this store, whatever address a script gives, and make groups of ours."""

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
        """Whichever machine a script names, what is kept there is part of our store."""

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
        """The same for a file."""

        def __new__(cls, file_name: str, world_size: int = -1) -> Any:
            made = store.part(f"{file_name}/")
            made.path = file_name
            return made

    _replace("TCPStore", TcpStore)
    _replace("FileStore", FileStore)


def _ours(given: tuple[list[Any], dict[str, Any]], name: str, place: int) -> None:
    """Make the backend among the arguments ours: gloo, nccl and mpi are the machine's business, and it has none."""
    positional, named = given
    if place < len(positional):
        positional[place] = positional[place] if str(positional[place]) in _LEFT_ALONE else NAME
    elif str(named.get(name)) not in _LEFT_ALONE:
        named[name] = NAME


def _adapt(function: str, change: Callable[[tuple[list[Any], dict[str, Any]]], None]) -> None:
    """Have the function called with other arguments."""
    original = getattr(distributed_c10d, function)

    @wraps(original)
    def adapted(*positional: Any, **named: Any) -> Any:
        given = (list(positional), named)
        change(given)
        return original(*given[0], **given[1])

    _replace(function, adapted)


def _replace(name: str, other: Any) -> None:
    """Put something in a thing's place, wherever in torch it is known under its name."""
    original = getattr(dist, name)
    for module in (dist, *(module for path, module in sys.modules.items() if path.startswith("torch.distributed"))):
        if getattr(module, name, None) is original:
            setattr(module, name, other)
