"""Compression with error feedback for DistributedDataParallel, as a communication hook.

    ddp = DistributedDataParallel(model)
    state = CompressionState(model, "topk:0.01+ef")
    ddp.register_comm_hook(state, compression_hook)

Residuals are kept by the names of the parameters, not by bucket, so they survive torch's rebuilding of the
buckets after the first step. The average is the same on every rank, bit for bit.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

from hcsim.calls import Compression, with_debts_of, without_debts
from hcsim.engine.compression import KeptCompression
from hcsim.torch_backend.process_group import HcsimGroup


class CompressionState:
    """The compression of one model's gradients, and its current step."""

    def __init__(
        self,
        model: nn.Module,
        compression: str,
        *,
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
        name: str = "gradients",
    ) -> None:
        """All ranks pass the same arguments. Models that are trained side by side on one group need different
        names: a new state replaces the earlier one of the same name and starts without residuals. `compression`
        is a spec as everywhere in the toolkit: "topk:0.01+ef", "int8+ef", "powersgd:4+ef". Without "+ef" what is
        not sent is lost."""
        group = process_group if process_group is not None else dist.group.WORLD
        if not isinstance(group, HcsimGroup):
            raise ValueError('this hook compresses on a process group of the backend "hcsim"; torch has its own others')
        self.group = group
        self.compression = compression
        self._kept = KeptCompression(group.engine_group, compression, seed, name)
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}

    def describe(self, bucket: GradBucket) -> Compression:
        tensors = tuple((self._names[each], tuple(each.shape)) for each in bucket.parameters())
        return self._kept.describe(tensors, last=bucket.is_last())

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals and the compressor's other state. It differs between ranks; call it between
        steps."""
        memory = np.frombuffer(bytearray(self._kept.memory()), np.uint8)
        return {"compression": self.compression, "step": self._kept.step, "memory": torch.from_numpy(memory)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._kept.load(state["compression"], state["step"], state["memory"].cpu().numpy().tobytes())

    def forget(self) -> None:
        """Drop the residuals: the loaded state is another rank's, which still has them."""
        self._kept.restore(without_debts(self._kept.memory()))

    def absorb(self, state: Mapping[str, Any]) -> None:
        """Add the residuals of a rank that is gone to this rank's."""
        self._kept.restore(with_debts_of(self._kept.memory(), state["memory"].cpu().numpy().tobytes()))


def compression_hook(state: CompressionState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    work = state.group.allreduce_compressed(bucket.buffer(), state.describe(bucket))
    return work.get_future().then(_first)


def _first(done: torch.futures.Future[list[Tensor]]) -> Tensor:
    return done.value()[0]
