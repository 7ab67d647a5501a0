"""torch.distributed on gloo, over TCP on the loopback interface.

Gloo keeps torch's own settings; arithmetic has one thread, as everywhere here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.peers.peer import Floats, Job, Peer, Rank

if TYPE_CHECKING:
    import torch


class _GlooRank:
    _tensor: torch.Tensor
    _dtype: np.dtype[Any]

    def load(self, values: Floats) -> None:
        import torch

        self._dtype = values.dtype  # numpy's bfloat16 means nothing to torch; its bytes do
        self._tensor = torch.from_numpy(values.view(np.uint8)).view(getattr(torch, values.dtype.name))

    async def all_reduce(self) -> None:
        import torch.distributed

        torch.distributed.all_reduce(self._tensor)

    async def barrier(self) -> None:
        import torch.distributed

        torch.distributed.barrier()

    def read(self) -> Floats:
        import torch

        values: Floats = self._tensor.view(torch.uint8).numpy().view(self._dtype)
        return values


def _missing() -> str | None:
    return None if find_spec("torch") else "torch is not installed"


@asynccontextmanager
async def _join(job: Job, rank: int) -> AsyncIterator[Rank]:
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    # A file as the store: torch's TCP store would listen on every interface.
    store = f"file://{job.folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=job.ranks)
    yield _GlooRank()
    torch.distributed.destroy_process_group()


GLOO = Peer("gloo", _missing, _join)
