"""States as JSON with tensors beside it: what `state_dict()` returns, taken apart and put together again.

JSON has no infinities, no whole numbers of any size, no tuples and no keys but words: those are spelled out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hcsim.errors import CheckpointError


def taken_apart(state: object, path: str, tensors: dict[str, Tensor]) -> Any:
    """A state as plain data; its tensors are put into `tensors` by their paths, those of no dimension into the data."""
    if isinstance(state, Tensor):
        return _tensor(state, path, tensors)
    if isinstance(state, Mapping):
        return {"$dict": [[_key(key, path), taken_apart(state[key], f"{path}/{key}", tensors)] for key in state]}
    if isinstance(state, tuple | list):
        parts = [taken_apart(value, f"{path}/{number}", tensors) for number, value in enumerate(state)]
        return {"$tuple": parts} if isinstance(state, tuple) else parts
    if state is None or isinstance(state, bool | str):
        return state
    if isinstance(state, int):
        return int(state) if abs(state) < 1 << 63 else {"$int": hex(state)}
    if isinstance(state, float):
        return float(state) if math.isfinite(state) else {"$float": str(float(state))}
    raise CheckpointError(f"{path} is a {type(state).__name__}: a checkpoint holds tensors, numbers and words")


def put_together(plain: Any, tensor: Callable[[str], Tensor]) -> Any:
    """What `taken_apart` was given."""
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
        case _:
            return {key: put_together(each, tensor) for key, each in value}


def dtype_name(dtype: torch.dtype) -> str:
    """As it is called in torch: bfloat16, say."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of that name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"this version of torch has no {name}")
    return dtype


def _tensor(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if tensor.dim() == 0 and not tensor.is_complex():
        return {"$scalar": [dtype_name(tensor.dtype), taken_apart(tensor.item(), path, tensors)]}
    while path in tensors:  # a key may have a slash in it
        path += "'"
    tensors[path] = tensor.detach()
    return {"$tensor": path}


def _key(key: object, path: str) -> str | int | None:
    if key is None or isinstance(key, str | int):
        return key
    raise CheckpointError(f"{path} has a key that is a {type(key).__name__}: a checkpoint has words and whole numbers")
