"""A cluster's secret, and how people carry it from one machine to the next.

Whoever knows the secret is a member; there is no default one. It is always random, 128 bits at least,
because two things that are made of it become public: the namespace id (a digest by which members find each
other) and, to whoever runs a handshake, a proof. Nobody can guess 2¹²⁸ secrets, so neither helps to find it; a
word that a person made up would be found at once, so it cannot be one.

Keys are derived from it with HKDF, one for each purpose, so that what one purpose gives away is of no use
to another.

The join phrase is the secret and a check of 22 bits, in Crockford's base 32 (no I, L, O, U: they are read as
1, 1, 0, and refused), in six groups of five. A typo goes unnoticed once in four million times.
"""

from __future__ import annotations

import hashlib

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from hcsim.errors import ConfigError, UsageError

SECRET_BYTES = 16
_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_READ_AS = {letter: value for value, letter in enumerate(_ALPHABET)} | {"I": 1, "L": 1, "O": 0}
_GROUPS, _GROUP = 6, 5
_CHARACTERS = _GROUPS * _GROUP
_CHECK_BITS = 5 * _CHARACTERS - 8 * SECRET_BYTES


class ClusterSecret:
    """The secret of one cluster, made of random bytes that the caller brings along."""

    def __init__(self, data: bytes) -> None:
        if len(data) != SECRET_BYTES:
            raise UsageError(f"a cluster's secret has {SECRET_BYTES} random bytes, not {len(data)}")
        self.data = data
        """Not for anybody but members."""
        self.namespace = hashlib.sha3_256(b"hcsim namespace 1\0" + data).digest()
        """Public: which cluster this is."""

    def __repr__(self) -> str:
        return f"<secret of cluster {self.namespace.hex()[:8]}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClusterSecret) and other.namespace == self.namespace

    def __hash__(self) -> int:
        return int.from_bytes(self.namespace[:8], "big")

    def derive(self, purpose: str) -> bytes:
        """The 32 bytes that members use for that purpose and nothing else."""
        return HKDF(SHA256(), 32, salt=b"hcsim cluster 1", info=purpose.encode()).derive(self.data)

    def phrase(self) -> str:
        """What a person types on the next machine."""
        number = int.from_bytes(self.data, "big") << _CHECK_BITS | _check(self.data)
        letters = "".join(_ALPHABET[number >> 5 * place & 31] for place in reversed(range(_CHARACTERS)))
        return "-".join(letters[start : start + _GROUP] for start in range(0, _CHARACTERS, _GROUP))

    @classmethod
    def from_phrase(cls, text: str) -> ClusterSecret:
        """Read a join phrase; case, spaces and hyphens do not matter."""
        letters = [letter for letter in text.upper() if not letter.isspace() and letter not in "-–—"]
        for place, letter in enumerate(letters):
            if letter not in _READ_AS:
                where = f"character {place % _GROUP + 1} of group {place // _GROUP + 1}"
                raise ConfigError(f"the join phrase has a typo: {letter!r} ({where}) never occurs in one")
        if len(letters) != _CHARACTERS:
            raise ConfigError(
                f"the join phrase has {len(letters)} letters and digits where {_CHARACTERS} are needed "
                f"({_GROUPS} groups of {_GROUP}): is a group missing or typed twice?"
            )
        number = 0
        for letter in letters:
            number = number << 5 | _READ_AS[letter]
        data = (number >> _CHECK_BITS).to_bytes(SECRET_BYTES, "big")
        if number & (1 << _CHECK_BITS) - 1 != _check(data):
            raise ConfigError(
                "the join phrase has a typo (its check does not match): compare it, group by group, "
                "with what the machine shows that created the cluster"
            )
        return cls(data)


def _check(data: bytes) -> int:
    digest = hashlib.sha3_256(b"hcsim join phrase 1\0" + data).digest()
    return int.from_bytes(digest, "big") >> 256 - _CHECK_BITS
