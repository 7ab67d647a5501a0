"""The state of a stage, block by block: what a backup or a checkpoint keeps, so that it serves any other cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from hcsim.errors import UsageError
from hcsim.runtime.channel import Phantom
from hcsim.training.layout import Layout, Tensor
from hcsim.training.learner import Learner, StateArray
from hcsim.training.task import Task, sequential

BlockState: TypeAlias = dict[str, StateArray]
"""The block's parameters, and its part of the optimizer's arrays."""
PARAMETERS = "parameters"


def blocks_of(learner: Learner, whole: Task, first: int, state_bytes: int) -> dict[int, BlockState]:
    """Return a copy of the state of a stage that begins with block `first`, without what it shares with other stages.
    `state_bytes` are the optimizer's for each parameter, which phantoms have as well."""
    layout, parameters = learner.layout, learner.replica.parameters
    found: dict[int, BlockState] = {}
    state = learner.stepper.state()
    for block, tensors in enumerate(layout.blocks, first):
        own = tensors[: len(whole.blocks[block].shapes)]
        span = slice(own[0].offset, own[-1].span.stop) if own else slice(0, 0)
        if isinstance(parameters, Phantom):
            size_bytes = (span.stop - span.start) * (layout.element_bytes + state_bytes)
            found[block] = {PARAMETERS: Phantom(size_bytes)}
            continue
        arrays = {name: array[span] if array.size == layout.length else array for name, array in state.items()}
        found[block] = {PARAMETERS: parameters[span].copy(), **{name: each.copy() for name, each in arrays.items()}}
    return found


def restore(learner: Learner, whole: Task, first: int, state: Mapping[int, BlockState]) -> None:
    """Set a stage's parameters and its optimizer to this state."""
    layout, parameters = learner.layout, learner.replica.parameters
    if isinstance(parameters, Phantom):
        return
    owners = {tie.tensor: tie.owner for tie in sequential(whole).ties}
    arrays: dict[str, StateArray] = {PARAMETERS: parameters, **learner.stepper.state()}
    for number, tensors in enumerate(layout.blocks, first):
        own = len(whole.blocks[number].shapes)
        for at, tensor in enumerate(tensors):
            block = number if at < own else owners[tensor.name]
            place = _place(whole, block, tensor)
            for name, array in arrays.items():
                found = state[block].get(name)
                if isinstance(array, Phantom) or found is None or isinstance(found, Phantom):
                    raise UsageError(f"there is no {name} of block {block}")
                if array.size == layout.length:
                    array[tensor.span] = found[place]
                else:
                    array[...] = found
    learner.stepper.restore(
        {name: array for name, array in arrays.items() if name != PARAMETERS and not isinstance(array, Phantom)}
    )


def _place(whole: Task, block: int, tensor: Tensor) -> slice:
    """Return where a tensor lies within its block."""
    (tensors,) = Layout.of([whole.blocks[block].shapes]).blocks
    return next(each.span for each in tensors if each.name == tensor.name)
