"""MLX's ring over TCP, and hcsim for MLX programs, whose processes of one machine share memory.

The arrays of MLX never change, so "in place" means to donate the input."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from experiments.peers.peer import Floats, Job, Peer, Rank


class _MlxRank:
    _array: Any
    _dtype: np.dtype[Any]

    def __init__(self, distributed: Any, group: Any) -> None:
        """`distributed` has the functions of `mlx.core.distributed`."""
        self._distributed = distributed
        self._group = group

    def load(self, values: Floats) -> None:
        import mlx.core as mx

        self._dtype = values.dtype
        self._array = None
        mx.clear_cache()
        self._array = mx.array(values)
        mx.eval(self._array)

    async def all_reduce(self) -> None:
        import mlx.core as mx

        # Rebinding drops the only reference to the input, so that MLX can reuse its buffer.
        self._array = self._distributed.all_sum(self._array, group=self._group)
        mx.eval(self._array)

    async def barrier(self) -> None:
        import mlx.core as mx

        mx.eval(self._distributed.all_sum(mx.zeros(1), group=self._group))

    def read(self) -> Floats:
        import mlx.core as mx

        return np.array(self._array.view(mx.uint8), copy=False).view(self._dtype)


def _missing() -> str | None:
    return None if find_spec("mlx") else "mlx is not installed"


@asynccontextmanager
async def _join(job: Job, rank: int) -> AsyncIterator[Rank]:
    if job.peer == HCSIM_MLX.name:
        import hcsim.mlx as distributed
    else:
        from mlx.core import distributed
    os.environ |= {"MLX_HOSTFILE": _write_hosts(job, rank), "MLX_RANK": str(rank)}
    yield _MlxRank(distributed, distributed.init(strict=True, backend="ring"))


def _write_hosts(job: Job, rank: int) -> str:
    # One file for each rank: none has to wait until another has written it.
    path = Path(job.folder, f"hosts-{rank}.json")
    path.write_text(json.dumps([[address] for address in job.addresses]))
    return str(path)


MLX = Peer("mlx", _missing, _join)
HCSIM_MLX = Peer("hcsim_mlx", _missing, _join)
