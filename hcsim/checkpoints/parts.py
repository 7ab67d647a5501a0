"""What a checkpoint is on disk: one part for each rank that saved it.

    FOLDER/step-00000100/rank-2-of-4.safetensors   tensors, and pieces of tensors, flat
    FOLDER/step-00000100/rank-2-of-4.json          what they are, and the file's SHA-256; written last
    FOLDER/step-00000100/rank-2-of-4-again-1.json  and so on: a step that was saved before

A part counts once its JSON file is there, which happens after its data are safe on the disk. A checkpoint counts when
all parts of one saving are there: they carry a number that was drawn for it, so that parts of two savings, or of two
steps, are never taken for one. Whoever dies meanwhile leaves an incomplete step, and the one before it is still whole.

What ranks tell each other about checkpoints is bytes that are decoded by type, never pickles.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from hcsim.errors import CheckpointError
from hcsim.files import write_whole


def place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Our rank, and of how many; a program that has not met others is the only one."""
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def gathered(mine: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Everyone's bytes, by rank. All ranks call this."""
    _, world = place(group)
    if world == 1:
        return [mine]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(mine)]), group=group)
    lengths = [int(size) for size in sizes]
    rooms = [torch.zeros(max(lengths), dtype=torch.uint8) for _ in range(world)]
    dist.all_gather(rooms, as_tensor(mine.ljust(max(lengths), b"\0")), group=group)
    return [room[:length].numpy().tobytes() for room, length in zip(rooms, lengths, strict=True)]


def as_tensor(data: bytes) -> torch.Tensor:
    """Bytes that can be sent."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


FORMAT = "hcsim checkpoint part 1"
_STEP = re.compile(r"step-(\d{8,})")


class Piece(msgspec.Struct, frozen=True, omit_defaults=True):
    """A range of a tensor's elements, in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    lo: int
    hi: int
    own: bool = False
    """Whether other ranks have others of these elements, or none."""
    first: bool = False
    """Whether, though it is each rank's own, another number of ranks goes on from the first rank's."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank saved."""

    format: str = FORMAT
    saving: str
    """The same in all parts of one saving."""
    again: int = 0
    """How many savings of this step there were before; they stay until this one is whole."""
    step: int
    rank: int
    world: int
    size_bytes: int
    sha256: str
    """Of the data file."""
    pieces: dict[str, Piece]
    """By the tensor's name; each is in the data file under that name."""
    plain: Any = None
    """Numbers and words that are the same on all ranks, as `taken_apart` gives them."""
    own: Any = None
    """What is this rank's alone: its random numbers, what it has not sent yet."""

    @property
    def stem(self) -> str:
        """Of its files' names."""
        return f"rank-{self.rank}-of-{self.world}" + (f"-again-{self.again}" if self.again else "")


def step_folder(folder: Path, step: int) -> Path:
    """Where the parts of a step are."""
    return folder / f"step-{step:08d}"


def data_file(folder: Path, part: Part) -> Path:
    """Where a part's tensors are."""
    return step_folder(folder, part.step) / f"{part.stem}.safetensors"


def steps_in(folder: Path) -> list[int]:
    """Steps of which there is something, the newest first."""
    if not folder.is_dir():
        return []
    found = (_STEP.fullmatch(entry.name) for entry in folder.iterdir())
    return sorted((int(match[1]) for match in found if match), reverse=True)


def write_part(folder: Path, part: Part, data: bytes) -> None:
    """Put it on the disk: all or nothing, and the description last."""
    where = data_file(folder, part)
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        write_whole(where, data)
        write_whole(where.with_suffix(".json"), _sealed(part))
    except OSError as error:
        raise CheckpointError(f"{where}: the checkpoint cannot be written: {error.strerror}") from None


def parts_in(folder: Path, step: int) -> tuple[list[Part], list[str]]:
    """The parts of a step that are described here, and what is wrong with descriptions that do not count."""
    parts, troubles = [], []
    for path in sorted(step_folder(folder, step).glob("rank-*.json")):
        try:
            part = _unsealed(path.read_bytes())
        except OSError as error:
            troubles.append(f"{path}: cannot be read: {error.strerror}")
        except (ValueError, RecursionError) as error:  # the second: nested without end
            troubles.append(f"{path}: {error}")
        else:
            if part.step == step and path.stem == part.stem:
                parts.append(part)
            else:
                troubles.append(f"{path}: this describes {part.stem} of step {part.step}")
    return parts, troubles


def check_data(folder: Path, part: Part) -> None:
    """Raise unless a part's data are the bytes that were saved."""
    path = data_file(folder, part)
    try:
        with open(path, "rb") as file:
            size_bytes, digest = os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    if size_bytes != part.size_bytes:
        raise CheckpointError(f"{path}: {size_bytes} bytes are there, and {part.size_bytes} were saved")
    if digest.hexdigest() != part.sha256:
        raise CheckpointError(f"{path}: these are not the bytes that were saved (their SHA-256 differs)")


def remove_step(folder: Path, step: int) -> None:
    """Take a step away, descriptions first. Other ranks may be doing the same."""
    where = step_folder(folder, step)
    for description in sorted(where.glob("*.json")):
        description.unlink(missing_ok=True)
    shutil.rmtree(where, ignore_errors=True)


def remove_savings(folder: Path, step: int, before: int) -> None:
    """Take away what there is of a step from savings before that one, which is whole."""
    for part in parts_in(folder, step)[0]:
        if part.again < before:
            data = data_file(folder, part)
            data.with_suffix(".json").unlink(missing_ok=True)
            data.unlink(missing_ok=True)


def complete(parts: Mapping[int, Part]) -> bool:
    """Whether these, by rank, are all parts of one saving."""
    kinds = {(part.saving, part.step, part.world) for part in parts.values()}
    return len(kinds) == 1 and sorted(parts) == list(range(next(iter(parts.values())).world))


def _sealed(part: Part) -> bytes:
    body = msgspec.json.format(msgspec.json.encode(part))
    return body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n"


def _unsealed(data: bytes) -> Part:
    body, _, seal = data.removesuffix(b"\n").rpartition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != seal:
        raise ValueError("this is not what was written (its SHA-256 differs)")
    part = msgspec.json.decode(body, type=Part)  # its DecodeError is a ValueError
    if part.format != FORMAT:
        raise ValueError(f"this is a {part.format!r}, and {FORMAT!r} can be read")
    return part
