"""What calls leave alone: the data of those who get no result, and the groups of the process that forked this one."""

from __future__ import annotations

import os
import signal

import pytest
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


def in_a_child() -> None:
    """The group is not the child's: it is told so, and lets it go."""
    with pytest.raises(ValueError, match="forked"):
        dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()


def fork_after_init() -> tuple[int, float]:
    dist.barrier()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # it may hang where it should fail
        code = 1
        try:
            in_a_child()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    return status, float(tensor[0])


def test_a_forked_child_is_told_that_the_group_is_not_its_own_and_disturbs_nobody(ranks: Ranks) -> None:
    assert ranks.run(fork_after_init, size=2) == [(0, 2.0)] * 2
