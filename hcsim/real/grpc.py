"""Channels over gRPC: one bidirectional stream of byte messages each, without generated code.

Needs the extra `hcsim[grpc]`. With TLS files both sides prove their membership. gRPC's TLS differs in two ways.
It always compares names, which hcsim does not (see `tls`); so the client first reads the server's certificate,
and then expects the name in it. And it does not support Ed25519: certificates for gRPC have ECDSA or RSA keys.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from hcsim.errors import ConfigError, PeerRefused
from hcsim.real.listener import MAX_UNACCEPTED, AcceptQueue
from hcsim.real.message_channel import MessageChannel
from hcsim.real.tls import Tls, TlsFiles
from hcsim.runtime.address import join_address
from hcsim.runtime.frame import HEADER_BYTES

try:
    import grpc
    from grpc import aio
except ImportError:
    raise ConfigError("grpc:// addresses need gRPC: pip install 'hcsim[grpc]'") from None

PIECE_BYTES = 256 * 1024
"""Well below gRPC's message limit of 4 MiB."""
_SERVICE, _METHOD = "hcsim.Channel", "Open"
_FOR_EVER_S = 1e9
_OPTIONS = (
    ("grpc.max_receive_message_length", PIECE_BYTES + HEADER_BYTES),
    ("grpc.max_send_message_length", PIECE_BYTES + HEADER_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_permit_without_calls", 0),
)
_SERVER_OPTIONS = (
    *_OPTIONS,
    ("grpc.max_allowed_incoming_connections", 2 * MAX_UNACCEPTED),
    ("grpc.max_concurrent_streams", 4),  # of one connection; ours have one each
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.max_connection_idle_ms", 30_000),  # without a stream
)


class _GrpcPipe:
    """A pipe whose pieces are messages of a gRPC stream."""

    carrier = "gRPC"
    piece_bytes = PIECE_BYTES

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def write(self, piece: bytes) -> None:
        try:
            await self._stream.write(piece)
        except (aio.AioRpcError, aio.UsageError, aio.InternalError, asyncio.InvalidStateError) as error:
            raise ConnectionResetError(_reason(error)) from None

    async def read(self) -> bytes | None:
        try:
            piece = await self._stream.read()
        except (aio.AioRpcError, aio.UsageError, aio.InternalError, asyncio.InvalidStateError) as error:
            raise ConnectionResetError(_reason(error)) from None
        return None if piece is aio.EOF else bytes(piece)


class _ClientPipe(_GrpcPipe):
    def __init__(self, call: Any, channel: Any) -> None:
        super().__init__(call)
        self._channel = channel

    async def finish(self) -> None:
        await self._stream.done_writing()

    async def abort(self) -> None:
        self._stream.cancel()
        await self._channel.close()


class _ServerPipe(_GrpcPipe):
    """The server's end. The stream ends when its handler returns; gRPC sends what was written before."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.ended = asyncio.Event()

    async def read(self) -> bytes | None:
        return None if self.ended.is_set() else await super().read()

    async def finish(self) -> None:
        self.ended.set()

    async def abort(self) -> None:
        self.ended.set()


async def dial(address: str, host: str, port: int, tls: TlsFiles | None) -> MessageChannel:
    """Make one attempt to open a channel."""
    target = join_address((host, port))
    if tls is None:
        channel = aio.insecure_channel(target, _OPTIONS)
    else:
        credentials = grpc.ssl_channel_credentials(*_pem(tls))
        name = await _certified_name(host, port, tls)
        channel = aio.secure_channel(target, credentials, (*_OPTIONS, ("grpc.ssl_target_name_override", name)))
    try:
        call = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")()
        await call.wait_for_connection()
        await call.initial_metadata()
        if call.done():
            raise aio.AioRpcError(await call.code(), None, None, await call.details())
    except aio.AioRpcError as error:
        await channel.close()
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise PeerRefused(f"{address} speaks gRPC, but is none of ours", address) from None
        reason = _reason(error)
        raise (ConnectionRefusedError if "refused" in reason else ConnectionError)(reason) from None
    except BaseException:
        await channel.close()
        raise
    return MessageChannel(_ClientPipe(call, channel), address)


class GrpcListener:
    """Accepts channels at one address."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._address = ""
        self._unaccepted = AcceptQueue()
        self._open = 0

    @classmethod
    async def open(cls, sockaddr: Any, tls: TlsFiles | None) -> GrpcListener:
        server = aio.server(options=_SERVER_OPTIONS)
        self = cls(server)
        handler = grpc.stream_stream_rpc_method_handler(self._called)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),))
        place = join_address(sockaddr)
        try:
            if tls is None:
                port = server.add_insecure_port(place)
            else:
                ca, key, cert = _pem(tls)
                credentials = grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True)
                port = server.add_secure_port(place, credentials)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen at grpc://{place}: {error}") from None
        await server.start()
        self._address = f"grpc://{join_address((sockaddr[0], port))}"
        return self

    @property
    def address(self) -> str:
        """The address with the actual port."""
        return self._address

    async def accept(self) -> MessageChannel:
        return await self._unaccepted.get(self._address)

    async def close(self) -> None:
        """Stop listening and close the channels that have not been accepted."""
        if self._unaccepted.closed:
            return
        await self._unaccepted.close()
        stopping = asyncio.create_task(self._server.stop(_FOR_EVER_S), name=f"stop {self._address}")
        _STOPPING.add(stopping)
        stopping.add_done_callback(_STOPPING.discard)
        if not self._open:
            await stopping

    async def _called(self, _: Any, context: Any) -> None:
        if self._unaccepted.full:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "refused: nobody accepts here, or too many wait")
        await context.send_initial_metadata(())
        pipe = _ServerPipe(context)
        self._open += 1
        try:
            self._unaccepted.put(MessageChannel(pipe, context.peer().partition(":")[2]))
            await pipe.ended.wait()
        finally:
            self._open -= 1


_STOPPING: set[asyncio.Task[None]] = set()
"""Servers that wait for their last channel to end."""


def _pem(tls: TlsFiles) -> tuple[bytes, bytes, bytes]:
    for path in (tls.cert, tls.ca):
        for certificate in x509.load_pem_x509_certificates(path.read_bytes()):
            if isinstance(certificate.public_key(), Ed25519PublicKey):
                raise ConfigError(
                    f"{path}: gRPC's TLS does not know Ed25519 keys; use certificates with ECDSA keys for grpc:// "
                    "addresses, or another carrier (host:port, wss://)"
                )
    return tls.ca.read_bytes(), tls.key.read_bytes(), tls.cert.read_bytes()


async def _certified_name(host: str, port: int, tls: TlsFiles) -> str:
    """Return a name in the server's certificate, after checking that the authority of `tls` signed it."""
    ours = Tls(tls)
    ours.context(server_side=False).set_alpn_protocols(["h2"])
    loop = asyncio.get_running_loop()
    family, kind, _, _, sockaddr = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
    sock = socket.socket(family, kind)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, sockaddr)
        tls_sock = (await ours.handshake(sock, server_side=False)).sock
    except BaseException:
        sock.close()
        raise
    certificate: Any = tls_sock.getpeercert() or {}
    tls_sock.close()
    names = [name for kind, name in certificate.get("subjectAltName", ()) if kind == "DNS"]
    names += [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    if not names:
        raise PeerRefused(f"the certificate of {host}:{port} has no name in it, which gRPC needs", f"{host}:{port}")
    return str(names[0])


def _reason(error: BaseException) -> str:
    details = error.details() if isinstance(error, aio.AioRpcError) else str(error)
    return str(details or type(error).__name__)
