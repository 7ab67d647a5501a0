"""Certificates that the members of a cluster make for themselves.

Python's `ssl` accepts a client certificate only from an authority that it knows. So the key of the cluster's
authority is derived from the cluster's secret, and every member can sign a certificate for its own node key.
Other clients already fail in the TLS handshake. A member can sign certificates for other keys, but this gives
it no other identity: a node is identified by its key, not by a name.

The authority's certificate is the same, byte for byte, on all members. Certificates do not expire, since the
clocks of machines at home may be wrong when they start.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hcsim.identity.keys import ClusterSecret, NodeKey

FOREVER = (datetime(2020, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC))
"""RFC 5280 defines the second date for certificates that do not expire."""


class Certificates(msgspec.Struct, frozen=True):
    """Certificates and keys in PEM format."""

    authority: bytes
    leaf: bytes
    key: bytes


def make_certificates(
    key: NodeKey, secret: ClusterSecret, validity: tuple[datetime, datetime] = FOREVER
) -> Certificates:
    """Return the authority's certificate, and a new one for a member's key."""
    authority = Ed25519PrivateKey.from_private_bytes(secret.derive("tls authority"))
    name = _name(f"hcsim cluster {secret.namespace.hex()[:16]}")
    root = (
        _builder(name, name, authority.public_key(), authority.public_key(), FOREVER)
        .serial_number(1)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(authority, None)
    )
    public = key.private.public_key()
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    leaf = (
        _builder(_name(key.node_id), name, public, authority.public_key(), validity)
        .serial_number(x509.random_serial_number())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .sign(authority, None)
    )
    pem = serialization.Encoding.PEM
    return Certificates(root.public_bytes(pem), leaf.public_bytes(pem), key.pem())


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: Ed25519PublicKey,
    authority: Ed25519PublicKey,
    validity: tuple[datetime, datetime],
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .not_valid_before(validity[0])
        .not_valid_after(validity[1])
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority), critical=False)
    )


def make_web_certificate(name: str) -> tuple[bytes, bytes]:
    """Return a new certificate that signs itself, for a browser to be shown, and its key, in PEM format.

    Browsers know no Ed25519, and take certificates for about a year only."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=365))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    return certificate.public_bytes(pem), key.private_bytes(pem, form, plain)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
