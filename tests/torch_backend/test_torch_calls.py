"""What a call leaves alone: the data of those who get no result."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.torch_backend.ranks import Ranks


def scale_and_reduce(strided: bool) -> list[float]:
    tensor = torch.full((3, 2), dist.get_rank() + 1.0)[:, 0] if strided else torch.full((3,), dist.get_rank() + 1.0)
    dist.reduce(tensor, 0, dist._make_nccl_premul_sum(2.0))
    return tensor.tolist()


def test_a_scaled_reduce_leaves_the_tensors_of_others_than_the_root_as_they_were(ranks: Ranks) -> None:
    for strided in (False, True):
        assert ranks.run(scale_and_reduce, strided, size=3) == [[12.0] * 3, [2.0] * 3, [3.0] * 3]
