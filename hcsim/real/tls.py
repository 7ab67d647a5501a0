"""Mutual TLS 1.3 from a certificate, its key and the cluster's certificate authority.

Both sides present a certificate, and whoever holds one that the authority signed is a member. Host
names are not compared: machines in a home get their addresses from a router, and the authority
signs nobody but members.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import msgspec

from hcsim.errors import ConfigError


class TlsFiles(msgspec.Struct, frozen=True):
    """Three PEM files."""

    cert: Path
    """Our certificate, with intermediates if there are any."""
    key: Path
    """Its private key, without a passphrase."""
    ca: Path
    """The authority that signed the certificates of all members."""


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """For accepting members."""
    return _context(files, ssl.PROTOCOL_TLS_SERVER)


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """For dialling members."""
    return _context(files, ssl.PROTOCOL_TLS_CLIENT)


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
    """Without this OpenSSL would ask at the terminal."""
    raise ValueError("the key has a passphrase; give one without")


async def handshake(sock: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> ssl.SSLSocket:
    """Wrap a connected non-blocking socket, which is taken over: it is closed if this fails or is cancelled."""
    loop = asyncio.get_running_loop()
    try:
        tls = context.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)
    except OSError:
        sock.close()
        raise
    try:
        while True:
            try:
                tls.do_handshake()
                return tls
            except ssl.SSLWantReadError:
                await _once(tls.fileno(), loop.add_reader, loop.remove_reader)
            except ssl.SSLWantWriteError:
                await _once(tls.fileno(), loop.add_writer, loop.remove_writer)
    except BaseException:
        tls.close()
        raise


async def _once(fd: int, watch: Callable[..., object], unwatch: Callable[[int], bool]) -> None:
    """Wait until the socket is ready."""
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    watch(fd, _resolve, waiter)
    try:
        await waiter
    finally:
        unwatch(fd)


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
