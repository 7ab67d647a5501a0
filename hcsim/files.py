"""Atomic file replacement, and files of other packages."""

from __future__ import annotations

import errno
import os
import secrets
from importlib.util import find_spec
from pathlib import Path


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
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name, too
    finally:
        os.close(folder)


def file_of(package: str, *parts: str) -> Path | None:
    """Return a file of an installed package without importing the package, or None if it has no such file."""
    spec = find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (file := Path(folder, *parts)).is_file():
            return file
    return None
