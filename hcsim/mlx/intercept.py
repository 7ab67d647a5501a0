"""`mlx.core.distributed` answered by hcsim, for scripts that do not know it.

What MLX itself builds on these functions (`mlx.nn.average_gradients`, sharded layers) looks them up when it is
called, and so comes here too.
"""

from __future__ import annotations

import mlx.core as mx

from hcsim.mlx import group as ours

_REPLACED = (
    "Group", "all_gather", "all_max", "all_min", "all_sum", "init", "is_available", "recv", "recv_like", "send",
    "sum_scatter",
)  # fmt: skip


def install() -> None:
    for name in _REPLACED:
        setattr(mx.distributed, name, getattr(ours, name))
