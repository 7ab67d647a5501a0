"""Other carriers than plain TCP, chosen by the scheme of an address.

host:port             TCP
ws://host:port/path   WebSocket; wss:// with TLS, as behind an HTTPS tunnel or reverse proxy
grpc://host:port      gRPC
"""

from __future__ import annotations

import ssl
from typing import Any, NamedTuple

from hcsim.errors import ConfigError
from hcsim.real.certificates import ClusterTls
from hcsim.real.tls import Tls, TlsFiles
from hcsim.runtime.address import hosts_of
from hcsim.runtime.channel import Channel, Listener

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


async def dial(target: Target, tls: TlsFiles | ClusterTls | None) -> Channel:
    """One attempt to open a channel; raises `OSError` where another may succeed."""
    if target.scheme == "grpc":
        from hcsim.real.grpc import dial as dial_grpc

        return await dial_grpc(target.text, target.hosts[0], target.port, _files(target, tls))
    from hcsim.real.websocket import dial as dial_websocket

    context: ssl.SSLContext | None = None
    if target.scheme == "wss":
        # Without a CA of one's own it is a public server, whose name its certificate has to have.
        context = ssl.create_default_context() if tls is None else Tls(tls).context(server_side=False)
    return await dial_websocket(target.text, context)


async def listen(
    target: Target, family: int, sockaddr: Any, tls: TlsFiles | ClusterTls | None, handshake_timeout_s: float
) -> Listener:
    """Accept channels."""
    if target.scheme == "grpc":
        from hcsim.real.grpc import GrpcListener

        return await GrpcListener.open(sockaddr, _files(target, tls))
    from hcsim.real.websocket import WebSocketListener

    if target.scheme == "wss" and tls is None:
        raise ConfigError(
            f"{target.text}: to listen with TLS takes a certificate, its key and a CA; "
            "behind a tunnel or proxy that has them, listen at ws://127.0.0.1:…"
        )
    context = Tls(tls).context(server_side=True) if target.scheme == "wss" and tls is not None else None
    return await WebSocketListener.open(target.path, family, sockaddr, context, handshake_timeout_s)


def _files(target: Target, tls: TlsFiles | ClusterTls | None) -> TlsFiles | None:
    if isinstance(tls, ClusterTls):
        raise ConfigError(f"{target.text}: gRPC takes no Ed25519 keys; give TLS files with ECDSA or RSA keys")
    return tls
