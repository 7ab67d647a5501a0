"""hcsim for MLX programs: the calls of `mlx.core.distributed`, compressed gradients, local SGD and DiLoCo.

import hcsim.mlx as dist

group = dist.init()
total = dist.all_sum(mx.ones(4), group=group)
"""

from __future__ import annotations

try:
    import mlx.core  # noqa: F401
except ImportError as error:
    raise ImportError("hcsim.mlx needs MLX: pip install 'hcsim[mlx]'") from error

from hcsim.mlx.gradients import GradientCompression, average_gradients
from hcsim.mlx.group import (
    Group,
    all_gather,
    all_max,
    all_min,
    all_sum,
    init,
    is_available,
    recv,
    recv_like,
    send,
    sum_scatter,
)
from hcsim.mlx.periodic import DiLoCo, local_sgd

__all__ = [
    "DiLoCo",
    "GradientCompression",
    "Group",
    "all_gather",
    "all_max",
    "all_min",
    "all_sum",
    "average_gradients",
    "init",
    "is_available",
    "local_sgd",
    "recv",
    "recv_like",
    "send",
    "sum_scatter",
]
