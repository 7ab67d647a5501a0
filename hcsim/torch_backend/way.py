"""How the ranks of a program reach each other: at which addresses, and how protected."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping

import msgspec

from hcsim.errors import ConfigError
from hcsim.identity.handshake import Credentials
from hcsim.real.interfaces import host_name, list_interfaces, reachable_at
from hcsim.real.keys import beside_a_node, default_home, load_credentials

CLUSTER = "HCSIM_CLUSTER"
ADDRESSES = "HCSIM_ADDRESSES"
INSECURE = "HCSIM_INSECURE"


class Way(msgspec.Struct, frozen=True):
    """What a process decides before its first group."""

    hosts: tuple[str, ...]
    """Where the others reach us, the best first."""
    proved: Credentials | None = None
    """What we prove ourselves with as members of a cluster."""
    insecure: bool = False


def way_of(environment: Mapping[str, str]) -> Way:
    """From the variables that torchrun and the user set."""
    name = environment.get(CLUSTER, "")
    insecure = environment.get(INSECURE, "") not in ("", "0")
    given = tuple(filter(None, environment.get(ADDRESSES, "").split(",")))
    hosts = given or (("127.0.0.1",) if _all_here(environment) else reachable_at(list_interfaces()))
    if name:
        # Several ranks may run on this machine, and its own node beside them.
        return Way(hosts, beside_a_node(load_credentials(default_home(), name, host_name())), insecure)
    if not insecure and not all(_is_loopback(host) for host in hosts):
        raise ConfigError(
            f"the ranks of this program are on several machines ({', '.join(hosts)}), and nothing protects what they"
            f" send: set {CLUSTER} to a cluster that all of them have joined (hcsim cluster create), or {INSECURE}=1"
            " where you trust everybody on the network"
        )
    return Way(hosts, None, insecure)


def _all_here(environment: Mapping[str, str]) -> bool:
    """Whether all ranks are on this machine, by what torchrun says, or else where they meet."""
    world = environment.get("WORLD_SIZE")
    if world is not None and world == environment.get("LOCAL_WORLD_SIZE"):
        return True
    if "LOCAL_WORLD_SIZE" in environment:
        return False
    return _is_loopback(environment.get("MASTER_ADDR", "localhost"))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except (OSError, ValueError):
        return False
