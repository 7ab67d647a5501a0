"""A model whose parameters are divided among the ranks learns as one process does, and holds no more than its share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from hcsim.training.modules.sharded import Sharded, clip_grad_norm
from tests.torch_backend.ranks import Ranks

ROWS = 6
WIDTH = 7


class Tied(nn.Module):
    """Two layers with one weight, a buffer, and a layer within a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out.weight = self.into.weight
        self.inner = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.seen, Tensor)
        self.seen += len(x)
        return self.out(torch.relu(self.inner(self.into(x))))


def model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(10, WIDTH), Tied(), nn.Linear(WIDTH, 3))


def sharded() -> nn.Sequential:
    """Rank 0's numbers count; the others begin with their own."""
    made = model()
    if dist.get_rank():
        for parameter in made.parameters():
            nn.init.normal_(parameter)
    made[1].inner = Sharded(made[1].inner)  # type: ignore[assignment]
    return nn.Sequential(*(Sharded(layer) for layer in made))


def whole(ours: nn.Sequential) -> dict[str, Tensor]:
    """Under the names of the plain model."""
    found = {}
    for name, module in ours.named_modules():
        if isinstance(module, Sharded):
            path = f"{name}.".replace("block.", "")
            found.update({path + key: value for key, value in module.full_parameters().items()})
    return found


def batch(step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(step)
    rows = ROWS * dist.get_world_size()
    return torch.randn(rows, 10), torch.randn(rows, 3)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def train(optimizer: str) -> None:
    rank = dist.get_rank()
    one, ours = model(), sharded()
    optimizers = [OPTIMIZERS[optimizer](each.parameters()) for each in (one, ours)]
    for step in range(8):
        inputs, targets = batch(step)
        mine = slice(rank * ROWS, (rank + 1) * ROWS)
        for each, rows in ((one, slice(None)), (ours, mine)):
            each.zero_grad()
            F.mse_loss(each(inputs[rows]), targets[rows]).backward()
        expected = nn.utils.clip_grad_norm_(one.parameters(), 0.3)
        assert clip_grad_norm(ours, 0.3) == pytest.approx(float(expected), rel=1e-4)
        for each in optimizers:
            each.step()
        now = whole(ours)
        for name, parameter in one.named_parameters(remove_duplicate=False):
            torch.testing.assert_close(now[name], parameter.detach(), rtol=1e-4, atol=1e-5, msg=f"{name} at {step}")
    assert float(ours[1].block.seen) == 8 * ROWS  # type: ignore[union-attr, arg-type]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("size", "optimizer"), [(2, "sgd"), (3, "adam"), (4, "sgd")])
def test_every_step_is_that_of_one_process(ranks: Ranks, size: int, optimizer: str) -> None:
    ranks.run(train, optimizer, size=size)


def test_it_runs_on_gloo_too(ranks: Ranks) -> None:
    ranks.run(train, "adam", size=2, backend="gloo")


@contextmanager
def gathered_wholes() -> Iterator[list[StorageWeakRef]]:
    """What the blocks gather meanwhile, without keeping it alive."""
    watched: list[StorageWeakRef] = []
    gather = dist.all_gather_single

    def watching(into: Tensor, *args: Any, **kwargs: Any) -> Any:
        watched.append(StorageWeakRef(into.untyped_storage()))
        return gather(into, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_single", watching)
        yield watched


def memory() -> None:
    ours = Sharded(nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40)))
    length = sum(piece.hi - piece.lo for piece in ours.pieces)
    assert sum(parameter.numel() for parameter in ours.parameters()) == -(-length // dist.get_world_size())

    with gathered_wholes() as watched:
        made = ours(torch.randn(3, 40, requires_grad=True))
        dist.barrier()  # a group may hold the last call's tensors until the next
        assert [each.expired() for each in watched] == [True]
        made.sum().backward()
        assert ours.shard.grad is not None
        with torch.no_grad():
            ours(torch.randn(3, 40))
        dist.barrier()
        assert len(watched) > 2
        assert all(each.expired() for each in watched)


def test_nothing_keeps_the_whole_between_forward_and_backward(ranks: Ranks) -> None:
    ranks.run(memory, size=2)


def frozen_memory() -> None:
    """Blocks that learn nothing, behind one that does."""
    held = [Sharded(nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 9)).requires_grad_(False)) for _ in range(3)]
    twice = nn.Sequential(nn.Linear(9, 9), *held, held[0])
    with gathered_wholes() as watched:
        made = twice(torch.randn(4, 9)).square().sum()
        made.backward(retain_graph=True)
        dist.barrier()
        assert watched
        assert all(each.expired() for each in watched)
    expected = [parameter.grad.clone() for parameter in twice[0].parameters() if parameter.grad is not None]
    assert len(expected) == 2
    twice.zero_grad()
    with gathered_wholes() as watched:
        made.backward()
        dist.barrier()
        assert watched
        assert all(each.expired() for each in watched)
    for parameter, grad in zip(twice[0].parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, grad)


def test_frozen_blocks_let_the_whole_go_after_the_backward_pass_too(ranks: Ranks) -> None:
    ranks.run(frozen_memory, size=2)


def edges() -> None:
    torch.manual_seed(1)
    plain = nn.Linear(3, 2)
    named = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
    ours = Sharded(plain)
    ours.load_full_parameters({name: value + 1 for name, value in named.items()})
    for name, value in ours.full_parameters().items():
        assert torch.equal(value, named[name] + 1)
    with pytest.raises(ValueError, match=r"missing \['bias'\]"):
        ours.load_full_parameters({"weight": named["weight"]})
    with pytest.raises(ValueError, match=r"bias has shape \(3,\), not \(2,\)"):
        ours.load_full_parameters({**named, "bias": torch.zeros(3)})

    # A step between the forward and the backward pass would have the gradient of other parameters.
    made = ours(torch.ones(1, 3, requires_grad=True)).sum()
    with torch.no_grad():
        ours.shard.add_(1.0)
    with pytest.raises(RuntimeError, match="have changed"):
        made.backward()

    # A block that fails leaves nothing behind that the next pass would take for its parameters.
    with pytest.raises(RuntimeError):
        ours(torch.ones(1, 4))
    with torch.no_grad():
        ours.shard.zero_()
    assert float(ours(torch.ones(1, 3)).abs().sum()) == 0

    frozen = Sharded(nn.Linear(3, 2).requires_grad_(False))
    inputs = torch.ones(1, 3, requires_grad=True)
    frozen(inputs).sum().backward()
    assert inputs.grad is not None
    torch.testing.assert_close(inputs.grad[0], frozen.full_parameters()["weight"].sum(0))
    assert frozen.shard.grad is None
    mixed = nn.Linear(3, 2)
    mixed.bias.requires_grad_(False)
    with pytest.raises(ValueError, match="all of them frozen or none"):
        Sharded(mixed)

    # Recomputed in the backward pass; and it can be shown.
    again = Sharded(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    assert "Linear(in_features=3" in repr(again)
    grads = []
    for through in (again, lambda x: checkpoint(again, x, use_reentrant=False)):
        inputs = torch.ones(2, 3, requires_grad=True)
        through(inputs).sum().backward()
        grads.append(inputs.grad)
    torch.testing.assert_close(grads[0], grads[1])

    # One element, more ranks: some hold padding alone; the same block twice in one pass.
    tiny = Sharded(nn.Linear(1, 1, bias=False))
    twice = tiny(tiny(torch.full((1, 1), 3.0)))
    weight = float(tiny.full_parameters()["weight"])
    assert float(twice) == pytest.approx(3 * weight**2)
    twice.sum().backward()
    shares = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(shares, tiny.shard.grad)  # type: ignore[arg-type]
    assert [float(share) for share in shares] == pytest.approx([6 * weight, *[0.0] * (len(shares) - 1)])


def test_names_shapes_frozen_and_changed_parameters_and_shards_of_nothing(ranks: Ranks) -> None:
    ranks.run(edges, size=3)


def clipping_beside() -> None:
    """A layer that is not sharded counts once."""
    both = nn.Sequential(Sharded(nn.Linear(2, 2)), nn.Linear(2, 2))
    for parameter in both.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert both[0].shard.numel() == 3  # type: ignore[operator]
    assert clip_grad_norm(both, 1.0) == pytest.approx(12**0.5)
    for parameter in both.parameters():
        torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 12**-0.5))
    assert clip_grad_norm(nn.Linear(2, 2), 1.0) == 0.0


def test_the_norm_counts_what_is_sharded_and_what_is_not(ranks: Ranks) -> None:
    ranks.run(clipping_beside, size=2)
