"""Other carriers than plain TCP, chosen by the scheme of an address (see `runtime.target`).

Whom a caller of wss:// trusts depends on what it has:

nothing, or a cluster's key   a public server, whose certificate must be of that name, from an authority that this
                              machine trusts. That is the tunnel's or proxy's, and says nothing about who is behind
                              it: members prove that to each other by the admission handshake, over the WebSocket.
TLS files of its own          whoever their authority has signed, and both sides show a certificate: a proxy has to
                              have one of that authority's.

Whoever runs the tunnel can read and change what passes through it.
"""

from __future__ import annotations

import ssl
from typing import Any

from hcsim.errors import ConfigError
from hcsim.real.tls import ClusterTls, Tls, TlsFiles
from hcsim.runtime.channel import Channel, Listener
from hcsim.runtime.target import Target


async def dial(target: Target, tls: TlsFiles | ClusterTls | None) -> Channel:
    """One attempt to open a channel; raises `OSError` where another may succeed."""
    if target.scheme == "grpc":
        from hcsim.real.grpc import dial as dial_grpc

        return await dial_grpc(target.text, target.hosts[0], target.port, _files(target, tls))
    from hcsim.real.websocket import dial as dial_websocket

    context: ssl.SSLContext | None = None
    if target.scheme == "wss":
        context = Tls(tls).context(server_side=False) if isinstance(tls, TlsFiles) else ssl.create_default_context()
    return await dial_websocket(target.text, context)


async def listen(
    target: Target, family: int, sockaddr: Any, tls: TlsFiles | ClusterTls | None, handshake_timeout_s: float
) -> Listener:
    """Accept channels."""
    if target.scheme == "grpc":
        from hcsim.real.grpc import GrpcListener

        return await GrpcListener.open(sockaddr, _files(target, tls))
    from hcsim.real.websocket import WebSocketListener

    context: ssl.SSLContext | None = None
    if target.scheme == "wss":
        if not isinstance(tls, TlsFiles):
            raise ConfigError(
                f"{target.text}: to listen with TLS takes a certificate, its key and a CA in files; "
                "behind a tunnel or proxy that has them, listen at ws://127.0.0.1:…"
            )
        context = Tls(tls).context(server_side=True)
    return await WebSocketListener.open(target.path, family, sockaddr, context, handshake_timeout_s)


def _files(target: Target, tls: TlsFiles | ClusterTls | None) -> TlsFiles | None:
    if isinstance(tls, ClusterTls):
        raise ConfigError(f"{target.text}: gRPC takes no Ed25519 keys; give TLS files with ECDSA or RSA keys")
    return tls
