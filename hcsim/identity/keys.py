"""The key of a node, and the secret of a cluster with the join phrase.

A node is the holder of its private key.

Any node that knows the cluster's secret is a member; there is no default secret. It is always random, with at
least 128 bits, because two values derived from it become public: the namespace id (a digest by which members
find each other) and, to the peer in a handshake, a proof. With 2¹²⁸ possible secrets neither helps to guess it.
A secret chosen by a person could be guessed from them, so it is not allowed.

Keys are derived from it with HKDF, one for each purpose, so that a key leaked by one purpose is useless for
another.

The join phrase, with which the user carries the secret from one machine to the next, is the secret and a check
of 22 bits, in Crockford's base 32 (no I, L, O, U: they are read as 1, 1, 0, and rejected), in six groups of
five. A typo goes unnoticed once in four million times. An invitation has the same format, for a secret that two
machines use for one exchange (see `cluster.joining`); its check differs.
"""

from __future__ import annotations

import hashlib

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from hcsim.errors import ConfigError, UsageError

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


SECRET_BYTES = 16
_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_READ_AS = {letter: value for value, letter in enumerate(_ALPHABET)} | {"I": 1, "L": 1, "O": 0}
_GROUPS, _GROUP = 6, 5
_CHARACTERS = _GROUPS * _GROUP
_CHECK_BITS = 5 * _CHARACTERS - 8 * SECRET_BYTES
_PHRASE, _INVITATION = b"hcsim join phrase 1\0", b"hcsim invitation 1\0"


class ClusterSecret:
    """The secret of one cluster, made of random bytes from the caller."""

    def __init__(self, data: bytes) -> None:
        if len(data) != SECRET_BYTES:
            raise UsageError(f"a cluster's secret has {SECRET_BYTES} random bytes, not {len(data)}")
        self.data = data
        """Secret: only for members."""
        self.namespace = hashlib.sha3_256(b"hcsim namespace 1\0" + data).digest()

    def __repr__(self) -> str:
        return f"<secret of cluster {self.namespace.hex()[:8]}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClusterSecret) and other.namespace == self.namespace

    def __hash__(self) -> int:
        return int.from_bytes(self.namespace[:8], "big")

    def derive(self, purpose: str) -> bytes:
        """Return the 32-byte key that members use for that purpose only."""
        return HKDF(SHA256(), 32, salt=b"hcsim cluster 1", info=purpose.encode()).derive(self.data)

    def phrase(self) -> str:
        """Return the join phrase, which the user types on the next machine."""
        return self._letters(_PHRASE)

    def invitation(self) -> str:
        return self._letters(_INVITATION)

    def _letters(self, label: bytes) -> str:
        number = int.from_bytes(self.data, "big") << _CHECK_BITS | _check(self.data, label)
        letters = "".join(_ALPHABET[number >> 5 * place & 31] for place in reversed(range(_CHARACTERS)))
        return "-".join(letters[start : start + _GROUP] for start in range(0, _CHARACTERS, _GROUP))

    @classmethod
    def from_phrase(cls, text: str) -> ClusterSecret:
        """Parse a join phrase; case, spaces and hyphens do not matter."""
        return cls._read(_letters_of(text), _PHRASE)

    @classmethod
    def from_invitation(cls, text: str) -> ClusterSecret | None:
        """Parse an invitation; return None if it is a join phrase."""
        letters = _letters_of(text)
        try:
            return cls._read(letters, _INVITATION)
        except ConfigError:
            cls.from_phrases(text)
            return None

    @classmethod
    def from_phrases(cls, text: str) -> tuple[ClusterSecret, ...]:
        """Parse a join phrase; after a rotation it has a second part, the present secret."""
        letters = _letters_of(text)
        if len(letters) != 2 * _CHARACTERS:
            return (cls._read(letters, _PHRASE),)
        return cls._read(letters[:_CHARACTERS], _PHRASE), cls._read(letters[_CHARACTERS:], _PHRASE)

    @classmethod
    def _read(cls, letters: list[str], label: bytes) -> ClusterSecret:
        for place, letter in enumerate(letters):
            if letter not in _READ_AS:
                where = f"character {place % _GROUP + 1} of group {place // _GROUP + 1}"
                raise ConfigError(f"the join phrase or invitation has a typo: {letter!r} ({where}) never occurs in one")
        if len(letters) != _CHARACTERS:
            raise ConfigError(
                f"the join phrase or invitation has {len(letters)} letters and digits where {_CHARACTERS} are needed "
                f"({_GROUPS} groups of {_GROUP}): is a group missing or typed twice?"
            )
        number = 0
        for letter in letters:
            number = number << 5 | _READ_AS[letter]
        data = (number >> _CHECK_BITS).to_bytes(SECRET_BYTES, "big")
        if number & (1 << _CHECK_BITS) - 1 != _check(data, label):
            raise ConfigError(
                "the join phrase or invitation has a typo (its check does not match): compare it, group by group, "
                "with what the other machine shows"
            )
        return cls(data)


def _letters_of(text: str) -> list[str]:
    return [letter for letter in text.upper() if not letter.isspace() and letter not in "-–—"]


def _check(data: bytes, label: bytes) -> int:
    digest = hashlib.sha3_256(label + data).digest()
    return int.from_bytes(digest, "big") >> 256 - _CHECK_BITS
