"""Atomic file replacement, files of the system, and files of other packages.

A file is durable once it is on the medium. On macOS `fsync` only hands the data to the drive, which may keep them in
its cache and write them in another order; `F_FULLFSYNC` makes the drive write them. Some file systems (SMB, NFS)
refuse it. On Linux `fsync` does both.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from importlib.util import find_spec
from pathlib import Path

_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)
_NOT_SUPPORTED = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY)


def flush(descriptor: int, full_sync: int | None = _FULL_SYNC) -> None:
    """Return once what was written to this file or folder is durable.

    `full_sync` is the request that makes the drive write its cache, where the system has one."""
    if full_sync is not None:
        try:
            fcntl.fcntl(descriptor, full_sync)
            return
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
    os.fsync(descriptor)


def flush_names(folder: Path) -> None:
    """Return once the names of the files in this folder are durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        flush(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replace a file atomically by one with these bytes, also in case of a power failure."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is there, and no file", str(path))  # a device must not be replaced by one
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")  # two processes may write the same file
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            flush(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    flush_names(path.parent)


def append_line(path: Path, line: bytes) -> None:
    """Add a line to a file, durably and after all lines that other processes add. A line that a crash has cut off is
    ended first, so that it spoils no other."""
    is_new = not path.exists()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
        size_bytes = os.fstat(file.fileno()).st_size
        torn = size_bytes > 0 and os.pread(file.fileno(), 1, size_bytes - 1) != b"\n"
        rest = memoryview((b"\n" if torn else b"") + line + b"\n")
        while rest:
            rest = rest[file.write(rest) :]
        flush(file.fileno())
    if is_new:
        flush_names(path.parent)


def text_of(path: Path) -> str:
    """Return the text of a file in which the system tells of itself; empty if it cannot be read: there is none, only
    root may, or the device does not answer."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def file_of(package: str, *parts: str) -> Path | None:
    """Return a file of an installed package without importing the package, or None if it has no such file."""
    spec = find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (file := Path(folder, *parts)).is_file():
            return file
    return None
