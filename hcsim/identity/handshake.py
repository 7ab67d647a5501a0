"""The admission handshake: two nodes prove their identity and their membership of the same cluster to each other.

    caller                                    listener
      | hello: version, role, namespace, key, boot, nonce →
      |    ← hello: the same of its own             |
      | proof: signature, MAC →                     |
      |    ← proof: signature, MAC                  |   both know the other's key
      | list, sealed →                              |   if their trust lists differ
      |    ← list, sealed                           |   both are members: admitted

Both proofs cover both hellos as sent, the channel's `binding`, and the role of the prover. The signature is
made with the node's key. The MAC key is derived from the cluster's secret and an X25519 agreement between the
two nonces, which are fresh public keys. So

- a proof is valid for one connection: another has other nonces, and on TLS another binding;
- it cannot be reflected to its sender, which has the other role;
- an eavesdropper cannot even test a guess of the secret against a MAC, since it lacks the agreement.

Hellos carry the namespace id, which is public; the secret and keys derived from it never leave the machine. The
caller proves first, so that a stranger that dials a listener gets no proof from it.

Hellos also carry a digest of the trust list. If both digests are the same, each side looks up the other's key.
Otherwise they first exchange their lists, encrypted with a key from the same agreement: a newcomer shows by
whom it is listed, and a member that was offline learns of changes and the present secret. A node that is still
not listed is rejected, and nothing of its list is kept. A node that is not a listed member is told only how the
sender itself is listed.

On a channel without encryption (`binding` empty) a man in the middle can relay the handshake and then send
messages in place of a peer: admission authenticates the peer at that moment, only TLS protects the channel
afterwards.

Either side ends a handshake with a refusal, which is a number, so that no text of a stranger gets into a log.
This module does no I/O: messages go in, messages and an outcome come out.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable
from enum import Enum, IntEnum
from typing import NamedTuple

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from hcsim.errors import HcsimError, UsageError
from hcsim.identity.keys import ClusterSecret, NodeKey, is_signed, node_id_of
from hcsim.identity.trust_list import MOST_BYTES, RefusalReason, TrustListFull
from hcsim.identity.trust_store import NO_DIGEST, TrustStore

VERSION = 2
MAX_MESSAGE_BYTES = 256
MAX_LIST_BYTES = MOST_BYTES + 64
_HELLO, _PROOF, _REFUSAL, _LIST = 1, 2, 3, 4
_HELLO_FIELDS = struct.Struct("!BBB32s32sQ32s32s")
_PROOF_FIELDS = struct.Struct("!B64s32s")
_REFUSAL_BYTES = 2
_LABEL = b"hcsim admission 1\0"


class HandshakeRole(IntEnum):
    """Which side opened the channel."""

    CALLER = 1
    LISTENER = 2


class HandshakeState(Enum):
    """The state of one side."""

    AWAITS_HELLO = "awaits the hello"
    AWAITS_PROOF = "awaits the proof"
    AWAITS_LIST = "awaits the trust list"
    ADMITTED = "the peer is a member"
    REFUSED = "one of us said no"


class HandshakeEvent(Enum):
    """The kind of a received message."""

    HELLO = "a hello without fault"
    PROOF = "a proof without fault, of a member"
    OTHER_LIST = "a proof without fault, of one with another trust list"
    LIST = "a trust list by which they are a member"
    FAULT = "something that we refuse"
    REFUSAL = "their refusal"


NEXT = {
    (HandshakeState.AWAITS_HELLO, HandshakeEvent.HELLO): HandshakeState.AWAITS_PROOF,
    (HandshakeState.AWAITS_HELLO, HandshakeEvent.FAULT): HandshakeState.REFUSED,
    (HandshakeState.AWAITS_HELLO, HandshakeEvent.REFUSAL): HandshakeState.REFUSED,
    (HandshakeState.AWAITS_PROOF, HandshakeEvent.PROOF): HandshakeState.ADMITTED,
    (HandshakeState.AWAITS_PROOF, HandshakeEvent.OTHER_LIST): HandshakeState.AWAITS_LIST,
    (HandshakeState.AWAITS_PROOF, HandshakeEvent.FAULT): HandshakeState.REFUSED,
    (HandshakeState.AWAITS_PROOF, HandshakeEvent.REFUSAL): HandshakeState.REFUSED,
    (HandshakeState.AWAITS_LIST, HandshakeEvent.LIST): HandshakeState.ADMITTED,
    (HandshakeState.AWAITS_LIST, HandshakeEvent.FAULT): HandshakeState.REFUSED,
    (HandshakeState.AWAITS_LIST, HandshakeEvent.REFUSAL): HandshakeState.REFUSED,
    (HandshakeState.ADMITTED, HandshakeEvent.FAULT): HandshakeState.REFUSED,
}
"""All transitions, of both roles. The last is for a peer that is found too slow while this side's proof is
being made."""


BOOT_BITS = 47
"""The size of a random boot number: unique for each start of a node, and exact in JSON and floats."""


class Credentials(msgspec.Struct, frozen=True):
    """The credentials with which a node authenticates."""

    key: NodeKey
    secret: ClusterSecret
    boot: int
    """Identifies this start of the node; 0: not a node, but a command or a program beside it."""
    fresh: Callable[[int], bytes]
    """Returns unpredictable random bytes: the operating system's, on a real machine."""
    trusted: TrustStore | None = None
    """The keys of members; None: any node that knows the secret is a member."""

    def __post_init__(self) -> None:
        if not 0 <= self.boot < 2**64:
            raise UsageError(f"a boot is a number of 64 bits, not {self.boot}")


class HandshakeHello(NamedTuple):
    """The content of a hello."""

    role: int
    namespace: bytes
    public: bytes
    boot: int
    list_digest: bytes
    nonce: bytes

    @property
    def node_id(self) -> str:
        return node_id_of(self.public)


class HandshakeFault(Exception):
    """Raised for a message that ends the handshake."""

    def __init__(self, reason: RefusalReason) -> None:
        super().__init__(reason.name)
        self.reason = reason


class Handshake:
    """One side of a handshake. Send what `first` and `receive` return, until `state` is final."""

    def __init__(self, role: HandshakeRole, us: Credentials, binding: bytes) -> None:
        self.state = HandshakeState.AWAITS_HELLO
        self.theirs: HandshakeHello | None = None
        """The peer's hello, once it is valid; authenticated when the state is ADMITTED."""
        self.reason: RefusalReason | None = None
        self.was_told = False
        """Whether the peer refused."""
        self._role = role
        self._us = us
        self._binding = binding
        self._secret_nonce: X25519PrivateKey | None = None
        self._transcript = b""
        self._mac_key = b""
        self._seal_key = b""
        self._list_digest = NO_DIGEST if us.trusted is None else us.trusted.digest
        """The digest that was sent: the list may change during the handshake."""
        self._hello = (
            self._make_hello() if role is HandshakeRole.CALLER else b""
        )  # a listener's, once somebody is worth it

    def first(self) -> bytes | None:
        return self._hello if self._role is HandshakeRole.CALLER else None

    def receive(self, message: bytes) -> bytes | None:
        """Process a message; return the answer, if there is one."""
        if len(message) == _REFUSAL_BYTES and message[0] == _REFUSAL:
            self._go(HandshakeEvent.REFUSAL)
            self.was_told = True
            self.reason = _reason_of(message[1])
            return None
        try:
            if self.state is HandshakeState.AWAITS_HELLO:
                self._hear_hello(message)
                self._go(HandshakeEvent.HELLO)
                return self._proof() if self._role is HandshakeRole.CALLER else self._hello
            is_caller = self._role is HandshakeRole.CALLER
            if self.state is HandshakeState.AWAITS_LIST:
                self._hear_list(message)
                self._go(HandshakeEvent.LIST)
                return None if is_caller else self._list()
            self._hear_proof(message)
            if self._lists_differ():
                self._go(HandshakeEvent.OTHER_LIST)
                return self._list() if is_caller else self._proof()
            self._look_up()
            self._go(HandshakeEvent.PROOF)
            return None if is_caller else self._proof()
        except HandshakeFault as fault:
            return self.refuse(fault.reason)

    def refuse(self, reason: RefusalReason) -> bytes:
        """End the handshake with this reason; return the message for the peer."""
        self._go(HandshakeEvent.FAULT)
        self.reason = reason
        return bytes([_REFUSAL, reason])

    def _go(self, heard: HandshakeEvent) -> None:
        if (self.state, heard) not in NEXT:
            raise UsageError(f"this handshake is over ({self.state.value}), and was given {heard.value}")
        self.state = NEXT[self.state, heard]

    def _make_hello(self) -> bytes:
        us = self._us
        self._secret_nonce = X25519PrivateKey.from_private_bytes(us.fresh(32))
        nonce = self._secret_nonce.public_key().public_bytes_raw()
        said = us.secret.namespace, us.key.public, us.boot, self._list_digest, nonce
        return _HELLO_FIELDS.pack(_HELLO, VERSION, self._role, *said)

    def _hear_hello(self, message: bytes) -> None:
        theirs = read_hello(message)
        if self._hello.endswith(theirs.nonce):
            raise HandshakeFault(RefusalReason.REFLECTED)
        if theirs.role != (HandshakeRole.LISTENER if self._role is HandshakeRole.CALLER else HandshakeRole.CALLER):
            raise HandshakeFault(RefusalReason.WRONG_ROLE)
        if not hmac.compare_digest(theirs.namespace, self._us.secret.namespace):
            raise HandshakeFault(RefusalReason.OTHER_CLUSTER)
        # In the same life it is ourselves: a worker that calls the server beside it.
        lives = theirs.boot, self._us.boot
        if theirs.public == self._us.key.public and theirs.boot != self._us.boot and 0 not in lives:
            raise HandshakeFault(RefusalReason.COPIED_IDENTITY)
        if self._us.trusted is not None and theirs.node_id in self._us.trusted.list.expelled:
            self.theirs = theirs  # it names a machine that we know
            raise HandshakeFault(RefusalReason.EXPELLED)
        self._hello = self._hello or self._make_hello()
        assert self._secret_nonce is not None
        try:
            agreed = self._secret_nonce.exchange(X25519PublicKey.from_public_bytes(theirs.nonce))
        except ValueError:  # a point that makes every agreement zero
            raise HandshakeFault(RefusalReason.MALFORMED) from None
        self.theirs = theirs
        in_order = (self._hello, message) if self._role is HandshakeRole.CALLER else (message, self._hello)
        said = b"".join(len(part).to_bytes(4, "big") + part for part in (*in_order, self._binding))
        self._transcript = hashlib.sha3_256(_LABEL + said).digest()
        salt = self._us.secret.derive("admission")
        self._mac_key = HKDF(SHA256(), 32, salt=salt, info=_LABEL + self._transcript).derive(agreed)
        self._seal_key = HKDF(SHA256(), 32, salt=salt, info=_LABEL + b"list" + self._transcript).derive(agreed)

    def _hear_proof(self, message: bytes) -> None:
        if len(message) != _PROOF_FIELDS.size or message[0] != _PROOF:
            raise HandshakeFault(RefusalReason.MALFORMED)
        assert self.theirs is not None
        if self._role is HandshakeRole.CALLER and hmac.compare_digest(message, self._proof()):
            raise HandshakeFault(RefusalReason.REFLECTED)
        _, signature, mac = _PROOF_FIELDS.unpack(message)
        role = HandshakeRole(self.theirs.role)
        if not is_signed(self._statement(role), signature, self.theirs.public):
            raise HandshakeFault(RefusalReason.FOREIGN_PROOF)
        if not hmac.compare_digest(mac, self._mac(role)):
            raise HandshakeFault(RefusalReason.WRONG_SECRET)

    def _lists_differ(self) -> bool:
        assert self.theirs is not None
        digests = self._list_digest, self.theirs.list_digest
        return NO_DIGEST not in digests and digests[0] != digests[1]

    def _hear_list(self, message: bytes) -> None:
        trusted, theirs = self._us.trusted, self.theirs
        assert trusted is not None
        assert theirs is not None
        try:
            if message[:1] != bytes([_LIST]):
                raise HandshakeFault(RefusalReason.MALFORMED)
            told = ChaCha20Poly1305(self._seal_key).decrypt(
                _nonce(HandshakeRole(theirs.role)), message[1:], self._transcript
            )
            trusted.receive(told, theirs.node_id, theirs.public)
        except TrustListFull:
            raise HandshakeFault(RefusalReason.LIST_FULL) from None
        except (InvalidTag, HcsimError):
            raise HandshakeFault(RefusalReason.MALFORMED) from None
        self._look_up()

    def _look_up(self) -> None:
        """Check whether both nodes are members according to this node's list."""
        assert self.theirs is not None
        if self._us.trusted is not None:
            known = self._us.trusted.list
            if self._us.key.node_id not in known.members:
                raise HandshakeFault(RefusalReason.WE_ARE_UNLISTED)
            if self.theirs.node_id not in known.members:
                raise HandshakeFault(
                    RefusalReason.EXPELLED if self.theirs.node_id in known.expelled else RefusalReason.UNLISTED
                )

    def _list(self) -> bytes:
        """Return the sealed list. It is sealed once per role in a handshake, so no nonce is used twice with a key."""
        assert self._us.trusted is not None
        assert self.theirs is not None
        told = self._us.trusted.told_to(self.theirs.public)
        return bytes([_LIST]) + ChaCha20Poly1305(self._seal_key).encrypt(_nonce(self._role), told, self._transcript)

    def _proof(self) -> bytes:
        signature = self._us.key.sign(self._statement(self._role))
        return _PROOF_FIELDS.pack(_PROOF, signature, self._mac(self._role))

    def _mac(self, role: HandshakeRole) -> bytes:
        return hmac.digest(self._mac_key, self._statement(role), "sha256")

    def _statement(self, role: HandshakeRole) -> bytes:
        return _LABEL + bytes([role]) + self._transcript


def read_hello(message: bytes) -> HandshakeHello:
    """Decode a hello of the same version; raise `HandshakeFault` if it is invalid. Its content is not authenticated."""
    if len(message) < 2 or message[0] != _HELLO:
        raise HandshakeFault(RefusalReason.MALFORMED)
    if message[1] != VERSION:
        raise HandshakeFault(RefusalReason.WRONG_VERSION)
    if len(message) != _HELLO_FIELDS.size:
        raise HandshakeFault(RefusalReason.MALFORMED)
    return HandshakeHello(*_HELLO_FIELDS.unpack(message)[2:])


def _nonce(role: HandshakeRole) -> bytes:
    return bytes([role]) * 12


def _reason_of(code: int) -> RefusalReason:
    try:
        return RefusalReason(code)
    except ValueError:
        return RefusalReason.UNKNOWN
