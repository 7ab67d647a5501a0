"""The trust list of a cluster: the keys that belong to it, and those that were expelled.

The list is a set of signed statements, from which everything else is computed. Merging two lists is the union
of their statements: in any order, any number of times, with the same result. There are two kinds of statements:

    listing    This key belongs to the cluster, under this name. Signed by a member, or with the phrase key: a node
               that knows the phrase may list itself.
    rotation   Ends a generation. It expels keys, names the keys that stay members, and replaces the phrase key.
               Signed by a member.

The cluster begins in generation 0 with the phrase key of its first secret and no members. A listing is valid in
its own generation if a member has signed it, or in the generation of the phrase key that has. It stays valid if
the rotation to the next generation keeps it. So a statement that was signed with an old phrase, by an expelled
member, or by a member that did not know of a rotation, is not valid after the rotation, however late it
arrives.

Members may rotate concurrently. Then all their expulsions apply, and members are those that all rotations keep;
a newcomer known to only one of them has to be invited again. A rotation by a member that a more senior one
expels concurrently has only one effect: it expels that senior member too. So an expelled member cannot undo its
expulsion, and expulsion is permanent. This needs no agreement among the members, which may be offline.

Statements are never removed, so the list has a limit. At the limit it admits no more machines; listed machines
stay members of each other, even if their lists differ, and can be expelled.

Cf. Kleppmann et al., "Making CRDTs Byzantine Fault Tolerant", 2022, where a set of signed updates is also
replicated by union, and the set determines which of them are valid.

An `Invitation` to a cluster expires, and admits a bounded number of machines. The inviting machine keeps it in
memory only, and measures its time with a monotonic clock: no clock has to be correct, and an invitation ends
with its process. A newcomer that has used it may ask again with the same key, since it may not have received
the answer.

A `RefusalReason` says why a node is not admitted. A refusal is sent as a number, so that no text of a stranger gets
into a log, and each side tells its own user.

This module does no I/O: no file, no clock, no network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from hcsim.errors import ConfigError
from hcsim.identity.keys import ClusterSecret, NodeKey, is_signed, node_id_of
from hcsim.runtime.frame import decode_message


class RefusalReason(IntEnum):
    """Why a node is not admitted. The number is sent to the peer."""

    MALFORMED = 1
    WRONG_VERSION = 2
    WRONG_ROLE = 3
    OTHER_CLUSTER = 4
    COPIED_IDENTITY = 5
    REFLECTED = 6
    FOREIGN_PROOF = 7
    WRONG_SECRET = 8
    TOO_MANY_FAILURES = 9
    TOO_SLOW = 10
    TOO_MANY_CALLERS = 11
    UNLISTED = 12
    EXPELLED = 13
    WE_ARE_UNLISTED = 14
    LIST_FULL = 15
    UNKNOWN = 255


_INVITE = "run `hcsim cluster invite` on a member of the cluster, and `hcsim cluster join` on the other machine"
OTHER_CLUSTER = f"remove the cluster of one of the two (its files in ~/.hcsim/clusters), then {_INVITE}"
_OTHER_CLUSTER = f"it belongs to another cluster: if the two belong together, {OTHER_CLUSTER}"
_NEW_KEY = "to have it back, delete its file node_key, which makes it a new machine, and invite it"
FULL = (
    "the cluster's trust list is full: create a new cluster (`hcsim cluster create --name …`) and have its machines "
    "join that"
)
WE_ARE_EXPELLED = (
    "this machine was expelled from the cluster: it can come back with a new key (delete its file node_key) and an "
    "invitation (`hcsim cluster invite` on a member)"
)
WE_ARE_UNLISTED = (
    "this machine's key is not on the cluster's trust list: run `hcsim cluster invite` on a member and "
    "`hcsim cluster join` here"
)
_COPIED = (
    "the file node_key was copied from one machine to another: delete it on one of them, which makes a new one "
    "when it starts again"
)

_OURS = {
    RefusalReason.MALFORMED: "it sent something that is not the admission handshake",
    RefusalReason.WRONG_VERSION: "it speaks another version of the handshake: install the same hcsim on both",
    RefusalReason.WRONG_ROLE: "it claims the same end of the connection as we have",
    RefusalReason.OTHER_CLUSTER: _OTHER_CLUSTER,
    RefusalReason.COPIED_IDENTITY: f"it presents our own identity: {_COPIED}",
    RefusalReason.REFLECTED: "it sent our own words back to us",
    RefusalReason.FOREIGN_PROOF: "its proof was not made for this connection (replayed, relayed or damaged)",
    RefusalReason.WRONG_SECRET: "it names our cluster, but does not know the secret",
    RefusalReason.TOO_MANY_FAILURES: "too many attempts from there have failed; it has to wait",
    RefusalReason.TOO_SLOW: "it did not finish the handshake in time",
    RefusalReason.TOO_MANY_CALLERS: "too many call from there at once, and have not said who they are",
    RefusalReason.UNLISTED: f"its key is not on the cluster's trust list: {_INVITE}",
    RefusalReason.EXPELLED: f"it was expelled from the cluster: {_NEW_KEY}",
    RefusalReason.WE_ARE_UNLISTED: f"our own key is not on the cluster's trust list: {_INVITE}",
    RefusalReason.LIST_FULL: f"its key is not on the list, and {FULL}",
    RefusalReason.UNKNOWN: "nobody knows why",
}
_THEIRS = {
    RefusalReason.MALFORMED: "it could not read our handshake: is it another version of hcsim?",
    RefusalReason.WRONG_VERSION: "it speaks another version of the handshake: install the same hcsim on both",
    RefusalReason.WRONG_ROLE: "it takes itself for the same end of the connection as we do",
    RefusalReason.OTHER_CLUSTER: _OTHER_CLUSTER,
    RefusalReason.COPIED_IDENTITY: f"it has the same identity as we: {_COPIED}",
    RefusalReason.REFLECTED: "it heard its own words from us: something between us sends them back",
    RefusalReason.FOREIGN_PROOF: "our proof did not fit its connection: something between us changes or relays it",
    RefusalReason.WRONG_SECRET: f"our secret is not that of its cluster: {_INVITE}",
    RefusalReason.TOO_MANY_FAILURES: "too many attempts from our address have failed; we have to wait",
    RefusalReason.TOO_SLOW: "we did not finish the handshake in time",
    RefusalReason.TOO_MANY_CALLERS: "too many call it at once from our address, and have not said who they are",
    RefusalReason.UNLISTED: f"our key is not on the cluster's trust list: {_INVITE}",
    RefusalReason.EXPELLED: WE_ARE_EXPELLED,
    RefusalReason.WE_ARE_UNLISTED: f"its own key is not on the cluster's trust list: {_INVITE}",
    RefusalReason.LIST_FULL: f"our key is not on its list, and {FULL}",
    RefusalReason.UNKNOWN: "for a reason that this version of hcsim does not know",
}


def told(peer: str, reason: RefusalReason, *, by_them: bool) -> str:
    return f"{peer} refused us: {_THEIRS[reason]}" if by_them else f"we refused {peer}: {_OURS[reason]}"


MOST_STATEMENTS = 512
MOST_BYTES = 128 * 1024
MOST_LISTINGS, MOST_LISTED_BYTES = MOST_STATEMENTS * 3 // 4, MOST_BYTES * 3 // 4
"""Listings leave room for rotations, so a node that fills the list can still be expelled."""
MOST_NAME = 64
_LABEL = b"hcsim trust list 1\0"

PublicKey: TypeAlias = Annotated[bytes, Meta(min_length=32, max_length=32)]
Signature: TypeAlias = Annotated[bytes, Meta(max_length=64)]
Generation: TypeAlias = Annotated[int, Meta(ge=0, le=2**32)]


class TrustListFull(ConfigError):
    """Raised if more statements would make the list too long."""

    def __init__(self) -> None:
        super().__init__(FULL)


class Listing(msgspec.Struct, frozen=True, array_like=True, tag="listing"):
    """A statement that a key belongs to the cluster."""

    generation: Generation
    public: PublicKey
    name: Annotated[str, Meta(max_length=MOST_NAME)]
    signer: PublicKey
    signature: Signature = b""


class Rotation(msgspec.Struct, frozen=True, array_like=True, tag="rotation"):
    """A statement that begins a generation."""

    generation: Annotated[int, Meta(ge=1, le=2**32)]
    expelled: Annotated[tuple[PublicKey, ...], Meta(max_length=MOST_STATEMENTS)]
    kept: Annotated[tuple[PublicKey, ...], Meta(max_length=MOST_STATEMENTS)]
    phrase: PublicKey
    signer: PublicKey
    signature: Signature = b""


Statement: TypeAlias = Listing | Rotation
_Any = TypeVar("_Any", Listing, Rotation)


class TrustRecord(msgspec.Struct, frozen=True):
    """A list with its secret, as it is stored in a file and sent to members."""

    statements: Annotated[tuple[Statement, ...], Meta(max_length=MOST_STATEMENTS)] = ()
    secret: Annotated[bytes, Meta(max_length=16)] = b""
    """The secret of the last rotation; empty if it is the first secret, or is withheld."""


_DECODER = msgspec.msgpack.Decoder(TrustRecord)


def decode_record(data: bytes, peer: str) -> TrustRecord:
    return decode_message(_DECODER, data, peer, "sent a trust list that cannot be read")


def phrase_key(secret: ClusterSecret) -> NodeKey:
    """Return the key with which a node that knows a cluster's secret may list itself."""
    return NodeKey(secret.derive("phrase key"))


class TrustList:
    """The statements of one cluster, and the members that follow from them."""

    def __init__(self, namespace: bytes, root: bytes, statements: Iterable[Statement] = ()) -> None:
        """`root` is the phrase key of the cluster's first secret. The signatures must have been checked."""
        self._namespace = namespace
        self._root = root
        encoded = {msgspec.msgpack.encode(each): each for each in statements}
        self.statements = tuple(encoded[data] for data in sorted(encoded))
        self.digest = hashlib.sha3_256(_LABEL + namespace + b"".join(sorted(encoded))).digest()
        self.generation = 0
        self.members: Mapping[str, str] = {}
        """The members' names, by node id, the most senior first."""
        self.expelled: Mapping[str, str] = {}
        self.phrases: tuple[bytes, ...] = (root,)
        """The phrase keys with which newcomers may list themselves: two after concurrent rotations, or none."""
        self._publics: dict[str, bytes] = {}
        self._evaluate()

    @classmethod
    def of(cls, secret: ClusterSecret) -> TrustList:
        """Return the empty list of the cluster that begins with that secret."""
        return cls(secret.namespace, phrase_key(secret).public)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrustList) and other.digest == self.digest

    def __hash__(self) -> int:
        return int.from_bytes(self.digest[:8], "big")

    def about(self, node: str) -> tuple[Statement, ...]:
        return tuple(each for each in self.statements if isinstance(each, Listing) and node_id_of(each.public) == node)

    def merged(self, statements: Iterable[Statement]) -> TrustList:
        """Return the list with these statements added, if their signatures are valid and their signers can be known
        here.

        Raise `TrustListFull` if that makes it too long."""
        mine = dict.fromkeys(self.statements)
        new = [each for each in statements if each not in mine]
        if not new:
            return self
        added = [each for each in self._connected([*self.statements, *new]) if each not in mine]
        merged = TrustList(self._namespace, self._root, [*mine, *filter(self.is_authentic, added)])
        listings = [each for each in merged.statements if isinstance(each, Listing)]
        lists = any(isinstance(each, Listing) for each in added)
        if _exceed(merged.statements, MOST_STATEMENTS, MOST_BYTES) or (
            lists and _exceed(listings, MOST_LISTINGS, MOST_LISTED_BYTES)
        ):
            raise TrustListFull
        return merged

    def is_authentic(self, statement: Statement) -> bool:
        return is_signed(self._signed_part(statement), statement.signature, statement.signer)

    def listing(self, public: bytes, name: str, key: NodeKey) -> Listing:
        return self._signed(Listing(self.generation, public, name[:MOST_NAME], key.public), key)

    def rotation(self, expelled: Iterable[str], phrase: bytes, key: NodeKey) -> Rotation:
        gone = tuple(self._publics[node] for node in expelled)
        kept = tuple(self._publics[node] for node in self.members if self._publics[node] not in gone)
        return self._signed(Rotation(self.generation + 1, gone, kept, phrase, key.public), key)

    def _signed(self, statement: _Any, key: NodeKey) -> _Any:
        return msgspec.structs.replace(statement, signature=key.sign(self._signed_part(statement)))

    def _signed_part(self, statement: Statement) -> bytes:
        bare = msgspec.structs.replace(statement, signature=b"")
        return _LABEL + self._namespace + msgspec.msgpack.encode(bare)

    def _connected(self, statements: Iterable[Statement]) -> list[Statement]:
        """Return the statements whose signers lead back to the first phrase key, whether they are valid or not."""
        known, waiting, found = {self._root: None}, [*statements], list[Statement]()
        while ready := [each for each in waiting if each.signer in known]:
            found += ready
            waiting = [each for each in waiting if each.signer not in known]
            known |= {each.public if isinstance(each, Listing) else each.phrase: None for each in ready}
        return found

    def _evaluate(self) -> None:
        members: dict[bytes, int] = {}  # since which generation
        expelled: dict[bytes, None] = {}
        names: dict[bytes, str] = {}
        listings = [each for each in self.statements if isinstance(each, Listing)]
        rotations = [each for each in self.statements if isinstance(each, Rotation)]
        while True:
            self._list(listings, members, expelled, names)
            next_ones = [r for r in rotations if r.generation == self.generation + 1 and r.signer in members]
            if not next_ones:
                break
            self.generation += 1
            counting = _expel(sorted(next_ones, key=lambda each: (members[each.signer], each.signer)), expelled)
            kept = {key: s for key, s in members.items() if all(key in rotation.kept for rotation in counting)}
            members = {key: since for key, since in kept.items() if key not in expelled}
            self.phrases = tuple(rotation.phrase for rotation in counting if rotation.signer not in expelled)
        seniority = sorted(members, key=lambda key: (members[key], key))
        self.members = {node_id_of(key): names[key] for key in seniority}
        self.expelled = {node_id_of(key): names.get(key, "") for key in expelled}
        self._publics = {node_id_of(key): key for key in seniority}

    def _list(
        self,
        listings: Iterable[Listing],
        members: dict[bytes, int],
        expelled: Mapping[bytes, None],
        names: dict[bytes, str],
    ) -> None:
        """Add the listings of the present generation, each once its signer is a member."""
        waiting = [each for each in listings if each.public not in expelled]
        while True:
            ready = [each for each in waiting if self._may_list(each, members)]
            if not ready:
                return
            waiting = [each for each in waiting if not self._may_list(each, members)]
            for each in ready:
                members.setdefault(each.public, self.generation)
                names[each.public] = max(each.name, names.get(each.public, ""))

    def _may_list(self, listing: Listing, members: Mapping[bytes, int]) -> bool:
        if listing.signer in self.phrases:
            return True
        return listing.generation == self.generation and listing.signer in members


def _exceed(statements: Sequence[Statement], most: int, most_bytes: int) -> bool:
    return len(statements) > most or len(msgspec.msgpack.encode(statements)) > most_bytes


def _expel(rotations: Iterable[Rotation], expelled: dict[bytes, None]) -> list[Rotation]:
    """Apply the expulsions of the rotations of one generation, in order of seniority; return the rotations that
    have further effect."""
    expellers: dict[bytes, list[bytes]] = {}
    counting = []
    for rotation in rotations:
        against = expellers.get(rotation.signer)
        if against is None:
            counting.append(rotation)
        for key in rotation.expelled:
            if against is None or key in against:
                expellers.setdefault(key, []).append(rotation.signer)
                expelled[key] = None
    return counting


class Invitation:
    """An invitation, and the keys that have used it."""

    def __init__(self, uses: int, expires_at_s: float) -> None:
        self.expires_at_s = expires_at_s
        self._uses = uses
        self._users: dict[bytes, bool] = {}
        """Whether the newcomer has confirmed the answer."""

    def use(self, public: bytes, now_s: float) -> str:
        """Count a use by that key; return the objection, if there is one."""
        if now_s >= self.expires_at_s:
            return "the invitation has expired"
        if public not in self._users and len(self._users) >= self._uses:
            return "the invitation has been used already"
        self._users.setdefault(public, False)
        return ""

    def confirm(self, public: bytes) -> None:
        if public in self._users:
            self._users[public] = True

    def give_back(self, public: bytes) -> None:
        """Undo a use, because the newcomer could not be admitted after all."""
        if not self._users.get(public, True):
            del self._users[public]

    def is_over(self, now_s: float) -> bool:
        return now_s >= self.expires_at_s or sum(self._users.values()) >= self._uses
