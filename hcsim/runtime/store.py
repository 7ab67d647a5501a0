"""What a host remembers when its process ends."""

from __future__ import annotations

import zlib
from typing import Any, Protocol, TypeVar

import msgspec

from hcsim.errors import UNDECODABLE, ConfigError

T = TypeVar("T")
_MARK = b"hcsim record 1\n"
_CRC_BYTES = 4


class Store(Protocol):
    """Small named records that outlive a crash: written whole or not at all."""

    def load(self, name: str) -> bytes | None:
        """The record of that name, as it was last saved; None where there is none."""

    def save(self, name: str, data: bytes) -> None:
        """Replace the record; once this returns, a crash cannot lose it."""

    def where(self, name: str) -> str:
        """Where a person finds the record of that name."""


def keep(store: Store, name: str, record: Any) -> None:
    """Save a record in a form that shows whether it was damaged since."""
    store.save(name, packed(record))


def kept(store: Store, name: str, kind: type[T]) -> T | None:
    """What `keep` has saved, or None."""
    saved = store.load(name)
    return None if saved is None else unpacked(saved, kind, store.where(name))


def packed(record: Any) -> bytes:
    """A record in that form."""
    data = msgspec.msgpack.encode(record)
    return _MARK + zlib.crc32(data).to_bytes(_CRC_BYTES, "big") + data


def unpacked(saved: bytes, kind: type[T], where: str) -> T:
    """The record; `where` is where a person finds it."""
    mark, rest = saved[: len(_MARK)], saved[len(_MARK) :]
    crc, data = rest[:_CRC_BYTES], rest[_CRC_BYTES:]
    if mark != _MARK:
        why = "it is damaged, or was written by another version"
    elif crc != zlib.crc32(data).to_bytes(_CRC_BYTES, "big"):
        why = "it is damaged"
    else:
        try:
            return msgspec.msgpack.decode(data, type=kind)
        except UNDECODABLE as error:
            why = f"it was written by another version ({error})"
    raise ConfigError(f"{where}: cannot be read: {why}; remove it to start afresh")
