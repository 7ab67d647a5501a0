"""What the scripts of the lab share: ranks as torchrun starts them, and a loop that says how long its steps take."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

WARM_UP_STEPS = 4


def begin() -> int:
    """Join the other ranks; return how many steps to take: the first argument."""
    torch.manual_seed(0)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("hcsim")
    return int(sys.argv[1]) if len(sys.argv) > 1 else 40


def shared(module: nn.Module) -> nn.Module:
    """Return a module whose gradients are averaged over the ranks."""
    return DistributedDataParallel(module) if dist.is_initialized() else module


def repeat(step: Callable[[], Tensor], steps: int) -> None:
    """Take steps; rank 0 prints the median of their times."""
    lasted_s = []
    for _ in range(WARM_UP_STEPS + steps):
        began_s = time.perf_counter()
        loss = step()
        lasted_s.append(time.perf_counter() - began_s)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"loss {loss.item():.3f}, {1e3 * statistics.median(lasted_s[WARM_UP_STEPS:]):.4f} ms a step")
    if dist.is_initialized():
        dist.destroy_process_group()
