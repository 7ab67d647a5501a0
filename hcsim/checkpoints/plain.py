"""Serialisation of `state_dict()` values as JSON, with the tensors beside it.

JSON has no infinities, no integers of arbitrary size, no tuples and only string keys: these are encoded
explicitly. Bytes and numpy arrays and scalars are stored as tensors with a type tag.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hcsim.errors import CheckpointError


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
