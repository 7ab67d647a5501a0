"""Parameters, gradients and optimizer state sharded among the ranks (ZeRO's third stage), on any device.

Each wrapped block keeps one flat shard of its parameters. All shards are gathered for its forward pass and
released afterwards. For the backward pass autograd keeps only which part of which block it needs, and the block
is gathered again. The gradient of the block is averaged and scattered to the shards. An optimizer that works
element by element (SGD, Adam and variants) sees the shards as its parameters. Activation checkpointing must
wrap a block, not lie within it, and weights can be tied only within a block.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call


class ParameterSlice(NamedTuple):
    """The range of one of the block's parameters in the flat array."""

    name: str
    shape: torch.Size
    lo: int
    hi: int


class _Held(NamedTuple):
    """The record that autograd keeps in place of a view of the gathered parameters."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Sharded(nn.Module):
    """A block of a model whose parameters are sharded among the ranks of a group. All begin with rank 0's."""

    def __init__(self, block: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        named = dict(_own_parameters(block))
        kinds = {(parameter.dtype, parameter.device, parameter.requires_grad) for parameter in named.values()}
        if len(kinds) != 1:
            raise ValueError(
                "a sharded block has parameters of one dtype on one device, all of them frozen or none, and some; "
                f"not {len(kinds)} kinds"
            )
        self._group = group
        self.rank, self._world = dist.get_rank(group), dist.get_world_size(group)
        self.pieces = tuple(_laid_out(named))
        share = -(-max(piece.hi for piece in self.pieces) // self._world)
        with torch.no_grad():
            first = next(iter(named.values()))
            whole = first.new_zeros(share * self._world)
            for piece in self.pieces:
                whole[piece.lo : piece.hi] = named[piece.name].reshape(-1)
            dist.broadcast(whole, group_src=0, group=group)
            shard = whole[self.rank * share : (self.rank + 1) * share].clone()
        for name in named:  # the block keeps its structure and its buffers, and none of the numbers
            owner, _, last = name.rpartition(".")
            block.get_submodule(owner).register_parameter(last, None)
        self.block = block
        self.shard = nn.Parameter(shard, requires_grad=first.requires_grad)
        self._whole: Tensor | None = None

    @property
    def places(self) -> tuple[ParameterSlice, ...]:
        """The pieces without second names of tied parameters."""
        return tuple({(piece.lo, piece.hi): piece for piece in reversed(self.pieces)}.values())[::-1]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block with the full parameters."""
        self._whole = None  # a backward pass that failed may have left an old one
        whole: Tensor = _Gather.apply(self.shard, self)  # type: ignore[no-untyped-call]
        place, version = whole.untyped_storage().data_ptr(), self.shard._version
        kept = used = 0

        def pack(tensor: Tensor) -> Tensor | _Held:
            nonlocal kept
            if tensor.untyped_storage().data_ptr() != place:
                return tensor
            kept += 1
            return _Held(tensor.shape, tensor.stride(), int(tensor.storage_offset()))

        def unpack(held: Tensor | _Held) -> Tensor:
            nonlocal used
            if isinstance(held, Tensor):
                return held
            if self.shard._version != version:
                raise RuntimeError("a sharded block's parameters have changed between its forward and backward pass")
            part = self._gathered().as_strided(*held)
            used += 1
            if not self.shard.requires_grad and used % kept == 0:  # nothing comes back through `_Gather` to let it go
                self._whole = None
            return part

        parameters = {piece.name: whole[piece.lo : piece.hi].view(piece.shape) for piece in self.pieces}
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                return functional_call(self.block, parameters, args, kwargs)
        finally:
            self._whole = None

    @torch.no_grad()
    def full_parameters(self) -> dict[str, Tensor]:
        """Return the full parameters by the block's own names, on every rank. All ranks must call this."""
        self._whole = None
        whole = self._gathered()
        self._whole = None
        return {piece.name: whole[piece.lo : piece.hi].view(piece.shape).clone() for piece in self.pieces}

    @torch.no_grad()
    def load_full_parameters(self, parameters: dict[str, Tensor]) -> None:
        """Take this rank's shard of the full parameters."""
        missing = [piece.name for piece in self.pieces if piece.name not in parameters]
        if missing or len(parameters) != len(self.pieces):
            unknown = sorted(parameters.keys() - {piece.name for piece in self.pieces})
            raise ValueError(f"these are not the block's parameters: missing {missing}, unknown {unknown}")
        whole = self.shard.new_zeros(self.shard.numel() * self._world)
        for piece in self.pieces:
            if parameters[piece.name].shape != piece.shape:
                raise ValueError(
                    f"{piece.name} has shape {tuple(parameters[piece.name].shape)}, not {tuple(piece.shape)}"
                )
            whole[piece.lo : piece.hi] = parameters[piece.name].reshape(-1)
        share = self.shard.numel()
        self.shard.copy_(whole[self.rank * share : (self.rank + 1) * share])

    def _gathered(self) -> Tensor:
        """Return the full parameters, gathered once until they are released."""
        if self._whole is None:
            whole = self.shard.new_empty(self.shard.numel() * self._world)
            dist.all_gather_single(whole, self.shard.detach(), group=self._group)
            self._whole = whole
        return self._whole


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, owner: Sharded) -> Tensor:
        ctx.owner = owner
        return owner._gathered()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        owner = ctx.owner
        owner._whole = None  # every view of it has been used
        mine = torch.empty_like(owner.shard)
        dist.reduce_scatter_single(mine, grad.contiguous(), group=owner._group)
        return mine.div_(owner._world), None


def clip_grad_norm(model: nn.Module, most: float, group: dist.ProcessGroup | None = None) -> float:
    """Scale the averaged gradients so that their norm, over all shards, is at most `most`; return the norm before.

    Parameters outside of all blocks count, too; their gradients must be the same on all ranks by then."""
    shards = [module.shard for module in model.modules() if isinstance(module, Sharded)]
    ours = [parameter.grad for parameter in shards if parameter.grad is not None]
    others = [p.grad for p in model.parameters() if p.grad is not None and not any(p is shard for shard in shards)]
    squares = torch.zeros((), device=shards[0].device if shards else None)
    for grad in ours:
        squares += grad.float().square().sum()
    if shards:
        dist.all_reduce(squares, group=group)
    norm = math.sqrt(float(squares) + sum(float(grad.float().square().sum()) for grad in others))
    if norm > most:
        for grad in (*ours, *others):
            grad.mul_(most / norm)
    return norm


def _own_parameters(block: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters under every name, without those of nested blocks with shards of their own."""
    for name, parameter in block.named_parameters(prefix, recurse=False, remove_duplicate=False):
        yield name, parameter
    for name, child in block.named_children():
        if not isinstance(child, Sharded):
            yield from _own_parameters(child, f"{prefix}.{name}" if prefix else name)


def _laid_out(parameters: dict[str, nn.Parameter]) -> Iterator[ParameterSlice]:
    """Lay out the parameters one after the other; a parameter with several names has one range."""
    at = 0
    places: dict[nn.Parameter, int] = {}
    for name, parameter in parameters.items():
        lo = places.setdefault(parameter, at)
        yield ParameterSlice(name, parameter.shape, lo, lo + parameter.numel())
        at = max(at, lo + parameter.numel())
