"""torch.distributed as it is on our clusters: everybody meets at one store, and every backend is hcsim."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d
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
    _replace("init_process_group", lambda given: _ours(given, "backend", 0))
    _replace("new_group", lambda given: _ours(given, "backend", 2))


def _ours(given: tuple[list[Any], dict[str, Any]], name: str, place: int) -> None:
    """Make the backend among the arguments ours: gloo, nccl and mpi are the machine's business, and it has none."""
    positional, named = given
    if place < len(positional):
        positional[place] = positional[place] if str(positional[place]) in _LEFT_ALONE else NAME
    elif str(named.get(name)) not in _LEFT_ALONE:
        named[name] = NAME


def _replace(function: str, change: Callable[[tuple[list[Any], dict[str, Any]]], None]) -> None:
    """Have the function called with other arguments, wherever in torch it is known under its name."""
    original = getattr(distributed_c10d, function)

    @wraps(original)
    def replaced(*positional: Any, **named: Any) -> Any:
        given = (list(positional), named)
        change(given)
        return original(*given[0], **given[1])

    for module in (dist, *(module for name, module in sys.modules.items() if name.startswith("torch.distributed"))):
        if getattr(module, function, None) is original:
            setattr(module, function, replaced)
