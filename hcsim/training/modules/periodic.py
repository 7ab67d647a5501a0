"""Local SGD and DiLoCo for a user-defined module: ranks communicate every H steps.

    inner = torch.optim.AdamW(model.parameters())
    outer = DiLoCo(model, every=50)
    for batch in data:
        ...
        inner.step()
        outer.step()

After H steps the ranks average their changes since the last exchange, and an outer optimizer takes that average
as its gradient. Its default, Nesterov momentum, is DiLoCo's (Douillard et al., 2023, arXiv 2311.08105); plain
SGD with a step of one averages the parameters, which is local SGD (Stich, ICLR 2019).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class DiLoCo:
    """The ranks exchange their changes on every `every`-th call of `step`."""

    def __init__(
        self,
        module: nn.Module,
        *,
        every: int,
        outer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None,
        group: dist.ProcessGroup | None = None,
        exchange: Callable[[Tensor], object] | None = None,
    ) -> None:
        """All ranks begin with rank 0's parameters. `outer` makes the outer optimizer of a list of tensors.
        `exchange` averages a flat tensor over the ranks, in place, in place of a plain all-reduce."""
        if every < 1:
            raise ValueError(f"ranks talk every 1, 2, … steps, not every {every}")
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._every = every
        self._group = group
        self._exchange = exchange or self._average
        self._steps = 0
        self._samples = 0
        with torch.no_grad():
            self._anchor = _flat(self._parameters)
            dist.broadcast(self._anchor, group_src=0, group=group)
            _unflat(self._anchor, self._parameters)
        self._anchor.requires_grad_()
        self._outer = (
            outer([self._anchor]) if outer else torch.optim.SGD([self._anchor], lr=0.7, momentum=0.9, nesterov=True)
        )

    @property
    def steps(self) -> int:
        """Inner steps since the last exchange."""
        return self._steps

    def step(self, samples: int = 1) -> bool:
        """Count an inner step on `samples` samples; return whether the ranks have exchanged. All ranks must call
        this alike."""
        self._steps += 1
        self._samples += samples
        if self._steps < self._every:
            return False
        self.exchange()
        return True

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange now, whatever the number of steps, for example at the end of a run. Ranks are weighted by their
        samples."""
        if not self._steps:
            return
        seen = torch.tensor([self._samples], device=self._anchor.device)
        dist.all_reduce(seen, group=self._group)
        weight = self._samples * dist.get_world_size(self._group) / max(int(seen), 1)
        went = (self._anchor - _flat(self._parameters)).mul_(weight)
        self._exchange(went)
        self._anchor.grad = went
        self._outer.step()
        self._anchor.grad = None
        _unflat(self._anchor, self._parameters)
        self._steps = self._samples = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint needs beside the module and the inner optimizer."""
        return {
            "anchor": self._anchor.detach().clone(),
            "outer": self._outer.state_dict(),
            "steps": self._steps,
            "samples": self._samples,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._anchor.copy_(state["anchor"])
        self._outer.load_state_dict(state["outer"])
        self._steps, self._samples = state["steps"], state["samples"]

    def _average(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self._group)
        tensor.div_(dist.get_world_size(self._group))


def local_sgd(module: nn.Module, *, every: int, group: dist.ProcessGroup | None = None) -> DiLoCo:
    """Average the parameters every `every` steps."""

    def as_they_are(tensors: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(tensors, lr=1.0)

    return DiLoCo(module, every=every, outer=as_they_are, group=group)


def _flat(parameters: list[nn.Parameter]) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])


def _unflat(flat: Tensor, parameters: list[nn.Parameter]) -> None:
    at = 0
    for parameter in parameters:
        parameter.copy_(flat[at : at + parameter.numel()].view_as(parameter))
        at += parameter.numel()
