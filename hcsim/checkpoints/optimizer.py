"""What an optimizer knows, by the names of the model's parameters: its moments, its counts, its settings.

A moment has its parameter's shape, and is divided as the parameter is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hcsim.checkpoints.ranges import Names, Range
from hcsim.errors import CheckpointError


class Source(Protocol):
    """Where saved tensors come from."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """A tensor's shape; None where there is none of that name."""

    def elements(self, name: str, lo: int, hi: int) -> Tensor:
        """Some of its elements."""


def optimizer_ranges(
    optimizer: torch.optim.Optimizer, model: nn.Module, group: dist.ProcessGroup | None = None
) -> Iterator[Range]:
    """The optimizer's tensors, to be saved by that group."""
    names = Names(model, group)
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not _is_number(key, value, parameter):
                if names.block(name) is not None and value.shape != parameter.shape:
                    raise CheckpointError(f"{key} of {name} has not its shape, and cannot be saved by shards")
                for part in names.like(name, value):
                    yield part._replace(name=_path(key, part.name))


def optimizer_plain(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """Its numbers: what it counts for each parameter, and the settings of its groups."""
    names = Names(model)
    numbers: dict[str, dict[str, Any]] = {}
    moments: dict[str, None] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not _is_number(key, value, parameter):
                moments[key] = None
                continue
            for whole in names.within(name):
                numbers.setdefault(whole, {})[key] = value
    return {"numbers": numbers, "moments": list(moments), "groups": _groups(optimizer, model)}


def restore_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, saved: Mapping[str, Any], source: Source
) -> None:
    """Put it back, into the groups of the same parameters."""
    here = [group["params"] for group in _groups(optimizer, model)]
    there = [group["params"] for group in saved["groups"]]
    if here != there:
        raise CheckpointError(
            f"the optimizer has {len(here)} groups, of {', '.join(str(len(group)) for group in here)} parameters, which"
            f" are not those of the checkpoint, {', '.join(str(len(group)) for group in there)}"
        )
    for group, settings in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update({key: value for key, value in settings.items() if key != "params"})
    names = Names(model)
    group_of = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter in group_of:
            state = _state(name, parameter, names, saved, source)
            on_device = group_of[parameter].get("capturable") or group_of[parameter].get("fused")
            for key, value in state.items():
                if isinstance(value, Tensor) and (on_device or key != "step"):  # torch counts steps on the CPU
                    state[key] = value.to(parameter.device)
            optimizer.state.pop(parameter, None)
            if state:
                optimizer.state[parameter] = state


def _state(name: str, parameter: Tensor, names: Names, saved: Mapping[str, Any], source: Source) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for whole in names.within(name):
        for key, number in saved["numbers"].get(whole, {}).items():
            state.setdefault(key, number.clone() if isinstance(number, Tensor) else number)
    for key in saved["moments"]:
        if not [*names.like(name, parameter)]:  # all of the shard is padding
            state[key] = torch.zeros_like(parameter, requires_grad=False)
            continue
        there = [path for whole in names.within(name) if source.shape(path := _path(key, whole)) is not None]
        if not there:
            continue
        shape = parameter.shape if names.block(name) is not None else source.shape(there[0])
        assert shape is not None
        dtype = source.elements(there[0], 0, 0).dtype
        if shape == parameter.shape:
            moment = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        else:
            moment = parameter.new_zeros(shape, dtype=dtype)
        for part in names.like(name, moment):
            if _path(key, part.name) in there:  # a parameter of the block that has had no gradient has no moment
                part.values.copy_(source.elements(_path(key, part.name), part.lo, part.hi).view(part.values.shape))
        state[key] = moment
    return state


def _groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[dict[str, Any]]:
    """Their settings, with the parameters by name."""
    names = Names(model)
    called = {parameter: names.within(name) for name, parameter in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        if any(parameter not in called for parameter in group["params"]):
            raise CheckpointError(
                "the optimizer has parameters that are not the model's: give a model that holds all of them"
            )
        within = sorted(name for parameter in group["params"] for name in called[parameter])
        groups.append({**group, "params": within})
    return groups


def _path(key: str, name: str) -> str:
    return f"optimizer/{key}/{name}"


def _is_number(key: str, value: object, parameter: Tensor) -> bool:
    """A count such as `step`, and not a moment; a parameter without dimensions has moments without."""
    return not isinstance(value, Tensor) or key == "step" or (value.dim() == 0 and parameter.dim() > 0)
