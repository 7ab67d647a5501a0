"""Batch normalisation over the samples of all ranks, on any device, with batches of different sizes.

Each rank sends the count, mean and sum of squared deviations of its own batch. These are merged pair by pair
(Chan, Golub and LeVeque, 1979), in float64 where the device has it. E[x²] − E[x]² would cancel for a mean far
from zero.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch normalisation with the statistics of the joined batch in training."""

    def __init__(self, *args: Any, group: dist.ProcessGroup | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.group = group

    @classmethod
    def convert(cls, module: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
        """Convert the batch norms of a module to this class. Parameters and statistics stay the same objects."""
        return cls._converted(module, group, {})

    @classmethod
    def _converted(
        cls, module: nn.Module, group: dist.ProcessGroup | None, done: dict[nn.Module, nn.Module]
    ) -> nn.Module:
        if module in done:  # it has several names
            return done[module]
        done[module] = module
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, cls):
            made = cls(
                module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats, group=group
            )
            made._parameters, made._buffers = module._parameters, module._buffers
            done[module] = made.train(module.training)
        for name, child in module._modules.items():  # under all of their names
            if child is not None:
                setattr(module, name, cls._converted(child, group, done))
        return done[module]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each channel, the second dimension."""
        self._check_input_dim(x)
        if not self.training:  # by itself, as torch's does: one rank alone may evaluate
            return super().forward(x)
        normalised: Tensor
        normalised, count, mean, variance = _Normalise.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, self.eps, self.group
        )
        if self.track_running_stats:
            self._remember(float(count), mean, variance)
        return normalised

    @torch.no_grad()
    def _remember(self, count: float, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        if not count:
            return
        self.num_batches_tracked += 1
        share = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (count / max(count - 1, 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"batch normalisation needs at least two dimensions, not {x.dim()}")
        if x.shape[1] != self.num_features:
            raise ValueError(f"this normalises {self.num_features} channels, and the input has {x.shape[1]}")


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        count, mean, deviations = _merged(x, group)
        computed = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
        variance = (deviations / max(float(count), 1.0)).to(computed)
        scale = torch.rsqrt(variance + eps)
        near = mean.to(computed)  # and what rounding took from the mean, which is much where the mean is large
        centred = (x - _by_channel(near, x)) - _by_channel((mean - near).to(computed), x)
        hat = centred * _by_channel(scale, x)
        ctx.save_for_backward(hat, scale, weight)
        ctx.count, ctx.group = float(count), group
        normalised = hat if weight is None or bias is None else hat * _by_channel(weight, x) + _by_channel(bias, x)
        ctx.mark_non_differentiable(count, mean, variance)
        return normalised.to(x.dtype), count, mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: object) -> tuple[Tensor | None, ...]:
        hat, scale, weight = ctx.saved_tensors
        dims = [dim for dim in range(hat.dim()) if dim != 1]
        grad, narrow = grad.to(hat.dtype), grad.dtype
        of_bias, of_weight = grad.sum(dims), (grad * hat).sum(dims)
        sums = torch.stack([of_bias, of_weight])
        dist.all_reduce(sums, group=ctx.group)
        everyones = sums / max(ctx.count, 1.0)
        inner = grad - _by_channel(everyones[0], grad) - hat * _by_channel(everyones[1], grad)
        of_input = inner * _by_channel(scale if weight is None else scale * weight, grad)
        return of_input.to(narrow), *((None, None) if weight is None else (of_weight, of_bias)), None, None


def _merged(x: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the count, mean and sum of squared deviations of each channel, over all ranks."""
    channels = x.shape[1]
    rows = x.detach().transpose(0, 1).reshape(channels, -1)
    wide = torch.float32 if x.device.type == "mps" else torch.float64
    mine = torch.zeros(2 * channels + 1, dtype=wide, device=x.device)
    if rows.shape[1]:
        deviation, average = torch.var_mean(rows.to(wide), 1, correction=0)
        mine[0], mine[1 : channels + 1] = rows.shape[1], average
        mine[channels + 1 :] = deviation * rows.shape[1]
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    count, mean, deviations = mine.new_zeros(()), mine.new_zeros(channels), mine.new_zeros(channels)
    for theirs in everyone:
        if not theirs[0]:
            continue
        total = count + theirs[0]
        apart = theirs[1 : channels + 1] - mean
        deviations = deviations + theirs[channels + 1 :] + apart.square() * (count * theirs[0] / total)
        mean = mean + apart * (theirs[0] / total)
        count = total
    return count, mean, deviations


def _by_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *([1] * (like.dim() - 2)))
