"""The checks by name, each with its time limit and what to do if it fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec

import msgspec

from hcsim.selftest.arena import Arena, GrpcArena, RealArena, SharedArena, TlsArena, VirtualArena, WebSocketArena
from hcsim.selftest.contracts import ADMISSION, CHANNELS, CLOCKS, Contract, NotHere, check_contracts

_REBUILD = "pip install --force-reinstall --no-deps hcsim"
_REPORT = "please report it with `hcsim selftest --json`"
_FIREWALL = "a firewall or another program may stand between two programs of this machine; see `hcsim doctor`"


class Check(msgspec.Struct, frozen=True):
    """One line of the report."""

    run: Callable[[], str]
    """Returns what was found. Raises `NotHere`, or what is wrong."""
    limit_s: float
    remedy: str


def _hold(arena: Callable[[], Arena], contracts: tuple[Contract, ...]) -> str:
    return f"{check_contracts(arena(), contracts)} promises hold"


def _over_shared_memory(check: Callable[[], str]) -> str:
    if find_spec("hcsim.real.shm.rings") is None:
        raise NotHere("shared memory was not compiled: TCP is used instead")
    if os.environ.get("HCSIM_SHARED_MEMORY") == "0":
        raise NotHere("HCSIM_SHARED_MEMORY=0: TCP is used instead")
    return check()


def _over_grpc(check: Callable[[], str]) -> str:
    if find_spec("grpc") is None:
        raise NotHere("grpcio is not installed")
    return check()


def _same_collectives(arena: Callable[..., Arena]) -> str:
    from hcsim.selftest.collectives import WORLDS, check_collectives

    count = check_collectives(arena)
    return f"{count} collectives of {' and '.join(map(str, WORLDS))} ranks have the simulated bits"


def _compressors() -> str:
    from hcsim.selftest.machine import check_compressors

    return check_compressors()


def _disk() -> str:
    from hcsim.selftest.machine import check_disk

    return check_disk()


def _processes() -> str:
    from hcsim.selftest.machine import check_processes

    return check_processes()


def _device() -> str:
    from hcsim.selftest.machine import check_device

    return check_device()


def _mdns() -> str:
    from hcsim.selftest.machine import check_mdns

    return check_mdns()


def _elastic() -> str:
    from hcsim.selftest.elastic import check_elastic

    return check_elastic()


def _checks() -> Mapping[str, Check]:
    memory = f"{_REBUILD}; or HCSIM_SHARED_MEMORY=0"
    carriers: dict[str, tuple[Callable[..., Arena], Callable[[Callable[[], str]], str], str]] = {
        "virtual": (VirtualArena, _called, _REPORT),
        "tcp": (RealArena, _called, _FIREWALL),
        "shared": (SharedArena, _over_shared_memory, memory),
        "tls": (TlsArena, _called, "pip install --upgrade cryptography; a Python with its own OpenSSL (python.org)"),
        "websocket": (WebSocketArena, _called, "pip install --upgrade aiohttp"),
        "grpc": (GrpcArena, _over_grpc, "pip install --upgrade grpcio"),
    }
    found = {"clocks": Check(partial(_hold, RealArena, CLOCKS), 20.0, "let the machine do less at the same time")}
    for name, (arena, within, remedy) in carriers.items():
        found[f"channels:{name}"] = Check(partial(within, partial(_hold, arena, CHANNELS)), 60.0, remedy)
    for name in ("tcp", "shared", "tls", "websocket"):
        arena, within, remedy = carriers[name]
        found[f"admission:{name}"] = Check(partial(within, partial(_hold, arena, ADMISSION)), 30.0, remedy)
    for name in ("tcp", "shared", "tls"):
        arena, within, remedy = carriers[name]
        found[f"collectives:{name}"] = Check(partial(within, partial(_same_collectives, arena)), 60.0, remedy)
    return found | {
        "compressors": Check(_compressors, 60.0, _REBUILD),
        "disk": Check(_disk, 60.0, "free some disk space; let TMPDIR be on a local disk"),
        "mdns": Check(_mdns, 30.0, "allow multicast in the firewall (UDP 5353); or name the others: [cluster] peers"),
        "processes": Check(_processes, 60.0, _REPORT),
        "device": Check(_device, 60.0, "update macOS and torch; meanwhile --set device=cpu"),
        "elastic": Check(_elastic, 150.0, _REPORT),
    }


def _called(check: Callable[[], str]) -> str:
    return check()


CHECKS = _checks()
