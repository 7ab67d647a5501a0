"""A planted bug as a file: what is wrong, and a unified diff that does it.

The file begins with three fields, each on a line of its own and, where it is long, on indented lines below it:

    What: what is wrong in the code
    Seen: what a user would see
    Breaks: safety | liveness | progress | resources | messages

The diff follows, as `diff -u` and `git diff` write it, with at most three lines of context. `git apply` takes such a
file, and `apply` does the same without git: a hunk goes to the place nearest to its line number that has its old lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from hcsim.errors import ConfigError

KINDS = ("safety", "liveness", "progress", "resources", "messages")
_FIELDS = ("What", "Seen", "Breaks")
_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@")


class Hunk(msgspec.Struct, frozen=True):
    """Lines that take the place of others."""

    line: int
    """Where the old ones began when the diff was made, from 1."""
    old: tuple[str, ...]
    new: tuple[str, ...]


class Patch(msgspec.Struct, frozen=True):
    """One planted bug."""

    name: str
    what: str
    seen: str
    breaks: str
    """Which of `KINDS` of invariants."""
    files: Mapping[str, tuple[Hunk, ...]]
    """By path from the root of the tree."""


def load_all(folder: Path) -> dict[str, Patch]:
    """All patches of a folder, by name."""
    return {file.stem: parse(file.read_text(encoding="utf-8"), file.stem) for file in sorted(folder.glob("*.patch"))}


def parse(text: str, name: str) -> Patch:
    """Read a patch; refuses one that is not complete."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith("--- a/")), len(lines))
    fields = _fields(lines[:start])
    for field in _FIELDS:
        if not fields.get(field):
            raise ConfigError(
                f"{name}: a patch begins with {', '.join(f'{each}:' for each in _FIELDS)}; {field}: is missing"
            )
    if fields["Breaks"] not in KINDS:
        raise ConfigError(f"{name}: Breaks: {fields['Breaks']} is none of {', '.join(KINDS)}")
    files = {path: tuple(hunks) for path, hunks in _files(lines[start:], name)}
    if not files:
        raise ConfigError(f"{name}: there is no diff in it")
    return Patch(name, fields["What"], fields["Seen"], fields["Breaks"], files)


def apply(patch: Patch, root: Path) -> None:
    """Change the files of a tree; refuses, before anything is changed, where the old lines are not there."""
    changed = {root / path: _changed(patch.name, root / path, hunks) for path, hunks in patch.files.items()}
    for file, text in changed.items():
        file.write_text(text, encoding="utf-8")


def _fields(lines: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    field = ""
    for line in lines:
        head, colon, rest = line.partition(":")
        if colon and head in _FIELDS:
            field, found[head] = head, rest.strip()
        elif field and line.startswith(" "):
            found[field] = f"{found[field]} {line.strip()}"
    return found


def _files(lines: Sequence[str], name: str) -> Iterator[tuple[str, list[Hunk]]]:
    path, hunks = "", list[Hunk]()
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if line.startswith("--- a/"):
            if path:
                yield path, hunks
            path, hunks = line.removeprefix("--- a/").split("\t")[0], []
            number += 1  # the +++ line
        elif begins := _HUNK.match(line):
            end = number
            while end < len(lines) and lines[end][:1] in (" ", "-", "+", "") and not lines[end].startswith("--- a/"):
                end += 1
            body = [each or " " for each in lines[number:end]]
            old = tuple(each[1:] for each in body if each[0] != "+")
            hunks.append(Hunk(int(begins[1]), old, tuple(each[1:] for each in body if each[0] != "-")))
            number = end
        elif line:
            raise ConfigError(f"{name}: {line!r} is no part of a unified diff")
    if path:
        yield path, hunks


def _changed(name: str, file: Path, hunks: Sequence[Hunk]) -> str:
    if not file.is_file():
        raise ConfigError(f"{name}: there is no file {file}")
    lines = file.read_text(encoding="utf-8").splitlines()
    moved = 0
    for hunk in hunks:
        size, expected = len(hunk.old), hunk.line - 1 + moved
        places = [at for at in range(len(lines) - size + 1) if tuple(lines[at : at + size]) == hunk.old]
        if not places:
            raise ConfigError(f"{name}: the lines that it changes near {file.name}:{hunk.line} are not there any more")
        at = min(places, key=lambda place: abs(place - expected))
        lines[at : at + size] = hunk.new
        moved += len(hunk.new) - size
    return "\n".join(lines) + "\n"
