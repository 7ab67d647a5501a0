"""What is known of each mutant so far, kept in a file, so that a run that was interrupted goes on where it was.

A line for each thing that was found out, with a digest of the tree and of the patch: what was found out about another
tree does not count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from experiments.mutants.hunt import Broken, Shrunk
from experiments.mutants.patches import Patch
from hcsim.errors import ConfigError


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that was found out."""

    digest: str
    seeds: tuple[int, int] | None = None
    """The first and the last of some seeds that were run: all kept every invariant, but for those that are `broken`."""
    broken: tuple[Broken, ...] = ()
    seed: int = 0
    """What was shrunk."""
    shrunk: Shrunk | None = None
    cpu_s: float = 0.0


class Known(msgspec.Struct):
    """What is known of one mutant, or of the tree without one."""

    clean: dict[int, None] = {}
    broken: dict[int, Broken] = {}
    shrunk: dict[int, Shrunk] = {}
    """By seed."""
    cpu_s: float = 0.0

    def add(self, entry: Entry) -> None:
        """One thing more."""
        self.cpu_s += entry.cpu_s
        self.broken |= {broken.seed: broken for broken in entry.broken}
        if entry.seeds is not None:
            first, last = entry.seeds
            self.clean |= dict.fromkeys(seed for seed in range(first, last + 1) if seed not in self.broken)
        if entry.shrunk is not None:
            self.shrunk[entry.seed] = entry.shrunk


class Ledger:
    """The file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known: dict[str, Known] = {}
        try:
            lines = file.read_bytes().splitlines() if file.exists() else []
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
        for line in lines:
            try:
                entry = msgspec.json.decode(line, type=Entry)
            except msgspec.DecodeError:
                continue  # it was cut short
            self.known(entry.digest).add(entry)

    def known(self, digest: str) -> Known:
        """Of the tree and patch of that digest."""
        return self._known.setdefault(digest, Known())

    def add(self, entry: Entry) -> None:
        """Note it, and keep it."""
        self.known(entry.digest).add(entry)
        with self._file.open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")


def digest_of(files: Iterable[Path], patch: Patch | None) -> str:
    """Of these files, and of what a patch changes in them."""
    sha = hashlib.sha256(msgspec.json.encode(patch.files if patch is not None else {}))
    for file in files:
        sha.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return sha.hexdigest()[:16]
