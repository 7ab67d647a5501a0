"""A device that only the program's threads may use, one at a time, as MPS is: no thread of the backend copies to it or
from it, and none runs a callback. Host memory stands for the device, behind the same copies; or CUDA, where it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from hcsim.torch_backend.hierarchy import Hierarchy, hierarchy_hook
from hcsim.torch_backend.hooks import CompressionState, compression_hook
from hcsim.torch_backend.process_group import create
from hcsim.torch_backend.tensors import CudaCopies, MpsCopies, Staging
from tests.torch_backend.models import STEPS, alone, batch, compare, loss_of, made, optimizer_of, weights_of
from tests.torch_backend.ranks import Meeting, Ranks

BACKEND = "in_turn"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]


class Late:
    """The end of a copy, which is not there when it is asked for the first time."""

    def __init__(self) -> None:
        self._asked = 0

    def query(self) -> bool:
        self._asked += 1
        return self._asked > 1


class InTurn:
    """The copies of MPS, or of CUDA, and notes of who asked for them."""

    in_turn = True

    def __init__(self, device: str) -> None:
        self._copies = CudaCopies() if device == "cuda" else MpsCopies(Late)
        self.notes: list[tuple[str, str]] = []
        """What was done, in which thread."""

    def shares(self, tensor: Tensor) -> bool:
        return False

    def buffer(self, length: int, dtype: torch.dtype) -> Tensor:
        return self._copies.buffer(length, dtype)

    def fetch(self, tensors: Sequence[Tensor], buffer: Tensor) -> Callable[[], None]:
        self.note("fetch")
        return self._copies.fetch(tensors, buffer) or (lambda: None)

    def put(self, buffer: Tensor, tensors: Sequence[Tensor]) -> None:
        self.note("put")
        self._copies.put(buffer, tensors)

    def note(self, what: str) -> None:
        self.notes.append((what, threading.current_thread().name))

    def order(self) -> list[str]:
        return [what for what, _ in self.notes]

    def threads(self) -> set[str]:
        return {thread for _, thread in self.notes}


def meet(us: Meeting, device: str) -> InTurn:
    """Make the group of all ranks."""
    copies = InTurn(device)
    dist.Backend.register_backend(
        BACKEND, lambda options, given: create(options, given, Staging({device: copies})), extended_api=True,
        devices=[device],
    )  # fmt: skip
    Meeting(us.rank, us.size, BACKEND, us.file).init()
    return copies


def check_threads(copies: InTurn) -> None:
    """Autograd has a thread for CUDA, and none for host memory; the backend's threads have names."""
    assert copies.notes
    assert not {name for name in copies.threads() if name.startswith("hcsim")}, copies.threads()


def call(us: Meeting, device: str) -> None:
    copies = meet(us, device)
    waited, polled, asked, mapped = (torch.full((5,), us.rank + 1.0, device=device) for _ in range(4))
    total = torch.full((5,), us.size * (us.size + 1) / 2, device=device)
    for tensor in (waited, polled):
        work = dist.all_reduce(tensor, async_op=True)
        while tensor is polled and not work.is_completed():
            pass
        work.wait()
        assert torch.equal(tensor, total)
    future = dist.all_reduce(asked, async_op=True).get_future()
    assert torch.equal(future.wait()[0], total)

    def follow(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        copies.note("callback")
        return done.value()[0] + 1

    after = dist.all_reduce(mapped, async_op=True).get_future().then(follow)
    (there,) = torch.futures.wait_all([after])
    assert torch.equal(there, total + 1)
    parts = [torch.empty(3, 2, device=device).t() for _ in range(us.size)]
    dist.all_gather(parts, torch.full((2, 3), float(us.rank), device=device))
    assert [part[1, 2].item() for part in parts] == list(range(us.size))
    halves = [torch.full((length,), us.rank + 0.5, device=device, dtype=torch.bfloat16) for length in (3, 1, 2)]
    dist.all_reduce_coalesced(halves)
    assert [half.tolist() for half in halves] == [[2.0] * 3, [2.0], [2.0] * 2]
    parts = [torch.empty(length, device=device, dtype=torch.int8) for length in (1, 3)]
    dist.all_gather(parts, torch.full((1 + 2 * us.rank,), us.rank, device=device, dtype=torch.int8))
    assert [part.tolist() for part in parts] == [[0], [1, 1, 1]]
    none = torch.empty(0, device=device)
    dist.all_reduce(none)
    dist.barrier()
    leveled = torch.full((5,), us.rank + 1.0, device=device)
    Hierarchy.of([[0], [1]], within="gloo", staging=Staging({device: copies})).all_reduce(leveled)
    assert torch.equal(leveled, total)
    with pytest.raises(ValueError, match="cpu, cuda, mps, not on meta"):
        dist.all_reduce(torch.ones(3, device="meta"))
    assert "callback" in copies.order()
    assert copies.threads() == {threading.current_thread().name}


@pytest.mark.parametrize("device", DEVICES)
def test_results_are_copied_by_the_thread_that_waits_for_them(ranks: Ranks, device: str) -> None:
    ranks.run(call, device, size=2, backend="")


def averaged_in_the_hook(group, bucket):  # DDP compares annotations with its classes, and here they are strings
    """Wait for the average before the backward pass has ended."""
    tensor = bucket.buffer().div_(group.size())
    future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
    assert future.wait()[0] is tensor
    return future.then(lambda done: done.value()[0])


def awaited_in_the_hook(group, bucket):
    """Wait for what is made of the sum before the backward pass has ended, and for what is made of that."""
    summed = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    halved = summed.then(lambda done: done.value()[0].div_(group.size()))
    doubled = halved.then(lambda done: done.value() * 2)
    assert torch.equal(doubled.wait(), halved.wait() * 2)
    return halved


HOOKS: dict[str, Callable[[nn.Module, Staging], tuple[Any, Any]]] = {
    "none": lambda model, staging: (None, None),
    "two levels": lambda model, staging: (Hierarchy.of([[0], [1]], within="gloo", staging=staging), hierarchy_hook),
    "waits": lambda model, staging: (dist.group.WORLD, averaged_in_the_hook),
    "waits for what follows": lambda model, staging: (dist.group.WORLD, awaited_in_the_hook),
    "compressed": lambda model, staging: (CompressionState(model, "topk:1"), compression_hook),
    "halves": lambda model, staging: (None, fp16_compress_hook),
    "powersgd": lambda model, staging: (PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook),
}
EXACT = ("none", "two levels", "waits", "waits for what follows", "compressed")


def train(us: Meeting, device: str, hook: str, views: bool) -> None:
    copies = meet(us, device)
    model = made().to(device)
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.002, gradient_as_bucket_view=views)
    state, function = HOOKS[hook](model, Staging({device: copies}))
    if function is not None:
        parallel.register_comm_hook(state, function)
    optimizer = optimizer_of(model)
    history = []
    for step in range(STEPS):
        inputs, targets = (each.to(device) for each in batch(step, us.rank, us.size))
        loss = loss_of(parallel(inputs), targets)
        copies.notes.clear()
        loss.backward()
        order = copies.order()
        optimizer.step()
        optimizer.zero_grad()
        check_threads(copies)
        if hook in ("none", "two levels", "compressed", "halves"):
            buckets = len(order) // 2
            assert buckets > 1 or step == 0  # DDP makes buckets of that size when it has seen one pass
            assert order == ["fetch"] * buckets + ["put"] * buckets
        history.append([weight.cpu() for weight in weights_of(model)])
    if hook in EXACT:
        compare(history, alone(us.size), exact=device == "cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("hook", "views"), [(hook, hook == "none") for hook in HOOKS] + [("none", False)])
def test_ddp_copies_gradients_in_autograds_thread(ranks: Ranks, device: str, hook: str, views: bool) -> None:
    ranks.run(train, device, hook, views, size=2, backend="")


def failing_in_what_follows(group, bucket):
    def fail(done):
        raise RuntimeError("this hook fails")

    return dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future().then(fail)


def fail_in_the_hook(us: Meeting, device: str) -> str:
    meet(us, device)
    parallel = DistributedDataParallel(made().to(device), bucket_cap_mb=0.002)
    parallel.register_comm_hook(dist.group.WORLD, failing_in_what_follows)
    inputs, targets = (each.to(device) for each in batch(0, us.rank, us.size))
    with pytest.raises(RuntimeError) as raised:
        loss_of(parallel(inputs), targets).backward()
    return str(raised.value)


@pytest.mark.parametrize("device", DEVICES)
def test_the_backward_pass_ends_with_the_error_of_a_hook(ranks: Ranks, device: str) -> None:
    for said in ranks.run(fail_in_the_hook, device, size=2, backend=""):
        assert "this hook fails" in said


def lose(us: Meeting, device: str) -> str:
    meet(us, device)
    model = made().to(device)
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.002)
    inputs, targets = (each.to(device) for each in batch(0, us.rank, us.size))
    loss = loss_of(parallel(inputs), targets)
    dist.barrier()
    if us.rank == us.size - 1:
        dist.group.WORLD.abort()
        return ""
    with pytest.raises(dist.DistBackendError) as raised:
        loss.backward()
    return str(raised.value)


@pytest.mark.parametrize("device", DEVICES)
def test_the_backward_pass_ends_with_the_error_of_the_group(ranks: Ranks, device: str) -> None:
    assert "rank 1" in ranks.run(lose, device, size=2, backend="")[0]
