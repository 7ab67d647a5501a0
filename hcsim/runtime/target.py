"""Addresses whose scheme says what carries the bytes.

host:port             TCP
ws://host:port/path   WebSocket; wss:// with TLS, as behind an HTTPS tunnel or reverse proxy
grpc://host:port      gRPC
"""

from __future__ import annotations

from typing import NamedTuple

from hcsim.errors import ConfigError
from hcsim.runtime.address import hosts_of

TCP = "tcp"
SCHEMES = ("ws", "wss", "grpc")
_DEFAULT_PORTS = {"ws": 80, "wss": 443}


class Target(NamedTuple):
    """An address, taken apart."""

    text: str
    scheme: str
    hosts: tuple[str, ...]
    """Where the machine is, the best place first."""
    port: int
    path: str = ""

    def encrypted(self, *, has_tls: bool) -> bool:
        """Whether what goes there is encrypted."""
        return self.scheme == "wss" or (self.scheme != "ws" and has_tls)


def parse(address: str) -> Target:
    """Take an address apart."""
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
