"""Local SGD and DiLoCo for an MLX model: ranks communicate every H steps.

    outer = DiLoCo(model, every=50)
    for batch in data:
        ...
        optimizer.update(model, gradients)
        outer.step()

After H steps the ranks average their changes since the last exchange, and an outer optimizer takes that average
as its gradient. Its default, Nesterov momentum, is DiLoCo's (Douillard et al., 2023, arXiv 2311.08105); plain SGD
with a step of one averages the parameters, which is local SGD (Stich, ICLR 2019). Only trainable parameters take
part, so of a LoRA only its adapters.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_unflatten

from hcsim.calls import Compression, GroupCall
from hcsim.errors import UsageError
from hcsim.mlx.arrays import evaluate, read
from hcsim.mlx.gradients import NONE, GradientCompression
from hcsim.mlx.group import Group, whole
from hcsim.training.optimizer import Optimizer, Sgd
from hcsim.training.periodic import PeriodicExchange, sample_weight

_OUTER = Sgd(lr=0.7, momentum=0.9, nesterov=True)


class DiLoCo(PeriodicExchange):
    """The ranks exchange their changes on every `every`-th call of `step`."""

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int,
        outer: Optimizer = _OUTER,
        group: Group | None = None,
        compressor: str = NONE,
    ) -> None:
        """All ranks begin with rank 0's parameters. `outer` is an optimizer of hcsim; it works on float32."""
        super().__init__(every)
        self._model = model
        self._group = whole(group)
        self._compression = None
        if compressor != NONE:
            self._compression = GradientCompression(compressor, group=self._group, name="diloco")
        self._anchor = self._flat()
        if self._group.size() > 1:
            self._group.start(GroupCall(operation="broadcast"), self._anchor).wait(None)
        self._write()
        self._outer = outer.open(self._anchor)

    def _exchange(self, samples: int) -> None:
        went = self._anchor - self._flat()
        if self._group.size() > 1:
            seen = np.array([samples], np.int64)
            self._group.start(GroupCall(operation="all_reduce"), seen).wait(None)
            went *= np.float32(sample_weight(samples, int(seen[0]), self._group.size()))
            call = GroupCall(operation="all_reduce", op="mean", compression=self._how())
            self._group.start(call, went).wait(None)
        self._outer.step(went)
        self._write()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint needs beside the model and the inner optimizer. With a compressor it
        differs between ranks."""
        return {
            "anchor": self._anchor.copy(),
            "outer": self._outer.state(),
            "steps": self._steps,
            "samples": self._samples,
            "compression": None if self._compression is None else self._compression.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._anchor[...] = state["anchor"]
        self._outer.restore(state["outer"])
        self._steps, self._samples = state["steps"], state["samples"]
        if self._compression is not None:
            self._compression.load_state_dict(state["compression"])

    def _how(self) -> Compression | None:
        if self._compression is None:
            return None
        shapes = tuple((name, tuple(each.shape)) for name, each in tree_flatten(self._model.trainable_parameters()))
        return self._compression.describe(shapes, last=True)

    def _flat(self) -> npt.NDArray[np.float32]:
        parameters = [each for _, each in tree_flatten(self._model.trainable_parameters())]
        if not parameters:
            raise UsageError("the model has no trainable parameters")
        evaluate(*parameters)
        return np.concatenate([read(each).astype(np.float32) for each in parameters])

    def _write(self) -> None:
        """Set the model's parameters to the anchor."""
        named = tree_flatten(self._model.trainable_parameters())
        ends = accumulate(each.size for _, each in named)
        placed = [
            (name, mx.array(self._anchor[end - each.size : end]).reshape(each.shape).astype(each.dtype))
            for (name, each), end in zip(named, ends, strict=True)
        ]
        self._model.update(tree_unflatten(placed))
        evaluate(*(each for _, each in placed))


def local_sgd(model: nn.Module, *, every: int, group: Group | None = None, compressor: str = NONE) -> DiLoCo:
    """Average the parameters every `every` steps."""
    return DiLoCo(model, every=every, outer=Sgd(lr=1.0), group=group, compressor=compressor)
