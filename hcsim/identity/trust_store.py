"""A machine's copy of the cluster's trust list: the list, the newest secret, and the operations to change them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

import msgspec

from hcsim.errors import ConfigError, HcsimError
from hcsim.identity.keys import SECRET_BYTES, ClusterSecret, NodeKey, node_id_of
from hcsim.identity.trust_list import (
    WE_ARE_EXPELLED,
    WE_ARE_UNLISTED,
    Rotation,
    TrustList,
    TrustListFull,
    TrustRecord,
    decode_record,
    phrase_key,
)
from hcsim.runtime.host import Store, keep, kept

NO_DIGEST = bytes(32)
MOST_UNPROVED = 64
"""The maximum number of new statements from a peer that is not on the list: each costs a signature check."""


class TrustStorage(Protocol):
    """The storage of the record. Other processes of the machine may change it, too."""

    def load(self) -> TrustRecord | None: ...

    def update(self, change: Callable[[TrustRecord | None], TrustRecord]) -> None:
        """Atomically replace the record with the result of `change`."""


class StoredTrust:
    """The record in a host's store, which only one process uses."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def load(self) -> TrustRecord | None:
        return kept(self._store, "trust", TrustRecord)

    def update(self, change: Callable[[TrustRecord | None], TrustRecord]) -> None:
        keep(self._store, "trust", change(self.load()))


class TrustStore:
    """The trust list as one machine knows it. A machine that knows the present phrase lists itself."""

    def __init__(self, first: ClusterSecret, key: NodeKey, name: str, disk: TrustStorage) -> None:
        """`first` is the secret that the cluster began with."""
        self.on_change: list[Callable[[], None]] = []
        self._first = first
        self._key = key
        self._name = name
        self._disk = disk
        self.list = TrustList.of(first)
        self._later: ClusterSecret | None = None
        """The secret of the last known rotation, or one that the user entered and no member has confirmed yet."""
        self._adopt(*self._with(self._disk.load() or TrustRecord()))
        self._list_ourselves()

    @property
    def namespace(self) -> bytes:
        """The id of the cluster: it stays when the secret changes."""
        return self._first.namespace

    @property
    def record(self) -> TrustRecord:
        return _record(self.list, self._later)

    @property
    def secret(self) -> ClusterSecret | None:
        known = [secret for secret in (self._later, self._first) if secret is not None]
        return next((secret for secret in known if phrase_key(secret).public in self.list.phrases), None)

    @property
    def digest(self) -> bytes:
        """The digest of the list and the secret: equal for members with the same knowledge. Never `NO_DIGEST`."""
        known = b"" if self.secret is None else self.secret.namespace
        return hashlib.sha3_256(self.list.digest + known).digest()

    @property
    def phrase(self) -> str | None:
        """The phrase to join without an invitation, if it is known: after a rotation it has two parts."""
        if self.secret is None:
            return None
        return "-".join(each.phrase() for each in dict.fromkeys((self._first, self.secret)))

    def told_to(self, public: bytes) -> bytes:
        """Return the data for a machine with that key: everything for a member, otherwise only how this machine is
        listed."""
        if node_id_of(public) in self.list.members:
            told = self.record
        else:
            told = TrustRecord(self.list.about(self._key.node_id))
        if self._later is not None and self._later != self.secret:  # a member may know what it is good for
            claim = self.list.listing(self._key.public, self._name, phrase_key(self._later))
            told = TrustRecord((*told.statements, claim))
        return msgspec.msgpack.encode(told)

    def receive(self, data: bytes, peer: str, public: bytes) -> bool:
        """Merge data from a machine with that key, if it is a member by then; return whether it is.

        Raise `TrustListFull` if only the lack of room on the list keeps it from being one."""
        told = decode_record(data, peer)
        node = node_id_of(public)
        if node not in self.list.members:
            known = dict.fromkeys(self.list.statements)
            if sum(each not in known for each in told.statements) > MOST_UNPROVED:
                return False
            if node not in self.list.merged(told.statements).members:
                return False
        with suppress(TrustListFull):  # it is a member all the same
            self.take(told)
        return True

    def take(self, record: TrustRecord) -> None:
        """Merge a list. If it cannot be saved, it is kept in memory until the process ends, and received again
        later.

        If the list would be too long, merge only the rotations and raise `TrustListFull`."""
        try:
            self._take(record)
        except TrustListFull:
            rotations = tuple(each for each in record.statements if isinstance(each, Rotation))
            self._take(TrustRecord(rotations, record.secret))
            raise

    def _take(self, record: TrustRecord) -> None:
        try:
            self.save(record)
        except TrustListFull:
            raise
        except HcsimError:
            self._adopt(*self._with(record))

    def enlist(self, public: bytes, name: str) -> None:
        """Make a key a member; raise `ConfigError` if that is impossible, or cannot be saved."""
        self.check_listed()
        node = node_id_of(public)
        if node in self.list.expelled:
            raise ConfigError(f"{name} was expelled with the key that it has: delete its file node_key for a new one")
        if node not in self.list.members:
            self.save(TrustRecord((self.list.listing(public, name, self._key),)))

    def rotate(self, secret: ClusterSecret, expelled: Iterable[str] = ()) -> None:
        """Replace the secret, and expel these nodes for good; raise `ConfigError` if that cannot be saved."""
        self.check_listed()
        rotation = self.list.rotation(expelled, phrase_key(secret).public, self._key)
        self.save(TrustRecord((rotation,), secret.data))

    def check_listed(self) -> None:
        """Raise `ConfigError` if this machine is not a member."""
        if self._key.node_id in self.list.expelled:
            raise ConfigError(WE_ARE_EXPELLED)
        if self._key.node_id not in self.list.members:
            raise ConfigError(WE_ARE_UNLISTED)

    def _list_ourselves(self) -> None:
        node, secret = self._key.node_id, self.secret
        if secret is not None and node not in self.list.members and node not in self.list.expelled:
            with suppress(TrustListFull):  # whoever needs it to be on the list says so
                self.take(TrustRecord((self.list.listing(self._key.public, self._name, phrase_key(secret)),)))

    def save(self, record: TrustRecord) -> None:
        """Merge the record with the one on disk, and both with the one in memory."""
        known = [(self.list, self._later)]

        def merged(saved: TrustRecord | None) -> TrustRecord:
            known[0] = self._with(record, saved or TrustRecord())
            return _record(*known[0])

        self._disk.update(merged)
        self._adopt(*known[0])

    def _with(self, *records: TrustRecord) -> tuple[TrustList, ClusterSecret | None]:
        """Return the list and the later secret that result from these records and the one in memory."""
        merged, secrets = self.list, [] if self._later is None else [self._later]
        for record in records:
            merged = merged.merged(record.statements)
            secrets += [ClusterSecret(record.secret)] if len(record.secret) == SECRET_BYTES else []
        right = {phrase_key(secret).public: secret for secret in secrets}
        present = next((right[phrase] for phrase in merged.phrases if phrase in right), None)
        return merged, present or next(iter(secrets), None)

    def _adopt(self, merged: TrustList, later: ClusterSecret | None) -> None:
        before = self.digest
        self.list, self._later = merged, later
        if self.digest != before:
            for act in self.on_change:
                act()


def _record(merged: TrustList, later: ClusterSecret | None) -> TrustRecord:
    return TrustRecord(merged.statements, b"" if later is None else later.data)
