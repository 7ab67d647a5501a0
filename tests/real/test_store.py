"""Records on a disk, and what becomes of them there."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from hcsim.errors import ConfigError
from hcsim.real.hardware import FolderStore
from hcsim.runtime.host import keep, kept


class Note(msgspec.Struct):
    """Something to remember."""

    name: str
    number: int


class Other(msgspec.Struct):
    """What another version remembers."""

    number: str


def test_a_record_is_read_as_it_was_kept(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    assert kept(store, "note", Note) is None
    keep(store, "note", Note("mini", 3))
    assert kept(store, "note", Note) == Note("mini", 3)


def test_any_damaged_bit_of_a_record_is_seen_and_its_file_is_named(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    keep(store, "note", Note("mini", 3))
    path = tmp_path / "note"
    whole = path.read_bytes()
    damaged = [
        bytes([*whole[:at], whole[at] ^ 1 << bit, *whole[at + 1 :]]) for at in range(len(whole)) for bit in range(8)
    ]
    for data in (*damaged, b"", whole[:3], whole[:-1], whole + b"\0"):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=f"^{path}: cannot be read: it is damaged.*remove it"):
            kept(store, "note", Note)


def test_a_record_of_another_kind_is_refused_by_its_file(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    keep(store, "note", Note("mini", 3))
    with pytest.raises(ConfigError, match=f"^{tmp_path}/note: cannot be read: .*number`"):
        kept(store, "note", Other)
