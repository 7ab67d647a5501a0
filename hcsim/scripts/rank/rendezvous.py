"""torch.distributed as it is on the simulated cluster: everybody meets at its store, and every backend is hcsim."""

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

from hcsim.scripts.rank.store import SimulatedStore
from hcsim.torch_backend import NAME

MASTER_PORT = 29500
_LEFT_ALONE = (NAME, "fake")


def environment(rank: int, world: int, first: str, life: int) -> dict[str, str]:
    """What torchrun would have set: one process on each machine."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "GROUP_WORLD_SIZE": str(world),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world),
        "ROLE_NAME": "default",
        "MASTER_ADDR": first,
        "MASTER_PORT": str(MASTER_PORT),
        "TORCHELASTIC_RUN_ID": "hcsim",
        "TORCHELASTIC_RESTART_COUNT": str(life - 1),
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def install(store: SimulatedStore) -> None:
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
