"""The admission handshake: two nodes prove to each other who they are and that they are of one cluster.

    caller                                    listener
      | hello: version, role, namespace, key, boot, nonce →
      |    ← hello: the same of its own             |
      | proof: signature, MAC →                     |
      |    ← proof: signature, MAC                  |   both are admitted

Both proofs cover everything: both hellos as they were sent, the channel's `binding`, and the role of the prover. The
signature is made with the node's key, the MAC with a key that takes two things to know: the cluster's
secret, and an agreement (X25519) between the two nonces, which are fresh public keys. So

- a proof is good for one connection: another has other nonces, and on TLS another binding;
- it cannot be sent back to its maker, who has the other role;
- who only listened cannot even check a guess of the secret against a MAC, since it lacks the agreement.

Hellos carry the namespace id, which is public; the secret and what is derived from it never leave the machine.
The caller proves first, so that a stranger who dials around gets nothing from a listener.

On a channel without encryption (`binding` empty) a man in the middle can pass the handshake through and
then speak in its place: admission says who was there, only TLS keeps it so.

Either side ends a handshake that it does not like with a refusal, which is a number: nothing that a
stranger wrote gets into a log. This file moves no bytes: messages go in, messages and an outcome come out.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable
from enum import Enum, IntEnum
from typing import NamedTuple

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from hcsim.errors import UsageError
from hcsim.identity.key import NodeKey, is_signed, node_id_of
from hcsim.identity.namespace import ClusterSecret
from hcsim.identity.reasons import Reason

VERSION = 1
MAX_MESSAGE_BYTES = 256
_HELLO, _PROOF, _REFUSAL = 1, 2, 3
_HELLO_FIELDS = struct.Struct("!BBB32s32sQ32s")
_PROOF_FIELDS = struct.Struct("!B64s32s")
_REFUSAL_BYTES = 2
_LABEL = b"hcsim admission 1\0"


class Role(IntEnum):
    """Who opened the channel."""

    CALLER = 1
    LISTENER = 2


class State(Enum):
    """Where one side stands."""

    AWAITS_HELLO = "awaits the hello"
    AWAITS_PROOF = "awaits the proof"
    ADMITTED = "the peer is a member"
    REFUSED = "one of us said no"


class Heard(Enum):
    """What a message turned out to be."""

    HELLO = "a hello without fault"
    PROOF = "a proof without fault"
    FAULT = "something that we refuse"
    REFUSAL = "their refusal"


NEXT = {
    (State.AWAITS_HELLO, Heard.HELLO): State.AWAITS_PROOF,
    (State.AWAITS_HELLO, Heard.FAULT): State.REFUSED,
    (State.AWAITS_HELLO, Heard.REFUSAL): State.REFUSED,
    (State.AWAITS_PROOF, Heard.PROOF): State.ADMITTED,
    (State.AWAITS_PROOF, Heard.FAULT): State.REFUSED,
    (State.AWAITS_PROOF, Heard.REFUSAL): State.REFUSED,
    (State.ADMITTED, Heard.FAULT): State.REFUSED,
}
"""All transitions, of both roles. The last is for a peer that is found too slow while our proof is under way."""


BOOT_BITS = 47
"""Of a boot that is drawn: no two lives of a node have the same, and JSON and floats hold it exactly."""


class Credentials(msgspec.Struct, frozen=True):
    """What a node proves itself with."""

    key: NodeKey
    secret: ClusterSecret
    boot: int
    """Which of its lives this is."""
    fresh: Callable[[int], bytes]
    """Random bytes that nobody can foresee: the operating system's, on a real machine."""

    def __post_init__(self) -> None:
        if not 0 <= self.boot < 2**64:
            raise UsageError(f"a boot is a number of 64 bits, not {self.boot}")


class Hello(NamedTuple):
    """What a hello says."""

    role: int
    namespace: bytes
    public: bytes
    boot: int
    nonce: bytes

    @property
    def node_id(self) -> str:
        """The node that it claims to come from."""
        return node_id_of(self.public)


class Fault(Exception):
    """A message that ends the handshake."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.name)
        self.reason = reason


class Handshake:
    """One side of one handshake. Send what `first` and `receive` return, until `state` is final."""

    def __init__(self, role: Role, us: Credentials, binding: bytes) -> None:
        self.state = State.AWAITS_HELLO
        self.theirs: Hello | None = None
        """Their hello, once it was without fault; proved when the state is ADMITTED."""
        self.reason: Reason | None = None
        """Why it ended in a refusal."""
        self.was_told = False
        """Whether the refusal was theirs."""
        self._role = role
        self._us = us
        self._binding = binding
        self._secret_nonce: X25519PrivateKey | None = None
        self._hello = self._make_hello() if role is Role.CALLER else b""  # a listener's, once somebody is worth it
        self._transcript = b""
        self._mac_key = b""

    def first(self) -> bytes | None:
        """What to send before anything was received."""
        return self._hello if self._role is Role.CALLER else None

    def receive(self, message: bytes) -> bytes | None:
        """Take in a message; returns the answer, if there is one."""
        if len(message) == _REFUSAL_BYTES and message[0] == _REFUSAL:
            self._go(Heard.REFUSAL)
            self.was_told = True
            self.reason = _reason_of(message[1])
            return None
        try:
            if self.state is State.AWAITS_HELLO:
                self._hear_hello(message)
                self._go(Heard.HELLO)
                return self._proof() if self._role is Role.CALLER else self._hello
            if self.state is State.AWAITS_PROOF:
                self._hear_proof(message)
            self._go(Heard.PROOF)
            return self._proof() if self._role is Role.LISTENER else None
        except Fault as fault:
            return self.refuse(fault.reason)

    def refuse(self, reason: Reason) -> bytes:
        """End it for a reason of our own; returns what to tell the peer."""
        self._go(Heard.FAULT)
        self.reason = reason
        return bytes([_REFUSAL, reason])

    def _go(self, heard: Heard) -> None:
        if (self.state, heard) not in NEXT:
            raise UsageError(f"this handshake is over ({self.state.value}), and was given {heard.value}")
        self.state = NEXT[self.state, heard]

    def _make_hello(self) -> bytes:
        us = self._us
        self._secret_nonce = X25519PrivateKey.from_private_bytes(us.fresh(32))
        nonce = self._secret_nonce.public_key().public_bytes_raw()
        return _HELLO_FIELDS.pack(_HELLO, VERSION, self._role, us.secret.namespace, us.key.public, us.boot, nonce)

    def _hear_hello(self, message: bytes) -> None:
        theirs = read_hello(message)
        if self._hello.endswith(theirs.nonce):
            raise Fault(Reason.REFLECTED)
        if theirs.role != (Role.LISTENER if self._role is Role.CALLER else Role.CALLER):
            raise Fault(Reason.WRONG_ROLE)
        if not hmac.compare_digest(theirs.namespace, self._us.secret.namespace):
            raise Fault(Reason.OTHER_CLUSTER)
        # In the same life it is ourselves: a worker that calls the server beside it.
        if theirs.public == self._us.key.public and theirs.boot != self._us.boot:
            raise Fault(Reason.COPIED_IDENTITY)
        self._hello = self._hello or self._make_hello()
        assert self._secret_nonce is not None
        try:
            agreed = self._secret_nonce.exchange(X25519PublicKey.from_public_bytes(theirs.nonce))
        except ValueError:  # a point that makes every agreement zero
            raise Fault(Reason.MALFORMED) from None
        self.theirs = theirs
        in_order = (self._hello, message) if self._role is Role.CALLER else (message, self._hello)
        said = b"".join(len(part).to_bytes(4, "big") + part for part in (*in_order, self._binding))
        self._transcript = hashlib.sha3_256(_LABEL + said).digest()
        salt = self._us.secret.derive("admission")
        self._mac_key = HKDF(SHA256(), 32, salt=salt, info=_LABEL + self._transcript).derive(agreed)

    def _hear_proof(self, message: bytes) -> None:
        if len(message) != _PROOF_FIELDS.size or message[0] != _PROOF:
            raise Fault(Reason.MALFORMED)
        assert self.theirs is not None
        if self._role is Role.CALLER and hmac.compare_digest(message, self._proof()):
            raise Fault(Reason.REFLECTED)
        _, signature, mac = _PROOF_FIELDS.unpack(message)
        role = Role(self.theirs.role)
        if not is_signed(self._statement(role), signature, self.theirs.public):
            raise Fault(Reason.FOREIGN_PROOF)
        if not hmac.compare_digest(mac, self._mac(role)):
            raise Fault(Reason.WRONG_SECRET)

    def _proof(self) -> bytes:
        signature = self._us.key.sign(self._statement(self._role))
        return _PROOF_FIELDS.pack(_PROOF, signature, self._mac(self._role))

    def _mac(self, role: Role) -> bytes:
        return hmac.digest(self._mac_key, self._statement(role), "sha256")

    def _statement(self, role: Role) -> bytes:
        return _LABEL + bytes([role]) + self._transcript


def read_hello(message: bytes) -> Hello:
    """Decode a hello of our version; raises `Fault`. Nothing of what it says is proved."""
    if len(message) < 2 or message[0] != _HELLO:
        raise Fault(Reason.MALFORMED)
    if message[1] != VERSION:
        raise Fault(Reason.WRONG_VERSION)
    if len(message) != _HELLO_FIELDS.size:
        raise Fault(Reason.MALFORMED)
    return Hello(*_HELLO_FIELDS.unpack(message)[2:])


def _reason_of(code: int) -> Reason:
    try:
        return Reason(code)
    except ValueError:
        return Reason.UNKNOWN
