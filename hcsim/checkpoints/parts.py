"""The format of a checkpoint on disk: one part for each rank that saved it.

    FOLDER/step-00000100/rank-2-of-4.safetensors   chunks of tensors
    FOLDER/step-00000100/rank-2-of-4.json          metadata, other data, and the SHA-256; written last
    FOLDER/step-00000100/rank-2-of-4-again-1.json  and so on: a step that was saved before

A part is valid once its JSON file exists, which is written after the data are durable. A checkpoint is valid
when all parts of one saving exist. They carry a random number drawn for that saving, so parts of two savings or
two steps are never mixed. A crash leaves an incomplete step; the previous step stays complete.

The values of a `state_dict()` are JSON, with the tensors beside it. JSON has no infinities, no integers of
arbitrary size, no tuples and only string keys: these are encoded explicitly. Bytes and numpy arrays and scalars
are stored as tensors with a type tag.

Ranks exchange metadata as typed messages, never as pickles.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hcsim.errors import CheckpointError, NoCheckpoint
from hcsim.files import write_whole


def taken_apart(state: object, path: str, tensors: dict[str, Tensor]) -> Any:
    """Convert a state to plain data. Tensors are put into `tensors` by their paths, zero-dimensional ones into
    the data."""
    if isinstance(state, Tensor):
        return _tensor(state, path, tensors)
    if isinstance(state, Mapping):
        return {"$dict": [[_key(key, path), taken_apart(state[key], f"{path}/{key}", tensors)] for key in state]}
    if isinstance(state, tuple | list):
        parts = [taken_apart(value, f"{path}/{number}", tensors) for number, value in enumerate(state)]
        return {"$tuple": parts} if isinstance(state, tuple) else parts
    if isinstance(state, str):
        return _word(state, path)
    if state is None or isinstance(state, bool):
        return state
    if isinstance(state, int):
        return int(state) if abs(state) < 1 << 63 else {"$int": hex(state)}
    if isinstance(state, float):
        return float(state) if math.isfinite(state) else {"$float": str(float(state))}
    for kind in _BYTES:
        if type(state) is kind:
            data = state.getvalue() if isinstance(state, io.BytesIO) else bytes(state)  # type: ignore[call-overload]
            return {f"${kind.__name__}": _tensor(as_tensor(data), path, tensors)}
    if type(state) is np.ndarray or isinstance(state, np.generic):
        return {
            f"${'array' if type(state) is np.ndarray else 'number'}": _tensor(_of_numpy(state, path), path, tensors)
        }
    raise _refused(state, path)


def put_together(plain: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Invert `taken_apart`."""
    if isinstance(plain, list):
        return [put_together(value, tensor) for value in plain]
    if not isinstance(plain, dict):
        return plain
    [(kind, value)] = plain.items()
    match kind:
        case "$tensor":
            return tensor(value)
        case "$scalar":
            dtype, number = value
            return torch.tensor(put_together(number, tensor), dtype=dtype_of(dtype))
        case "$tuple":
            return tuple(put_together(each, tensor) for each in value)
        case "$int":
            return int(value, 16)
        case "$float":
            return float(value)
        case "$bytes" | "$bytearray" | "$BytesIO":
            [made] = [each for each in _BYTES if kind == f"${each.__name__}"]
            return made(put_together(value, tensor).numpy().tobytes())
        case "$array" | "$number":
            array = put_together(value, tensor).numpy()
            return array if kind == "$array" else array[()]
        case _:
            return {key: put_together(each, tensor) for key, each in value}


def as_tensor(data: bytes) -> Tensor:
    """Return bytes as a tensor, to be sent."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"this version of torch has no {name}")
    return dtype


_BYTES: tuple[type, ...] = (bytes, bytearray, io.BytesIO)


def _of_numpy(state: Any, path: str) -> Tensor:
    try:
        return torch.from_numpy(np.array(state, state.dtype.newbyteorder("="), order="C"))
    except TypeError:  # of words, say, or of objects
        raise _refused(state, path) from None


def _refused(state: object, path: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is a {type(state).__name__}: a checkpoint holds tensors, arrays, numbers, words and bytes"
    )


def _word(word: str, path: str) -> str:
    """Return the string unchanged if files can hold it; raise otherwise."""
    try:
        word.encode()
    except UnicodeEncodeError:
        raise CheckpointError(f"{path} has {word!a}, which is no text: half of a surrogate pair is missing") from None
    return word


def _tensor(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if tensor.dim() == 0 and not tensor.is_complex():
        return {"$scalar": [dtype_name(tensor.dtype), taken_apart(tensor.item(), path, tensors)]}
    while path in tensors:  # a key may have a slash in it
        path += "'"
    tensors[path] = tensor.detach()
    return {"$tensor": path}


def _key(key: object, path: str) -> str | int | None:
    if isinstance(key, str):
        return _word(key, path)
    if key is None or isinstance(key, int):
        return key
    raise CheckpointError(f"{path} has a key that is a {type(key).__name__}: a checkpoint has words and whole numbers")


FORMAT = "hcsim checkpoint part 2"
_STEP = re.compile(r"step-(\d{8,})")


class Item(msgspec.Struct, frozen=True, omit_defaults=True):
    """A DCP item: a chunk of a tensor or, without a dtype, an object."""

    path: tuple[str | int, ...]
    """The path in the state dict. DCP's name joins it with dots."""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    """The shape of the whole tensor."""
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    stored: str = ""
    """The chunk's name in the data file, if it differs."""
    plain: Any = None
    """The object, in the form of `taken_apart`."""

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path))


class CheckpointShard(msgspec.Struct, frozen=True, kw_only=True):
    """The part that one rank saved."""

    format: str = FORMAT
    saving: str
    """The random number of the saving, the same in all its parts."""
    again: int = 0
    """The number of earlier savings of this step, which are kept until this one is complete."""
    step: int
    rank: int
    world: int
    size_bytes: int = 0
    sha256: str = ""
    items: list[Item]
    aliases: dict[str, str] = {}
    """Additional names of tensors saved under another name, as for tied weights."""

    @property
    def stem(self) -> str:
        """The stem of its file names."""
        return f"rank-{self.rank}-of-{self.world}" + (f"-again-{self.again}" if self.again else "")


class _Kind(msgspec.Struct):
    format: str


def place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this rank and the number of ranks: (0, 1) for a program without a process group."""
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def gathered(mine: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """All-gather bytes, by rank. All ranks call this."""
    _, world = place(group)
    if world == 1:
        return [mine]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(mine)]), group=group)
    lengths = [int(size) for size in sizes]
    rooms = [torch.zeros(max(lengths), dtype=torch.uint8) for _ in range(world)]
    dist.all_gather(rooms, as_tensor(mine.ljust(max(lengths), b"\0")), group=group)
    return [room[:length].numpy().tobytes() for room, length in zip(rooms, lengths, strict=True)]


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def data_file(folder: Path, part: CheckpointShard) -> Path:
    return step_folder(folder, part.step) / f"{part.stem}.safetensors"


def steps_in(folder: Path) -> list[int]:
    """Return the steps of which the folder has any file, the newest first."""
    if not folder.is_dir():
        return []
    found = (_STEP.fullmatch(entry.name) for entry in folder.iterdir())
    return sorted((int(match[1]) for match in found if match), reverse=True)


def write_part(folder: Path, part: CheckpointShard, data: bytes) -> None:
    """Write the part to disk atomically, the JSON file last."""
    where = data_file(folder, part)
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        write_whole(where, data)
        write_whole(where.with_suffix(".json"), _sealed(part))
    except OSError as error:
        raise CheckpointError(f"{where}: the checkpoint cannot be written: {error.strerror}") from None


def parts_in(folder: Path, step: int) -> tuple[list[CheckpointShard], list[str]]:
    """Return the parts of a step whose JSON files are valid, and the errors of the others."""
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


def _sound(folder: Path, parts: Sequence[CheckpointShard]) -> tuple[list[int], list[str]]:
    """Return the ranks of the parts whose data are intact, and the errors of the others."""
    sound, troubles = [], []
    for part in parts:
        path = data_file(folder, part)
        try:
            with open(path, "rb") as file:
                size_bytes, digest = os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256")
        except OSError as error:
            troubles.append(f"{path}: cannot be read: {error.strerror}")
            continue
        if size_bytes != part.size_bytes:
            troubles.append(f"{path}: {size_bytes} bytes are there, and {part.size_bytes} were saved")
        elif digest.hexdigest() != part.sha256:
            troubles.append(f"{path}: these are not the bytes that were saved (their SHA-256 differs)")
        else:
            sound.append(part.rank)
    return sound, troubles


def chosen(
    folder: Path, step: int | None, gather: Callable[[bytes], list[bytes]]
) -> tuple[dict[int, CheckpointShard], list[list[int]]]:
    """Return the parts of the newest complete saving, and which of them each rank has. Damaged files are named."""
    if (folder / ".metadata").exists():
        raise CheckpointError(f"{folder} is a checkpoint of torch's FileSystemWriter: its FileSystemReader reads that")
    mine: list[CheckpointShard] = []
    troubles: list[str] = []
    for found in steps_in(folder) if step is None else [step]:
        parts, damaged = parts_in(folder, found)
        mine += parts
        troubles += damaged
    described = _decoded(gather(msgspec.msgpack.encode(mine)), list[CheckpointShard])
    for parts_of in _savings(described):
        sound, damaged = _sound(folder, [part for part in parts_of.values() if part in mine])
        troubles += damaged
        held = _decoded(gather(msgspec.msgpack.encode(sound)), list[int])
        if {rank for ranks in held for rank in ranks} == parts_of.keys():
            if troubles:
                warnings.warn("; ".join(troubles) + f": step {parts_of[0].step} is loaded", stacklevel=3)
            return parts_of, held
    said = _decoded(gather(msgspec.msgpack.encode(troubles)), list[str])
    damaged = [each for ours in said for each in ours]
    kind = CheckpointError if damaged or any(described) else NoCheckpoint
    raise kind(_nothing(folder, step, described, damaged))


def _decoded(everyones: Sequence[bytes], kind: Any) -> list[Any]:
    return [msgspec.msgpack.decode(each, type=kind) for each in everyones]


def _nothing(
    folder: Path, step: int | None, described: Sequence[Sequence[CheckpointShard]], troubles: Sequence[str]
) -> str:
    """Describe what exists instead of a complete checkpoint."""
    said = list(troubles)
    for found in sorted({part.step for parts in described for part in parts}, reverse=True)[:3]:
        parts = [part for each in described for part in each if part.step == found]
        if len({part.saving for part in parts}) > 1:
            said.append(f"the parts of step {found} are of several savings")
        elif lacking := sorted({*range(parts[0].world)} - {part.rank for part in parts}):
            said.append(f"of step {found} the part of rank {', '.join(map(str, lacking))} is missing")
    what = "no whole checkpoint" + ("" if step is None else f" of step {step}")
    return f"{folder}: there is {what} here" + (f": {'; '.join(dict.fromkeys(said))}" if said else "")


class PartName(NamedTuple):
    """A part that is on some rank's disk."""

    step: int
    again: int
    saving: str
    world: int
    rank: int


def parts_before(folder: Path, step: int) -> list[PartName]:
    """Return the parts of older steps that are on this rank's disk."""
    return [
        PartName(part.step, part.again, part.saving, part.world, part.rank)
        for older in steps_in(folder)
        if older < step
        for part in parts_in(folder, older)[0]
    ]


def whole_steps(parts: Iterable[PartName]) -> list[int]:
    """Return the steps of which some saving has all its parts on the disks of the ranks, the oldest first."""
    found: dict[tuple[int, int, str, int], set[int]] = {}
    for part in parts:
        found.setdefault(part[:4], set()).add(part.rank)
    return sorted({step for (step, _, _, world), ranks in found.items() if len(ranks) == world})


def _savings(described: Sequence[Sequence[CheckpointShard]]) -> Iterator[dict[int, CheckpointShard]]:
    """Yield the savings of which every part exists on some rank, the newest first."""
    found: dict[tuple[int, int, str], dict[int, CheckpointShard]] = {}
    for part in (part for parts in described for part in parts):
        found.setdefault((part.step, part.again, part.saving), {})[part.rank] = part
    for _, parts in sorted(found.items(), key=lambda item: item[0], reverse=True):
        worlds = {part.world for part in parts.values()}
        if len(worlds) == 1 and sorted(parts) == list(range(*worlds)):
            yield dict(sorted(parts.items()))


def remove_step(folder: Path, step: int) -> None:
    """Delete a step, the JSON files first. Safe when other ranks do the same concurrently."""
    where = step_folder(folder, step)
    with suppress(FileNotFoundError):  # another rank was faster
        for description in sorted(where.glob("*.json")):
            description.unlink(missing_ok=True)
    shutil.rmtree(where, ignore_errors=True)


def remove_savings(folder: Path, step: int, before: int) -> None:
    """Delete the files of savings of a step before this one, which is complete."""
    for part in parts_in(folder, step)[0]:
        if part.again < before:
            data = data_file(folder, part)
            data.with_suffix(".json").unlink(missing_ok=True)
            data.unlink(missing_ok=True)


def _sealed(part: CheckpointShard) -> bytes:
    body = msgspec.json.format(msgspec.json.encode(part))
    return body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n"


def _unsealed(data: bytes) -> CheckpointShard:
    body, _, seal = data.removesuffix(b"\n").rpartition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != seal:
        raise ValueError("this is not what was written (its SHA-256 differs)")
    kind = msgspec.json.decode(body, type=_Kind).format  # its DecodeError is a ValueError
    if kind != FORMAT:
        raise ValueError(f"this is a {kind!r}, and {FORMAT!r} can be read")
    return msgspec.json.decode(body, type=CheckpointShard)
