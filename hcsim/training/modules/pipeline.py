"""Pipeline parallelism: a model cut into stages, one on each rank, processes a batch as microbatches.

The schedules, GPipe and 1F1B, are those of `hcsim.training.pipeline.schedule`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hcsim.training.pipeline.schedule import Schedule, turns


class Pipeline:
    """This rank's stage of a model."""

    def __init__(
        self,
        stage: nn.Module,
        *,
        entering: Sequence[int] | None = None,
        schedule: Schedule = "1f1b",
        microbatches: int = 4,
        group: dist.ProcessGroup | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """`entering` is the shape of one microbatch's input to this stage; the first stage needs none."""
        if schedule not in ("gpipe", "1f1b"):
            raise ValueError(f"{schedule!r} is no schedule: there are gpipe and 1f1b")
        if microbatches < 1:
            raise ValueError(f"a batch is cut into at least one microbatch, not {microbatches}")
        self._stage = stage
        self._group = group
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)
        if entering is None and self._rank:
            raise ValueError(f"rank {self._rank} is not the first stage: say the shape of what enters it")
        self._entering = None if entering is None else tuple(entering)
        self._schedule: Schedule = schedule
        self._microbatches = microbatches
        self._dtype, self._device = dtype, torch.device(device)
        # The stage before us sends microbatch n + this much once it has our gradient of microbatch n - 1.
        self._waits_behind = microbatches if schedule == "gpipe" else self._world - self._rank
        self.most_kept = 0
        """The largest number of microbatches in flight here at once."""

    def step(
        self,
        inputs: Tensor | None = None,
        targets: Tensor | None = None,
        loss_of: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> float | None:
        """Run a batch, and leave the gradients of its mean loss in the parameters.

        The first rank gives the inputs. The last rank gives the targets and the loss function, and returns the
        loss."""
        first, last = self._rank == 0, self._rank == self._world - 1
        if (first and inputs is None) or (last and (targets is None or loss_of is None)):
            raise ValueError("the first stage needs the inputs, the last one targets and a loss")
        coming = self._cut(inputs) if first and inputs is not None else None
        wanted = self._cut(targets) if last and targets is not None else None
        kept: dict[int, tuple[Tensor | None, Tensor]] = {}
        ahead: deque[_Sending] = deque()
        back: deque[_Sending] = deque()
        total = 0.0
        for kind, number in turns(self._schedule, self._rank, self._world, self._microbatches):
            if kind == "F":
                entered = coming[number] if coming is not None else self._receive()
                _let_go(back, number - self._waits_behind)
                left = self._stage(entered)
                if wanted is not None and loss_of is not None:
                    left = loss_of(left, wanted[number]) / self._microbatches
                    total += float(left.detach())
                else:
                    ahead.append(self._send(number, left, self._rank + 1))
                kept[number] = (None if first else entered), left
                self.most_kept = max(self.most_kept, len(kept))
            else:
                given, left = kept.pop(number)
                grad = None
                if not last:
                    grad = torch.empty_like(left)
                    dist.recv(grad, group_src=self._rank + 1, group=self._group)
                    _let_go(ahead, number + 1)
                torch.autograd.backward(left, grad)
                if given is not None:
                    upstream = torch.zeros_like(given) if given.grad is None else given.grad
                    back.append(self._send(number, upstream, self._rank - 1))
        _let_go(ahead, self._microbatches)
        _let_go(back, self._microbatches)
        return total if last else None

    def _cut(self, batch: Tensor) -> tuple[Tensor, ...]:
        if len(batch) % self._microbatches:
            raise ValueError(f"a batch of {len(batch)} cannot be cut into {self._microbatches} equal microbatches")
        return torch.chunk(batch, self._microbatches)

    def _receive(self) -> Tensor:
        assert self._entering is not None
        entered = torch.empty(self._entering, dtype=self._dtype, device=self._device)
        dist.recv(entered, group_src=self._rank - 1, group=self._group)
        return entered.requires_grad_()

    def _send(self, number: int, tensor: Tensor, to: int) -> _Sending:
        """Send without waiting: the neighbour may be sending to this rank."""
        moved = tensor.detach().contiguous()
        return _Sending(number, dist.isend(moved, group_dst=to, group=self._group), moved)


class _Sending(NamedTuple):
    """A tensor in flight, kept alive until it has been sent."""

    number: int
    work: dist.Work | None
    tensor: Tensor


def _let_go(sending: deque[_Sending], below: int) -> None:
    """Release the sent tensors of microbatches below that number."""
    while sending and sending[0].number < below:
        work = sending.popleft().work
        if work is not None:
            work.wait()
