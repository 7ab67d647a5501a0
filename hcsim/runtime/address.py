"""Addresses as users write them: host:port, or [v6]:port.

A machine with several interfaces has several hosts in one address: `10.0.0.7|192.168.1.7:52416`, the best
first.

An address may have a scheme, which selects the carrier:

host:port             TCP
ws://host:port/path   WebSocket; wss:// with TLS, as behind an HTTPS tunnel or reverse proxy
grpc://host:port      gRPC
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hcsim.errors import ConfigError

TCP = "tcp"
SCHEMES = ("ws", "wss", "grpc")
_DEFAULT_PORTS = {"ws": 80, "wss": 443}
LAST_PORT = 65535
_PORT_DIGITS = 5
"""Python does not parse a number of thousands of digits."""


def split_address(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    is_port = port.isdecimal() and len(port) <= _PORT_DIGITS and int(port) <= LAST_PORT
    if not colon or not host or not is_port or (":" in host and not bracketed):
        raise ConfigError(f"{address!r} is not an address: write host:port, or [::1]:port for IPv6")
    return host.strip("[]"), int(port)


def hosts_of(address: str) -> tuple[tuple[str, ...], int]:
    hosts, colon, port = address.rpartition(":")
    return tuple(split_address(f"{host}{colon}{port}")[0] for host in hosts.split("|")), int(port)


def address_at(hosts: Sequence[str], port: int) -> str:
    return "|".join(f"[{host}]" if ":" in host else host for host in hosts) + f":{port}"


def with_port(address: str, port: int) -> str:
    """Return the address with this port if it has none. Addresses of other carriers (ws://…) are returned
    unchanged."""
    if "://" in address or address.count(":") == 1 or "]:" in address:
        return address
    return f"[{address}]:{port}" if ":" in address and not address.startswith("[") else f"{address}:{port}"


def join_address(sockaddr: tuple[Any, ...]) -> str:
    host, port = sockaddr[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Target(NamedTuple):
    """A parsed address."""

    text: str
    scheme: str
    hosts: tuple[str, ...]
    port: int
    path: str = ""

    def encrypted(self, *, has_tls: bool) -> bool:
        """Return whether connections to it are encrypted."""
        return self.scheme == "wss" or (self.scheme != "ws" and has_tls)


def parse(address: str) -> Target:
    scheme, separator, rest = address.partition("://")
    if not separator:
        return Target(address, TCP, *hosts_of(address))
    if scheme not in SCHEMES:
        raise ConfigError(f"{address!r}: {scheme}:// is not known; write host:port, or one of {', '.join(SCHEMES)}://")
    place, slash, path = rest.partition("/")
    if path and scheme == "grpc":
        raise ConfigError(f"{address!r}: a gRPC address is grpc://host:port, without a path")
    if scheme in _DEFAULT_PORTS and (":" not in place or place.endswith("]")):
        place = f"{place}:{_DEFAULT_PORTS[scheme]}"
    return Target(address, scheme, *hosts_of(place), slash + path)
