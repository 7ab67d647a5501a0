"""Two levels of torch groups: gloo within a machine, hcsim between machines, beside an all-reduce over all ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hcsim.rng import generator
from hcsim.torch_backend import Options
from tests.torch_backend.ranks import Ranks

TWO_BY_TWO = [[0, 1], [2, 3]]
ONE_AND_THREE = [[2], [0, 3, 1]]
SMALL, LARGE, ODD = 10, 40_000, 40_003


def _values(length: int) -> Tensor:
    return torch.from_numpy(generator(dist.get_rank(), "values").integers(1, 50, length)).float()


def _both_ways(machines: list[list[int]]) -> list[str]:
    from hcsim.torch_backend.hierarchy import Hierarchy

    two = Hierarchy.of(machines, within="gloo")
    unlike = []
    for op in ("SUM", "AVG", "MAX"):
        for length in (SMALL, LARGE, ODD):
            ours, flat = _values(length), _values(length)
            two.all_reduce(ours, getattr(dist.ReduceOp, op))
            dist.all_reduce(flat, getattr(dist.ReduceOp, op))
            if not torch.equal(ours, flat):
                unlike.append(f"{op} of {length}")
    return unlike


@pytest.mark.slow
@pytest.mark.parametrize("machines", [TWO_BY_TWO, ONE_AND_THREE])
def test_two_levels_come_to_the_same_as_one(ranks: Ranks, machines: list[list[int]]) -> None:
    """Whole numbers: their sums are exact in whatever order."""
    assert ranks.run(_both_ways, machines, size=4) == [[]] * 4


def _compressed() -> tuple[Tensor, Tensor]:
    from hcsim.torch_backend.hierarchy import Hierarchy

    two = Hierarchy.of(TWO_BY_TWO, within="gloo", options=Options(compression="int8"))
    ours, flat = _values(LARGE), _values(LARGE)
    two.all_reduce(ours)
    dist.all_reduce(flat)
    return ours, flat


def test_what_goes_between_machines_may_be_compressed(ranks: Ranks) -> None:
    answers = ranks.run(_compressed, size=4)
    for ours, flat in answers:
        assert torch.equal(ours, answers[0][0])
        assert 0 < (ours - flat).abs().max() <= 4 * 200 / 127


def _gradient(hooked: bool) -> list[np.ndarray]:
    from hcsim.torch_backend.hierarchy import Hierarchy, hierarchy_hook

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 4))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
    if hooked:
        ddp.register_comm_hook(Hierarchy.of(TWO_BY_TWO, within="gloo"), hierarchy_hook)
    for step in range(3):
        ddp.zero_grad()
        batch = generator(dist.get_rank(), "batch", step).standard_normal((8, 64), np.float32)
        ddp(torch.from_numpy(batch)).square().mean().backward()
    return [each.grad.numpy() for each in model.parameters()]


def test_ddp_trains_over_two_levels(ranks: Ranks) -> None:
    flat, two = (ranks.run(_gradient, hooked, size=4) for hooked in (False, True))
    for rank in range(4):
        for ours, expected, first in zip(two[rank], flat[0], two[0], strict=True):
            np.testing.assert_allclose(ours, expected, atol=1e-6)
            assert np.array_equal(ours, first)
