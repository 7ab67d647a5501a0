"""torch.distributed as it is on our clusters: everybody meets at one store, and every backend is hcsim."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import wraps
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import _rendezvous_handlers

from hcsim.scripts.rank.store import RemoteStore
from hcsim.torch_backend import NAME

_LEFT_ALONE = (NAME, "fake")


def install(store: RemoteStore) -> None:
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
