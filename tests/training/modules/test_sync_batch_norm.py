"""Batch norm over all ranks is the batch norm of the joined batch, taken in float64 by one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hcsim.training.modules.batch_norm import SyncBatchNorm
from tests.torch_backend.ranks import Ranks

CHANNELS = 6


def model() -> nn.Sequential:
    torch.manual_seed(3)
    made = nn.Sequential(nn.BatchNorm2d(CHANNELS), nn.Sequential(nn.BatchNorm2d(CHANNELS, momentum=None)))
    for parameter in made.parameters():
        nn.init.uniform_(parameter, 0.5, 2.0)
    return made


def joined(step: int, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The batch of all ranks, far from zero, and the gradient of what comes out."""
    torch.manual_seed(100 + step)
    shape = (sum(sizes), CHANNELS, 2, 3)
    return torch.randn(shape) + 1e4, torch.randn(shape)


def train(sizes: Sequence[int]) -> None:
    rank = dist.get_rank()
    lo, hi = sum(sizes[:rank]), sum(sizes[: rank + 1])
    one, ours = model().double(), SyncBatchNorm.convert(copy.deepcopy(model()))
    for step in range(3):
        batch, grad = joined(step, sizes)
        whole = batch.double().requires_grad_()
        expected = one(whole)
        expected.backward(grad.double())
        mine = batch[lo:hi].requires_grad_()
        made = ours(mine)
        made.backward(grad[lo:hi])
        torch.testing.assert_close(made.double(), expected[lo:hi], rtol=1e-4, atol=2e-5)
        assert mine.grad is not None
        assert whole.grad is not None
        torch.testing.assert_close(mine.grad.double(), whole.grad[lo:hi], rtol=1e-4, atol=2e-5)
    for ours_now, theirs in zip(ours.parameters(), one.parameters(), strict=True):
        assert ours_now.grad is not None
        dist.all_reduce(ours_now.grad)
        torch.testing.assert_close(ours_now.grad.double(), theirs.grad, rtol=1e-4, atol=1e-3)
    for (name, buffer), expected in zip(ours.named_buffers(), one.buffers(), strict=True):
        torch.testing.assert_close(buffer.double(), expected.double(), rtol=1e-5, atol=1e-6, msg=name)
    batch, _ = joined(9, sizes)
    torch.testing.assert_close(ours.eval()(batch).double(), one.eval()(batch.double()), rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("sizes", [(3, 5), (4, 0, 2), (2, 1, 7, 3)], ids=str)
def test_statistics_gradients_and_memory_are_those_of_the_joined_batch(ranks: Ranks, sizes: Sequence[int]) -> None:
    ranks.run(train, sizes, size=len(sizes))


def test_it_runs_on_gloo_too(ranks: Ranks) -> None:
    ranks.run(train, (1, 4), size=2, backend="gloo")


def narrow_and_empty() -> None:
    half = SyncBatchNorm(4, affine=False).bfloat16()
    torch.manual_seed(dist.get_rank())
    batch = torch.randn(8, 4, dtype=torch.bfloat16)
    assert half(batch).dtype == torch.bfloat16

    nothing = SyncBatchNorm(4)
    assert nothing(torch.zeros(0, 4)).shape == (0, 4)
    assert nothing.num_batches_tracked is not None
    assert int(nothing.num_batches_tracked) == 0

    with pytest.raises(ValueError, match="4 channels, and the input has 5"):
        nothing(torch.zeros(2, 5))
    with pytest.raises(ValueError, match="two dimensions"):
        nothing(torch.zeros(2))


def test_it_takes_narrow_numbers_and_no_samples_at_all_and_refuses_other_channels(ranks: Ranks) -> None:
    ranks.run(narrow_and_empty, size=2)


def test_who_evaluates_needs_no_others_with_or_without_statistics() -> None:
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    for tracked in (True, False):
        theirs = nn.BatchNorm1d(4, track_running_stats=tracked).eval()
        ours = SyncBatchNorm.convert(copy.deepcopy(theirs))
        assert torch.equal(ours(batch), theirs(batch))


def test_converting_keeps_the_parameters_and_the_mode() -> None:
    before = model().eval()
    parameters, buffers = list(before.parameters()), list(before.buffers())
    after = SyncBatchNorm.convert(before)
    assert all(a is b for a, b in zip(after.parameters(), parameters, strict=True))
    assert all(a is b for a, b in zip(after.buffers(), buffers, strict=True))
    assert not any(module.training for module in after.modules())
    assert SyncBatchNorm.convert(after) is after


def test_a_norm_of_several_names_stays_one() -> None:
    norm = nn.BatchNorm2d(CHANNELS)
    after = SyncBatchNorm.convert(nn.ModuleDict({"first": norm, "second": nn.Sequential(norm), "again": norm}))
    assert isinstance(after, nn.ModuleDict)
    assert isinstance(after["first"], SyncBatchNorm)
    assert after["again"] is after["first"]
    assert after["second"].get_submodule("0") is after["first"]
