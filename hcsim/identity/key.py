"""Node keys: the holder of the private key is the node."""

from __future__ import annotations

import hashlib

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from hcsim.errors import UsageError

SEED_BYTES = 32
_NODE_ID_BYTES = 16


def node_id_of(public: bytes) -> str:
    """Return the node id: the first 16 bytes of the SHA3-256 of the public key, in hex."""
    return hashlib.sha3_256(public).digest()[:_NODE_ID_BYTES].hex()


class NodeKey:
    """An Ed25519 key pair, made of 32 random bytes from the caller."""

    def __init__(self, seed: bytes) -> None:
        if len(seed) != SEED_BYTES:
            raise UsageError(f"a node key is made of {SEED_BYTES} bytes, not {len(seed)}")
        self.private = Ed25519PrivateKey.from_private_bytes(seed)
        self.public = self.private.public_key().public_bytes_raw()
        self.node_id = node_id_of(self.public)

    def __repr__(self) -> str:
        return f"<key of node {self.node_id}>"

    def sign(self, message: bytes) -> bytes:
        return self.private.sign(message)

    def pem(self) -> bytes:
        """Return the private key in the format that openssl reads."""
        return self.private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


def is_signed(message: bytes, signature: bytes, public: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):  # the second: no such point on the curve
        return False
    return True
