"""What a checkpoint is on disk: one part for each rank that saved it.

    FOLDER/step-00000100/rank-2-of-4.safetensors   tensors, and pieces of tensors
    FOLDER/step-00000100/rank-2-of-4.json          what they are, and the file's SHA-256; written last

A part counts once its JSON file is there, which happens after its data are safe on the disk. A checkpoint counts when
all parts of one saving are there: they carry a number that was drawn for it, so that parts of two savings, or of two
steps, are never taken for one. Whoever dies meanwhile leaves an incomplete step, and the one before it is still whole.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from hcsim.errors import CheckpointError

FORMAT = "hcsim checkpoint part 1"
_STEP = re.compile(r"step-(\d{8,})")


class Piece(msgspec.Struct, frozen=True):
    """A range of a tensor's elements, in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    lo: int
    hi: int


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank saved."""

    format: str = FORMAT
    saving: str
    """The same in all parts of one saving."""
    step: int
    rank: int
    world: int
    size_bytes: int
    sha256: str
    """Of the data file."""
    pieces: dict[str, Piece]
    """By the tensor's name; each is in the data file under that name, flat."""
    own: tuple[str, ...] = ()
    """Names of tensors that are this rank's alone: the state of its random numbers, what it has not sent yet."""
    plain: dict[str, Any] = {}
    """Numbers and words, the same on all ranks."""
    own_plain: dict[str, Any] = {}
    """This rank's alone."""

    @property
    def stem(self) -> str:
        """Of its files' names."""
        return f"rank-{self.rank}-of-{self.world}"


def step_folder(folder: Path, step: int) -> Path:
    """Where the parts of a step are."""
    return folder / f"step-{step:08d}"


def steps_in(folder: Path) -> list[int]:
    """Steps of which there is something, the newest first."""
    if not folder.is_dir():
        return []
    found = (_STEP.fullmatch(entry.name) for entry in folder.iterdir())
    return sorted((int(match[1]) for match in found if match), reverse=True)


def write_part(folder: Path, part: Part, data: bytes) -> None:
    """Put it on the disk: all or nothing, and the description last."""
    where = step_folder(folder, part.step)
    try:
        where.mkdir(parents=True, exist_ok=True)
        _write(where / f"{part.stem}.safetensors", data)
        _write(where / f"{part.stem}.json", _sealed(part))
    except OSError as error:
        raise CheckpointError(f"{where}: the checkpoint cannot be written: {error.strerror}") from None


def parts_in(folder: Path, step: int) -> Iterator[Part]:
    """The parts of a step that are described here. One whose description is damaged is as good as not there."""
    for path in sorted(step_folder(folder, step).glob("rank-*.json")):
        part = _unsealed(path.read_bytes())
        if part is not None and part.step == step and path.stem == part.stem:
            yield part


def read_data(folder: Path, part: Part) -> bytes:
    """A part's data, as they were saved, or an error."""
    path = step_folder(folder, part.step) / f"{part.stem}.safetensors"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) != part.size_bytes or hashlib.sha256(data).hexdigest() != part.sha256:
        raise CheckpointError(f"{path}: these are not the bytes that were saved (their SHA-256 differs)")
    return data


def remove_part(folder: Path, step: int, stem: str) -> None:
    """Take a part away, description first; and the step's folder with its last part."""
    where = step_folder(folder, step)
    for suffix in (".json", ".safetensors"):
        (where / f"{stem}{suffix}").unlink(missing_ok=True)
    if where.is_dir() and not any(where.iterdir()):
        where.rmdir()


def complete(parts: Mapping[int, Part]) -> bool:
    """Whether these, by rank, are all parts of one saving."""
    kinds = {(part.saving, part.step, part.world) for part in parts.values()}
    return len(kinds) == 1 and sorted(parts) == list(range(next(iter(parts.values())).world))


def _write(path: Path, data: bytes) -> None:
    beside = path.with_name(f".{path.name}.part")
    with open(beside, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name, too
    finally:
        os.close(folder)


def _sealed(part: Part) -> bytes:
    body = msgspec.json.encode(part)
    return msgspec.json.format(body) + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n"


def _unsealed(data: bytes) -> Part | None:
    body, _, seal = data.rstrip(b"\n").rpartition(b"\n")
    try:
        part = msgspec.json.decode(body, type=Part)
    except msgspec.DecodeError:
        return None
    whole = part.format == FORMAT and hashlib.sha256(msgspec.json.encode(part)).hexdigest().encode() == seal
    return part if whole else None
