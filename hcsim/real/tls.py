"""Mutual TLS 1.3: both sides present a certificate, and a peer is accepted if the authority signed its
certificate.

The certificates are those that the cluster's members make for themselves (`ClusterTls`), or files of the user
(`TlsFiles`). Host names are not compared: machines in a home get their addresses from a router, and the
authority signs members only. A peer's identity is the key in its certificate.

With `ClusterTls` the time is not compared either, since these certificates do not expire, and a machine's clock
may be wrong. With files of the user it is.

Sessions are not resumed: each connection is authenticated anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from hcsim.errors import ConfigError
from hcsim.identity.keys import ClusterSecret, NodeKey, node_id_of
from hcsim.real.sockets import PLAINTEXT, HandshakeCut, own

_LINGER_S = 0.25
_LINGER_BYTES = 64 * 1024
_ALERT = bytes.fromhex("15030100020246")
"""The alert "protocol version" (fatal). OpenSSL sends none to a peer without TLS; an hcsim without TLS recognises
it."""

_NO_CHECK_TIME = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which `ssl` does not define."""


class ClusterTls(msgspec.Struct, frozen=True):
    """The key and secret from which a cluster member makes its certificates."""

    key: NodeKey
    secret: ClusterSecret


class TlsFiles(msgspec.Struct, frozen=True):
    """Three PEM files of the user."""

    cert: Path
    """This machine's certificate, with any intermediates."""
    key: Path
    """The certificate's private key, without a passphrase."""
    ca: Path
    """The authority that signed the certificates of all members."""


class TlsConnection(NamedTuple):
    """A connection to an authenticated peer."""

    sock: ssl.SSLSocket
    identity: str
    """The node id of the key in the peer's certificate."""
    binding: bytes


class Tls:
    """The TLS contexts of this machine."""

    def __init__(self, source: TlsFiles | ClusterTls) -> None:
        if isinstance(source, ClusterTls):
            self._make(source)
        else:
            self._load(source)

    def context(self, *, server_side: bool) -> ssl.SSLContext:
        return self._contexts[server_side]

    async def handshake(self, sock: socket.socket, *, server_side: bool) -> TlsConnection:
        """Run the handshake on a connected non-blocking socket. The socket is owned by this call, and closed on
        failure.

        If the handshake fails, the alert reaches the peer before the close, within a time limit."""
        ours = self._public
        tls = await _shake_hands(sock, self.context(server_side=server_side), server_side=server_side)
        try:
            theirs = _key_of(tls.getpeercert(binary_form=True) or b"")
            raw = theirs.public_bytes_raw() if isinstance(theirs, Ed25519PublicKey) else _encoded(theirs)
            in_order = (_encoded(theirs), ours) if server_side else (ours, _encoded(theirs))
            # The client's last handshake message: a MAC over all others, with a key of this connection alone.
            unique = tls.get_channel_binding("tls-unique") or b""
            parts = b"".join(len(part).to_bytes(4, "big") + part for part in (*in_order, unique))
            return TlsConnection(tls, node_id_of(raw), hashlib.sha256(b"hcsim tls binding 1\0" + parts).digest())
        except BaseException:
            tls.close()
            raise

    def _make(self, source: ClusterTls) -> None:
        from hcsim.real.certificates import make_certificates

        made = make_certificates(source.key, source.secret)
        with _in_files(made.leaf, made.key, made.authority) as files:
            self._load(files)
        for context in self._contexts.values():
            context.verify_flags |= ssl.VerifyFlags(_NO_CHECK_TIME)

    def _load(self, files: TlsFiles) -> None:
        from cryptography import x509  # a tenth of what a command without TLS takes to start

        self._contexts = {
            True: _context(files, ssl.PROTOCOL_TLS_SERVER),
            False: _context(files, ssl.PROTOCOL_TLS_CLIENT),
        }
        self._contexts[True].num_tickets = 0
        self._public = _encoded(x509.load_pem_x509_certificate(files.cert.read_bytes()).public_key())


def web_context(name: str) -> tuple[ssl.SSLContext, str]:
    """Return the context of a server for browsers, whose certificate signs itself, and the certificate's SHA-256, by
    which a person can recognise it."""
    from hcsim.real.certificates import make_web_certificate

    certificate, key = make_web_certificate(name)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    with _in_files(certificate, key, b"") as files:
        context.load_cert_chain(files.cert, files.key)
    digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate.decode())).hexdigest().upper()
    return context, ":".join(digest[i : i + 2] for i in range(0, len(digest), 2))


@contextmanager
def _in_files(cert: bytes, key: bytes, authority: bytes) -> Iterator[TlsFiles]:
    """Write these to files in a folder that only we can enter, for as long as `ssl`, which reads keys from files alone,
    takes to read them."""
    with tempfile.TemporaryDirectory(prefix="hcsim-") as folder:
        files = TlsFiles(Path(folder, "cert"), Path(folder, "key"), Path(folder, "ca"))
        for path, data in ((files.cert, cert), (files.key, key), (files.ca, authority)):
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
        yield files


def _context(files: TlsFiles, protocol: int) -> ssl.SSLContext:
    for path in (files.cert, files.key, files.ca):
        if not path.is_file():
            raise ConfigError(f"{path}: there is no such file; TLS needs a certificate, a key and a CA in PEM format")
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(files.ca)
    except OSError as error:
        raise ConfigError(f"{files.ca}: not a CA certificate in PEM format ({error})") from None
    try:
        context.load_cert_chain(files.cert, files.key, password=_no_passphrase)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{files.cert} and {files.key}: not a PEM certificate and its key ({error})") from None
    return context


def _no_passphrase() -> str:
    """Raise `ValueError`, since the key has a passphrase; OpenSSL would prompt for it at the terminal."""
    raise ValueError("the key has a passphrase; give one without")


def _key_of(certificate: bytes) -> object:
    from cryptography import x509

    try:
        return x509.load_der_x509_certificate(certificate).public_key()
    except (ValueError, UnsupportedAlgorithm) as error:  # the authority signed it, and yet we cannot read it
        raise ssl.SSLError(ssl.SSL_ERROR_SSL, f"the peer's certificate cannot be read: {error}") from None


def _encoded(public: object) -> bytes:
    """Encode a public key of any kind as in a certificate."""
    assert hasattr(public, "public_bytes")
    encoded: bytes = public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return encoded


async def _shake_hands(sock: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> ssl.SSLSocket:
    loop = asyncio.get_running_loop()
    try:
        tls = context.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)
    except OSError:
        sock.close()
        raise
    own(tls)
    try:
        while True:
            try:
                tls.do_handshake()
                return tls
            except ssl.SSLWantReadError:
                await _once(tls.fileno(), loop.add_reader, loop.remove_reader)
            except ssl.SSLWantWriteError:
                await _once(tls.fileno(), loop.add_writer, loop.remove_writer)
    except (ssl.SSLEOFError, ConnectionResetError, BrokenPipeError):
        tls.close()
        raise HandshakeCut(theirs=server_side) from None
    except ssl.SSLError as error:
        await _part(socket.socket(fileno=tls.detach()), _ALERT if error.reason in PLAINTEXT else b"")
        raise
    except BaseException:
        tls.close()
        raise


async def _part(sock: socket.socket, alert: bytes) -> None:
    """Close after the peer has read the alert: a reset, which unread bytes would cause, may overtake it."""
    sock.setblocking(False)
    try:
        with suppress(OSError):  # TimeoutError is one
            sock.send(alert)
            sock.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(_LINGER_S):
                left_bytes = _LINGER_BYTES
                while left_bytes > 0 and (data := await asyncio.get_running_loop().sock_recv(sock, left_bytes)):
                    left_bytes -= len(data)
    finally:
        sock.close()


async def _once(fd: int, watch: Callable[..., object], unwatch: Callable[[int], bool]) -> None:
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    watch(fd, _resolve, waiter)
    try:
        await waiter
    finally:
        unwatch(fd)


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
