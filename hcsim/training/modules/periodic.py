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

from hcsim.training.periodic import PeriodicExchange, sample_weight


class DiLoCo(PeriodicExchange):
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
        super().__init__(every)
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._group = group
        self._to_mean = exchange or self._average
        with torch.no_grad():
            self._anchor = _flat(self._parameters)
            dist.broadcast(self._anchor, group_src=0, group=group)
            _unflat(self._anchor, self._parameters)
        self._anchor.requires_grad_()
        self._outer = (
            outer([self._anchor]) if outer else torch.optim.SGD([self._anchor], lr=0.7, momentum=0.9, nesterov=True)
        )

    @torch.no_grad()
    def _exchange(self, samples: int) -> None:
        seen = torch.tensor([samples], device=self._anchor.device)
        dist.all_reduce(seen, group=self._group)
        went = self._anchor - _flat(self._parameters)
        self._to_mean(went.mul_(sample_weight(samples, int(seen), dist.get_world_size(self._group))))
        self._anchor.grad = went
        self._outer.step()
        self._anchor.grad = None
        _unflat(self._anchor, self._parameters)

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
