"""What a compressor remembers of each tensor, and from when on.

What is learned in a step is only proposed. Committing the step makes it count; abandoning it, or trying it again,
leaves what was remembered before. A tensor has two arrays that change places, so nothing is allocated
after the second step.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from hcsim.compressors.base import Array, Shape, State
from hcsim.errors import UsageError


class Memory:
    """Arrays by the tensor's name. `prefix` is what its names in a state begin with."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._kept: dict[str, Array] = {}
        self._proposed: dict[str, Array] = {}
        self._spare: dict[str, Array] = {}
        self._step: int | None = None

    def kept(self, name: str, shape: Shape) -> Array | None:
        """What counts, if there is anything."""
        array = self._kept.get(name)
        if array is not None and array.shape != shape:
            raise UsageError(f"{name}: what is remembered of it has the shape {array.shape}, not {shape}")
        return array

    def propose(self, name: str, shape: Shape, step: int) -> Array:
        """An array to fill with what is to count once the step is committed."""
        if self._proposed and step != self._step:
            raise UsageError(f"{name}: step {step} began, but step {self._step} was neither committed nor abandoned")
        self._step = step
        array = self._proposed.pop(name, None)
        if array is None:
            array = self._spare.pop(name, None)
        if array is None or array.shape != shape:
            array = np.empty(shape, np.float32)
        self._proposed[name] = array
        return array

    def proposed(self, name: str, step: int) -> Array:
        """What was proposed in this step."""
        if step != self._step or name not in self._proposed:
            raise UsageError(f"{name}: nothing was proposed for it in step {step}")
        return self._proposed[name]

    def commit(self, step: int) -> None:
        """What was proposed in this step counts."""
        if step != self._step:
            return
        for name, array in self._proposed.items():
            if name in self._kept:
                self._spare[name] = self._kept[name]
            self._kept[name] = array
        self._proposed = {}

    def abandon(self, step: int) -> None:
        """What was proposed in this step is forgotten."""
        if step == self._step:
            self._spare.update(self._proposed)
            self._proposed = {}

    def state(self) -> State:
        """Copies of what counts."""
        return {self.prefix + name: array.copy() for name, array in self._kept.items()}

    def restore(self, state: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Only this counts from now on."""
        restored = {}
        for key, array in state.items():
            if not key.startswith(self.prefix) or array.dtype != np.float32 or not np.isfinite(array).all():
                raise UsageError(f"{key} is not a state that can be restored here: expected finite float32 arrays "
                                 f"whose names begin with {self.prefix}")  # fmt: skip
            restored[key.removeprefix(self.prefix)] = np.array(array, np.float32)
        self._kept, self._proposed, self._spare = restored, {}, {}
