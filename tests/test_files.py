"""What is written is durable: on the medium, and not in the cache of its drive."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from hcsim.files import flush, write_whole
from hcsim.real.keys import load_node_key

FULL_SYNC = 51
"""macOS's number of F_FULLFSYNC. Linux knows no such request."""


class Drive:
    """Records which requests the system gets for files and folders; it may refuse the full one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refusal: int = 0) -> None:
        self.asked: list[tuple[str, str]] = []
        self._refusal = refusal
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._sync)
        monkeypatch.setattr(fcntl, "fcntl", self._full)

    def _note(self, what: str, descriptor: int) -> None:
        self.asked.append((what, "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"))

    def _sync(self, descriptor: int) -> None:
        self._note("fsync", descriptor)
        self._fsync(descriptor)

    def _full(self, descriptor: int, request: int, *_: Any) -> int:
        assert request == FULL_SYNC
        self._note("full", descriptor)
        if self._refusal:
            raise OSError(self._refusal, os.strerror(self._refusal))
        return 0


def test_the_drives_cache_is_written_where_the_system_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive(monkeypatch)
    with (tmp_path / "data").open("wb") as file:
        flush(file.fileno(), FULL_SYNC)
    assert drive.asked == [("full", "file")]


def test_a_file_system_that_refuses_gets_the_ordinary_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive(monkeypatch, errno.ENOTSUP)
    with (tmp_path / "data").open("wb") as file:
        flush(file.fileno(), FULL_SYNC)
    assert drive.asked == [("full", "file"), ("fsync", "file")]


def test_a_failed_write_is_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive(monkeypatch, errno.EIO)
    with (tmp_path / "data").open("wb") as file, pytest.raises(OSError, match="Input/output"):
        flush(file.fileno(), FULL_SYNC)
    assert drive.asked == [("full", "file")]


@pytest.mark.skipif(hasattr(fcntl, "F_FULLFSYNC"), reason="this system knows the request")
def test_a_system_that_does_not_know_the_request_gets_the_ordinary_one(tmp_path: Path) -> None:
    with (tmp_path / "data").open("wb") as file:
        with pytest.raises(OSError, match="Invalid argument"):
            fcntl.fcntl(file.fileno(), FULL_SYNC)
        flush(file.fileno(), FULL_SYNC)


def test_records_and_keys_are_durable_with_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive(monkeypatch)
    write_whole(tmp_path / "record", b"data")
    assert [kind for _, kind in drive.asked] == ["file", "folder"]
    drive.asked.clear()
    load_node_key(tmp_path / "home")
    assert [kind for _, kind in drive.asked] == ["file", "folder"]
    load_node_key(tmp_path / "home")
    assert len(drive.asked) == 2
