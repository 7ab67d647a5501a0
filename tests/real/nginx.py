"""nginx as the end of an HTTPS tunnel: it has a certificate of its own, and leads WebSockets on to another port."""

from __future__ import annotations

import asyncio
import shutil
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

PROGRAM = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/opt/homebrew/bin")
needs_nginx = pytest.mark.skipif(PROGRAM is None, reason="there is no nginx here: apt-get install nginx-light")
CONFIG = """
daemon off;
worker_processes 1;
worker_shutdown_timeout 5s;
pid {folder}/nginx.pid;
error_log {folder}/error.log info;
events {{ worker_connections 64; }}
http {{
    access_log {folder}/access.log;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port} ssl;
        server_name localhost;
        ssl_certificate {folder}/chain.pem;
        ssl_certificate_key {folder}/key.pem;
        location /tunnel/ {{
            proxy_pass http://127.0.0.1:{upstream}/;
            proxy_http_version 1.1;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection "upgrade";
            proxy_read_timeout 60s;
        }}
    }}
}}
"""


class Nginx:
    """Takes TLS off at wss://localhost:port/tunnel/… and goes on to ws://127.0.0.1:upstream/…"""

    def __init__(self, folder: Path, port: int, upstream: int) -> None:
        self.address = f"wss://localhost:{port}/tunnel"
        self.authority = folder / "authority.pem"
        """Who signed its certificate; not ours."""
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None
        _certify(folder)
        (folder / "nginx.conf").write_text(CONFIG.format(folder=folder, port=port, upstream=upstream))

    async def __aenter__(self) -> Nginx:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """What has ended is in its log then, which `stop` does not wait for."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGQUIT)
            async with asyncio.timeout(20.0):
                await self._process.wait()

    async def start(self) -> None:
        assert PROGRAM is not None
        where = ("-p", str(self._folder), "-c", str(self._folder / "nginx.conf"), "-e", str(self._folder / "start.log"))
        self._process = await asyncio.create_subprocess_exec(PROGRAM, *where)

    async def stop(self) -> None:
        """All its connections end at once."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()

    def calls(self) -> list[int]:
        """The answers that callers got whose connections have ended: 101 is a WebSocket."""
        log = self._folder / "access.log"
        return [int(line.split('"')[2].split()[0]) for line in log.read_text().splitlines()]


def _certify(folder: Path) -> None:
    """A public authority, and a certificate of its for localhost."""
    root_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    root_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "an authority that machines trust")])
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    root = _builder(root_name, root_name, root_key, root_key, is_ca=True).sign(root_key, hashes.SHA256())
    builder = _builder(root_name, name, key, root_key, is_ca=False)
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    leaf = builder.sign(root_key, hashes.SHA256())
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / "authority.pem").write_bytes(root.public_bytes(pem))
    (folder / "chain.pem").write_bytes(leaf.public_bytes(pem))
    (folder / "key.pem").write_bytes(key.private_bytes(pem, form, serialization.NoEncryption()))


def _builder(
    issuer: x509.Name,
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    *,
    is_ca: bool,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    usage = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False)
    usage |= {"encipher_only": False, "decipher_only": False}
    usage |= {"digital_signature": not is_ca, "key_cert_sign": is_ca, "crl_sign": is_ca}
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    return (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**usage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(identifier, critical=False)
    )
