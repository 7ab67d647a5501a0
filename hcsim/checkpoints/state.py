"""What there is to save of a program, and putting it back: parameters, optimizer, random numbers, whatever else has a
state.

A tensor that all ranks hold is saved once, by one of them. One that is divided among the ranks (`Sharded`) is saved
in pieces under the name and shape that it has in the whole model, so that any number of ranks, or one, can read it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from hcsim.errors import CheckpointError
from hcsim.training.modules.sharded import Sharded


class HasState(Protocol):
    """A learning-rate schedule, a communication hook with residuals, a data loader…"""

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and words, in dictionaries and lists."""

    def load_state_dict(self, state: dict[str, Any]) -> object:
        """Go on from there."""


class Range(NamedTuple):
    """Some elements of a tensor, flat."""

    name: str
    values: Tensor
    shape: tuple[int, ...]
    """Of the whole."""
    lo: int
    shared: bool
    """All ranks hold it."""


class Names:
    """The names that a model's tensors have when nothing of it is wrapped."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._blocks = {name: module for name, module in model.named_modules() if isinstance(module, Sharded)}

    def unwrapped(self, name: str) -> str:
        """The name without the wrappers on the way to it."""
        for prefix in sorted(self._blocks, key=len, reverse=True):
            head = f"{prefix}." if prefix else ""
            name = head + name.removeprefix(f"{head}block.") if name.startswith(f"{head}block.") else name
        return name

    def ranges(self) -> Iterator[Range]:
        """The model's parameters and buffers, or what this rank has of them."""
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            yield from self.like(name, tensor)

    def within(self, name: str) -> list[str]:
        """The parameters of the whole model that are in the one of that name, on whichever rank."""
        prefix, _, last = name.rpartition(".")
        block = self._blocks.get(prefix) if last == "shard" else None
        if block is None:
            return [self.unwrapped(name)]
        return [self.unwrapped(f"{prefix}.block.{piece.name}".lstrip(".")) for piece in block.pieces]

    def like(self, name: str, tensor: Tensor) -> Iterator[Range]:
        """A tensor that is divided as the parameter of that name is: the parameter itself, or a moment of it."""
        prefix, _, last = name.rpartition(".")
        block = self._blocks.get(prefix) if last == "shard" else None
        if block is None:
            yield Range(self.unwrapped(name), tensor.detach().reshape(-1), tuple(tensor.shape), 0, shared=True)
            return
        flat = tensor.detach()
        start = block.rank * flat.numel()
        for piece in block.pieces:
            lo, hi = max(piece.lo, start), min(piece.hi, start + flat.numel())
            if lo < hi:
                whole = self.unwrapped(f"{prefix}.block.{piece.name}".lstrip("."))
                yield Range(whole, flat[lo - start : hi - start], tuple(piece.shape), lo - piece.lo, shared=False)


def optimizer_ranges(optimizer: torch.optim.Optimizer, model: nn.Module) -> Iterator[Range]:
    """The optimizer's tensors, under OPTIMIZER/KEY/PARAMETER."""
    names = Names(model)
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if _is_moment(value, parameter):
                for part in names.like(name, value):
                    yield part._replace(name=f"optimizer/{key}/{part.name}")


def optimizer_plain(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """Its numbers: what it counts for each parameter, and the settings of its groups."""
    names = Names(model)
    counts: dict[str, dict[str, Any]] = {}
    moments: dict[str, None] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if _is_moment(value, parameter):
                moments[key] = None
                continue
            number = (
                [str(value.dtype).removeprefix("torch."), value.item()] if isinstance(value, Tensor) else ["", value]
            )
            for whole in names.within(name):
                counts.setdefault(whole, {})[key] = number
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"counts": counts, "moments": list(moments), "groups": groups}


def random_state() -> dict[str, Any]:
    """Of all generators that a program usually draws from."""
    kind, words, at, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, cached = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": {"kind": kind, "words": torch.from_numpy(np.array(words, np.int64)), "rest": [at, has_gauss, gauss]},
        "python": {"version": version, "words": torch.tensor(internal, dtype=torch.int64), "cached": cached},
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Go on drawing where that was taken."""
    torch.set_rng_state(state["torch"])
    theirs = state["numpy"]
    np.random.set_state((theirs["kind"], theirs["words"].numpy().astype(np.uint32), *theirs["rest"]))
    theirs = state["python"]
    random.setstate((theirs["version"], tuple(theirs["words"].tolist()), theirs["cached"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])


def taken_apart(state: object, path: str, tensors: dict[str, Tensor]) -> Any:
    """A state as plain data, with its tensors put beside it by their paths."""
    if isinstance(state, Tensor):
        tensors[path] = state.detach()
        return {"$tensor": path}
    if isinstance(state, Mapping):
        return {"$dict": [[key, taken_apart(value, f"{path}/{key}", tensors)] for key, value in state.items()]}
    if isinstance(state, tuple | list):
        parts = [taken_apart(value, f"{path}/{number}", tensors) for number, value in enumerate(state)]
        return {"$tuple": parts} if isinstance(state, tuple) else parts
    if state is None or isinstance(state, bool | int | float | str):
        return state
    raise CheckpointError(f"{path} is a {type(state).__name__}: a checkpoint holds tensors, numbers and words")


def put_together(plain: Any, tensor: Callable[[str], Tensor]) -> Any:
    """What `taken_apart` was given."""
    if isinstance(plain, list):
        return [put_together(value, tensor) for value in plain]
    if not isinstance(plain, dict):
        return plain
    if "$tensor" in plain:
        return tensor(plain["$tensor"])
    if "$tuple" in plain:
        return tuple(put_together(value, tensor) for value in plain["$tuple"])
    return {key: put_together(value, tensor) for key, value in plain["$dict"]}


def _is_moment(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape
